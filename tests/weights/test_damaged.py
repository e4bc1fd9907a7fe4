"""Damaged, incomplete and foreign checkpoints are refused, with values, rule and remedy."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from longspec_jax.config.layers import MAX_EXPERTS
from longspec_jax.drafters.checkpoints.longspec import load_draft
from longspec_jax.weights.checkpoint import Tensor, each_expert
from longspec_jax.weights.hf import load_stop_tokens, load_target, save_target
from tests.kit import each_row, random_target, tiny_target_config

CONFIG = tiny_target_config()


@pytest.fixture
def folder(tmp_path):
    """A sound checkpoint."""
    save_target(tmp_path, CONFIG, random_target(CONFIG), stop_tokens=(2, 3))
    return tmp_path


@pytest.fixture
def sharded(folder):
    """A sound checkpoint in four files."""
    tensors = load_file(folder / "model.safetensors")
    names = list(tensors)
    files = [f"model-{i:05}-of-00004.safetensors" for i in range(1, 5)]
    for first, file in enumerate(files):
        save_file({name: tensors[name] for name in names[first::4]}, folder / file)
    weight_map = {name: files[i % 4] for i, name in enumerate(names)}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    (folder / "model.safetensors").unlink()
    return folder


def _edit(folder, edit):
    """Change the stored tensors."""
    tensors = dict(load_file(folder / "model.safetensors"))
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def _edit_config(folder, **values):
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | values))


def test_a_sound_checkpoint_loads(folder):
    config, params = load_target(folder)
    assert config == CONFIG
    jax.tree.map(np.testing.assert_array_equal, params, random_target(CONFIG))
    assert load_stop_tokens(folder) == (2, 3)
    (folder / "generation_config.json").write_text('{"eos_token_id": 5}')
    assert load_stop_tokens(str(folder)) == (5,)


def test_saving_replaces_older_weights(sharded):
    """Files of another, larger save must not be mistaken for this one's."""
    smaller = tiny_target_config(num_layers=1)
    save_target(sharded, smaller, random_target(smaller))
    assert sorted(p.name for p in sharded.iterdir()) == ["config.json", "model.safetensors"]
    assert load_target(sharded)[0] == smaller


