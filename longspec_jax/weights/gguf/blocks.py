"""GGUF tensors as tensors that are read by slice: a slice costs its own blocks and nothing else.

Blocks are dequantised into float32 products. Floats are passed on as they are. The file is mapped
anew for each slice, so that what was read does not count as the process' memory.
"""

import jax.numpy as jnp
import numpy as np

from longspec_jax.weights.checkpoint import Index, Tensor
from longspec_jax.weights.gguf import matrices
from longspec_jax.weights.gguf.file import StoredTensor

_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def decoded(stored: StoredTensor) -> Tensor:
    """A stored tensor in the order of its file."""
    if dtype := _FLOATS.get(stored.type.name):
        kind = jnp.dtype(dtype) if dtype == "bfloat16" else jnp.dtype(dtype).newbyteorder("<")

        def floats(index: Index) -> np.ndarray:
            return np.array(stored.rows().view(kind)[index])

        return Tensor(stored.shape, dtype, floats, stored.path)
    elements, blocks = stored.type.elements, packed(stored)

    def read(index: Index) -> np.ndarray:
        *outer, inputs = (*index, *(slice(None),) * (len(stored.shape) - len(index)))
        start, stop, _ = inputs.indices(stored.shape[-1])
        first, last = start // elements, -(-stop // elements)
        found = blocks.read((*outer, slice(first, last)))
        with np.errstate(all="ignore"):  # What is not finite is refused where it is cast.
            values = matrices.dequantised(found, stored.type.name)
        begin = first * elements
        return values[..., start - begin : stop - begin]

    return Tensor(stored.shape, "float32", read, stored.path)


def packed(stored: StoredTensor) -> Tensor:
    """The bytes of a tensor, ``[..., blocks of a row, bytes of a block]``."""
    shape = (*stored.shape[:-1], stored.row_bytes // stored.type.size, stored.type.size)

    def read(index: Index) -> np.ndarray:
        return np.array(stored.rows().reshape(shape)[index])

    return Tensor(shape, "U8", read, stored.path)
