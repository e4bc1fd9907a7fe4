"""How fast Hugging Face transformers decodes plainly: the alternative to measure in the same run.

Random weights of the real shapes are drawn on the device, a real prefill in chunks fills the cache,
and greedy decoding of single tokens is timed from there: the median over repetitions of many
tokens, after some that warm up. The cache is static and the step compiled by
``torch.compile(mode="reduce-overhead")``, that is with CUDA graphs. Attention is torch's
``scaled_dot_product_attention``. The roof is the bytes of a step (weights that are read, cached
keys and values) over the bandwidth measured in this run.
"""

import argparse
import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

from longspec_jax.cli import settled
from longspec_jax.config.target import TargetConfig
from longspec_jax.weights.hf_config import hf_config

from .arguments import SHAPES
from .report import Report, Row, refusal, run_header
from .timing import median_seconds, rounded, step

SHOWN = (
    "implementation shape batch context ms_per_token percent_of_roof tokens_per_second "
    "cuda_graph_skips refusal"
).split()
WARM_TOKENS = 6
"""Tokens before the first timed one: compilation, and the two recordings of a CUDA graph."""
ALIGNMENT = 64
"""Slots of a static cache are a multiple of this; odd sizes have slower kernels."""
PREFILL_CHUNK = 2048


def main(arguments: argparse.Namespace) -> None:
    """Measure, print, and write the files."""
    import torch

    cpu = not torch.cuda.is_available()
    device = "cpu" if cpu else "cuda"
    arguments = settled(arguments, cpu)
    points = [*itertools.product(arguments.batch, arguments.context)]
    values = torch.randn(2**20 if cpu else 2**30, device=device)
    bytes_per_s = 4 * len(values) / median_seconds(values.sum, lambda _: _synchronize())
    del values
    name = "cpu" if cpu else torch.cuda.get_device_name()
    header = run_header(name, __doc__ or "", roof_tb_per_s=bytes_per_s / 1e12)
    with Report(header, arguments.json, SHOWN) as report:
        for shape in arguments.shape:
            step(f"drawing the weights of {shape}")
            model = random_model(SHAPES[shape], device)
            for batch, context in points:
                row = {
                    "implementation": "transformers-static",
                    "shape": shape,
                    "context": context,
                    "batch": batch,
                    "dtype": SHAPES[shape].dtype,
                }
                try:
                    row |= measure(model, context, batch, arguments)
                    floor = row["step_bytes"] / bytes_per_s
                    row["percent_of_roof"] = rounded(100e3 * floor / row["ms_per_token"])
                except torch.OutOfMemoryError as error:  # The next point may be smaller.
                    row |= {"ms_per_token": None, "refusal": refusal(error)}
                report.add(row)
                torch.compiler.reset()  # What the row took: graphs, compiled programs, memory.
                gc.collect()
                torch.cuda.empty_cache()


def measure(model: Any, context: int, batch: int, arguments: argparse.Namespace) -> Row:
    """The figures of one row; the cache is gone when it returns."""
    import torch
    from torch._dynamo.utils import counters
    from transformers import StaticCache

    count = arguments.new_tokens
    tokens = WARM_TOKENS + count * arguments.repetitions
    slots = math.ceil((context + tokens) / ALIGNMENT) * ALIGNMENT
    cache = StaticCache(config=model.config, max_cache_len=slots)
    compiled = torch.cuda.is_available()
    skipped = counters["inductor"]["cudagraph_skips"]
    advance = greedy_step(model, cache, compiled)
    last = torch.zeros((batch, 1), dtype=torch.long, device=model.device)
    position = torch.full((1, 1), context, dtype=torch.long, device=model.device)

    def decode(steps: int) -> float:
        nonlocal last, position
        begin = time.perf_counter()
        for _ in range(steps):
            last, position = advance(last, position), position + 1
        _synchronize()
        return time.perf_counter() - begin

    with torch.no_grad():
        prefill(model, cache, context, batch, PREFILL_CHUNK)
        decode(WARM_TOKENS)
        median = statistics.median(decode(count) for _ in range(arguments.repetitions)) / count
    return {
        "ms_per_token": rounded(1e3 * median),
        "tokens_per_second": rounded(batch / median),
        "compiled": compiled,
        # A graph that torch refuses to record as a CUDA graph runs all the same, only slower.
        "cuda_graph_skips": counters["inductor"]["cudagraph_skips"] - skipped,
        "step_bytes": step_bytes(model, batch, context + tokens // 2),
    }


def random_model(config: TargetConfig, device: str) -> Any:
    """Transformers' own model of this shape, with random weights drawn on the device."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    raw = hf_config(config)
    named = {key: raw[key] for key in raw if key not in ("architectures", "torch_dtype")}
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**named),
            dtype=getattr(torch, config.dtype),
            attn_implementation="sdpa",
        ).eval()


def prefill(model: Any, cache: Any, context: int, batch: int, chunk: int) -> None:
    """Fill the cache with a random prompt, uncompiled."""
    import torch

    prompt = torch.randint(model.config.vocab_size, (batch, context), device=model.device)
    for start in range(0, context, chunk):
        fresh = prompt[:, start : start + chunk]
        positions = torch.arange(start, start + fresh.shape[1], device=model.device)[None]
        model(fresh, position_ids=positions, past_key_values=cache, logits_to_keep=1)


def greedy_step(model: Any, cache: Any, compiled: bool) -> Callable[[Any, Any], Any]:
    """``(tokens[B, 1], position[1, 1]) -> tokens[B, 1]``: one token more in the cache."""
    import torch

    def step(tokens: Any, position: Any) -> Any:
        output = model(tokens, position_ids=position, past_key_values=cache, use_cache=True)
        return output.logits[:, -1:].argmax(-1)

    if not compiled:
        return step
    # Shapes stay as they are: dynamic ones, which torch infers from a second context, are slower.
    fast = torch.compile(step, mode="reduce-overhead", dynamic=False)

    def replayed(tokens: Any, position: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return fast(tokens, position).clone()  # The next replay overwrites the graph's output.

    return replayed


def step_bytes(model: Any, batch: int, length: int) -> int:
    """Bytes a decode step must read: weights but the embedding table, cached keys and values."""
    config = model.config
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    table = model.get_input_embeddings().weight
    if not config.tie_word_embeddings:
        weights -= table.numel() * table.element_size()
    slot = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return weights + batch * length * slot * table.element_size()


def _synchronize() -> None:
    """Wait for the device."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
