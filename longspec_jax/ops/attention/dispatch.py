"""The attention ops of the project: validate, choose an implementation, refuse with the reason.

``prefix_attention`` and ``tree_attention`` return mergeable partial results; the decode step uses
their union, ``speculative_attention`` (LongSpec section 3.3). ``chunk_attention`` serves prefill
and ``causal_attention`` training. :mod:`longspec_jax.ops.attention.reference` defines what each
computes.

An implementation is a module that provides the op under the same name and raises
``NotImplementedError`` with a sentence for what it cannot do; it is imported on first use, so that
a missing backend is one more such sentence. Without an explicit choice the first implementation
that accepts the call is used; an explicit choice never falls back.
"""

import dataclasses
import functools
import importlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Float

from longspec_jax.axes import Array, Queries, TreeRows
from longspec_jax.ops.attention.merge import Partial, merge
from longspec_jax.ops.attention.operands import Fresh, Prefix


@dataclasses.dataclass(frozen=True)
class Implementation:
    """Where an implementation of an op lives.

    Attributes:
      module: the module's full name.
      options: what the op is always called with.
    """

    module: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __call__(self, op: str, *args: Any, **options: Any) -> Any:
        """Call the op, or refuse because its backend is not installed."""
        try:
            module = importlib.import_module(self.module)
        except ImportError as error:
            raise NotImplementedError(f"{self.module} cannot be imported: {error}") from error
        return getattr(module, op)(*args, **options, **self.options)


@dataclasses.dataclass(frozen=True)
class Merged:
    """Speculative attention as the merge of what two implementations find.

    Attributes:
      prefix: attends to the prefix.
      tree: attends to the tree.
    """

    prefix: Implementation
    tree: Implementation

    def __call__(
        self, op: str, q: Queries, prefix: Prefix, fresh: Fresh, *, scale: float | None
    ) -> Float[Array, "B T N H"]:
        """Compute both parts and merge them."""
        seen = self.prefix("prefix_attention", q, prefix, scale=scale)
        tree = self.tree("tree_attention", q, fresh, scale=scale)
        return merge(seen, tree).out.astype(q.dtype)


@dataclasses.dataclass(frozen=True)
class Masked:
    """Chunk attention as speculative attention under a causal mask.

    Attributes:
      speculative: what attends.
    """

    speculative: Implementation | Merged

    def __call__(
        self,
        op: str,
        q: Queries,
        prefix: Prefix,
        keys: TreeRows,
        values: TreeRows,
        *,
        scale: float | None,
    ) -> Float[Array, "B T N H"]:
        """Attend to what the mask shows."""
        causal = jnp.tril(jnp.ones((q.shape[1], q.shape[1]), bool))
        fresh = Fresh(keys, values, jnp.broadcast_to(causal, (q.shape[0], *causal.shape)))
        return self.speculative("speculative_attention", q, prefix, fresh, scale=scale)


_OPS = "longspec_jax.ops.attention"
_REFERENCE = Implementation(f"{_OPS}.reference")
_KERNELS = Implementation(f"{_OPS}.kernels")
_HOPPER_KERNELS = Implementation(f"{_OPS}.kernels", {"hopper": True})
_INTERPRETED_KERNELS = Implementation(f"{_OPS}.kernels", {"interpret": True})
_TREE_KERNEL = Implementation(f"{_OPS}.tree_pallas")
_TREE_XLA = Implementation(f"{_OPS}.tree_xla")

PREFIX_IMPLEMENTATIONS: dict[str, Implementation] = {
    "pallas": _KERNELS,
    "mosaic": _HOPPER_KERNELS,
    "triton": Implementation(f"{_OPS}.prefix_triton"),
    "xla": Implementation(f"{_OPS}.prefix_xla"),
    "reference": _REFERENCE,
    "interpret": _INTERPRETED_KERNELS,
}
TREE_IMPLEMENTATIONS: dict[str, Implementation] = {
    "pallas": _TREE_KERNEL,
    "mosaic": _TREE_KERNEL,
    "triton": _TREE_KERNEL,
    "xla": _TREE_XLA,
    "reference": _REFERENCE,
    "interpret": Implementation(f"{_OPS}.tree_pallas", {"interpret": True}),
}
SPECULATIVE_IMPLEMENTATIONS: dict[str, Implementation | Merged] = {
    "pallas": _KERNELS,
    "mosaic": _HOPPER_KERNELS,
    "triton": Merged(PREFIX_IMPLEMENTATIONS["triton"], _TREE_XLA),
    "xla": Merged(PREFIX_IMPLEMENTATIONS["xla"], _TREE_XLA),
    "reference": _REFERENCE,
    "interpret": _INTERPRETED_KERNELS,
}
CHUNK_IMPLEMENTATIONS: dict[str, Implementation | Masked] = {
    "pallas": _KERNELS,
    "mosaic": _HOPPER_KERNELS,
    "triton": Masked(SPECULATIVE_IMPLEMENTATIONS["triton"]),
    "xla": Masked(SPECULATIVE_IMPLEMENTATIONS["xla"]),
    "reference": Masked(SPECULATIVE_IMPLEMENTATIONS["reference"]),
    "interpret": _INTERPRETED_KERNELS,
}
AUTOMATIC = ("pallas", "xla")
"""The implementations that are tried, in this order, when none is named."""


