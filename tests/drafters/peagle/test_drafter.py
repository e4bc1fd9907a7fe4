"""P-EAGLE: blocks as published, every dialect, what the window reaches, and what is refused.

``speculators/`` holds checkpoints of speculators 0.9.0 (torch 2.13.0, transformers 5.24.0) with
random weights, as its ``save_pretrained`` wrote them. Next to each lie the inputs and the logits of
its training forward, with a block at every position of a text (``steps.safetensors``). That no
token changes is in :mod:`tests.drafters.test_published`.
"""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from longspec_jax.config.tree import PLAIN, TreeConfig
from longspec_jax.drafters.base import Needs, Params
from longspec_jax.drafters.checkpoints import eagle3
from longspec_jax.drafters.checkpoints.peagle import load
from longspec_jax.drafters.peagle import PEagleDrafter, PEagleOptions
from longspec_jax.drafters.registry import PEAGLE
from longspec_jax.loading import choose_drafts
from tests.decoding.lossless import CONFIG
from tests.drafters.dflash.test_drafter import KNOWN, best_first, text
from tests.drafters.eagle3.test_parity import TARGET, assert_chains
from tests.drafters.kit import edit, paths, proposed
from tests.drafters.peagle.toys import config_for, random_params
from tests.kit import each_row

FILES = Path(__file__).parent / "speculators"
DRAFT = config_for(CONFIG, proposable=len(KNOWN))
WINDOW = PEagleDrafter(DRAFT, TreeConfig((4, 5, 3), budget=9), window=6)
"""Fewer entries than most rows have, in a ring of eight."""


@pytest.mark.parametrize("variant", ["llama", "qwen3"])
def test_blocks_of_speculators(variant: str) -> None:
    """Every slot of a block at every position: layers, norms, flags, scaled positions, window."""
    draft = load(FILES / variant, TARGET)
    config, window = draft.config, 5 if variant == "qwen3" else None
    assert (config.num_layers, config.window) == (2 if window else 3, window)
    assert (config.features, config.mask_token, config.depths) == ((-1, 0, 1), 35, 3)
    assert draft.seen == (window and window - 1, 0) and config.qk_norm == bool(window)
    assert_chains(draft, load_file(FILES / variant / "steps.safetensors"))
    with pytest.raises(ValueError, match="4 levels is deeper .* proposes 3 tokens"):
        draft.drafter(TreeConfig((1,) * 4))


def _amazon(raw: dict[str, Any], tensors: dict[str, Any]) -> None:
    raw |= {"architectures": ["LlamaForCausalLMEagle3"], "ptd_token_id": 35}
    _renamed(tensors, "layers.0.", "midlayer.")


def _specforge(raw: dict[str, Any], tensors: dict[str, Any]) -> None:
    raw |= {"architectures": ["PEagleDraftModel"], "pard_token": 35, "ptd_token_id": 3}


def _nemo(raw: dict[str, Any], tensors: dict[str, Any]) -> None:
    raw |= {"architectures": ["LlamaEagle3DraftModel"], "mask_token_id": 35, "pard_token": 3}
    tensors["mask_hidden"] = tensors["mask_hidden"][0]
    _renamed(tensors, "", "model.")


def _vllm(raw: dict[str, Any], tensors: dict[str, Any]) -> None:
    _amazon(raw, tensors)
    raw |= {"dflash_config": {"mask_token_id": 35}, "ptd_token_id": 4, "pard_token": 3}
    raw["eagle_config"]["norm_before_fc"] = raw.pop("norm_before_fc")


def _renamed(tensors: dict[str, Any], old: str, new: str) -> None:
    for name in [name for name in tensors if name.startswith(old) and name not in ("d2t", "t2d")]:
        tensors[new + name.removeprefix(old)] = tensors.pop(name)


DIALECTS = {"amazon": _amazon, "SpecForge": _specforge, "NeMo": _nemo, "vLLM": _vllm}


def _saved(folder: Path, name: str, **changes: Any) -> Path:
    """The draft of Llama's layers as others write it, with keys changed, or taken away by None."""
    shutil.copytree(FILES / "llama", folder, dirs_exist_ok=True)
    if name in DIALECTS:
        theirs = json.loads((folder / "config.json").read_text())
        raw = theirs["transformer_layer_config"] | {"draft_vocab_size": 23, "norm_before_fc": True}
        raw["eagle_config"] = {eagle3.IDS: [each - 1 for each in theirs[eagle3.IDS]]}
        _retold(folder, lambda tensors: DIALECTS[name](raw, tensors))
        (folder / "config.json").write_text(json.dumps(raw))
    return edit(folder, **changes)


