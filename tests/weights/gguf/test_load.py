"""A GGUF file of a model loads as the model's folder does, in every supported architecture."""

import dataclasses
from itertools import cycle

import gguf
import jax
import numpy as np
import pytest

from longspec_jax.drafters.checkpoints import mtp
from longspec_jax.drafters.draft import Target
from longspec_jax.loading import choose_drafts
from longspec_jax.weights.gguf.file import TYPES, read_gguf
from longspec_jax.weights.hf import load_target
from tests.drafters.kit import drawn, publish
from tests.drafters.test_mtp import config_of, stored_shapes
from tests.kit import each_row
from tests.models.families import CASES, YARN, make_model
from tests.weights.gguf.files import (
    ARCHITECTURES,
    keys_of,
    tensors_of,
    with_draft,
    write_gguf,
    write_model,
)

OVERRIDES = {
    # Not stored: llama.cpp assumes the published models'.
    "qwen3-moe": dict(mlp_only_layers=[]),
    "qwen3-yarn": dict(rope_parameters=YARN),
    "gemma2": dict(query_pre_attn_scalar=16),
    "gemma3": dict(query_pre_attn_scalar=16),
    "ministral3": dict(
        rope_parameters=CASES["ministral3"][1]["rope_parameters"]
        | dict(original_max_position_embeddings=16)
    ),
    "gpt-oss": dict(swiglu_limit=7.0, layer_types=["sliding_attention", "full_attention"]),
    "qwen3.5": dict(layer_types=["linear_attention"] * 3 + ["full_attention"]),
    "llama3": dict(
        rope_parameters=CASES["llama3"][1]["rope_parameters"]
        | dict(original_max_position_embeddings=8192)
    ),
}
"""What a file cannot say otherwise."""
READ = [
    case
    for case, (family, own) in CASES.items()
    if family in ARCHITECTURES and own.get("sliding_window") != 3
]


@each_row("case", READ)
def test_file_loads_as_the_folder_does(tmp_path, case):
    """Same configuration, same bits: only divisors and exponents pass through a rounding."""
    model = make_model(case, **OVERRIDES.get(case, {}))
    model.save_pretrained(tmp_path / "folder")
    write_model(tmp_path / "model.gguf", model, CASES[case][0])
    expected, params = load_target(tmp_path / "folder", dtype="float32")
    config, found = load_target(tmp_path / "model.gguf", dtype="float32")
    for field in dataclasses.fields(config):
        ours, theirs = getattr(config, field.name), getattr(expected, field.name)
        assert ours == theirs or field.name in ("kinds", "pattern", "architecture"), field.name
    layers = range(config.num_layers)
    assert [*map(config.layer, layers)] == [*map(expected.layer, layers)]
    # A norm's scale is written with 1 added to it.
    rtol, atol = (3e-7, 2e-7) if expected.offset_norms else (0, 0)
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=rtol, atol=atol),
        found,
        params,
    )


def test_the_layer_behind_the_others_is_a_draft(tmp_path):
    """As in the folder; a second one is refused, and the target loads next to either."""
    model = make_model("qwen3.5", **OVERRIDES["qwen3.5"])
    model.save_pretrained(tmp_path / "folder")
    target = Target(*load_target(tmp_path / "folder", dtype="float32"))
    tensors = drawn(stored_shapes(config_of(target.config), mtp.QWEN))
    publish(tmp_path / "folder", tensors, {"mtp_num_hidden_layers": 1})
    keys, layers = keys_of(model.config, "qwen35"), target.config.num_layers
    written = [*tensors_of(model, "qwen35"), *with_draft(tensors, layers)]
    expected = mtp.load(tmp_path / "folder", target)
    file = tmp_path / "model.gguf"
    write_gguf(
        file,
        "qwen35",
        keys | {"block_count": layers + 1, "nextn_predict_layers": 1},
        iter(written),
    )
    assert load_target(file, dtype="float32")[0].num_layers == layers
    [chosen] = choose_drafts(["mtp"], {}, target=file)
    found = chosen.load(target)
    assert found.config == expected.config
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=3e-7, atol=2e-7),
        found.params.layer,
        expected.params.layer,
    )
    two = [*written, *with_draft(tensors, layers + 1)]
    more = {"block_count": layers + 2, "nextn_predict_layers": 2}
    write_gguf(file, "qwen35", keys | more, iter(two))
    assert load_target(file, dtype="float32")[0].num_layers == layers
    with pytest.raises(ValueError, match=r"has mtp\.layers\.1\.nextn\.eh_proj\.weight"):
        chosen.load(target)


