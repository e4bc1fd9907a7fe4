"""Attention alone, one layer of a decode step: ours, FlashInfer's and tokamax's.

A step has one query, or a tree of 64 nodes under its mask. Each call reads a cache of its own,
together larger than the second-level cache, and waits for the one before; launches are not counted
(:mod:`benchmarks.attention`). The tree's keys are the cache's last slots, but ours are apart from
it. FlashInfer needs ``torch``, ``nvcc`` and ``ninja``: its cache has pages of 16 tokens, a step is
planned once, outside the CUDA graph, as engines plan for all layers of a pass, and one query takes
tensor cores where four heads share a key, as its documentation advises. tokamax is its kernel for
Hopper with queries of a key/value head folded together, the fastest of some splits of the keys,
none of which its own heuristic takes.
"""

import functools
import importlib
import sys
from typing import Any

from .. import attention
from ..arguments import SHAPES
from ..attention import TOKEN_MAJOR, Case
from ..report import Row
from ..timing import median_seconds, rounded, step
from .rows import Job

PAGE = 16
WORKSPACE = 256 << 20
"""Bytes for the partial results of FlashInfer's splits, twice what is recommended."""
GROUPED = 4
SPLITS = 1, 8, 32


def main(path: str, peer: str) -> None:
    """Measure a job of a peer."""
    measure(Job.read(path), peer)


def measure(job: Job, peer: str) -> None:
    """Add its rows."""
    step(f"{peer}: attention, {job.drafter}, {job.shape}")
    config = SHAPES[job.shape]

    def point(context: int, batch: int) -> Row:
        case = Case(
            tokens=int((job.drafter or "").split()[0]),
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_width,
            context=context,
            batch=batch,
            dtype=config.dtype,
        )
        return {"ms": rounded(1e3 * MEASURES[peer](case))}

    job.measure(point)


def _flashinfer(case: Case) -> float:
    """Seconds of a call."""
    import torch

    q, caches = operands(case, "cuda")
    call = planned(case, "cuda")

    def chain() -> Any:
        out = q
        for _ in range(case.turns):
            for cache in caches:
                out = call(out, cache)
        return out

    chain()  # It loads what it compiles.
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    return median_seconds(graph.replay, lambda _: torch.cuda.synchronize()) / case.calls


def operands(case: Case, device: str) -> tuple[Any, list[Any]]:
    """Queries ``[B T, N, H]`` and distinct caches of pages ``[B S / 16, 2, 16, K, H]``."""
    import torch

    draw = functools.partial(torch.randn, device=device, dtype=getattr(torch, case.dtype))
    q = draw(case.batch * case.tokens, case.heads, case.head_dim)
    pages = case.batch * (case.context // PAGE)
    sizes = (pages, 2, PAGE, case.kv_heads, case.head_dim)
    return q, [draw(*sizes) for _ in range(case.copies)]


def planned(case: Case, device: str) -> Any:
    """``(q, cache) -> out``."""
    import torch

    flashinfer: Any = importlib.import_module("flashinfer")
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)
    ends = torch.arange(case.batch + 1, dtype=torch.int32, device=device)
    pages = case.context // PAGE
    table = torch.arange(case.batch * pages, dtype=torch.int32, device=device)
    last = torch.full((case.batch,), PAGE, dtype=torch.int32, device=device)
    sizes = (case.heads, case.kv_heads, case.head_dim, PAGE)
    dtype = getattr(torch, case.dtype)
    if case.tokens == 1:
        grouped = case.heads >= GROUPED * case.kv_heads
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=grouped
        )
        wrapper.plan(ends * pages, table, last, *sizes, q_data_type=dtype, kv_data_type=dtype)
    else:
        tree = torch.from_numpy(attention.tree_mask(case.tokens)).to(device)
        seen = tree.new_ones(case.tokens, case.context - case.tokens)
        mask = torch.cat([seen, tree], 1).flatten().repeat(case.batch)
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        queries = ends * case.tokens
        wrapper.plan(
            *(queries, ends * pages, table, last, *sizes),
            custom_mask=mask,
            q_data_type=dtype,
            kv_data_type=dtype,
        )
    return wrapper.run


def _tokamax(case: Case) -> float:
    """Seconds of a call with the fastest of the splits."""
    outcomes = []
    for split in SPLITS:
        name = f"tokamax, {split}"
        call = functools.partial(tokamax_call, split)
        attention.CANDIDATES[name] = (call, TOKEN_MAJOR)
        outcomes.append(attention.seconds(name, case, attention.compiled(name, case)))
    times = [found for found in outcomes if not isinstance(found, str)]
    if not times:
        raise ValueError(f"tokamax: {outcomes[0]}")
    return min(times)


def tokamax_call(split: int, q: Any, k: Any, v: Any, tree_k: Any, tree_v: Any, mask: Any) -> Any:
    """Its attention to one cache, under the tree's mask if there is a tree."""
    import jax.numpy as jnp

    kernels: Any = importlib.import_module("tokamax._src.ops.attention.pallas_mosaic_gpu")
    config = kernels.ConfigSM90(block_kv=128, fold_q_sequence_heads=True, split_k=split)
    batch, tokens = q.shape[:2]
    seen = jnp.ones((batch, tokens, k.shape[1] - tokens), bool)
    whole = None if tokens == 1 else jnp.concatenate([seen, mask], axis=2)[:, None]
    attend = kernels.PallasMosaicGpuFlashAttention(config=config)
    return attend(q, k, v, mask=kernels.Mask(whole)).astype(q.dtype)  # Split, it adds in float32.


def _ours(case: Case) -> float:
    """Seconds of a call of the automatic choice."""
    found = attention.seconds("ours", case, attention.compiled("ours", case))
    if isinstance(found, str):
        raise ValueError(found)
    return found


MEASURES = {"ours": _ours, "flashinfer": _flashinfer, "tokamax": _tokamax}
"""By peer: what times a call."""

if __name__ == "__main__":
    main(*sys.argv[1:3])
