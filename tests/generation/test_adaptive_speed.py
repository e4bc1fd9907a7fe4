"""Never much slower than plain decoding: real models, a draft that knows nothing, real seconds."""

import math

import jax
import numpy as np
import pytest

from longspec_jax import PLAIN, GenerateResult, LongSpec, demo_prompts
from longspec_jax.embedded import DEMO, DRAFTS
from tests.infer.toys import bound_draft, rebound


@pytest.mark.slow
@pytest.mark.skipif(not DEMO.is_dir(), reason="the demo model is not in this checkout")
def test_a_useless_draft_costs_at_most_a_tenth() -> None:
    spec, random = LongSpec.demo(draft=DRAFTS["demo"]), np.random.default_rng(0)

    def useless(leaf: jax.Array) -> jax.Array:
        values = np.asarray(0.05 * random.normal(size=leaf.shape), leaf.dtype)
        return jax.device_put(values, leaf.sharding)

    spec = rebound(spec, jax.tree.map(useless, bound_draft(spec).params.layer))
    prompt = next(iter(demo_prompts().values()))[:1000]
    options = dict(adaptive=True, max_new_tokens=384, eos_token_id=[])
    plain = spec.generate(prompt, tree=PLAIN, **{**options, "adaptive": False})
    costs = []
    # A burst of load in the wrong moment may spoil a run; five in a row it does not.
    while len(costs) < 5 and min(costs, default=math.inf) > 1.10:
        run = spec.generate(prompt, **options)
        assert run.sequences == plain.sequences
        assert run.stats.acceptance_length < 1.1
        costs.append(_over_own_plain_rounds(run))
    assert min(costs) <= 1.10


def _over_own_plain_rounds(result: GenerateResult) -> float:
    """Seconds of a run over what its tokens would have taken at the pace of its plain rounds.

    The same run's, which met the same load throughout.
    """
    stats, plain = result.stats, result.stats.trees[0]
    return stats.decode_seconds / (stats.decode_tokens * plain.seconds / plain.rounds)
