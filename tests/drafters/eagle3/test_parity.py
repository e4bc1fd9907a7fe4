"""EAGLE-3 drafts equal the implementation of speculators, on files that it wrote.

``speculators/`` holds checkpoints of speculators 0.9.0 (torch 2.13.0, transformers 5.19.0) with
random weights, which share its options among them, as its ``save_pretrained`` wrote them. Next to
each lie the inputs and the logits of its training forward over three steps (``steps.safetensors``):
from every position of a text a chain whose next tokens are given.
"""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from longspec_jax.config.tree import TreeConfig
from longspec_jax.drafters.base import Committed, Features, Params
from longspec_jax.drafters.checkpoints.eagle3 import load
from longspec_jax.drafters.draft import Target
from tests.drafters.kit import Given
from tests.kit import random_target, tiny_target_config, view_of

FILES = Path(__file__).parent / "speculators"
VARIANTS = sorted(path.name for path in FILES.iterdir())
CONFIG = tiny_target_config(vocab_size=37, model_width=16, num_layers=2, max_positions=64)
TARGET = Target(CONFIG, random_target(CONFIG))
STEPS = 3


@partial(jax.jit, static_argnums=0)
def _chains(drafter: Any, params: Params, hidden: Any, tokens: Any, own: Any) -> Any:
    """Logits ``[STEPS, B, v]`` of a chain from every position of a text.

    Args:
      drafter: of a chain.
      params: of target and draft.
      hidden: the target's states ``[T, 3 D]`` at tokens 0 to T - 1.
      tokens: tokens 1 to T.
      own: the same as the draft numbers them.
    """
    rows = len(tokens) - STEPS
    lengths = jnp.arange(rows) + 1
    text = jnp.broadcast_to(jnp.pad(tokens, (1, 0))[:-1], (rows, len(tokens)))
    parts = jnp.split(jnp.broadcast_to(hidden, (rows, *hidden.shape)), 3, axis=2)
    features = Features(dict(zip(drafter.config.features, parts, strict=True)))
    state = drafter.begin(params, rows, len(tokens))
    state = drafter.extend(params, state, Committed(text, 0 * lengths, lengths, features))
    none = jnp.zeros((rows, 1, 8, 8))
    noise = Given(jnp.stack([own[step : step + rows] for step in range(1, STEPS + 1)], 1), [])
    drafter.propose(params, state, view_of(tokens[:rows], lengths, none, none), noise)
    return jnp.stack(noise.heard)


def assert_chains(draft: Any, steps: dict[str, np.ndarray]) -> None:
    """A draft's chains from every position of a text have the stored logits."""
    drafter = draft.drafter(TreeConfig((1,) * STEPS))
    known = np.asarray(draft.params.vocabulary)
    own = np.searchsorted(known, steps["tokens"])
    np.testing.assert_array_equal(known[own], steps["tokens"])
    params = Params(TARGET.params, draft.params)
    logits = _chains(drafter, params, steps["hidden"], steps["tokens"], own)
    expected = steps["logits"][:, : logits.shape[1]]
    np.testing.assert_allclose(logits, expected, atol=3e-4, rtol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_chains_of_speculators(variant: str) -> None:
    """Every step of a chain from every position: norms, flags, window, YaRN and fed-back states."""
    draft = load(FILES / variant, TARGET)
    assert draft.config.features == (-1, 0, 1)
    assert draft.seen == ((4, 0) if variant == "qwen3" else (None, 0))
    assert_chains(draft, load_file(FILES / variant / "steps.safetensors"))
