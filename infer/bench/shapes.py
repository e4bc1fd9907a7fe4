"""The shapes that benchmarks know by name."""

from longspec_jax.config import TARGETS, TINY, Llama3RopeScaling, TargetConfig
from longspec_jax.embedded import DEMO
from longspec_jax.weights.hf_config import target_config
from longspec_jax.weights.json_files import read_json

_LLAMA_1B = TargetConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128256,
    model_width=2048,
    mlp_width=8192,
    num_layers=16,
    num_heads=32,
    num_kv_heads=8,
    head_width=64,
    max_positions=131072,
    rope_theta=5e5,
    rope_scaling=Llama3RopeScaling(32.0, 1.0, 4.0, 8192),
    tied_embeddings=True,
)
"""Llama-3.2-1B: so small that a decode step is bound by its launches."""
SHAPES: dict[str, TargetConfig] = {
    "tiny": TINY,
    "demo": target_config(read_json(DEMO / "target" / "config.json"), "float32"),
    **{name: known.config for name, known in TARGETS.items()},
    "llama32-1b": _LLAMA_1B,
}
"""``demo`` is the embedded demo's target; ``tiny`` has two layers and shows that a benchmark
runs."""