def decoded(path):
    """Every tensor of a file in float32, by the package that wrote it."""
    return {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        for tensor in gguf.GGUFReader(path).tensors
    }


def test_every_type_is_decoded_in_place(tmp_path):
    """Also where rows are permuted; 16 bits are the float32 product, rounded once."""
    model = make_model("llama3", hidden_size=256, intermediate_size=512, **OVERRIDES["llama3"])
    kinds = cycle(kind.name for kind in TYPES.values())

    def types(name, weights):
        return next(kinds) if weights.ndim > 1 else "F32"

    write_model(tmp_path / "model.gguf", model, "Llama", types)
    stored = decoded(tmp_path / "model.gguf")
    assert {*read_gguf(tmp_path / "model.gguf").types} == {
        kind.name for kind in TYPES.values() if kind.elements > 1
    }
    for dtype in ("float32", "bfloat16"):
        config, params = load_target(tmp_path / "model.gguf", dtype=dtype)
        for layer in range(config.num_layers):
            own, theirs = params[f"layers_{layer}"], f"blk.{layer}."
            query = stored[f"{theirs}attn_q.weight"].reshape(4, 32, 2, 256).swapaxes(1, 2)
            found = own["attention"]["qkv"]["fused"]["kernel"][:, :, :-2]
            expected = query.reshape(2, 2, 64, 256).transpose(3, 0, 1, 2)
            np.testing.assert_array_equal(found, expected.astype(found.dtype))
            gate_up = [stored[f"{theirs}ffn_{name}.weight"].T for name in ("gate", "up")]
            found = own["mlp"]["gate_up"]["kernel"]
            np.testing.assert_array_equal(found, np.stack(gate_up, 1).astype(found.dtype))


def test_mxfp4_experts_stay_in_their_bits(tmp_path):
    """The same codes and powers as of the published folder, whose bytes hold other pairs."""
    model = make_model("gpt-oss", hidden_size=64, **OVERRIDES["gpt-oss"])

    def types(name, weights):
        return "MXFP4" if name.endswith("_exps.weight") else "F32"

    write_model(tmp_path / "model.gguf", model, "GptOss", types)
    _, params = load_target(tmp_path / "model.gguf", dtype="float32")
    stored = decoded(tmp_path / "model.gguf")
    own = params["layers_1"]["mlp"]
    for start, name in enumerate(("gate", "up")):
        found = own["expert_gate_up"].dequantised(np.float32)[start::2]
        np.testing.assert_array_equal(found, stored[f"blk.1.ffn_{name}_exps.weight"])
    found = own["expert_down"].dequantised(np.float32)
    np.testing.assert_array_equal(found, stored["blk.1.ffn_down_exps.weight"])


def test_heads_of_keys_are_as_many_as_heads_if_the_file_does_not_say(tmp_path):
    """As of models whose configuration leaves them out, such as the first Llama and Vicuna."""
    model = make_model("llama-tied", num_key_value_heads=4)
    write_model(tmp_path / "whole.gguf", model, "Llama")
    keys = keys_of(model.config, "llama")
    assert keys.pop("attention.head_count_kv") == 4
    write_gguf(tmp_path / "model.gguf", "llama", keys, tensors_of(model, "llama"))
    (expected, params), (config, found) = (
        load_target(tmp_path / name, dtype="float32") for name in ("whole.gguf", "model.gguf")
    )
    assert config == expected
    jax.tree.map(np.testing.assert_array_equal, found, params)
    write_gguf(tmp_path / "none.gguf", "llama", {}, tensors_of(model, "llama"))
    with pytest.raises(ValueError, match="none.gguf: the file lacks "):
        load_target(tmp_path / "none.gguf", dtype="float32")


def test_untied_output_is_the_models_own(tmp_path):
    """Qwen's quantised files have it though their configuration is tied."""
    model = make_model("qwen2-yarn", tie_word_embeddings=False)
    write_model(tmp_path / "model.gguf", model, "Qwen2")
    config, params = load_target(tmp_path / "model.gguf", dtype="float32")
    assert not config.tied_embeddings
    np.testing.assert_array_equal(params["head"], model.lm_head.weight.detach().numpy())
