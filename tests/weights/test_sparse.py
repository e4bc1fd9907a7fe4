"""Which layers of a ``config.json`` have experts, and of what size."""

from dataclasses import replace

import pytest

from longspec_jax.config.known import PRESETS
from longspec_jax.config.layers import ExpertsConfig
from longspec_jax.weights.hf_config import hf_config, target_config
from longspec_jax.weights.json_files import JsonObject, as_raw
from longspec_jax.weights.layer_kinds import EXPERTS
from tests.kit import each_row
from tests.weights.test_hf_config import QWEN_3

QWEN3_30B_A3B = QWEN_3 | dict(
    architectures=["Qwen3MoeForCausalLM"],
    model_type="qwen3_moe",
    decoder_sparse_step=1,
    hidden_act="silu",
    hidden_size=2048,
    intermediate_size=6144,
    max_window_layers=48,
    mlp_only_layers=[],
    moe_intermediate_size=768,
    norm_topk_prob=True,
    num_experts=128,
    num_experts_per_tok=8,
    num_hidden_layers=48,
    num_key_value_heads=4,
    router_aux_loss_coef=0.001,
)
GPT_OSS_20B = dict(
    architectures=["GptOssForCausalLM"],
    model_type="gpt_oss",
    attention_bias=True,
    attention_dropout=0.0,
    eos_token_id=200002,
    experts_per_token=4,
    head_dim=64,
    hidden_act="silu",
    hidden_size=2880,
    initial_context_length=4096,
    intermediate_size=2880,
    layer_types=["sliding_attention", "full_attention"] * 12,
    max_position_embeddings=131072,
    num_attention_heads=64,
    num_experts_per_tok=4,
    num_hidden_layers=24,
    num_key_value_heads=8,
    num_local_experts=32,
    pad_token_id=199999,
    quantization_config=dict(
        modules_to_not_convert=["model.layers.*.self_attn", "model.layers.*.mlp.router"],
        quant_method="mxfp4",
    ),
    rms_norm_eps=1e-05,
    rope_scaling=dict(
        beta_fast=32.0,
        beta_slow=1.0,
        factor=32.0,
        original_max_position_embeddings=4096,
        rope_type="yarn",
        truncate=False,
    ),
    rope_theta=150000,
    sliding_window=128,
    swiglu_limit=7.0,
    tie_word_embeddings=False,
    vocab_size=201088,
)


def read(**overrides):
    return target_config(JsonObject(QWEN3_30B_A3B | overrides))


def sparse_layers(config):
    return [index for index in range(config.num_layers) if config.layer(index).experts]


def test_the_published_shape():
    assert read() == PRESETS["qwen3-30b-a3b"]
    assert read().layer(47).experts == ExpertsConfig(128, 8, 768)


@each_row(
    ("overrides", "layers"),
    [
        (dict(decoder_sparse_step=2), [1, 3, 5]),
        (dict(mlp_only_layers=[0, 5]), [1, 2, 3, 4]),
        (dict(decoder_sparse_step=3, mlp_only_layers=[2]), [5]),
        (dict(num_experts=0), []),
        (dict(num_experts=None, num_local_experts=9), [0, 1, 2, 3, 4, 5]),
    ],
)
def test_layers_may_be_dense(overrides, layers):
    config = read(num_hidden_layers=6, norm_topk_prob=False, **overrides)
    assert sparse_layers(config) == layers
    assert target_config(JsonObject(hf_config(config))) == config


@each_row(
    ("overrides", "message"),
    [
        (dict(mlp_only_layers="1"), "mlp_only_layers"),
        (dict(mlp_only_layers=[1.5]), "mlp_only_layers"),
        (dict(num_experts=4), "num_experts_per_tok"),
        (dict(norm_topk_prob=1), "norm_topk_prob"),
        (dict(num_experts=10**6), "num_experts=1000000 must be a whole number from 1 to 4096"),
    ],
)
def test_what_is_no_mixture_is_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        read(**overrides)


def test_gpt_oss_as_published():
    """Every other layer has a window and all have experts; absent keys mean the same."""
    raw = {**GPT_OSS_20B, "torch_dtype": "bfloat16"}
    config = target_config(JsonObject(raw))
    assert config == PRESETS["gpt-oss-20b"]
    assert config.read_layer == 23 and config.layer(22).window == 128
    usual = "layer_types", "rope_scaling", "rope_theta", "swiglu_limit", "attention_bias"
    kept = {key: value for key, value in raw.items() if key not in usual}
    assert target_config(JsonObject(kept)) == config
    assert target_config(JsonObject(hf_config(config))) == config


@each_row(
    ("changes", "message"),
    [
        (dict(swiglu_alpha=1.5), "swiglu_alpha"),
        (dict(swiglu_limit=0), "swiglu_limit"),
        (dict(num_experts_per_tok=33), "num_experts_per_tok"),
        (dict(attention_bias=1), "attention_bias"),
    ],
)
def test_another_gpt_oss_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        target_config(JsonObject({**GPT_OSS_20B, "torch_dtype": "bfloat16", **changes}))


def test_mxfp4_of_another_family_is_refused():
    with pytest.raises(ValueError, match="'mxfp4', which is read only for gpt-oss"):
        read(quantization_config=dict(quant_method="mxfp4"))


def test_a_dense_architecture_cannot_say_that_there_are_experts():
    with pytest.raises(ValueError, match="name the architecture it belongs to"):
        hf_config(replace(read(), architecture="Qwen3ForCausalLM"))


def test_a_table_of_keys_reads_what_it_writes():
    experts = ExpertsConfig(7, 2, 12, renormalised=False)
    assert JsonObject(as_raw(experts, EXPERTS)).made(ExpertsConfig, EXPERTS) == experts
