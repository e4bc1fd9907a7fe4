"""EAGLE-3 drafts as published: every dialect in and out, and what is refused."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from longspec_jax.config.layers import LinearRopeScaling, Llama3RopeScaling, YarnRopeScaling
from longspec_jax.config.target import TargetConfig
from longspec_jax.config.tree import TreeConfig
from longspec_jax.drafters.checkpoints.eagle3 import (
    AUTHORS,
    DEEPSPEC,
    IDS,
    MIDLAYER,
    SPECFORGE,
    SPECULATORS,
    FeatureDialect,
    load,
    save_draft,
)
from longspec_jax.drafters.draft import Target
from longspec_jax.drafters.eagle3 import Eagle3Config, Eagle3Draft, Eagle3Options
from longspec_jax.drafters.registry import EAGLE3, LONGSPEC
from longspec_jax.drafters.window import DraftWindow
from longspec_jax.loading import choose_drafts
from tests.drafters.eagle3.toys import config_for, random_params
from tests.drafters.kit import assert_same_files, edit
from tests.infer.toys import toy_spec
from tests.kit import each_row, random_target, tiny_target_config

CONFIG = tiny_target_config(num_layers=8)
TARGET = Target(CONFIG, random_target(CONFIG))
KNOWN = np.sort(np.random.default_rng(0).permutation(CONFIG.vocab_size)[:60])
REDUCED: dict[str, Any] = dict(proposable=len(KNOWN), features=(1, 3, 4))
DRAFTS: dict[str, tuple[FeatureDialect, Eagle3Config]] = {
    "authors": (AUTHORS, config_for(CONFIG, **REDUCED, rope_theta=5e5)),
    "authors, whole vocabulary": (AUTHORS, config_for(CONFIG, features=(1, 3, 4))),
    "authors, yarn of SpecPV": (
        AUTHORS,
        config_for(
            CONFIG, **REDUCED, rope_scaling=YarnRopeScaling.usual(32.0, 2048), max_positions=65536
        ),
    ),
    "SpecForge": (
        SPECFORGE,
        config_for(CONFIG, **REDUCED, rope_scaling=Llama3RopeScaling(8.0, 1.0, 4.0, 8192)),
    ),
    "SpecForge, 3.1": (
        SPECFORGE,
        config_for(
            CONFIG, **REDUCED, feature_norms=True, rope_scaling=YarnRopeScaling(4.0, 64, 1.5)
        ),
    ),
    "SpecForge without a norm": (SPECFORGE, config_for(CONFIG, **REDUCED, normed_head=False)),
    "SpecForge, fed back normed": (
        SPECFORGE,
        config_for(CONFIG, **REDUCED, normed_feedback=True, qk_norm=True),
    ),
    "speculators": (
        SPECULATORS,
        config_for(CONFIG, proposable=60, features=(-1, 2, 7), norm_before_fuse=True, window=9),
    ),
    "speculators, 3.1": (
        SPECULATORS,
        config_for(
            CONFIG,
            proposable=60,
            features=(0, 1, 7),
            norm_before_residual=True,
            feature_norms=True,
            normed_feedback=True,
            qk_norm=True,
        ),
    ),
    "DeepSpec": (DEEPSPEC, config_for(CONFIG, features=(0, 2, 4, 5, 6), qk_norm=True)),
    "with biases": (SPECFORGE, config_for(CONFIG, **REDUCED, qkv_bias=True)),
}


def _saved(folder: Path, name: str, **changes: Any) -> Path:
    """A draft's folder, with keys of its ``config.json`` changed, or taken away by None."""
    dialect, config = DRAFTS[name]
    whole = config.proposable == config.vocab_size
    save_draft(folder, config, random_params(config, None if whole else KNOWN))
    if dialect is not SPECFORGE:
        _translate(folder, dialect)
    return edit(folder, **changes) if changes else folder


def _translate(folder: Path, dialect: FeatureDialect) -> None:
    """Write a draft of SpecForge's anew, as another family of trainers does."""
    raw = json.loads((folder / "config.json").read_text())
    own = raw.pop("eagle_config")
    flags = {key: raw.pop(key) for key in ("norm_before_residual", "norm_before_fc", "fc_norm")}
    # To SpecForge it is about the head, to others about what is fed back.
    del raw["norm_output"]
    flags["norm_output"] = own.get("return_hidden_post_norm", False)
    for key in ("mscale", "mscale_all_dim"):
        (raw.get("rope_scaling") or {}).pop(key, None)
    ids, sizes = own[IDS], ("draft_vocab_size", "torch_dtype", "target_hidden_size")
    if dialect is SPECULATORS:
        named = {"architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3"}
        more = {key: raw.pop(key) for key in sizes if key in raw}
        del raw["architectures"]
        entering = {"transformer_layer_config": raw, IDS: [each + 1 for each in ids]}
        raw = named | entering | more | flags
    elif dialect is DEEPSPEC:
        raw |= {"architectures": ["Qwen3Eagle3Model"], "target_layer_ids": ids} | flags
    else:
        raw |= {"architectures": ["LlamaForCausalLM"], "eagle_config": {IDS: ids}} | flags
    (folder / "config.json").write_text(json.dumps(raw))

    def renamed(tensors: dict[str, np.ndarray]) -> None:
        for name in [name for name in tensors if name.startswith(MIDLAYER)]:
            tensors[dialect.layer + name.removeprefix(MIDLAYER)] = tensors.pop(name)

    _retold(folder, renamed)


