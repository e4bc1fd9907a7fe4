"""Drafts of DFlash and its kin as published: every dialect in and out, and what is refused."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from longspec_jax.config.layers import Llama3RopeScaling
from longspec_jax.config.tree import PLAIN
from longspec_jax.drafters.checkpoints.dflash import (
    DEEPSPEC,
    SPECULATORS,
    ZLAB,
    FeatureDialect,
    hidden_layers,
    load,
    load_draft,
    save_draft,
)
from longspec_jax.drafters.dflash import (
    Confidence,
    DFlashConfig,
    DFlashDraft,
    DFlashOptions,
    Markov,
)
from longspec_jax.drafters.dflash2 import Convolution, Selector
from longspec_jax.drafters.draft import Target
from longspec_jax.drafters.registry import DFLASH
from longspec_jax.loading import choose_drafts
from longspec_jax.weights.json_files import JsonObject
from tests.drafters.dflash.toys import config_for, random_params
from tests.drafters.kit import assert_same_tensors, edit
from tests.kit import each_row, random_target, tiny_target_config

CONFIG = tiny_target_config(num_layers=8)
TARGET = Target(CONFIG, random_target(CONFIG))
KNOWN = np.sort(np.random.default_rng(0).permutation(CONFIG.vocab_size)[:60])
SLIDING: dict[str, Any] = dict(windows=(9, None), causal=(True, False))
CAUSAL: dict[str, Any] = dict(causal=(True, True))
DFLASH2: dict[str, Any] = dict(convolution=Convolution(2, 4), selector=Selector(5, 7))
DRAFTS: dict[str, tuple[FeatureDialect, DFlashConfig]] = {
    "z-lab": (ZLAB, config_for(CONFIG, features=(1, 3, 5))),
    "z-lab, sliding": (ZLAB, config_for(CONFIG, **SLIDING, block=8)),
    "JetSpec": (ZLAB, config_for(CONFIG, **CAUSAL, block=16)),
    "JetSpec, sliding": (ZLAB, config_for(CONFIG, **CAUSAL, windows=(9, None))),
    "DFlash 2": (ZLAB, config_for(CONFIG, **DFLASH2, block=8, windows=(9, 9))),
    "SpecForge, DSpark": (ZLAB, config_for(CONFIG, from_pending=True, markov=Markov(4))),
    "DeepSpec, DFlash": (DEEPSPEC, config_for(CONFIG, from_pending=True)),
    "DeepSpec, DSpark": (
        DEEPSPEC,
        config_for(
            CONFIG,
            trunk=dict(rope_scaling=Llama3RopeScaling(8.0, 1.0, 4.0, 8192)),
            from_pending=True,
            features=(0, 2, 4, 5, 6),
            markov=Markov(4, gated=True),
            confidence=Confidence(True),
        ),
    ),
    "speculators": (SPECULATORS, config_for(CONFIG, **SLIDING, proposable=60, features=(0, 6))),
    "speculators, DFlash 2": (SPECULATORS, config_for(CONFIG, **DFLASH2, features=(0, 6))),
    "speculators, DSpark": (
        SPECULATORS,
        config_for(
            CONFIG,
            proposable=60,
            windows=(None, 9),
            markov=Markov(4, recurrent=True),
            confidence=Confidence(False),
        ),
    ),
}


def _saved(folder: Path, name: str, **changes: Any) -> Path:
    """A draft's folder, with keys of its ``config.json`` changed, or taken away by None."""
    dialect, config = DRAFTS[name]
    whole = config.proposable == config.vocab_size
    save_draft(folder, config, random_params(config, None if whole else KNOWN))
    if dialect is not ZLAB:
        _translate(folder, dialect)
    return edit(folder, **changes)


