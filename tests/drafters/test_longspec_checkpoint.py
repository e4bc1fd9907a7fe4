"""The released draft format: every prefix and file kind in, the same 20 tensors out."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from longspec_jax.config.known import PRESETS
from longspec_jax.config.layers import LinearRopeScaling, YarnRopeScaling
from longspec_jax.drafters.checkpoints.longspec import hf_draft_config, load_draft, save_draft
from longspec_jax.drafters.longspec import DraftConfig
from tests.kit import each_row, random_draft, tiny_target_config
from tests.models.draft_oracle import Shape, random_state

TARGET = tiny_target_config()
DRAFT = DraftConfig.for_target(TARGET)
STATE = random_state(Shape())
PREFIXES = ["", "glide.", "draft_model.", "model."]


def _write_config(folder, **overrides):
    raw = hf_draft_config(DRAFT, TARGET) | overrides
    (folder / "config.json").write_text(json.dumps(raw))


def _safetensors(folder, state):
    save_file(state, folder / "model.safetensors")


def _torch_state(state):
    torch = pytest.importorskip("torch", reason="writes the pickles of the release")
    return torch, {name: torch.from_numpy(value.copy()) for name, value in state.items()}


def _pth(folder, state):
    """As the release's trainer saves."""
    torch, state = _torch_state(state)
    state = {name: torch.nn.Parameter(value) for name, value in state.items()}
    torch.save(state, folder / "draft_model_weights.pth")


KINDS = {"safetensors": _safetensors, "pth": _pth}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """The parameters of :data:`STATE`."""
    folder = tmp_path_factory.mktemp("draft")
    _write_config(folder)
    _safetensors(folder, STATE)
    return load_draft(folder, TARGET)[1]


CASES = [*((prefix, "safetensors") for prefix in PREFIXES), *(("glide.", kind) for kind in KINDS)]


@each_row(("prefix", "kind"), dict.fromkeys(CASES))
def test_every_prefix_and_file_kind(tmp_path, loaded, prefix, kind):
    _write_config(tmp_path)
    KINDS[kind](tmp_path, {prefix + name: value for name, value in STATE.items()})
    config, params = load_draft(tmp_path, TARGET)
    assert config == DRAFT
    jax.tree.map(np.testing.assert_array_equal, params, loaded)


def test_export_is_bit_exact(tmp_path, loaded):
    """Live tensors come back as they were, dead ones as zeros, and the export loads again."""
    save_draft(tmp_path, DRAFT, loaded, target=TARGET)
    stored = load_file(tmp_path / "model.safetensors")
    assert set(stored) == set(STATE)
    for name, value in STATE.items():
        dead = name.startswith(("cross_attn.k", "cross_attn.v"))
        np.testing.assert_array_equal(stored[name], 0 * value if dead else value)
        assert stored[name].shape == value.shape
    config, params = load_draft(tmp_path, TARGET)
    assert config == DRAFT
    jax.tree.map(np.testing.assert_array_equal, params, loaded)


@each_row("dtype", ["bfloat16", "float16"])
def test_half_precision_is_bit_exact(tmp_path, dtype):
    target = tiny_target_config(dtype=dtype)
    draft = DraftConfig.for_target(target, window=64)
    params = random_draft(draft)
    save_draft(tmp_path, draft, params)
    config, again = load_draft(tmp_path, target)
    assert config == draft
    jax.tree.map(np.testing.assert_array_equal, again, params)


def test_the_draft_follows_its_targets_dtype(tmp_path):
    _write_config(tmp_path, torch_dtype="float16")
    _safetensors(tmp_path, {name: value.astype(np.float16) for name, value in STATE.items()})
    config, params = load_draft(tmp_path, TARGET)
    assert config.dtype == "float32" and params["mlp"]["down"]["kernel"].dtype == jnp.float32
    config, params = load_draft(tmp_path, TARGET, dtype="bfloat16")
    assert config.dtype == "bfloat16" and params["mlp"]["down"]["kernel"].dtype == jnp.bfloat16