def prefix_attention(
    q: Queries,
    prefix: Prefix,
    *,
    scale: float | None = None,
    dtype: DTypeLike = jnp.float32,
    implementation: str | None = None,
) -> Partial:
    """Attention of a few query tokens to a long prefix, split over keys (FlashDecoding).

    Args:
      q: query tokens; every token of row ``b`` sees the same slots.
      prefix: the cached tokens.
      scale: factor on the scores; ``H ** -0.5`` if absent.
      dtype: of the output; what is to be merged wants float32.
      implementation: a name from ``PREFIX_IMPLEMENTATIONS``; chosen automatically if absent.

    Returns:
      The partial result; ``out = 0`` and ``lse = -inf`` for rows that see no slot.

    Raises:
      ValueError: if shapes or dtypes do not fit together, or the implementation is unknown.
      NotImplementedError: if the chosen implementation cannot take this call; says why.
    """
    _check_prefix(q, prefix)
    options = dict(scale=scale, dtype=jnp.dtype(dtype))
    return _run(PREFIX_IMPLEMENTATIONS, implementation, "prefix_attention", q, prefix, **options)


def tree_attention(
    q: Queries,
    fresh: Fresh,
    *,
    scale: float | None = None,
    dtype: DTypeLike = jnp.float32,
    implementation: str | None = None,
) -> Partial:
    """Attention of tree nodes to fresh keys under an arbitrary boolean mask.

    Args and errors as in :func:`prefix_attention`. The number of keys need not equal the number of
    queries.
    """
    _check_fresh(q, fresh)
    options = dict(scale=scale, dtype=jnp.dtype(dtype))
    return _run(TREE_IMPLEMENTATIONS, implementation, "tree_attention", q, fresh, **options)