def _retold(folder: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> None:
    """Change the stored tensors."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


@each_row("name", DRAFTS)
def test_every_dialect_is_read_and_one_is_written(name: str, tmp_path: Path) -> None:
    dialect, config = DRAFTS[name]
    folder = _saved(tmp_path / "one", name)
    draft = load(folder, TARGET)
    assert draft.config == config
    vocabulary = draft.params.vocabulary
    if config.proposable == config.vocab_size:
        assert vocabulary is None
    else:
        np.testing.assert_array_equal(vocabulary, KNOWN)
    expected = random_params(config, vocabulary)
    jax.tree.map(np.testing.assert_array_equal, draft.params, expected)
    save_draft(tmp_path / "two", draft.config, draft.params)
    if dialect is SPECFORGE:
        assert_same_files(folder, tmp_path / "two")
    again = load(tmp_path / "two", TARGET)
    assert again.config == config
    jax.tree.map(np.testing.assert_array_equal, again.params, expected)


def test_tensors_are_called_as_published(tmp_path: Path) -> None:
    names = {
        "d2t": (60,),
        "t2d": (101,),
        "embed_tokens.weight": (101, 36),
        "fc.weight": (36, 108),
        "lm_head.weight": (60, 36),
        "norm.weight": (36,),
        "midlayer.hidden_norm.weight": (36,),
        "midlayer.input_layernorm.weight": (36,),
        "midlayer.post_attention_layernorm.weight": (36,),
        "midlayer.self_attn.q_proj.weight": (32, 72),
        "midlayer.self_attn.k_proj.weight": (16, 72),
        "midlayer.self_attn.v_proj.weight": (16, 72),
        "midlayer.self_attn.o_proj.weight": (36, 32),
        "midlayer.mlp.gate_proj.weight": (29, 36),
        "midlayer.mlp.up_proj.weight": (29, 36),
        "midlayer.mlp.down_proj.weight": (36, 29),
    }
    tensors = load_file(_saved(tmp_path, "authors") / "model.safetensors")
    assert {name: tensor.shape for name, tensor in tensors.items()} == names
    assert tensors["d2t"].dtype == np.int64 and tensors["t2d"].dtype == bool
    np.testing.assert_array_equal(tensors["d2t"] + np.arange(60), np.flatnonzero(tensors["t2d"]))


def test_files_as_their_trainers_leave_them(tmp_path: Path) -> None:
    """Without what is usual: layers, base and positions; and with what only training reads."""
    folder = _saved(tmp_path / "authors", "authors", eagle_config=None, rope_theta=None)
    config = load(folder, TARGET).config
    assert config.features == (1, 3, 4) and config.rope_theta == 10000
    scaled = {"type": "linear", "factor": 2.0}
    edit(folder, rope_scaling=scaled, rope_theta=5e5)
    with pytest.warns(UserWarning, match="rope_theta=500000 is not used.* draft option rope_theta"):
        config = load(folder, TARGET).config
    # The authors' code forgets rope_theta where it scales; SpecForge's does not.
    assert (config.rope_theta, config.rope_scaling) == (10000, LinearRopeScaling(2.0))
    assert load(folder, TARGET, Eagle3Options(rope_theta=7e5)).config.rope_theta == 7e5
    # Of a base in the entry it knows nothing: another trainer wrote it.
    edit(folder, rope_scaling=scaled | {"rope_theta": 5e5})
    assert load(folder, TARGET).config.rope_theta == 5e5
    edit(folder, rope_scaling=scaled)
    edit(folder, architectures=["Eagle3LlamaForCausalLM"])
    assert load(folder, TARGET).config.rope_theta == 5e5
    folder = _saved(tmp_path / "speculators", "speculators")

    def trained(tensors: dict[str, np.ndarray]) -> None:
        tensors["verifier_lm_head.weight"] = np.full((60, 36), np.nan, np.float32)
        for name in [name for name in tensors if name not in ("d2t", "t2d")]:
            tensors[f"model.{name}"] = tensors.pop(name)

    _retold(folder, trained)
    assert load(folder, TARGET).config == DRAFTS["speculators"][1]


@each_row("name", ["authors", "SpecForge", "DeepSpec"])
def test_the_number_of_layers_may_be_the_targets(tmp_path: Path, name: str) -> None:
    """As in the published head of Vicuna-13B: the tensors tell that there is one."""
    folder = _saved(tmp_path, name, num_hidden_layers=CONFIG.num_layers)
    assert load(folder, TARGET).config == DRAFTS[name][1]


def test_tables_of_the_target_are_not_kept_twice(tmp_path: Path) -> None:
    """An absent embedding, and a stored one that equals the target's; its LM head likewise."""
    target = TARGET.params
    folder = _saved(tmp_path, "authors, whole vocabulary")
    assert load(folder, TARGET).params.own_embedding
    _retold(folder, lambda t: t.update({"embed_tokens.weight": np.asarray(target["embedding"])}))
    same = load(folder, TARGET)
    assert same.params.embedding is target["embedding"] and same.params.own_head
    assert same.own_params[1] is None and same.own_params[2] is same.params.head
    _retold(folder, lambda t: [t.pop(name) for name in ("embed_tokens.weight", "lm_head.weight")])
    absent = load(folder, TARGET)
    assert absent.params.embedding is target["embedding"]
    assert absent.params.head is target["head"] and absent.own_params[1:3] == (None, None)
    save_draft(tmp_path / "without", absent.config, absent.params)
    names = load_file(tmp_path / "without" / "model.safetensors")
    assert not names.keys() & {"embed_tokens.weight", "lm_head.weight"}


def _one_more(tensors: dict[str, np.ndarray]) -> None:
    tensors["t2d"] = tensors["t2d"] | (np.arange(101) == np.flatnonzero(~tensors["t2d"])[0])


REFUSED: dict[str, dict[str, dict[str, Any]]] = {
    "authors": {
        "target of hidden_size=48, the target has hidden_size=36": dict(target_hidden_size=48),
        "num_hidden_layers=2": dict(num_hidden_layers=2),
    },
    "SpecForge": {
        "[1, 4, 8] must be layers of the target, -1 to 7: it has 8 layers, and SpecForge counts "
        "the hidden states that leave": dict(
            eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 4, 8]}
        ),
        "enter the layers 2,4,5, which is layers=1,3,4; written by SpecForge it means the hidden "
        "states that leave the layers 2,4,5, layers=2,4,5": dict(
            eagle_config=None, eagle_aux_hidden_state_layer_ids=[2, 4, 5]
        ),
        "(target_layer_ids) the draft is written as DeepSpec writes it, with tensors "
        "layers.0.*; its weights have midlayer.*, as of the authors' code, SpecForge": dict(
            target_layer_ids=[1, 3, 4]
        ),
        "missing fc_norm.0.weight (36,)": dict(fc_norm=True),
        "rotary_emb_base=500000.0 is not used by the rotary embedding": dict(rotary_emb_base=5e5),
    },
    "speculators": {
        "[1, 4, 9] must be layers of the target, 0 to 8: it has 8 layers, and speculators counts "
        "the hidden states that enter": dict(eagle_aux_hidden_state_layer_ids=[1, 4, 9]),
        "speculators_model_type='dflash' is not supported, only 'eagle3'": dict(
            speculators_model_type="dflash"
        ),
        "rope_theta=500000.0 is not used by a file whose layers are in": dict(rope_theta=5e5),
    },
}
"""Of every draft: words of the refusal, and the keys of its file that are changed."""
DAMAGED: dict[str, Callable[[dict[str, np.ndarray]], Any]] = {
    "num_hidden_layers=8 is not supported: one layer is, and the weights have layers.1.*": (
        lambda tensors: tensors.update({"layers.1.mlp.up_proj.weight": np.ones((29, 36))})
    ),
    "d2t names 60 tokens and t2d (101,) marks 61, and they must be the same ones": _one_more,
    "the draft knows 60 of 101 tokens, and d2t": lambda tensors: tensors.pop("d2t"),
    "no lm_head.weight [60, 36]": lambda tensors: tensors.pop("lm_head.weight"),
}
"""Words of the refusal, and what is changed in the tensors of the authors' draft."""


