"""The shapes that benchmarks know by name."""

from longspec_jax.config import PRESETS, TargetConfig
from longspec_jax.embedded import DEMO
from longspec_jax.weights.hf_config import target_config
from longspec_jax.weights.raw import read_json

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
    "vicuna7b": PRESETS["vicuna-7b-v1.5-16k"],
    "vicuna13b": PRESETS["vicuna-13b-v1.5-16k"],
    "longchat7b": PRESETS["longchat-7b-v1.5-32k"],
    "longchat13b": PRESETS["longchat-13b-16k"],
    "llama3-8b": PRESETS["llama-3-8b-instruct-262k"],
    "llama31-8b": PRESETS["llama-3.1-8b-instruct"],
    "qwq32b-preview": PRESETS["qwq-32b-preview"],
    "qwq32b": PRESETS["qwq-32b"],
}
"""``demo`` is the embedded demo's target; ``tiny`` has two layers and shows that a benchmark
runs."""
