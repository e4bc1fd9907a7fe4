"""The attention ops of the project: check the operands, choose an implementation.

``prefix_attention`` and ``tree_attention`` return mergeable partial results, and
``speculative_attention`` their union (LongSpec section 3.3). ``path_attention`` is the same union
in an order of its sums that the tree does not change. ``causal_attention`` serves training.
:mod:`longspec_jax.ops.attention.reference` defines what each computes, and
:mod:`longspec_jax.ops.dispatch` chooses.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, TypedDict, Unpack

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Float, Int, PyTree

from longspec_jax.axes import Array, Queries, Sinks, TreeRows
from longspec_jax.ops.attention import attention_xla, path, reference
from longspec_jax.ops.attention.float8 import CODES, scaled
from longspec_jax.ops.attention.operands import Fresh, Partial, Prefix
from longspec_jax.ops.dispatch import Given, Implementation, Op, R, where_triton_is_not_first
from longspec_jax.ops.hardware import (
    AMPERE,
    HOPPER,
    compute_capability,
    require_ampere,
)


class _Options(TypedDict, total=False):
    """What kernels take besides their operands; as in the ops."""

    scale: float | None
    cap: float | None


class _InterpretedOptions(_Options, total=False):
    """The same of kernels for Triton."""

    interpret: bool


class _HopperOptions(_InterpretedOptions, total=False):
    """The same where there is a kernel for Hopper, which is then asked for."""

    hopper: bool


class _PartialOptions(_Options, total=False):
    """The same of partial results, which have a dtype of their own."""

    dtype: DTypeLike


class _TreeOptions(_InterpretedOptions, _PartialOptions, total=False):
    """Both."""


class _HopperPartialOptions(_HopperOptions, _PartialOptions, total=False):
    """Both, and Hopper's."""


def _prefix_kernels(
    q: Queries, prefix: Prefix, **options: Unpack[_HopperPartialOptions]
) -> Partial:
    from longspec_jax.ops.attention import kernels

    return kernels.prefix_attention(q, prefix, **options)


def _tree_kernel(q: Queries, fresh: Fresh, **options: Unpack[_TreeOptions]) -> Partial:
    from longspec_jax.ops.attention import fresh_pallas

    return fresh_pallas.tree_attention(q, fresh, **options)


def _speculative_kernels(
    q: Queries,
    prefix: Prefix,
    fresh: Fresh,
    sinks: Sinks | None = None,
    **options: Unpack[_HopperOptions],
) -> Array:
    from longspec_jax.ops.attention import kernels

    return kernels.speculative_attention(q, prefix, fresh, sinks, **options)


def _prefix_ampere(q: Queries, prefix: Prefix, **options: Unpack[_PartialOptions]) -> Partial:
    from longspec_jax.ops.attention import kernels_ampere

    return kernels_ampere.prefix_attention(q, prefix, **options)


def _tree_ampere(q: Queries, fresh: Fresh, **options: Unpack[_PartialOptions]) -> Partial:
    from longspec_jax.ops.attention import kernels_ampere

    return kernels_ampere.tree_attention(q, fresh, **options)


def _speculative_ampere(
    q: Queries,
    prefix: Prefix,
    fresh: Fresh,
    sinks: Sinks | None = None,
    **options: Unpack[_Options],
) -> Array:
    from longspec_jax.ops.attention import kernels_ampere

    return kernels_ampere.speculative_attention(q, prefix, fresh, sinks, **options)


def _of_generation(hopper: Implementation, other: Callable[Given, R]) -> Callable[Given, R]:
    """The kernel for Hopper there, and what refuses where there is no GPU; the other elsewhere."""

    def call(*operands: Given.args, **options: Given.kwargs) -> R:
        found = compute_capability() or HOPPER
        return (hopper if found[0] == HOPPER[0] else other)(*operands, **options)

    return call


def _path_kernel(
    q: Queries,
    prefix: Prefix,
    fresh: Fresh,
    depth: Array,
    sinks: Sinks | None,
    *,
    levels: int,
    window: int | None,
    scale: float | None,
    cap: float | None,
) -> Array:
    operands = q, prefix, fresh, depth, sinks
    if path.require_kernel(q, prefix.keys, fresh.keys, levels, window):
        from longspec_jax.ops.attention import path_kernels

        return path_kernels.path_attention(*operands, scale=scale, cap=cap, window=window)
    from longspec_jax.ops.attention import path_ampere

    return path_ampere.path_attention(*operands, scale=scale, cap=cap, window=window)


