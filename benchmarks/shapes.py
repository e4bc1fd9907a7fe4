"""Shapes of published targets that have no training configuration, for benchmarks."""

import dataclasses

from longspec_jax.config.known import TARGETS, shape
from longspec_jax.config.layers import (
    HeadsConfig,
    LayerConfig,
    LinearRopeScaling,
    Llama3RopeScaling,
    ProportionalRopeScaling,
    QueryScaling,
    RecurrenceConfig,
    Rotary,
    YarnRopeScaling,
)
from longspec_jax.config.target import TargetConfig

LLAMA_1B = TargetConfig(
    **shape("Llama", 128256, (2048, 8192), 16, (32, 8), 64),
    max_positions=131072,
    rope_theta=5e5,
    rope_scaling=Llama3RopeScaling(32.0, 1.0, 4.0, 8192),
    tied_embeddings=True,
)
"""Llama-3.2-1B: so small that launches bound a decode step."""
LLAMA_3B = dataclasses.replace(
    LLAMA_1B, model_width=3072, num_layers=28, num_heads=24, head_width=128
)
"""Llama-3.2-3B: three query heads for each key/value head."""
QWEN3_8B_YARN = dataclasses.replace(
    TARGETS["qwen3-8b"].config, rope_scaling=YarnRopeScaling.usual(4.0, 32768), max_positions=131072
)
MINISTRAL3_8B = TargetConfig(
    **shape("Ministral3", 131072, (4096, 14336), 34, (32, 8)),
    max_positions=262144,
    rope_theta=1e6,
    rope_scaling=YarnRopeScaling(16.0, 16384, 1.0),
    query_scaling=QueryScaling(0.1, 16384),
)
_OLMO3_FAR = Rotary(5e5, YarnRopeScaling.usual(8.0, 8192))
OLMO3_7B = TargetConfig(
    **shape("Olmo3", 100278, (4096, 11008), 32, (32, 32)),
    max_positions=65536,
    rope_theta=5e5,
    rope_scaling=_OLMO3_FAR.scaling,
    kinds=(LayerConfig(Rotary(5e5), 4096), LayerConfig(_OLMO3_FAR)),
    pattern=(0, 0, 0, 1) * 8,
    norm_eps=1e-6,
    wide_qk_norm=True,
    pre_norms=False,
    post_norms=True,
)
_GEMMA3_FAR = Rotary(1e6, LinearRopeScaling(8.0))
GEMMA3_12B = TargetConfig(
    **shape("Gemma3", 262208, (3840, 15360), 48, (16, 8), 256),
    max_positions=131072,
    rope_theta=1e6,
    rope_scaling=_GEMMA3_FAR.scaling,
    kinds=(LayerConfig(Rotary(1e4), 1024), LayerConfig(_GEMMA3_FAR)),
    pattern=(0, 0, 0, 0, 0, 1) * 8,
    norm_eps=1e-6,
    tied_embeddings=True,
    qk_norm=True,
    post_norms=True,
    offset_norms=True,
    gelu=True,
    embedding_factor=62.0,
    attention_scale=0.0625,
)
_GEMMA4_FAR = Rotary(1e6, ProportionalRopeScaling(), 128)
GEMMA4_31B = TargetConfig(
    **shape("Gemma4", 262144, (5376, 21504), 60, (32, 4), 512),
    max_positions=262144,
    rope_theta=1e6,
    rope_scaling=_GEMMA4_FAR.scaling,
    rotary_width=128,
    kinds=(
        LayerConfig(Rotary(1e4), 1024, heads=HeadsConfig(16, 256)),
        LayerConfig(_GEMMA4_FAR, keys_are_values=True),
    ),
    pattern=(0, 0, 0, 0, 0, 1) * 10,
    norm_eps=1e-6,
    tied_embeddings=True,
    qk_norm=True,
    value_norm=True,
    post_norms=True,
    layer_factors=True,
    gelu=True,
    embedding_factor=73.5,
    attention_scale=1.0,
    logit_cap=30.0,
)
QWEN35_4B = TargetConfig(
    **shape("Qwen3_5", 248320, (2560, 9216), 32, (16, 4), 256),
    max_positions=262144,
    rope_theta=1e7,
    rotary_width=64,
    kinds=(
        LayerConfig(recurrence=RecurrenceConfig(16, 32, 128, 128)),
        LayerConfig(Rotary(1e7, width=64)),
    ),
    pattern=(0, 0, 0, 1) * 8,
    norm_eps=1e-6,
    tied_embeddings=True,
    qk_norm=True,
    offset_norms=True,
    gated_attention=True,
)
QWEN35_27B = dataclasses.replace(
    QWEN35_4B,
    **shape("Qwen3_5", 248320, (5120, 17408), 64, (24, 4), 256),
    kinds=(LayerConfig(recurrence=RecurrenceConfig(16, 48, 128, 128)), QWEN35_4B.kinds[1]),
    pattern=(0, 0, 0, 1) * 16,
    tied_embeddings=False,
)


def _qwen(
    family: str, widths: tuple[int, int], layers: int, heads: tuple[int, int], tied: bool
) -> TargetConfig:
    """A Qwen2.5 or Qwen3 of other sizes: widths of model and MLP, heads and key/value heads."""
    base = TARGETS["qwen3-8b" if family == "Qwen3" else "qwq32b"].config
    sizes = shape(family, base.vocab_size, widths, layers, heads)
    return dataclasses.replace(base, **sizes, tied_embeddings=tied)


SHAPES: dict[str, TargetConfig] = {
    "llama32-1b": LLAMA_1B,
    "llama32-3b": LLAMA_3B,
    "mistral-7b": dataclasses.replace(
        TARGETS["llama31-8b"].config,
        architecture="MistralForCausalLM",
        vocab_size=32768,
        max_positions=32768,
        rope_theta=1e6,
        rope_scaling=None,
    ),
    "qwen25-1.5b": _qwen("Qwen2", (1536, 8960), 28, (12, 2), True),
    "qwen25-7b": _qwen("Qwen2", (3584, 18944), 28, (28, 4), False),
    "qwen3-14b": _qwen("Qwen3", (5120, 17408), 40, (40, 8), False),
    "qwen3-8b-yarn": QWEN3_8B_YARN,
    "ministral3-8b": MINISTRAL3_8B,
    "gemma3-12b": GEMMA3_12B,
    "gemma4-31b": GEMMA4_31B,
    "olmo3-7b": OLMO3_7B,
    "qwen35-4b": QWEN35_4B,
    "qwen35-27b": QWEN35_27B,
}
"""By the names that ``--shape`` takes."""