def _translate(folder: Path, dialect: FeatureDialect) -> None:
    """Write a draft of z-lab's anew, as another family of trainers does."""
    raw = json.loads((folder / "config.json").read_text())
    own = raw.pop("dflash_config")
    kind = own.pop("projector_type", "dflash2" if "selector_rank" in own else "dflash")
    from_pending, causal = raw.pop("sample_from_anchor", kind == "dspark"), own.pop("causal", True)
    if dialect is DEEPSPEC:
        absent = {"markov_rank": 0, "enable_confidence_head": False}
        raw |= {"architectures": ["Qwen3DSparkModel"]} | absent | own
    else:
        ids = [each + 1 for each in own.pop("target_layer_ids")]
        sizes = "block_size", "draft_vocab_size", "target_hidden_size"
        beside = {key: raw.pop(key) for key in sizes if key in raw}
        del raw["architectures"]
        raw = {
            "architectures": [
                {"dspark": "DSpark", "dflash": "DFlash", "dflash2": "DFlash2"}[kind] + "DraftModel"
            ],
            "speculators_model_type": kind,
            "transformer_layer_config": raw,
            "aux_hidden_state_layer_ids": ids,
            "sample_from_anchor": from_pending,
            "sliding_window_non_causal": not causal,
        }
        raw |= own | beside
    (folder / "config.json").write_text(json.dumps(raw))


@each_row("name", DRAFTS)
def test_every_dialect_is_read_and_one_is_written(name: str, tmp_path: Path) -> None:
    _, config = DRAFTS[name]
    folder = _saved(tmp_path / "one", name)
    draft = load(folder, TARGET)
    assert draft.config == config
    vocabulary = draft.params.vocabulary
    assert (vocabulary is None) == (config.proposable == config.vocab_size)
    expected = random_params(config, vocabulary)
    jax.tree.map(np.testing.assert_array_equal, draft.params, expected)
    save_draft(tmp_path / "two", draft.config, draft.params)
    assert_same_tensors(folder, tmp_path / "two")
    assert load(tmp_path / "two", TARGET).config == config
    [chosen] = choose_drafts([folder], {"window": 64})
    assert chosen.kind is DFLASH


def test_files_of_speculators_come_back_with_the_same_tensors(tmp_path: Path) -> None:
    config = tiny_target_config(vocab_size=37, model_width=16, max_positions=64)
    for folder in (Path(__file__).parent / "speculators").iterdir():
        draft, params = load_draft(folder, Target(config, random_target(config)))
        assert not params.stores_embedding
        save_draft(tmp_path / folder.name, draft, params)
        assert_same_tensors(folder, tmp_path / folder.name)
        again, _ = load_draft(tmp_path / folder.name, Target(config, random_target(config)))
        assert again == draft


