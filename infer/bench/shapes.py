"""The shapes that benchmarks know by name."""

from longspec_jax.config import TARGETS, TINY, TargetConfig
from longspec_jax.embedded import DEMO
from longspec_jax.weights.hf_config import target_config
from longspec_jax.weights.json_files import read_json

SHAPES: dict[str, TargetConfig] = {
    "tiny": TINY,
    "demo": target_config(read_json(DEMO / "target" / "config.json"), "float32"),
    **{name: known.config for name, known in TARGETS.items()},
}
"""``demo`` is the embedded demo's target; ``tiny`` has two layers and shows that a benchmark
runs."""