@each_row(("name", "words"), [(name, words) for name in REFUSED for words in REFUSED[name]])
def test_refusals(name: str, words: str, tmp_path: Path) -> None:
    folder = _saved(tmp_path, name, **REFUSED[name][words])
    with pytest.raises(ValueError, match=re.escape(words)):
        load(folder, TARGET)


@each_row("words", DAMAGED)
def test_damaged_tensors_are_refused(words: str, tmp_path: Path) -> None:
    # The number of layers is the target's in some published files: one of the draft's is enough.
    folder = _saved(tmp_path, "authors", num_hidden_layers=CONFIG.num_layers)
    _retold(folder, DAMAGED[words])
    with pytest.raises(ValueError, match=re.escape(words)):
        load(folder, TARGET)


def test_the_layers_can_be_named(tmp_path: Path) -> None:
    """Where a file has two readings, and where it is wrong."""
    ids = dict(eagle_config=None, eagle_aux_hidden_state_layer_ids=[2, 4, 5])
    folder = _saved(tmp_path, "SpecForge", **ids)
    assert load(folder, TARGET, Eagle3Options(layers="-1,3,4")).config.features == (-1, 3, 4)
    with pytest.raises(ValueError, match=re.escape("(1, 3, 8), counted from 0 with -1")):
        load(folder, TARGET, Eagle3Options(layers="1,3,8"))


