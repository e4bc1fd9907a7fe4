"""MXFP4 experts, as gpt-oss stores them: 4-bit floats with a power of two for every 32 inputs.

They are dequantised as they are read, which is exact in 16 bits: a number has three bits.

Source: transformers 5 (``integrations/mxfp4.py``, ``convert_moe_packed_tensors``).
"""

import numpy as np

from longspec_jax.ops.matmul.quantised_weights import E2M1
from longspec_jax.weights.checkpoint import Index, Tensor

GROUP = 32
NOT_A_NUMBER = 255
"""A scale of the format e8m0 that stands for NaN."""
BIAS = 127
"""Of a scale's exponent."""
VALUES = np.asarray([*E2M1, *(-each for each in E2M1)], np.float32)
PAIRS = np.stack([np.tile(VALUES, 16), np.repeat(VALUES, 16)], axis=-1)
"""The two numbers of every byte: the lower four bits come first."""


def dequantised(blocks: Tensor, scales: Tensor) -> Tensor:
    """The matrices of all experts, ``[E, in, out]``, float32, that are read by slice.

    Args:
      blocks: bytes ``..._blocks [E, out, groups, 16]``.
      scales: exponents ``..._scales [E, out, groups]``, 127 above the power of two.

    Raises:
      ValueError: if the tensors are of other dtypes or shapes; when it is read, if a scale is no
        number.
    """
    found = (blocks.dtype, scales.dtype), blocks.shape
    if found != (("U8", "U8"), (*scales.shape, GROUP // 2)) or len(scales.shape) != 3:
        raise ValueError(
            f"{blocks.file}: blocks are {blocks.dtype} {blocks.shape} and scales {scales.dtype} "
            f"{scales.shape}; MXFP4's are U8 [E, out, groups, 16] and U8 [E, out, groups]"
        )
    count, outputs, groups = scales.shape

    def read(index: Index) -> np.ndarray:
        experts, inputs, columns = index
        start, stop, _ = inputs.indices(groups * GROUP)
        some = slice(start // GROUP, -(-stop // GROUP))
        exponents = scales.read((experts, columns, some))
        if (exponents == NOT_A_NUMBER).any():
            raise ValueError(
                f"{scales.file}: a scale is NaN; the file is damaged: download it again"
            )
        codes = blocks.read((experts, columns, some, slice(None)))
        powers = np.ldexp(np.float32(1), exponents.astype(np.int32) - BIAS)
        values = PAIRS[codes].reshape(*exponents.shape, GROUP) * powers[..., None]
        first = some.start * GROUP
        values = values.reshape(*exponents.shape[:2], -1)[..., start - first : stop - first]
        return values.swapaxes(1, 2)

    return Tensor((count, groups * GROUP, outputs), "float32", read, blocks.file)