REFUSED: dict[str, dict[str, dict[str, Any]]] = {
    "speculators": {
        "target of hidden_size=48, the target has hidden_size=36": dict(target_hidden_size=48),
        "speculators_model_type='mtp' must be 'dflash', 'dspark' or 'dflash2'": dict(
            speculators_model_type="mtp"
        ),
    },
    "z-lab": {
        "num_target_layers=36, the target has 8 layers": dict(num_target_layers=36),
        "the file has DFlash2DraftModel, which drafts of DFlash 2 have, and lacks "
        "conv_kernel_size, conv_group_size, selector_rank, selector_top_k": dict(
            architectures=["DFlash2DraftModel"]
        ),
        "the file has selector_rank, which drafts of DFlash 2 have, and lacks conv_ker": dict(
            dflash_config=dict(mask_token_id=5, target_layer_ids=[1, 3], selector_rank=256)
        ),
        "missing layers.0.attention_conv.base_kernel (2, 2, 36)": dict(
            conv_kernel_size=2, conv_group_size=4, selector_rank=5, selector_top_k=7
        ),
        "causal_head=True is not supported outside of dflash_config": dict(causal_head=True),
        "causal_head=1 must be true or false": dict(
            dflash_config=dict(mask_token_id=5, causal_head=1)
        ),
        "causal=False contradicts causal_head=True of the same file": dict(
            dflash_config=dict(mask_token_id=5, causal_head=True, causal=False)
        ),
        "output_multiplier=0.19 is not supported": dict(output_multiplier=0.19),
        "input_embedding_scale=60.0 is not supported": dict(
            dflash_config=dict(mask_token_id=5, input_embedding_scale=60.0)
        ),
        "projector_type='domino' must be dflash or dspark": dict(
            dflash_config=dict(mask_token_id=5, projector_type="domino")
        ),
        "the file lacks block_size": dict(block_size=None),
        "attention_bias=True is not supported": dict(attention_bias=True),
    },
    "DeepSpec, DSpark": {
        "[1, 4, 8] must be layers of the target, -1 to 7: it has 8 layers, and DeepSpec counts the "
        "hidden states that leave": dict(target_layer_ids=[1, 4, 8]),
        "mask_token_id": dict(mask_token_id=101),
        "unexpected confidence_head.proj.weight (1, 40)": dict(enable_confidence_head=False),
        "must be one of vanilla, gated, rnn": dict(markov_head_type="lstm"),
    },
    "speculators, DFlash 2": {
        "conv_group_size=16 a divisor of hidden_size=36": dict(conv_group_size=16),
        "conv_kernel_size=5 must be at most block_size=4": dict(conv_kernel_size=5),
        "a selector is not used with": dict(draft_vocab_size=60),
    },
    "JetSpec": {
        "is_causal=False contradicts causal_head=True of the same file": dict(is_causal=False),
    },
    "DeepSpec, DFlash": {
        "missing markov_head.markov_w1.weight (101, 4)": dict(markov_rank=4),
    },
}
"""Of every draft: words of the refusal, and the keys of its file that are changed."""


@each_row(("name", "words"), [(name, words) for name in REFUSED for words in REFUSED[name]])
def test_refusals(name: str, words: str, tmp_path: Path) -> None:
    folder = _saved(tmp_path, name, **REFUSED[name][words])
    with pytest.raises(ValueError, match=re.escape(words)):
        load(folder, TARGET)


def beside(folder: Path, dialect: str, name: str) -> Path:
    """A draft's folder with one tensor more."""
    file = _saved(folder, dialect) / "model.safetensors"
    save_file(load_file(file) | {name: np.ones(3, np.float32)}, file)
    return folder


DFLASH_2 = "the file has {name}, which drafts of DFlash 2 have, and lacks conv_kernel"
OTHERS = "hold {name}, which drafts of {kind}.* not supported yet; load another draft"


@each_row(
    ("name", "words"),
    [
        ("refiner_head.mixer.weight", OTHERS.replace("{kind}", "XPress")),
        ("hidden_dim_adapter.weight", OTHERS.replace("{kind}", "JetSpec")),
        # It would draft without them: whatever the file calls itself, it must say their sizes.
        ("layers.0.attention_conv.base_kernel", DFLASH_2),
        ("layers.1.mlp_conv.kernel_projection.weight", DFLASH_2),
        ("candidate_selector.predecessor_codebook", DFLASH_2),
    ],
)
@each_row("dialect", ["z-lab", "speculators"])
def test_other_drafts_are_recognised_by_their_tensors(
    tmp_path: Path, name: str, words: str, dialect: str
) -> None:
    """Whatever the file calls itself, and though it has none of the keys."""
    with pytest.raises(ValueError, match=words.format(name=re.escape(name))):
        load(beside(tmp_path, dialect, name), TARGET)


def test_a_draft_of_dflash_2_under_another_name(tmp_path: Path) -> None:
    """As conversions leave it; and with its sizes next to ``dflash_config``, as some files have."""
    folder = _saved(tmp_path, "DFlash 2", architectures=["DFlashDraftModel"])
    expected = DRAFTS["DFlash 2"][1]
    assert load(folder, TARGET).config == expected
    own = json.loads((folder / "config.json").read_text())["dflash_config"]
    del own["causal"]
    sizes = {key: own.pop(key) for key in [*own] if key.startswith(("conv", "selector"))}
    edit(folder, dflash_config=own, is_causal=False)
    with pytest.raises(ValueError, match="lacks conv_kernel_size"):
        load(folder, TARGET)
    edit(folder, **sizes)
    assert load(folder, TARGET).config == expected