def _path_reference(
    q: Queries,
    prefix: Prefix,
    fresh: Fresh,
    depth: Array,
    sinks: Sinks | None,
    *,
    levels: int,
    window: int | None,
    scale: float | None,
    cap: float | None,
) -> Array:
    prefix = prefix.within(window, prefix.length[:, None] + depth)
    return reference.speculative_attention(q, prefix, fresh, sinks, scale=scale, cap=cap)


def _prefix_triton(
    q: Queries,
    prefix: Prefix,
    *,
    scale: float | None = None,
    cap: float | None = None,
    dtype: DTypeLike = jnp.float32,
) -> Partial:
    require_ampere("the jax-triton prefix kernel")
    if cap is not None or prefix.oldest is not None or prefix.keys.dtype != q.dtype:
        raise NotImplementedError(
            "the jax-triton prefix kernel takes no soft cap, no window and no cache in 8 bits; "
            "choose 'pallas' or 'xla'"
        )
    try:
        from longspec_jax.ops.attention import prefix_triton

        return prefix_triton.prefix_attention(q, prefix, scale=scale, dtype=dtype)
    except ImportError as error:
        raise NotImplementedError(
            f"the jax-triton prefix kernel cannot be imported ({error}); install the extra "
            "triton (Python 3.12 or newer) next to jax with GPU support, or choose another "
            "implementation"
        ) from error


CUDNN_WIDTH = 128
"""Widest heads that cuDNN differentiates on Ampere; twice as wide from Hopper on."""

PREFIX = Op(
    "prefix_attention",
    automatic={
        "mosaic": where_triton_is_not_first(_prefix_ampere),
        "pallas": _prefix_kernels,
        "xla": attention_xla.prefix_attention,
    },
    by_name={
        "mosaic": _of_generation(partial(_prefix_kernels, hopper=True), _prefix_ampere),
        "triton": _prefix_triton,
        "reference": reference.prefix_attention,
        "interpret": partial(_prefix_kernels, interpret=True),
    },
)
TREE = Op(
    "tree_attention",
    automatic={
        "mosaic": where_triton_is_not_first(_tree_ampere),
        "pallas": _tree_kernel,
        "xla": attention_xla.tree_attention,
    },
    by_name={
        "mosaic": _of_generation(_tree_kernel, _tree_ampere),
        "triton": _tree_kernel,
        "reference": reference.tree_attention,
        "interpret": partial(_tree_kernel, interpret=True),
    },
)
SPECULATIVE = Op(
    "speculative_attention",
    automatic={
        "mosaic": where_triton_is_not_first(_speculative_ampere),
        "pallas": _speculative_kernels,
        "xla": attention_xla.speculative_attention,
    },
    by_name={
        "mosaic": _of_generation(partial(_speculative_kernels, hopper=True), _speculative_ampere),
        "triton": partial(attention_xla.speculative_attention, attend=_prefix_triton),
        "reference": reference.speculative_attention,
        "interpret": partial(_speculative_kernels, interpret=True),
    },
)
PATH = Op("path_attention", {"mosaic": _path_kernel}, {"reference": _path_reference})


def prefix_attention(
    q: Queries,
    prefix: Prefix,
    *,
    scale: float | None = None,
    cap: float | None = None,
    dtype: DTypeLike = jnp.float32,
    implementation: str | None = None,
) -> Partial:
    """Attention of a few query tokens to a long prefix, split over keys (FlashDecoding).

    Args:
      q: query tokens; every token of row ``b`` sees the same slots, unless the prefix is seen
        through a window.
      prefix: the cached tokens.
      scale: factor on the scores; ``H ** -0.5`` if absent.
      cap: bounds the scaled scores softly, ``cap * tanh(score / cap)`` (Gemma 2).
      dtype: of the output; what is to be merged wants float32.
      implementation: a name of ``config.ATTENTION``; chosen automatically if absent.

    Returns:
      The partial result; ``out = 0`` and ``lse = -inf`` for rows that see no slot.

    Raises:
      ValueError: if shapes or dtypes do not fit together, or the implementation is unknown.
      NotImplementedError: if the chosen implementation cannot take this call; says why.
    """
    _check_prefix(q, prefix)
    scales = prefix.scales
    if scales is not None:
        q, prefix = scaled(q, scales.keys), replace(prefix, scales=None)
    q, prefix = _without_gradient(PREFIX.name, (q, prefix))
    attend = PREFIX.named(implementation)
    found = attend(q, prefix, scale=scale, cap=cap, dtype=jnp.dtype(dtype))
    return found if scales is None else Partial(scaled(found.out, scales.values), found.lse)