def speculative_attention(
    q: Queries,
    prefix: Prefix,
    fresh: Fresh,
    *,
    scale: float | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T N H"]:
    """Attention of tree nodes to the committed prefix and, masked, to the tree itself.

    Args and errors as in :func:`prefix_attention` and :func:`tree_attention`, of which this is the
    merged result, in the dtype of the queries. On a GPU all is one kernel or, of more than a few
    rows, two.
    """
    _check_prefix(q, prefix)
    _check_fresh(q, fresh)
    _check_together(prefix, fresh.keys)
    op = "speculative_attention"
    return _run(SPECULATIVE_IMPLEMENTATIONS, implementation, op, q, prefix, fresh, scale=scale)


def chunk_attention(
    q: Queries,
    prefix: Prefix,
    keys: TreeRows,
    values: TreeRows,
    *,
    scale: float | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T N H"]:
    """Attention of one prefill chunk to the prefix before it and, causally, to itself.

    Args:
      q: the chunk's queries.
      prefix: the cached tokens before the chunk.
      keys: the chunk's own, one for each query.
      values: likewise.
      scale: factor on the scores; ``H ** -0.5`` if absent.
      implementation: a name from ``CHUNK_IMPLEMENTATIONS``; chosen automatically if absent.

    Raises:
      ValueError, NotImplementedError: as :func:`prefix_attention`.
    """
    _check_prefix(q, prefix)
    _check_rows(q, keys, values)
    _check_together(prefix, keys)
    if keys.shape[1] != q.shape[1]:
        raise ValueError(f"a chunk of {q.shape[1]} queries has as many keys, not {keys.shape[1]}")
    op = "chunk_attention"
    return _run(CHUNK_IMPLEMENTATIONS, implementation, op, q, prefix, keys, values, scale=scale)


def causal_attention(
    q: Queries,
    k: TreeRows,
    v: TreeRows,
    *,
    window: int | None = None,
    scale: float | None = None,
) -> Float[Array, "B T N H"]:
    """Differentiable causal attention over whole sequences, for training.

    With a window, query ``t`` sees keys ``t - window ... t``: both ends included, as in the
    published draft. cuDNN on GPUs that have it for this dtype, XLA elsewhere.
    """
    half = q.dtype in (jnp.bfloat16, jnp.float16)
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        scale=scale,
        is_causal=True,
        local_window_size=None if window is None else (window, 0),
        implementation="cudnn" if half and jax.default_backend() == "gpu" else "xla",
    )


def _check_prefix(q: Queries, prefix: Prefix) -> None:
    """Refuse a cache that does not fit the queries."""
    k, v = prefix.keys, prefix.values
    _check_heads(q, k.shape[1], k.shape[3], k.dtype)
    if k.shape != v.shape or k.dtype != v.dtype or k.shape[0] != q.shape[0]:
        raise ValueError(
            f"keys {k.shape} {k.dtype}, values {v.shape} {v.dtype} and queries {q.shape} must "
            "share the batch, and keys and values their dtype and whole shape [B, K, S, H]"
        )
    for name in ("length", "start"):
        bound = getattr(prefix, name)
        if bound is not None and bound.shape != q.shape[:1]:
            raise ValueError(f"{name} {bound.shape} must have one number a row, {q.shape[:1]}")


def _check_fresh(q: Queries, fresh: Fresh) -> None:
    """Refuse fresh keys that do not fit the queries, and a mask that does not fit both."""
    k, mask = fresh.keys, fresh.mask
    _check_rows(q, k, fresh.values)
    if mask.shape != (q.shape[0], q.shape[1], k.shape[1]) or mask.dtype != jnp.bool_:
        raise ValueError(
            f"mask {mask.shape} {mask.dtype} must be boolean [B, T, U] = "
            f"{(q.shape[0], q.shape[1], k.shape[1])}"
        )


def _check_rows(q: Queries, k: TreeRows, v: TreeRows) -> None:
    """Refuse fresh keys that do not fit the queries."""
    _check_heads(q, k.shape[2], k.shape[3], k.dtype)
    if k.shape != v.shape or k.dtype != v.dtype or k.shape[0] != q.shape[0]:
        raise ValueError(
            f"keys {k.shape} {k.dtype}, values {v.shape} {v.dtype} and queries {q.shape} must "
            "share the batch, and keys and values their dtype and whole shape [B, U, K, H]"
        )


def _check_together(prefix: Prefix, keys: TreeRows) -> None:
    """Refuse a prefix and fresh keys of different heads or types."""
    if prefix.keys.shape[1] != keys.shape[2] or prefix.keys.dtype != keys.dtype:
        raise ValueError(
            f"the prefix has {prefix.keys.shape[1]} key/value heads of {prefix.keys.dtype} and the "
            f"fresh tokens {keys.shape[2]} of {keys.dtype}; they must agree"
        )


def _check_heads(q: Array, kv_heads: int, width: int, dtype: jnp.dtype) -> None:
    """Refuse queries that cannot be grouped over the key/value heads."""
    if q.shape[2] % kv_heads or q.shape[3] != width:
        raise ValueError(
            f"{q.shape[2]} query heads of width {q.shape[3]} do not group over {kv_heads} "
            f"key/value heads of width {width}: one must be a multiple of the other, widths equal"
        )
    if q.dtype != dtype:
        raise ValueError(f"queries are {q.dtype} and keys {dtype}; cast one of them explicitly")


def _run(
    implementations: Mapping[str, Implementation | Merged | Masked],
    choice: str | None,
    op: str,
    *operands: Any,
    **options: Any,
) -> Any:
    """Call the chosen implementation, or the first that does not refuse."""
    operands = _without_gradient(op, operands)
    if choice is not None:
        if choice not in implementations:
            raise ValueError(
                f"{op} has no implementation {choice!r}; choose one of {sorted(implementations)}"
            )
        return implementations[choice](op, *operands, **options)
    refusals = []
    for name in AUTOMATIC:
        try:
            return implementations[name](op, *operands, **options)
        except NotImplementedError as refusal:
            refusals.append(f"{name}: {refusal}")
    raise NotImplementedError(f"no implementation of {op} takes this call. " + "; ".join(refusals))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _without_gradient(op: str, operands: tuple[Any, ...]) -> tuple[Any, ...]:
    """Pass operands on, and refuse to be differentiated."""
    return operands


@_without_gradient.defjvp
def _refuse_gradient(op: str, primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        f"{op} serves decoding and has no gradient; train with causal_attention, or stop the "
        "gradient before this call"
    )
