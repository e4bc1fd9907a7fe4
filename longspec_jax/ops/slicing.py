"""Parts of arrays of tokens: the nodes on a path, and chunks of long rows."""

import jax
import jax.numpy as jnp
from jaxtyping import Int, Shaped

from longspec_jax.axes import Array


def along(path: Int[Array, "B h ..."], feature: Array) -> Array:
    """A feature ``[B, T, ...]`` of the tokens, or tree nodes, on a path."""
    return jax.vmap(lambda nodes, row: row[nodes])(path, feature)


def last_along(feature: Array, count: Int[Array, " B"]) -> Array:
    """The row ``count[b] - 1`` of a feature ``[B, T, ...]``; the first where the count is 0."""
    return along(jnp.maximum(count - 1, 0)[:, None], feature)[:, 0]


def chunk_length(rows: int, length: int, chunk: int) -> int:
    """Tokens of each row in one chunk: the largest divisor of the length that fits.

    If that is less than half of what fits, as for prime lengths, chunks are as even as possible
    and :func:`whole_chunks` pads the last one. Chunks cut every row and never the batch, because
    devices share the batch.

    Args:
      rows: rows of one device.
      length: tokens of a row.
      chunk: the most tokens of all rows together.
    """
    fits = min(length, max(1, chunk // rows))
    divisor = max(size for size in range(1, fits + 1) if length % size == 0)
    return divisor if 2 * divisor >= fits else -(-length // -(-length // fits))


def whole_chunks(part: Shaped[Array, "..."], size: int, axis: int = 1) -> Shaped[Array, "..."]:
    """Pad an array with zeros to whole chunks."""
    padding = [(0, -part.shape[axis] % size if each == axis else 0) for each in range(part.ndim)]
    return jnp.pad(part, padding)


def cut(part: Shaped[Array, "B T ..."], start: Array | int, size: int) -> Shaped[Array, "B t ..."]:
    """The chunk of ``size`` tokens that begins at ``start``."""
    return jax.lax.dynamic_slice_in_dim(part, start, size, axis=1)


def put(
    whole: Shaped[Array, "B T ..."], part: Shaped[Array, "B t ..."], start: Array
) -> Shaped[Array, "B T ..."]:
    """Replace the chunk that begins at ``start``, in place where the compiler can."""
    return jax.lax.dynamic_update_slice_in_dim(whole, part.astype(whole.dtype), start, axis=1)
