"""The first divergence of two sequences, where the draw after it is no ordinary one."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np

from longspec_jax.generation import comparison
from tests.kit import each_row


@each_row(("other", "gap"), [(1.5, 0.5), (-np.inf, None), (np.nan, None)])
def test_a_gap_is_a_number_or_none(other, gap, monkeypatch) -> None:
    """Filters leave tokens out by a score of minus infinity."""
    monkeypatch.setattr(comparison, "_scores", lambda *args: jnp.asarray([[2.0, other]]))
    target = SimpleNamespace(has_bounded_layers=False)
    plan = SimpleNamespace(waits=False, target=target, params=None)
    request = SimpleNamespace(adjustments=None, sampling=None)
    batch = SimpleNamespace(prompts=((3, 4),), request=request)
    engine = SimpleNamespace(rows=SimpleNamespace(cache=None))
    rows = [SimpleNamespace(tokens=[1, 0])]
    run = SimpleNamespace(plan=plan, batch=batch, engine=engine, rows=rows)
    found = comparison._divergence(run, 0, ((1, 0), (1, 1)))  # type: ignore[arg-type]
    assert found == comparison.Divergence(0, 1, 0, 1, gap)