def tree_attention(
    q: Queries,
    fresh: Fresh,
    *,
    scale: float | None = None,
    cap: float | None = None,
    dtype: DTypeLike = jnp.float32,
    implementation: str | None = None,
) -> Partial:
    """Attention of tree nodes to fresh keys under an arbitrary boolean mask.

    Args and errors as in :func:`prefix_attention`. The number of keys need not equal the number of
    queries.
    """
    _check_fresh(q, fresh)
    q, fresh = _without_gradient(TREE.name, (q, fresh))
    attend = TREE.named(implementation)
    return attend(q, fresh, scale=scale, cap=cap, dtype=jnp.dtype(dtype))


def speculative_attention(
    q: Queries,
    prefix: Prefix,
    fresh: Fresh,
    sinks: Sinks | None = None,
    *,
    scale: float | None = None,
    cap: float | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T N H"]:
    """Attention of fresh tokens to the committed prefix and, masked, to themselves.

    They are the nodes of a tree or, without a mask, a chunk of a prompt. Args and errors as in
    :func:`prefix_attention` and :func:`tree_attention`, of which this is the merged result, in the
    dtype of the queries. On a GPU this is one kernel for a few rows and two for more. ``sinks`` are
    scores of one more key of each head, whose value is zero (gpt-oss).
    """
    _check_prefix(q, prefix)
    _check_fresh(q, fresh, chunk=True)
    _check_together(prefix, fresh.keys)
    _check_sinks(q, sinks)
    operands = _without_gradient(SPECULATIVE.name, (q, prefix, fresh, sinks))
    return SPECULATIVE.named(implementation)(*operands, scale=scale, cap=cap)


def path_attention(
    q: Queries,
    prefix: Prefix,
    fresh: Fresh,
    depth: Int[Array, "B T"],
    sinks: Sinks | None = None,
    *,
    levels: int,
    window: int | None = None,
    scale: float | None = None,
    cap: float | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T N H"]:
    """Attention of a tree's nodes to the committed prefix and along their own paths.

    A node's bits depend only on its position and on the tokens before it, not on which of them are
    in the tree (:mod:`longspec_jax.ops.attention.path_kernels`). That holds up to the prefix's
    :func:`~longspec_jax.ops.attention.path.reach`. It needs an NVIDIA GPU of compute capability 8.0
    or later. In exact arithmetic this is :func:`speculative_attention`.

    Args:
      q: the nodes' queries.
      prefix: the cached tokens.
      fresh: the nodes themselves; each sees its ancestors and itself, those that a window holds.
      depth: of every node, which is its position less the prefix's length.
      sinks: as in :func:`speculative_attention`.
      levels: the greatest depth that a node may have.
      window: tokens that a node sees, its own included, in a layer with a window, whose slots are a
        ring; all if absent.
      scale: factor on the scores; ``H ** -0.5`` if absent.
      cap: as in :func:`prefix_attention`.
      implementation: as in :func:`prefix_attention`.

    Raises:
      ValueError, NotImplementedError: as :func:`prefix_attention`.
    """
    _check_prefix(q, prefix)
    _check_fresh(q, fresh)
    _check_together(prefix, fresh.keys)
    _check_sinks(q, sinks)
    if prefix.oldest is not None:
        raise ValueError("path_attention takes a window instead of the first positions it shows")
    operands = _without_gradient(PATH.name, (q, prefix, fresh, depth, sinks))
    attend = PATH.named(implementation)
    return attend(*operands, levels=levels, window=window, scale=scale, cap=cap)


def causal_attention(
    q: Queries,
    k: TreeRows,
    v: TreeRows,
    sinks: Sinks | None = None,
    *,
    window: int | None = None,
    scale: float | None = None,
    cap: float | None = None,
) -> Float[Array, "B T N H"]:
    """Differentiable causal attention over whole sequences, for training.

    With a window, query ``t`` sees keys ``t - window ... t``: both ends included, as in the
    published draft. A target's window of ``W`` tokens, of which the query's own is one, is
    ``window=W - 1``. cuDNN on GPUs that have it for this dtype and width, XLA elsewhere. A soft
    ``cap`` as in :func:`prefix_attention` and ``sinks`` as in :func:`speculative_attention` are
    XLA's.
    """
    _check_sinks(q, sinks)
    fused = _cudnn_serves(q.dtype, q.shape[-1])
    if cap is not None or sinks is not None or (jax.default_backend() == "gpu" and not fused):
        return attention_xla.causal_attention(
            q, k, v, sinks=sinks, window=window, scale=scale, cap=cap
        )
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        scale=scale,
        is_causal=True,
        local_window_size=None if window is None else (window, 0),
        implementation="cudnn" if fused else "xla",
    )


def _cudnn_serves(dtype: DTypeLike, width: int) -> bool:
    """Whether cuDNN differentiates attention of this dtype and head width on this GPU.

    Elsewhere it fails, and no earlier than at the first step of a training run: below Ampere, on
    GPUs of AMD, and for widths that are not a multiple of 8.
    """
    capability = compute_capability() or (0, 0)
    widest = 2 * CUDNN_WIDTH if capability >= HOPPER else CUDNN_WIDTH
    half = dtype in (jnp.bfloat16, jnp.float16)
    return half and capability >= AMPERE and width % 8 == 0 and width <= widest


def _check_prefix(q: Queries, prefix: Prefix) -> None:
    """Refuse a cache that does not fit the queries."""
    rows = q.shape[0] if prefix.cache_rows is None else None
    _check_pair(q, prefix.keys, prefix.values, "[B, K, S, H]", prefix.keys.shape[1], rows)
    oldest = prefix.oldest
    if oldest is not None and (oldest.shape != q.shape[:2] or prefix.start is not None):
        raise ValueError(
            f"oldest {oldest.shape} must have one position a query, {q.shape[:2]}, and no start "
            "next to it"
        )
    for name in ("length", "start", "cache_rows"):
        bound = getattr(prefix, name)
        if bound is not None and bound.shape != q.shape[:1]:
            raise ValueError(f"{name} {bound.shape} must have one number a row, {q.shape[:1]}")


def _check_fresh(q: Queries, fresh: Fresh, *, chunk: bool = False) -> None:
    """Refuse fresh keys that do not fit the queries, and a mask that does not fit both."""
    k, mask = fresh.keys, fresh.mask
    _check_pair(q, k, fresh.values, "[B, U, K, H]", k.shape[2], q.shape[0])
    if mask is None:
        if not chunk:
            raise ValueError("a tree needs a mask, which says what its nodes see")
        if k.shape[1] != q.shape[1]:
            raise ValueError(f"a chunk of {q.shape[1]} queries has as many keys, not {k.shape[1]}")
    elif mask.shape != (q.shape[0], q.shape[1], k.shape[1]) or mask.dtype != jnp.bool_:
        raise ValueError(
            f"mask {mask.shape} {mask.dtype} must be boolean [B, T, U] = "
            f"{(q.shape[0], q.shape[1], k.shape[1])}"
        )


def _check_sinks(q: Queries, sinks: Sinks | None) -> None:
    """Refuse sinks of other heads."""
    if sinks is not None and sinks.shape != q.shape[2:3]:
        raise ValueError(f"sinks {sinks.shape} must be one number a query head, {q.shape[2:3]}")


def _check_pair(q: Array, k: Array, v: Array, axes: str, kv_heads: int, rows: int | None) -> None:
    """Refuse keys and values that do not fit each other, the queries, or that many rows."""
    if q.shape[2] % kv_heads or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"{q.shape[2]} query heads of width {q.shape[3]} do not group over {kv_heads} "
            f"key/value heads of width {k.shape[3]}: one must be a multiple of the other, widths "
            "equal"
        )
    # Only what is cached is ever in 8 bits.
    if q.dtype != k.dtype and (k.dtype != CODES or "S" not in axes):
        raise ValueError(f"queries are {q.dtype} and keys {k.dtype}; cast one of them explicitly")
    if k.shape != v.shape or k.dtype != v.dtype or k.shape[0] != (rows or k.shape[0]):
        raise ValueError(
            f"keys {k.shape} {k.dtype}, values {v.shape} {v.dtype} and queries {q.shape} must "
            f"share the batch, and keys and values their dtype and whole shape {axes}"
        )


def _check_together(prefix: Prefix, keys: TreeRows) -> None:
    """Refuse a prefix and fresh keys of different heads or types, or in different units."""
    if prefix.scales is not None:
        raise ValueError("fresh keys are in the cache's units; a prefix next to them has no scales")
    if prefix.keys.shape[1] != keys.shape[2] or prefix.keys.dtype not in (keys.dtype, CODES):
        raise ValueError(
            f"the prefix has {prefix.keys.shape[1]} key/value heads of {prefix.keys.dtype} and the "
            f"fresh tokens {keys.shape[2]} of {keys.dtype}; they must agree"
        )


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _without_gradient(op: str, operands: tuple[Any, ...]) -> tuple[Any, ...]:
    """Pass operands on, and refuse to be differentiated."""
    return operands


@_without_gradient.defjvp
def _refuse_gradient(op: str, primals: PyTree, tangents: PyTree) -> NoReturn:
    raise NotImplementedError(
        f"{op} serves decoding and has no gradient; train with causal_attention, or stop the "
        "gradient before this call"
    )
