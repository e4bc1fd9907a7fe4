"""PyTorch's attention for the attention benchmark, replayed from a CUDA graph.

The graph excludes launch overhead, as compiled programs do for the candidates of jax. Keys and
values of prefix and tree are one array, which saves torch a concatenation.
"""

from collections.abc import Callable
from typing import Any

from .attention_cases import Case, tree_mask
from .timing import median_seconds


def seconds(case: Case, attend: Callable[[Case, Any], Callable[..., Any]]) -> float:
    """Median seconds of one call.

    Args:
      case: the problem.
      attend: makes ``(q, k, v) -> out`` from a case and its tree mask, a value of ``TORCH``.
    """
    import torch

    total = _chain_seconds(case, attend)
    torch.cuda.empty_cache()  # What the chain held is free by now, for jax beside it.
    return total / case.calls


def _chain_seconds(case: Case, attend: Callable[[Case, Any], Callable[..., Any]]) -> float:
    """Median seconds of all calls, each waiting for the one before, as one CUDA graph."""
    import torch

    torch.manual_seed(0)
    dtype = getattr(torch, case.dtype)
    keys = case.context + case.tokens

    def normal(*sizes: int) -> Any:
        return torch.randn(sizes, device="cuda", dtype=dtype)

    q = normal(case.batch, case.heads, case.tokens, case.head_dim)
    caches = [normal(2, case.batch, case.kv_heads, keys, case.head_dim) for _ in range(case.copies)]
    call = attend(case, torch.from_numpy(tree_mask(case.tokens)).cuda())

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
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    prefix = torch.ones(case.tokens, case.context, dtype=torch.bool, device=tree.device)
    mask = torch.cat([prefix, tree], 1)
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


TORCH: dict[str, Callable[[Case, Any], Callable[..., Any]]] = {
    "torch-sdpa": _sdpa,
    "torch-flex": _flex,
}