def test_tensors_beside_the_draft_are_unexpected(tmp_path):
    _write_config(tmp_path)
    state = {f"draft_model.{name}": value for name, value in STATE.items()}
    state["target_model.norm.weight"] = np.ones(36, np.float32)
    state["input_layernorm.weight"] = np.ones(36, np.float32)
    _safetensors(tmp_path, state)
    with pytest.raises(ValueError) as error:
        load_draft(tmp_path, TARGET)
    assert "unexpected target_model.norm.weight" in str(error.value)
    assert "unexpected input_layernorm.weight (next to draft_model.*)" in str(error.value)


def test_a_target_is_not_a_draft(tmp_path):
    _write_config(tmp_path)
    _safetensors(
        tmp_path, {"model.layers.0.self_attn.q_proj.weight": np.ones((36, 36), np.float32)}
    )
    with pytest.raises(ValueError, match="(?s)missing cross_attn.o_proj.weight.*unexpected"):
        load_draft(tmp_path, TARGET)


@each_row(
    "overrides",
    [
        dict(model_width=48, head_width=8),
        dict(num_kv_heads=3),
        dict(head_width=12),
        dict(rope_theta=5e5),
        dict(rope_scaling=LinearRopeScaling(4.0)),
        dict(vocab_size=103),
    ],
)
def test_a_draft_of_another_target_is_refused(tmp_path, loaded, overrides):
    save_draft(tmp_path, DRAFT, loaded, target=TARGET)
    name = next(iter(overrides))
    with pytest.raises(ValueError, match=f"{name}=.*(?:belongs to this target|trained for)"):
        load_draft(tmp_path, tiny_target_config(**overrides))


def test_a_released_size_is_refused_before_anything_is_read(tmp_path):
    """Vicuna's draft with LongChat: the same shapes, another rotary embedding."""
    vicuna, longchat = PRESETS["vicuna-7b-v1.5-16k"], PRESETS["longchat-7b-v1.5-32k"]
    raw = hf_draft_config(DraftConfig.for_target(vicuna), vicuna)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    stretched = dataclasses.replace(vicuna, rope_scaling=YarnRopeScaling.usual(4.0, 16384))
    with pytest.raises(ValueError, match="the target rope_scaling=YarnRopeScaling"):
        DraftConfig.for_target(vicuna).check_fits(stretched)
    with pytest.raises(ValueError, match="rope_scaling=LinearRopeScaling"):
        load_draft(tmp_path, longchat)


def test_a_draft_of_two_layers_is_refused(tmp_path):
    """One of ours has one layer; the release copies its target's number."""
    _safetensors(tmp_path, STATE)
    _write_config(tmp_path, num_hidden_layers=2)
    with pytest.raises(ValueError, match="num_hidden_layers=2 must be 1: a LongSpec draft has one"):
        load_draft(tmp_path, TARGET)
    _write_config(tmp_path, num_hidden_layers=3, architectures=["LlamaForCausalLM"])
    with pytest.raises(ValueError, match="num_hidden_layers=3 must be 1"):
        load_draft(tmp_path, TARGET)
    _write_config(tmp_path, num_hidden_layers=2, architectures=["LlamaForCausalLM"])
    assert load_draft(tmp_path, TARGET)[0] == DRAFT


@each_row("kind", ["text", "nested", "list"])
def test_strange_pickles_are_refused(tmp_path, kind):
    torch, state = _torch_state(STATE)
    _write_config(tmp_path)
    path = tmp_path / "pytorch_model.bin"
    torch.save({"nested": {"model": state}, "list": [1]}.get(kind, state), path)
    if kind == "text":
        path.write_text("not a pickle")
    with pytest.raises(ValueError, match="pytorch_model.bin .*(safetensors|flat dictionary)"):
        load_draft(tmp_path, TARGET)