def test_factors_of_one_and_switches_that_are_off(tmp_path: Path) -> None:
    """As files have them that say all that there is."""
    expected = load(_saved(tmp_path, "z-lab"), TARGET).config
    own = json.loads((tmp_path / "config.json").read_text())["dflash_config"]
    off = dict(causal_head=False, output_multiplier=1.0, final_logit_softcapping=None)
    edit(tmp_path, dflash_config=own | off | dict(input_embedding_scale=1))
    assert load(tmp_path, TARGET).config == expected


def test_a_base_in_the_scaling_is_that_of_the_layers(tmp_path: Path) -> None:
    held = dict(rope_scaling=dict(rope_type="default", rope_theta=5e5), rope_theta=None)
    assert load(_saved(tmp_path, "z-lab", **held), TARGET).config.trunk.rope_theta == 5e5


def test_layers_that_no_file_names(tmp_path: Path) -> None:
    """One for each of the draft's, evenly; or those that the user names."""
    raw = JsonObject({"mask_token_id": 5})
    assert hidden_layers(raw, ZLAB, 36, 5) == (1, 9, 17, 25, 33)
    assert hidden_layers(raw, ZLAB, 8, 1) == (4,)
    named = load(_saved(tmp_path, "z-lab"), TARGET, DFlashOptions(layers="-1,2,7"))
    assert named.config.features == (-1, 2, 7)


def test_what_is_seen_follows_from_the_trained_range(tmp_path: Path) -> None:
    folder = _saved(tmp_path, "z-lab", max_position_embeddings=512)
    with pytest.warns(UserWarning, match=r"made for 512 .* for 1024, .* first 4 and the last 504 "):
        assert load(folder, TARGET).drafter(PLAIN).window == 504
    assert load(folder, TARGET, DFlashOptions(window=300)).drafter(PLAIN).sinks == 4
    assert load(_saved(tmp_path, "z-lab"), TARGET).drafter(PLAIN).window is None


@each_row("fields", [{}, CAUSAL])
@each_row(("block", "deepest"), [(4, 3), (16, 15), (64, 16)])
def test_default_trees_fit_the_block(block: int, deepest: int, fields: dict[str, Any]) -> None:
    """Those of a causal block have up to 128 nodes, as its authors' have."""
    config = config_for(CONFIG, block=block, **fields)
    draft = DFlashDraft(config, random_params(config))
    trees = draft.default_trees
    for tree in (*trees.cpu, *trees.gpu, *trees.large, *trees.together):
        assert draft.drafter(tree).tree.num_levels <= deepest
    assert {min(tree.num_levels, 15) for tree in trees.large} == {min(deepest, 15)}
    assert any(tree.budget == 128 for tree in trees.large) == bool(fields)


def test_a_key_of_jetspec_is_what_tells_its_heads_from_drafts_of_dflash(tmp_path: Path) -> None:
    """As its authors write it: six heads are such files."""
    folder = _saved(tmp_path, "JetSpec")
    raw = json.loads((folder / "config.json").read_text())
    assert raw["architectures"] == ["DFlashDraftModel"] and raw["block_size"] == 16
    assert raw["num_target_layers"] == 8, "their class does not load a file without it"
    own = raw["dflash_config"]
    assert own == dict(target_layer_ids=[-1, 0, 7], mask_token_id=100, causal_head=True)
    del own["causal_head"]
    config = load(edit(folder, dflash_config=own), TARGET).config
    assert config == replace(DRAFTS["JetSpec"][1], causal=(False, False))


@each_row("causal", [(True, False), (False, True)])
def test_blocks_that_no_file_describes_are_refused(causal: tuple[bool, bool]) -> None:
    """Else they would be saved as others."""
    with pytest.raises(ValueError, match=r"must be true of all layers, .* no file says more"):
        config_for(CONFIG, causal=causal)