def _retold(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the stored tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@each_row("name", DIALECTS)
def test_every_dialect_is_the_same_draft(name: str, tmp_path: Path) -> None:
    """The first layer under both names, every key of a mask token in its turn, prefixes."""
    [chosen] = choose_drafts([_saved(tmp_path, name, num_depths=7)], {"window": 64})
    assert chosen.kind is PEAGLE
    draft, usual = load(tmp_path, TARGET), load(FILES / "llama", TARGET)
    assert draft.config == replace(usual.config, depths=7)
    jax.tree.map(np.testing.assert_array_equal, draft.params, usual.params)
    silent = load(edit(tmp_path, num_depths=None), TARGET)
    assert silent.config.depths is None
    assert silent.default_trees.large[0].num_levels == 8
    assert silent.drafter(TreeConfig((1,) * 18)).tree.num_levels == 18


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "num_hidden_layers=2 must be 3, the layers of the weights": (
        "amazon",
        dict(num_hidden_layers=2),
    ),
    "the file names no mask token (mask_token_id, pard_token, ptd_token_id)": (
        "SpecForge",
        dict(pard_token=None, ptd_token_id=None),
    ),
    "mask_token_id=37 must be": ("amazon", dict(ptd_token_id=37)),
    "all layers have the window or none has": (
        "amazon",
        dict(layer_types=["full_attention", "sliding_attention"], sliding_window=5),
    ),
    "speculators_model_type='eagle3' is not supported with a mask token": (
        "speculators",
        dict(speculators_model_type="eagle3"),
    ),
}
"""Words of the refusal: whose draft, and the keys of its file that are changed."""


@each_row("words", REFUSED)
def test_refusals(words: str, tmp_path: Path) -> None:
    name, changes = REFUSED[words]
    folder = _saved(tmp_path, name, **changes)
    assert choose_drafts([folder], {})[0].kind is PEAGLE
    with pytest.raises(ValueError, match=re.escape(words)):
        load(folder, TARGET)


DAMAGED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no mask_hidden, which stands in mask slots": lambda tensors: tensors.pop("mask_hidden"),
    "mask_hidden is (1, 1, 16), must be (1, 1, 48)": lambda tensors: tensors.update(
        mask_hidden=np.ones((1, 1, 16), np.float32)
    ),
    "must be 2, the layers of the weights": lambda tensors: [
        tensors.pop(name) for name in [*tensors] if name.startswith("layers.2.")
    ],
    "missing layers.2.input_layernorm.weight": lambda tensors: tensors.pop(
        "layers.2.input_layernorm.weight"
    ),
}
"""Words of the refusal, and what is changed in the tensors."""


@each_row("words", DAMAGED)
def test_damaged_tensors_are_refused(words: str, tmp_path: Path) -> None:
    _retold(_saved(tmp_path, "amazon"), DAMAGED[words])
    with pytest.raises(ValueError, match=re.escape(words)):
        load(tmp_path, TARGET)


def test_eagle_3_is_no_half_of_it(tmp_path: Path) -> None:
    """A draft without the key of a mask token is one of EAGLE-3, which has one layer."""
    folder = _saved(tmp_path, "amazon", ptd_token_id=None)
    kind = choose_drafts([folder], {})[0].kind
    with pytest.raises(ValueError, match="one layer is, and the weights have layers.1"):
        kind.load(folder, TARGET)


@each_row(
    ("options", "words"),
    [
        (dict(sinks=4, window=64), "sinks=4 would be turned to stand before the window"),
        (dict(working=1024), "working=1024: a P-EAGLE draft reads the last tokens or all"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PEagleOptions(**options)


def test_what_is_seen_follows_from_the_trained_range() -> None:
    """A target of a longer range makes it a window, without sinks; it needs what that reaches."""
    longer = TARGET._replace(config=replace(TARGET.config, max_positions=4096))
    with pytest.warns(UserWarning, match="the first 0 and the last 32 tokens"):
        draft = load(FILES / "llama", longer)
    assert draft.drafter(PLAIN).needs == Needs((-1, 0, 1), recent=3 * 32 + 1)
    assert load(FILES / "llama", TARGET).drafter(PLAIN).needs == Needs((-1, 0, 1))
    seen = load(FILES / "llama", longer, PEagleOptions(window=100)).seen
    assert seen == (100, 0)


def test_a_window_reaches_as_far_as_all_layers_of_it() -> None:
    """Tokens before the last ``L W + 1`` change nothing; the first of these does."""
    drafter = replace(WINDOW, config=config_for(CONFIG, num_layers=2), window=3)
    params, (tokens, start, _, *hidden) = Params(None, random_params(drafter.config)), text()
    length, pending = np.array([16, 16], np.int32), tokens[:, 0]

    def logits(first: int) -> np.ndarray:
        """Those of the root after texts whose states before a token are others."""
        states = [np.where(np.arange(16)[:, None] < first, -each, each) for each in hidden]
        block = tokens, start, length, *states
        return np.asarray(proposed(drafter, params, block, pending)[1][0])

    # Entries 9 to 14, made of the states of tokens 9 to 14; token 15 is the root's.
    np.testing.assert_allclose(logits(9), logits(0), atol=1e-5)
    assert np.abs(logits(10) - logits(0)).max() > 1e-3


def test_a_tree_holds_the_best_sums_of_a_blocks_rows() -> None:
    """Under the target's numbers of the tokens that the draft knows."""
    draft: Any = random_params(DRAFT, KNOWN)
    params = Params(None, replace(draft, head=9 * draft.head))
    drafter = PEagleDrafter(DRAFT, TreeConfig((12,) * 5, budget=24))
    block = text()
    tree, heard = proposed(drafter, params, block, KNOWN[[5, 50]].astype(np.int32))
    logs = np.asarray(jax.nn.log_softmax(jnp.stack(heard)[:, :, 0]), np.float64)
    for row in range(2):
        best = {tuple(map(int, KNOWN[[*path]])) for path in best_first(logs[:, row], 24)}
        assert paths(tree, row).keys() - {()} == best
