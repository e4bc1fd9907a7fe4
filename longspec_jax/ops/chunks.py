"""Cutting long rows into chunks of tokens, so that what is large per token exists for some only."""

import jax
import jax.numpy as jnp
from jaxtyping import Shaped

from longspec_jax.axes import Array


def chunk_length(rows: int, length: int, chunk: int) -> int:
    """Tokens of each row in one chunk: the largest divisor of the length that fits.

    Where that is less than half of what fits, as for prime lengths, chunks are as even as can be
    and the last one is padded by :func:`whole_chunks`. Chunks cut every row and never the batch,
    because the batch is what devices share.

    Args:
      rows: of one device.
      length: tokens of a row.
      chunk: most tokens of all rows together.
    """
    fits = min(length, max(1, chunk // rows))
    divisor = max(size for size in range(1, fits + 1) if length % size == 0)
    return divisor if 2 * divisor >= fits else -(-length // -(-length // fits))


def whole_chunks(part: Shaped[Array, "..."], size: int, axis: int = 1) -> Shaped[Array, "..."]:
    """An array with zeros behind it, as far as the last chunk needs some."""
    padding = [(0, -part.shape[axis] % size if each == axis else 0) for each in range(part.ndim)]
    return jnp.pad(part, padding)


def cut(part: Shaped[Array, "B T ..."], start: Array, size: int) -> Shaped[Array, "B t ..."]:
    """The chunk of ``size`` tokens that begins at ``start``."""
    return jax.lax.dynamic_slice_in_dim(part, start, size, axis=1)


def put(
    whole: Shaped[Array, "B T ..."], part: Shaped[Array, "B t ..."], start: Array
) -> Shaped[Array, "B T ..."]:
    """The array with a chunk of it replaced, in place where that may be."""
    return jax.lax.dynamic_update_slice_in_dim(whole, part.astype(whole.dtype), start, axis=1)
