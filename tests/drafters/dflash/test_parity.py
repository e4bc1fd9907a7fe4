"""DFlash and DSpark drafts equal the implementation of speculators, on files that it wrote.

``speculators/`` holds checkpoints of speculators 0.9.0 (torch 2.13.0, transformers 5.23.0) with
random weights, which share its options among them, as its ``save_pretrained`` wrote them. Beside
each lie the inputs and the logits of its training forward over four blocks of one text, and the
tables that it takes from the target (``blocks.safetensors``). A Markov head is given the text's own
tokens there.
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
from longspec_jax.drafters.checkpoints.dflash import load
from longspec_jax.drafters.dflash import Confidence, DFlashDrafter, Markov
from longspec_jax.drafters.draft import Target
from tests.drafters.kit import Given
from tests.kit import random_target, tiny_target_config, view_of

FILES = Path(__file__).parent / "speculators"
VARIANTS = sorted(path.name for path in FILES.iterdir())
CONFIG = tiny_target_config(vocab_size=37, model_width=16, num_layers=2, max_positions=64)
HEADS = {
    "dspark": (Markov(6), Confidence(True)),
    "dspark_gated": (Markov(6, gated=True), Confidence(False)),
    "dspark_rnn": (Markov(6, recurrent=True), None),
}


@partial(jax.jit, static_argnums=0)
def _blocks(
    drafter: DFlashDrafter, params: Params, hidden: Any, tokens: Any, anchors: Any, own: Any
) -> Any:
    """Logits ``[levels, B, v]`` of the block at every anchor, down the text's own tokens."""
    rows, levels = len(anchors), drafter.tree.num_levels
    text = jnp.broadcast_to(tokens, (rows, len(tokens)))
    parts = jnp.split(jnp.broadcast_to(hidden, (rows, *hidden.shape)), 3, axis=2)
    features = Features(dict(zip(drafter.config.features, parts, strict=True)))
    state = drafter.begin(params, rows, len(tokens))
    state = drafter.extend(params, state, Committed(text, 0 * anchors, anchors, features))
    none = jnp.zeros((rows, 1, 8, 8))
    noise = Given(own[anchors[:, None] + 1 + jnp.arange(levels)], [])
    drafter.propose(params, state, view_of(tokens[anchors], anchors, none, none), noise)
    return jnp.stack(noise.heard)


@pytest.mark.parametrize("variant", VARIANTS)
def test_blocks_of_speculators(variant: str) -> None:
    """Features, windows, causal and bidirectional blocks, Markov heads, tables of the target."""
    blocks = load_file(FILES / variant / "blocks.safetensors")
    tables = {"embedding": jnp.asarray(blocks["embedding"]), "head": jnp.asarray(blocks["head"])}
    target = random_target(CONFIG) | tables
    draft = load(FILES / variant, Target(CONFIG, target))
    config = draft.config
    assert config.features == (-1, 0, 1) and draft.seen == (None, 0)
    assert (config.markov, config.confidence) == HEADS.get(variant, (None, None))
    assert config.from_pending == (variant in ("dspark", "dspark_rnn"))
    slides = {"dflash_sliding": (5, None, 5), "dspark_rnn": (5, 5)}
    assert config.windows == slides.get(variant, (None, None))
    causal = tuple(bool(each) and variant == "dflash_sliding" for each in config.windows)
    assert config.causal == causal
    known = draft.params.vocabulary
    known = np.arange(37) if known is None else np.asarray(known)
    own = np.searchsorted(known, blocks["tokens"])
    np.testing.assert_array_equal(known[own], blocks["tokens"])
    drafter = draft.drafter(TreeConfig((1,) * config.tokens))
    params = Params(target, draft.params)
    given = blocks["hidden"], jnp.asarray(blocks["tokens"]), blocks["anchors"], jnp.asarray(own)
    logits = _blocks(drafter, params, *given)
    expected = blocks["logits"][:, config.first_slot :].swapaxes(0, 1)
    np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=1e-4)
