"""GGUF tensors as tensors that are read by slice: a slice costs its own blocks and nothing else.

Blocks are decoded by the package ``gguf``, into float32 products. Floats are passed on as they are.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from longspec_jax.extras import missing_extra
from longspec_jax.weights.checkpoint import Index, Tensor
from longspec_jax.weights.gguf.file import StoredTensor

_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def decoded(stored: StoredTensor) -> Tensor:
    """A stored tensor in the order of its file."""
    rows = stored.rows()
    if dtype := _FLOATS.get(stored.type.name):
        floats = rows.view(jnp.dtype(dtype).newbyteorder("<") if dtype != "bfloat16" else dtype)
        return Tensor(stored.shape, dtype, floats.__getitem__, stored.path)
    elements, size = stored.type.elements, stored.type.size
    dequantize, types = _decoder()

    def read(index: Index) -> np.ndarray:
        *outer, inputs = (*index, *(slice(None),) * (len(stored.shape) - len(index)))
        start, stop, _ = inputs.indices(stored.shape[-1])
        first, last = start // elements, -(-stop // elements)
        blocks = np.ascontiguousarray(rows[(*outer, slice(first * size, last * size))])
        with np.errstate(all="ignore"):  # What is not finite is refused where it is cast.
            values = dequantize(blocks, types[stored.type.name])
        begin = first * elements
        return values[..., start - begin : stop - begin]

    return Tensor(stored.shape, "float32", read, stored.path)


def packed(stored: StoredTensor) -> Tensor:
    """The bytes of a tensor, ``[..., blocks of a row, bytes of a block]``."""
    rows = stored.rows()
    bytes_ = rows.reshape(*rows.shape[:-1], -1, stored.type.size)
    return Tensor(bytes_.shape, "U8", bytes_.__getitem__, stored.path)


def _decoder() -> tuple[Any, Any]:
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(missing_extra(error), name="gguf") from error
    return dequantize, GGMLQuantizationType
