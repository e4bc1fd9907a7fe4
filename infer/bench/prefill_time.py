"""How fast a prompt is prefilled at a setting of ``infer.bench decode``."""

import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from longspec_jax.decoding.prefill import prefill

from .decode_setting import Bench
from .kernel_profile import traced, write
from .timing import rounded


def time_prefill(bench: Bench, chunk: int, profile: Path | None = None) -> dict[str, Any]:
    """Seconds and useful TFLOP/s of prefilling the setting's rows, compiled before.

    Args:
      bench: the setting; its cache is given up.
      chunk: tokens of a prefill step.
      profile: folder for a trace of one more prefill, and for its kernels' times beside it.
    """
    setting, config = bench.setting, bench.model.config
    del (
        bench.cache
    )  # Room for the one that prefill allocates; this is a setting's last measurement.
    tokens = np.random.default_rng(0).integers(
        0, config.vocab_size, (setting.batch, setting.context)
    )
    length = np.asarray(setting.contexts, np.int32)

    def once() -> float:
        begin = time.perf_counter()
        state = prefill(
            bench.model.target,
            bench.drafter,
            bench.model.params,
            tokens,
            length,
            bench.request,
            capacity=setting.capacity,
            max_emitted=setting.new_tokens,
            chunk=chunk,
        )
        jax.block_until_ready(state)
        return time.perf_counter() - begin

    once()
    seconds = once()
    if profile is not None:
        _, kernels = traced(once, profile)
        write(kernels, profile, 1, "us of kernels")
    flops = sum(prefill_flops(config, tokens) for tokens in setting.contexts)
    return {
        "prefill_chunk": chunk,
        "prefill_seconds": rounded(seconds),
        "prefill_tflop_per_s": rounded(flops / seconds / 1e12),
    }


def prefill_flops(config: Any, tokens: int) -> int:
    """Operations of a prefill: products of all layers, causal attention, one LM head row."""
    heads, width = config.num_heads * config.head_width, config.model_width
    kv = config.num_kv_heads * config.head_width
    products = 2 * width * (heads + 2 * kv) + 2 * heads * width + 6 * width * config.mlp_width
    attention = 4 * heads * (tokens + 1) // 2
    return config.num_layers * tokens * (products + attention) + 2 * width * config.vocab_size