@each_row(
    ("options", "words"),
    [
        (dict(window=0), "window=0 must be at least 1"),
        (dict(sinks=65), "sinks=65 must be at most 64"),
        (dict(yarn=1.0), "yarn=1 must be a factor above 1"),
        (dict(layers="1;2"), "numbers of layers with commas"),
        (dict(rope_theta=0.5), "rope_theta=0.5 must be at least 1"),
        (dict(working=1024, window=64), "working=1024 and window=64 exclude each other"),
        (dict(working=1024, sinks=4), "working=1024 and sinks=4 exclude each other"),
        (dict(working=100), "working=100 must be a multiple of 32"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Eagle3Options(**options)


def _bound(draft: Eagle3Config, target: TargetConfig, **options: Any) -> DraftWindow:
    return Eagle3Draft.bind(draft, random_params(draft), target, Eagle3Options(**options)).seen


def _seen(trained: int, context: int, window: int | None = None, **options: Any) -> DraftWindow:
    target: TargetConfig = replace(CONFIG, max_positions=context)
    draft = config_for(target, max_positions=trained, window=window)
    return _bound(draft, target, **options)


def test_what_is_seen_follows_from_the_trained_range() -> None:
    assert _seen(4096, 4096) == (None, 0)
    assert _seen(2048, 4096) == (2048 - 4 - 32, 4)
    assert _seen(2048, 4096, sinks=0) == (2048 - 32, 0)
    assert _seen(4096, 4096, window=512) == (511, 0)
    assert _seen(4096, 4096, window=512, sinks=2) == (511, 2)
    assert _seen(2048, 131072, sinks=2) == _seen(2048, 4096, sinks=2)
    # A window as long as the target's range leaves nothing out.
    short = config_for(CONFIG, max_positions=64)
    assert _bound(short, CONFIG, window=CONFIG.max_positions) == (None, 0)
    assert _seen(2048, 4096, working=512) == (None, 0)
    stretched = config_for(CONFIG, max_positions=64).stretched(4.0)
    assert (stretched.max_positions, stretched.rope_scaling) == (
        256,
        YarnRopeScaling.usual(4.0, 64),
    )


@each_row("name", DRAFTS)
def test_the_registry_knows_every_dialect(name: str, tmp_path: Path) -> None:
    [chosen] = choose_drafts([_saved(tmp_path, name)], {"window": 64})
    assert chosen.kind is EAGLE3
    edit(tmp_path, speculators_model_type=None, draft_vocab_size=None)
    assert choose_drafts([tmp_path], {})[0].kind is (EAGLE3 if "auth" not in name else LONGSPEC)
    edit(tmp_path, architectures=None)
    [chosen] = choose_drafts([tmp_path], {})
    assert chosen.kind is LONGSPEC


def test_a_draft_without_a_window_reuses_no_prefix_and_says_so() -> None:
    """It needs features of every token of a prompt; with a window only of the last ones."""
    config = config_for(toy_spec().target_config, features=(-1, 0, 0))
    draft = Eagle3Draft(config, random_params(config))
    spec = replace(toy_spec(), draft=draft, tree=TreeConfig((1,)))
    with pytest.warns(UserWarning, match="no prefix of a prompt is reused.* window=N.* below 128"):
        spec.engine(max_num_seqs=1, max_model_len=160, prefixes=True).close()
    spec.engine(max_num_seqs=1, max_model_len=160).close()
    near = replace(spec, draft=replace(draft, seen=DraftWindow(100, 4)))
    near.engine(max_num_seqs=1, max_model_len=160, prefixes=True).close()
