"""Attention of PyTorch and FlashInfer for the attention benchmark, replayed from a CUDA graph.

The graph excludes launch overhead, as compiled programs do for the candidates of jax. Keys and
values of prefix and tree are one array, which saves a concatenation.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from .attention_cases import HEAD_MAJOR, TOKEN_MAJOR, Case, tree_mask
from .timing import median_seconds

Attend = Callable[[Case, Any], Callable[..., Any]]
"""Makes ``(q, k, v) -> out`` from a case and its tree mask ``[T, T]``."""
FLASHINFER_WORKSPACE = 256 << 20
"""Bytes for the partial results of its splits, twice what its documentation recommends."""


@dataclasses.dataclass(frozen=True)
class Alternative:
    """A library's attention, and how it wants queries, keys and values."""

    attend: Attend
    layout: str


def seconds(case: Case, alternative: Alternative) -> float:
    """Median seconds of one call.

    Args:
      case: the problem.
      alternative: a value of ``TORCH``.
    """
    import torch

    total = _chain_seconds(case, alternative)
    torch.cuda.empty_cache()  # What the chain held is free by now, for jax beside it.
    return total / case.calls


def operands(case: Case, layout: str, device: str) -> tuple[Any, list[Any]]:
    """Queries ``[B, N, T, H]``, or ``[B, T, N, H]``, and distinct caches ``[2, ...]`` like them."""
    import torch

    torch.manual_seed(0)

    def normal(*shape: int) -> Any:
        return torch.randn(shape, device=device, dtype=getattr(torch, case.dtype))

    # Queries lie like the keys of a cache of their own.
    queries = dataclasses.replace(case, kv_heads=case.heads, context=case.tokens)
    whole = dataclasses.replace(case, context=case.context + case.tokens).cache_shape(layout)
    return normal(*queries.cache_shape(layout)), [normal(2, *whole) for _ in range(case.copies)]


def _chain_seconds(case: Case, alternative: Alternative) -> float:
    """Median seconds of all calls, each waiting for the one before, as one CUDA graph."""
    import torch

    q, caches = operands(case, alternative.layout, "cuda")
    call = alternative.attend(case, torch.from_numpy(tree_mask(case.tokens)).cuda())

    def chain() -> Any:
        out = q
        for _ in range(case.turns):
            for k, v in caches:
                out = call(out, k, v)
        return out

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        chain()
        chain()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    return median_seconds(graph.replay, lambda _: torch.cuda.synchronize())


def _sdpa(case: Case, tree: Any) -> Callable[..., Any]:
    """``scaled_dot_product_attention`` with a boolean mask over all keys."""
    from torch.nn.functional import scaled_dot_product_attention

    mask = _whole_mask(case, tree)
    grouped = case.heads != case.kv_heads
    return lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)


def _flex(case: Case, tree: Any) -> Callable[..., Any]:
    """``flex_attention``, compiled for the case, with a block mask."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def visible(b: Any, h: Any, query: Any, key: Any) -> Any:
        inside = torch.clamp(key - case.context, min=0)
        return (key < case.context) | tree[query, inside]

    keys = case.context + case.tokens
    blocks = create_block_mask(visible, None, None, case.tokens, keys, device=tree.device.type)
    flex = torch.compile(flex_attention, dynamic=False)
    grouped = case.heads != case.kv_heads
    return lambda q, k, v: flex(q, k, v, block_mask=blocks, enable_gqa=grouped)


def _flashinfer(case: Case, tree: Any) -> Callable[..., Any]:
    """FlashInfer's attention of a batch under a custom mask, as engines verify trees with it.

    Planned once, outside the graph, as an engine does for all layers of a pass.
    """
    import flashinfer  # pyright: ignore[reportMissingImports]
    import torch

    keys, dtype = case.context + case.tokens, getattr(torch, case.dtype)
    workspace = torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=tree.device)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    ends = torch.arange(case.batch + 1, dtype=torch.int32, device=tree.device)
    wrapper.plan(
        *(ends * case.tokens, ends * keys, case.heads, case.kv_heads, case.head_dim),
        custom_mask=_whole_mask(case, tree).flatten().repeat(case.batch),
        q_data_type=dtype,
    )

    def call(q: Any, k: Any, v: Any) -> Any:
        return wrapper.run(*(part.flatten(0, 1) for part in (q, k, v))).view(q.shape)

    return call


def _whole_mask(case: Case, tree: Any) -> Any:
    """``[T, S + T]``: which of all keys a node sees."""
    import torch

    prefix = torch.ones(case.tokens, case.context, dtype=torch.bool, device=tree.device)
    return torch.cat([prefix, tree], 1)


TORCH: dict[str, Alternative] = {
    "torch-sdpa": Alternative(_sdpa, HEAD_MAJOR),
    "torch-flex": Alternative(_flex, HEAD_MAJOR),
    "flashinfer": Alternative(_flashinfer, TOKEN_MAJOR),
}
"""Those that compute with torch tensors; one that is not installed refuses with the reason."""
