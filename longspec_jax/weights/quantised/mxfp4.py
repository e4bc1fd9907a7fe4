"""MXFP4 experts, as gpt-oss stores them: 4-bit floats with a power of two for every 32 inputs.

Their codes stay as they are, and the powers become floats. 16 bits hold every weight exactly, which
has three bits.

Source: transformers 5 (``integrations/mxfp4.py``, ``convert_moe_packed_tensors``).
"""

import numpy as np

from longspec_jax.weights.checkpoint import Index, Tensor

GROUP = 32
NOT_A_NUMBER = 255
"""A scale of the format e8m0 that stands for NaN."""
BIAS = 127
"""Of a scale's exponent."""


def stored(blocks: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Codes ``[E, in / 2, out]`` and float32 scales ``[E, groups, out]``, read by slice.

    The axes are those of the whole matrices of all experts, ``[E, in, out]``.

    Args:
      blocks: bytes ``..._blocks [E, out, groups, 16]``, of two codes each, the earlier one lower.
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

    def codes(index: Index) -> np.ndarray:
        experts, inputs, columns = index
        start, stop, _ = inputs.indices(groups * GROUP // 2)
        some = slice(start // 16, -(-stop // 16))
        found = blocks.read((experts, columns, some, slice(None)))
        first = 16 * some.start
        return found.reshape(*found.shape[:2], -1)[..., start - first : stop - first].swapaxes(1, 2)

    def powers(index: Index) -> np.ndarray:
        experts, some, columns = index
        exponents = scales.read((experts, columns, some))
        if (exponents == NOT_A_NUMBER).any():
            raise ValueError(
                f"{scales.file}: a scale is NaN; the file is damaged: download it again"
            )
        return np.ldexp(np.float32(1), exponents.astype(np.int32) - BIAS).swapaxes(1, 2)

    return (
        Tensor((count, groups * GROUP // 2, outputs), "uint8", codes, blocks.file),
        Tensor((count, groups, outputs), "float32", powers, scales.file),
    )
