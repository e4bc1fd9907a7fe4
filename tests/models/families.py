"""Tiny random models of every family, made by transformers: the independent oracle."""

from pathlib import Path
from typing import Any

import pytest

from longspec_jax.weights.hf import load_target

torch = pytest.importorskip("torch", reason="the oracle is transformers' PyTorch models")
transformers = pytest.importorskip("transformers", reason="the oracle is transformers' own models")

LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
    rope_theta=5e5,
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32, rope_theta=1e4)
MULTIPLIERS = dict(
    embedding_multiplier=12.0,
    logits_scaling=8.0,
    residual_multiplier=0.22,
    attention_multiplier=0.05,
)
_MIXED = ("full", "sliding")
_WINDOW = dict(sliding_window=7, head_dim=16)
_RECURRENT_EXPERTS = dict(
    head_dim=16,
    layer_types=["linear_attention", "full_attention"],
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    shared_expert_intermediate_size=20,
    initializer_range=0.15,  # Near ties of the router would flip experts.
)
_GEMMA4 = _WINDOW | dict(
    num_hidden_layers=4,
    layer_types=[f"{kind}_attention" for kind in ("sliding", "full", "sliding", "full")],
    global_head_dim=32,
    hidden_size_per_layer_input=0,
    final_logit_softcapping=3.0,
)


def _case(family: str, base: dict[str, Any] | None = None, **own: Any) -> Any:
    """Class of transformers, and what its configuration has beyond the tests' usual one."""
    return family, {**(base or {}), **own}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-linear": _case(
        "Llama",
        num_key_value_heads=4,
        rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=1e4),
    ),
    "llama3": _case("Llama", rope_parameters=LLAMA3),
    "llama-tied": _case("Llama", num_key_value_heads=1, tie_word_embeddings=True),
    "mistral": _case("Mistral", sliding_window=None, head_dim=16),
    "qwen3-moe": _case(
        "Qwen3Moe",
        head_dim=10,
        num_experts=7,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        norm_topk_prob=True,
        mlp_only_layers=[1],  # Its last layer is dense.
    ),
    "qwen2-yarn": _case("Qwen2", rope_parameters=YARN),
    "qwen3-yarn": _case("Qwen3", rope_parameters=YARN | dict(truncate=False), head_dim=16),
    "ministral3": _case(
        "Ministral3",
        rope_parameters=YARN
        | dict(
            original_max_position_embeddings=16,
            mscale=1.0,
            mscale_all_dim=0.5,
            llama_4_scaling_beta=0.1,
        ),
        head_dim=16,
    ),
    "phi3": _case("Phi3"),
    "phi4-mini": _case(
        "Phi3",
        hidden_size=64,
        initializer_range=0.2,
        tie_word_embeddings=True,
        original_max_position_embeddings=32,
        rope_parameters=dict(
            rope_type="longrope",
            rope_theta=1e4,
            partial_rotary_factor=0.75,
            short_factor=[1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
            long_factor=[1.0, 2.0, 4.0, 6.0, 7.0, 8.0],
        ),
    ),
    "smollm3": _case("SmolLM3", no_rope_layer_interval=2),
    "granite": _case("Granite", MULTIPLIERS),
    "granite4": _case(
        "GraniteMoeHybrid",
        MULTIPLIERS,
        layer_types=["attention"] * 2,
        num_local_experts=0,
        shared_intermediate_size=80,
        position_embedding_type="rope",
        mamba_n_heads=4,
    ),
    "olmo2": _case("Olmo2"),
    # Narrower than the test's tree is deep: nodes leave the window of their own descendants.
    "mistral-window": _case("Mistral", sliding_window=3),
    "ministral": _case(
        "Ministral",
        sliding_window=7,
        head_dim=12,
        layer_types=[f"{kind}_attention" for kind in _MIXED],
    ),
    "gemma2": _case(
        "Gemma2",
        _WINDOW,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
    ),
    "gemma3": _case(
        "Gemma3Text",
        _WINDOW,
        sliding_window_pattern=2,
        query_pre_attn_scalar=24,
        rope_parameters=dict(
            full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1e6),
            sliding_attention=dict(rope_type="default", rope_theta=1e4),
        ),
    ),
    "gemma4": _case("Gemma4Text", _GEMMA4, attention_k_eq_v=True, num_global_key_value_heads=1),
    "gemma4-unified": _case("Gemma4UnifiedText", _GEMMA4),
    "gemma4-e": _case(
        "Gemma4Text",
        _GEMMA4,
        num_hidden_layers=6,
        layer_types=[f"{kind}_attention" for kind in ("sliding", "full") * 3],
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=97,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
    ),
    "gemma4-moe": _case(
        "Gemma4Text",
        _GEMMA4,
        enable_moe_block=True,
        num_experts=7,
        top_k_experts=2,
        moe_intermediate_size=12,
        initializer_range=0.15,  # Near ties of the router would flip experts.
    ),
    "olmo3": _case(
        "Olmo3",
        sliding_window=7,
        layer_types=[f"{kind}_attention" for kind in _MIXED],
        rope_parameters=dict(
            full_attention=YARN, sliding_attention=dict(rope_type="default", rope_theta=1e4)
        ),
    ),
    "glm4": _case("Glm4", head_dim=16),
    "qwen3.5": _case(
        "Qwen3_5Text",
        num_hidden_layers=4,
        head_dim=16,
        layer_types=[f"{kind}_attention" for kind in ("linear", "full", "linear", "linear")],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=12,
    ),
    "gpt-oss": _case(
        "GptOss",
        _WINDOW,
        intermediate_size=32,
        num_local_experts=8,
        num_experts_per_tok=2,
        swiglu_limit=1.5,  # So that it acts.
        rope_parameters=YARN | dict(truncate=False),
    ),
    "qwen3.5-moe": _case("Qwen3_5MoeText", _RECURRENT_EXPERTS),
    "qwen3-next": _case("Qwen3Next", _RECURRENT_EXPERTS),
}


def make_model(case: str, **overrides: Any) -> Any:
    """A random model of two layers, in which every parameter matters."""
    family, own = CASES[case]
    config = getattr(transformers, f"{family}Config")(
        **dict(
            vocab_size=97,
            hidden_size=48,
            intermediate_size=80,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            initializer_range=0.3,
        )
        | own
        | overrides
    )
    torch.manual_seed(0)
    kind = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")
    model = kind._from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        factors = (each for each in model.named_buffers() if each[0].endswith("layer_scalar"))
        for name, parameter in (*model.named_parameters(), *factors):
            # Norms start at 1, biases at 0: mistakes would hide.
            if parameter.ndim == 1 or name.endswith("bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def load(case: str, folder: Path) -> tuple[Any, Any, Any]:
    """The model, and the configuration and parameters that are loaded of its files."""
    model = make_model(case)
    model.save_pretrained(folder)
    return model, *load_target(folder, dtype="float32")
