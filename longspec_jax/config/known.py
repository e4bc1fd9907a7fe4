"""Targets that come up by name: their repositories and shapes, and a tiny one."""

from dataclasses import dataclass, replace
from typing import Any

from longspec_jax.config.layers import (
    ExpertsConfig,
    LayerConfig,
    LinearRopeScaling,
    Llama3RopeScaling,
    Rotary,
    YarnRopeScaling,
    yarn_magnitude,
)
from longspec_jax.config.target import TargetConfig


def shape(
    family: str,
    vocab_size: int,
    widths: tuple[int, int],
    layers: int,
    heads: tuple[int, int],
    head_width: int = 128,
) -> dict[str, Any]:
    """Sizes of a target: widths of model and MLP, heads and key/value heads."""
    return dict(
        architecture=f"{family}ForCausalLM",
        vocab_size=vocab_size,
        model_width=widths[0],
        mlp_width=widths[1],
        num_layers=layers,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_width=head_width,
    )


def _plain(
    family: str,
    vocab_size: int,
    widths: tuple[int, int],
    layers: int,
    heads: tuple[int, int],
    head_width: int = 128,
) -> TargetConfig:
    """A target of these sizes and of 4,096 positions, and nothing else; as in :func:`shape`."""
    return TargetConfig(
        **shape(family, vocab_size, widths, layers, heads, head_width), max_positions=4096
    )


_SEVEN_B = _plain("Llama", 32000, (4096, 11008), 32, (32, 32))
_THIRTEEN_B = _plain("Llama", 32000, (5120, 13824), 40, (40, 40))
_EIGHT_B = _plain("Llama", 128256, (4096, 14336), 32, (32, 8))
_QWQ = replace(_plain("Qwen2", 152064, (5120, 27648), 64, (40, 8)), rope_theta=1e6, qkv_bias=True)
_QWEN3 = replace(
    _plain("Qwen3", 151936, (4096, 12288), 36, (32, 8)),
    max_positions=40960,
    rope_theta=1e6,
    norm_eps=1e-6,
    qk_norm=True,
)
_GPT_OSS_ROTARY = Rotary(
    150000.0, YarnRopeScaling(32.0, 4096, yarn_magnitude(32.0), truncate=False)
)
_GPT_OSS_EXPERTS = ExpertsConfig(32, 4, 2880, biases=True, limit=7.0)
_GPT_OSS = replace(
    _plain("GptOss", 201088, (2880, 2880), 24, (64, 8), 64),
    max_positions=131072,
    rope_theta=_GPT_OSS_ROTARY.theta,
    rope_scaling=_GPT_OSS_ROTARY.scaling,
    qkv_bias=True,
    out_bias=True,
    attention_sinks=True,
    kinds=(
        LayerConfig(_GPT_OSS_ROTARY, 128, _GPT_OSS_EXPERTS),
        LayerConfig(_GPT_OSS_ROTARY, None, _GPT_OSS_EXPERTS),
    ),
    pattern=(0, 1) * 12,
)


@dataclass(frozen=True)
class KnownTarget:
    """A target that comes up by name."""

    repository: str
    """On the Hugging Face hub."""
    config: TargetConfig


TARGETS: dict[str, KnownTarget] = {
    "vicuna7b": KnownTarget(
        "lmsys/vicuna-7b-v1.5-16k",
        replace(_SEVEN_B, max_positions=16384, rope_scaling=LinearRopeScaling(4.0)),
    ),
    "vicuna13b": KnownTarget(
        "lmsys/vicuna-13b-v1.5-16k",
        replace(_THIRTEEN_B, max_positions=16384, rope_scaling=LinearRopeScaling(4.0)),
    ),
    "longchat7b": KnownTarget(
        "lmsys/longchat-7b-v1.5-32k",
        replace(_SEVEN_B, max_positions=32768, rope_scaling=LinearRopeScaling(8.0)),
    ),
    "longchat13b": KnownTarget(
        "lmsys/longchat-13b-16k",
        replace(
            _THIRTEEN_B,
            max_positions=16384,
            rope_scaling=LinearRopeScaling(8.0),
            norm_eps=1e-6,
        ),
    ),
    "llama3-8b": KnownTarget(
        "gradientai/Llama-3-8B-Instruct-262k",
        replace(_EIGHT_B, max_positions=262144, rope_theta=283461213.0),
    ),
    "llama31-8b": KnownTarget(
        "meta-llama/Llama-3.1-8B-Instruct",
        replace(
            _EIGHT_B,
            max_positions=131072,
            rope_theta=5e5,
            rope_scaling=Llama3RopeScaling(8.0, 1.0, 4.0, 8192),
        ),
    ),
    "qwq32b-preview": KnownTarget("Qwen/QwQ-32B-Preview", replace(_QWQ, max_positions=32768)),
    "qwq32b": KnownTarget("Qwen/QwQ-32B", replace(_QWQ, max_positions=131072)),
    "qwen3-8b": KnownTarget(
        "Qwen/Qwen3-8B",
        _QWEN3,
    ),
    "qwen3-4b": KnownTarget(
        "Qwen/Qwen3-4B",
        replace(_QWEN3, model_width=2560, mlp_width=9728, tied_embeddings=True),
    ),
    "qwen3-30b-a3b": KnownTarget(
        "Qwen/Qwen3-30B-A3B",
        replace(
            _QWEN3,
            architecture="Qwen3MoeForCausalLM",
            model_width=2048,
            mlp_width=6144,
            num_layers=48,
            num_kv_heads=4,
            kinds=(LayerConfig(Rotary(1e6), experts=ExpertsConfig(128, 8, 768)),),
            pattern=(0,) * 48,
        ),
    ),
    "gpt-oss-20b": KnownTarget("openai/gpt-oss-20b", _GPT_OSS),
}
"""The paper's and the release's targets, three of Qwen3 and gpt-oss, by the names that the commands
take."""
PRESETS: dict[str, TargetConfig] = {
    known.repository.split("/")[1].lower(): known.config for known in TARGETS.values()
}
"""Their shapes by the names of their repositories, for planning and benchmarks without weights."""
TINY = replace(_plain("Llama", 512, (64, 96), 2, (4, 2), 16), dtype="float32")
"""A target of two layers, which shows that something runs."""