def test_missing_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="is not a folder; name a folder with config.json"):
        load_target(tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        load_draft("./absent/model", CONFIG)


def test_hub_id_out_of_reach():
    """The tests run offline: the hub's files are not there, and the message says what to do."""
    with pytest.raises(FileNotFoundError, match="(?s)neither a folder here nor.*HF_HUB_OFFLINE"):
        load_target("nobody/no-such-model")


WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
WHOLE: dict[str, tuple[list[str], list[str], str]] = {
    "no config": (["config.json"], [], "has no config.json.*download the whole model"),
    "an adapter alone": (["config.json"], ["adapter_config.json"], "merge it into its model"),
    "an adapter's config": ([WEIGHTS], ["adapter_config.json"], "merge it into its model"),
    # The folder's own weights count, and their config.json is missing.
    "GGUF": (["config.json"], ["model-q4.gguf"], "name the .gguf file itself"),
    "weights of another name": (
        [WEIGHTS],
        ["weights.safetensors"],
        "holds no weights: expected one of model.safetensors.*found.*weights.safetensors",
    ),
    # Another download would bring the same files.
    "a cache": (
        ["config.json", WEIGHTS],
        ["snapshots"],
        "name the folder below snapshots, or the hub id",
    ),
    "Mistral's": (["config.json", WEIGHTS], ["params.json"], "the files in Hugging Face's format"),
    "its weights": (
        ["config.json", WEIGHTS],
        ["consolidated.safetensors"],
        "the files in Hugging Face's format",
    ),
}
"""What a valid folder lacks, what it has instead, and the expected message."""


@each_row("case", WHOLE)
def test_a_folder_that_is_no_whole_model_is_told(tmp_path, case):
    absent, instead, words = WHOLE[case]
    save_target(tmp_path, CONFIG, random_target(CONFIG))
    for name in absent:
        (tmp_path / name).unlink()
    for name in instead:
        (tmp_path / name).touch()
    with pytest.raises(FileNotFoundError, match=words):
        load_target(tmp_path)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 123456789\n"
HEADER = json.dumps({"a": {"dtype": "F3", "shape": [8], "data_offsets": [0, 3]}}).encode()
CUT = r"bytes\) is truncated or not.*download it again"
DAMAGED = {
    **{f"cut at {kept}": (lambda old, kept=kept: old[:kept], CUT) for kept in (0, 5, 500, -1)},
    "a pointer": (lambda old: POINTER, "git lfs pull"),
    # A whole file is not downloaded again: it is newer than the package that reads it.
    "newer numbers": (
        lambda old: len(HEADER).to_bytes(8, "little") + HEADER + b"123",
        "of a kind that safetensors .* does not know.*pip install --upgrade safetensors$",
    ),
}


@each_row("case", DAMAGED)
def test_a_damaged_file_is_told(tmp_path, case):
    change, words = DAMAGED[case]
    save_target(tmp_path, CONFIG, random_target(CONFIG))
    (tmp_path / WEIGHTS).write_bytes(change((tmp_path / WEIGHTS).read_bytes()))
    with pytest.raises(ValueError, match=f"(?s){words}"):
        load_target(tmp_path)


def test_an_index_and_its_files(sharded):
    index = sharded / INDEX
    raw = json.loads(index.read_text())
    fewer = {name: file for name, file in raw["weight_map"].items() if name != "model.norm.weight"}
    index.write_text(json.dumps({"weight_map": fewer}))
    with pytest.raises(ValueError, match="disagree about model.norm.weight"):
        load_target(sharded)
    index.write_text("{}")
    with pytest.raises(FileNotFoundError, match="weight_map names no file; download"):
        load_target(sharded)
    index.write_text(json.dumps(raw))
    next(sharded.glob("model-00002-of-*")).unlink()
    with pytest.raises(FileNotFoundError, match="names . files, but model-00002-of-.* is missing"):
        load_target(sharded)


DOWN, NORM = "model.layers.1.mlp.down_proj.weight", "model.norm.weight"


def _with(name, place, value):
    return lambda tensors: tensors[name].__setitem__(place, value)


@each_row(
    ("edit", "config", "options", "words"),
    [
        *(
            (_with(DOWN, (35, 52), value), {}, {}, f"{DOWN} holds NaN or infinite.*download it ag")
            for value in (np.nan, np.inf)
        ),
        (_with(NORM, 3, -1e6), {}, {"dtype": "float16"}, f"{NORM} holds 1e.06, .*dtype='bfloat16'"),
        # A head that is missing is not tied silently, nor a stored dtype cast.
        (lambda old: old.pop("lm_head.weight"), {}, {}, r"missing lm_head.weight \(101, 36\)"),
        (None, {"torch_dtype": "bfloat16"}, {}, "is float32, config.json says bfloat16: pass dtyp"),
        (None, {"num_hidden_layers": 9}, {}, "(?s)missing model.layers.2.*and 55 more like these"),
        (None, {}, {"dtype": "int8"}, "'int8' is not supported; parameters are one of bfloat16"),
        (None, {}, {"revision": "main"}, "revision='main' chooses a version of a hub id"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, edit, config, options, words):
    save_target(tmp_path, CONFIG, random_target(CONFIG))
    if edit is not None:
        _edit(tmp_path, edit)
    _edit_config(tmp_path, **config)
    with pytest.raises(ValueError, match=words):
        load_target(tmp_path, **options)


def test_a_cast_that_is_asked_for(folder):
    """Whatever the configuration says, and of a number that float16 does not hold."""
    _edit(folder, _with(NORM, 3, -1e6))
    _edit_config(folder, torch_dtype="bfloat16")
    assert load_target(folder, dtype="bfloat16")[1]["embedding"].dtype == jnp.bfloat16


def test_all_mismatches_are_reported_together(folder):
    def edit(tensors):
        del tensors["model.norm.weight"]
        del tensors["model.layers.1.self_attn.k_proj.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(36, np.float32)
        tensors["model.layers.0.mlp.up_proj.weight"] = np.zeros((36, 53), np.float32)
        tensors["lm_head.weight"] = np.zeros((101, 36), np.int8)

    _edit(folder, edit)
    with pytest.raises(ValueError) as error:
        load_target(folder)
    for line in (
        "missing model.norm.weight (36,)",
        "missing model.layers.1.self_attn.k_proj.weight (12, 36)",
        "unexpected model.layers.0.self_attn.q_proj.bias (36,)",
        "model.layers.0.mlp.up_proj.weight is (36, 53), must be (53, 36)",
        "lm_head.weight is stored as I8, must be floating point",
    ):
        assert line in str(error.value)
    assert "another model" in str(error.value)


def test_dropped_tensors_are_accepted(folder):
    def edit(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(3, np.float32)
        tensors["model.rotary_emb.inv_freq"] = np.full(3, np.nan, np.float16)

    _edit(folder, edit)
    load_target(folder)


def test_a_tied_head_is_dropped(tmp_path):
    config = tiny_target_config(tied_embeddings=True)
    save_target(tmp_path, config, random_target(config))
    _edit(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}))
    _, params = load_target(tmp_path)
    assert "head" not in params


def test_saving_refuses_what_loading_would(tmp_path):
    params = random_target(CONFIG)
    norm = params["final_norm"]["scale"]
    with pytest.raises(ValueError, match="final_norm/scale holds NaN"):
        bad = params | {"final_norm": {"scale": norm.at[0].set(jnp.nan)}}
        save_target(tmp_path, CONFIG, bad)
    assert not (tmp_path / "config.json").exists(), "an interrupted save must not look like a model"
    with pytest.raises(ValueError) as error:
        bad = params | {"final_norm": {"scale": norm[:-1]}, "head2": params["head"]}
        bad["embedding"] = bad["embedding"].astype(jnp.bfloat16)
        del bad["head"]
        save_target(tmp_path, CONFIG, bad)
    for line in (
        "missing head (101, 36)",
        "unexpected head2 (101, 36)",
        "final_norm/scale is (35,), must be (36,)",
        "embedding is bfloat16, the configuration says float32",
    ):
        assert re.search(re.escape(line), str(error.value))


@each_row("token", [101, -1, None, 2.0])
def test_saving_refuses_stop_tokens_outside_the_vocabulary(tmp_path, token):
    with pytest.raises(ValueError, match="stop_tokens=.* must be a whole number from 0 to 100"):
        save_target(tmp_path, CONFIG, random_target(CONFIG), stop_tokens=(2, token))


def test_saving_into_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    save_target("~/model", CONFIG, random_target(CONFIG))
    assert load_target("~/model")[0] == CONFIG == load_target(tmp_path / "model")[0]


def test_experts_without_bytes_are_not_listed_for_ever(tmp_path):
    """A file of 100 bytes may claim 2**40 of them, and one of 20 KB has 200 such tensors."""
    stacked = Tensor((2**15, 2, 0), "float32", lambda index: np.zeros(0), tmp_path)
    names = (f"model.layers.{index}.mlp.experts.gate_up_proj" for index in range(9))
    found = each_expert(dict.fromkeys(names, stacked), ["model.layers.0.", "model.layers.9."])
    assert len(found) == 2 * (MAX_EXPERTS + 1) + 8
