"""Tiny random models of transformers, the independent oracle of the parity tests."""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the oracle is transformers' PyTorch models")
transformers = pytest.importorskip("transformers", reason="the oracle is transformers' own models")

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": dict(rms_norm_eps=1e-5),
    "Qwen2": dict(rms_norm_eps=1e-6),
    # Heads wider than the model divided by their number, and one table for embedding and head.
    "Qwen3": dict(head_dim=10, tie_word_embeddings=True),
    "Mistral": dict(sliding_window=None, head_dim=8),
    # Its last layer is dense.
    "Qwen3Moe": dict(
        head_dim=10,
        num_experts=7,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        norm_topk_prob=True,
        mlp_only_layers=[1],
    ),
}
HEADS = 6
KV_HEADS = {"MHA": 6, "GQA": 2, "MQA": 1}
LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)


def make_model(family: str, kv_heads: int = 2, seed: int = 0, **overrides: Any) -> Any:
    """A random two-layer model whose every parameter matters: norms and biases are random too."""
    config = getattr(transformers, f"{family}Config")(
        **dict(
            vocab_size=101,
            hidden_size=36,
            intermediate_size=53,
            num_hidden_layers=2,
            num_attention_heads=HEADS,
            num_key_value_heads=kv_heads,
            max_position_embeddings=1024,
            attn_implementation="eager",
        )
        | FAMILIES[family]
        | overrides
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.2 * noise)
    return model


def save_model(model: Any, folder: Path) -> Path:
    """Save as transformers does."""
    model.save_pretrained(folder)
    return folder


def state_of(model: Any) -> dict[str, Any]:
    """The model's tensors as NumPy arrays, under their stored names."""
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}
