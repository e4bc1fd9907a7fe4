"""Which layers of a ``config.json`` have experts, and of what size."""

from dataclasses import replace

import pytest

from longspec_jax.config import PRESETS, ExpertsConfig
from longspec_jax.weights.hf_config import hf_config, target_config
from longspec_jax.weights.json_files import JsonObject

QWEN3_30B_A3B = dict(
    architectures=["Qwen3MoeForCausalLM"],
    model_type="qwen3_moe",
    attention_bias=False,
    decoder_sparse_step=1,
    head_dim=128,
    hidden_act="silu",
    hidden_size=2048,
    intermediate_size=6144,
    max_position_embeddings=40960,
    max_window_layers=48,
    mlp_only_layers=[],
    moe_intermediate_size=768,
    norm_topk_prob=True,
    num_attention_heads=32,
    num_experts=128,
    num_experts_per_tok=8,
    num_hidden_layers=48,
    num_key_value_heads=4,
    rms_norm_eps=1e-6,
    rope_scaling=None,
    rope_theta=1000000.0,
    router_aux_loss_coef=0.001,
    sliding_window=None,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    use_sliding_window=False,
    vocab_size=151936,
)


def read(**overrides):
    return target_config(JsonObject(QWEN3_30B_A3B | overrides))


def sparse_layers(config):
    return [index for index in range(config.num_layers) if config.layer(index).experts]


def test_the_published_shape():
    assert read() == PRESETS["qwen3-30b-a3b"]
    assert read().layer(47).experts == ExpertsConfig(128, 8, 768)


@pytest.mark.parametrize(
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


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (dict(mlp_only_layers="1"), "mlp_only_layers"),
        (dict(mlp_only_layers=[1.5]), "mlp_only_layers"),
        (dict(num_experts=4), "num_experts_per_tok"),
        (dict(norm_topk_prob=1), "norm_topk_prob"),
        (dict(num_experts=10**6), "experts: count"),
    ],
)
def test_what_is_no_mixture_is_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        read(**overrides)


def test_a_dense_architecture_cannot_say_that_there_are_experts():
    with pytest.raises(ValueError, match="name the architecture it belongs to"):
        hf_config(replace(read(), architecture="Qwen3ForCausalLM"))
