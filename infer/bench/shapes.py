"""The shapes that benchmarks know by name."""

from longspec_jax.config import TARGETS, TargetConfig
from longspec_jax.embedded import DEMO
from longspec_jax.weights.hf_config import target_config
from longspec_jax.weights.json_files import read_json

TINY = TargetConfig(
    architecture="LlamaForCausalLM",
    vocab_size=512,
    model_width=64,
    mlp_width=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_width=16,
    max_positions=4096,
    dtype="float32",
)
SHAPES: dict[str, TargetConfig] = {
    "tiny": TINY,
    "demo": target_config(read_json(DEMO / "target" / "config.json"), "float32"),
    **{name: known.config for name, known in TARGETS.items()},
}
"""``demo`` is the embedded demo's target; ``tiny`` has two layers and shows that a benchmark
runs."""
