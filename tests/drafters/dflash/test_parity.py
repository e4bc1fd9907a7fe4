"""Drafts of DFlash, DFlash 2 and DSpark equal those of speculators, on files that it wrote.

``speculators/`` holds checkpoints of speculators 0.9.0 (torch 2.13.0, transformers 5.23.0) with
random weights, which share its options among them, as its ``save_pretrained`` wrote them. Next to
each lie the inputs and the logits of its training forward over four blocks of one text, and the
tables that it takes from the target (``blocks.safetensors``). A Markov head is given the text's own
tokens there.

JetSpec's heads equal the definition, written in PyTorch. Ours and their authors' class (commit
2c7b3fa of their repository, transformers 5.24) agreed to 2e-6 on such a file, once.
"""

import json
from dataclasses import replace
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
from longspec_jax.drafters.checkpoints.dflash import load, save_draft
from longspec_jax.drafters.dflash import Confidence, DFlashDrafter, Markov
from longspec_jax.drafters.draft import Target
from tests.drafters.dflash.toys import config_for, random_params
from tests.drafters.kit import Given, without_tables
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
    slides = {"dflash_sliding": (5, None, 5), "dspark_rnn": (5, 5), "dflash2": (5, None)}
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


CAUSAL = config_for(
    CONFIG, trunk=dict(num_layers=3), features=(-1, 0, 1), block=9, causal=(True,) * 3
)
TEXT = np.random.default_rng(5).integers(0, CONFIG.vocab_size, 24).astype(np.int32)
HIDDEN = np.random.default_rng(6).standard_normal((16, 3 * CONFIG.model_width)).astype(np.float32)
ANCHORS = np.array([0, 3, 15], np.int32)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_a_causal_block_is_that_of_the_definition(layers: int, tmp_path: Path) -> None:
    """Layer by layer: of a draft with only its first layers, read from a published file."""
    torch = pytest.importorskip("torch", reason="the oracle is PyTorch")
    from tests.train.drafts.plain_dflash import DFlashOracle

    trunk = replace(CAUSAL.trunk, num_layers=layers)
    config = replace(CAUSAL, trunk=trunk, windows=(), causal=(True,) * layers)
    save_draft(tmp_path, config, without_tables(random_params(config)))
    assert json.loads((tmp_path / "config.json").read_text())["dflash_config"]["causal_head"]
    target = random_target(CONFIG)
    draft = load(tmp_path, Target(CONFIG, target))
    drafter = draft.drafter(TreeConfig((1,) * config.tokens))
    given = HIDDEN, jnp.asarray(TEXT[:16]), jnp.asarray(ANCHORS), jnp.asarray(TEXT)
    found = np.asarray(_blocks(drafter, Params(target, draft.params), *given))
    stored = load_file(tmp_path / "model.safetensors")
    oracle = DFlashOracle({name: torch.tensor(each) for name, each in stored.items()}, config)
    table, head = (torch.tensor(np.array(target[name])) for name in ("embedding", "head"))
    for row, anchor in enumerate(map(int, ANCHORS)):
        features = torch.tensor(HIDDEN[:anchor])
        wanted = oracle.logits(table, head, features, anchor, int(TEXT[anchor]))
        np.testing.assert_allclose(found[:, row], wanted, atol=2e-5)
