"""MXFP4 experts, as gpt-oss stores them: 4-bit floats with a power of two for every 32 inputs.

Source: transformers 5 (``integrations/mxfp4.py``, ``convert_moe_packed_tensors``).
"""

import jax.numpy as jnp
import numpy as np

from longspec_jax.ops.matmul.quantised_weights import QuantisedMatrix
from longspec_jax.weights.checkpoint import Tensor

GROUP = 32
NOT_A_NUMBER = 255
"""A scale of the format e8m0 that stands for NaN."""


def read_experts(blocks: Tensor, scales: Tensor, experts: slice = slice(None)) -> QuantisedMatrix:
    """The matrices of some experts, outputs ``[experts, out]``.

    The rows of ``gate_up_proj`` alternate gate and up.

    Args:
      blocks: bytes ``…_blocks [E, out, groups, 16]``; the lower four bits come first.
      scales: exponents ``…_scales [E, out, groups]``, 127 above the power of two.
      experts: which are read.

    Raises:
      ValueError: if the tensors are of other dtypes or shapes, or a scale is no number.
    """
    found = (blocks.dtype, scales.dtype), blocks.shape
    if found != (("U8", "U8"), (*scales.shape, GROUP // 2)) or len(scales.shape) != 3:
        raise ValueError(
            f"{blocks.file}: blocks are {blocks.dtype} {blocks.shape} and scales {scales.dtype} "
            f"{scales.shape}; MXFP4's are U8 [E, out, groups, 16] and U8 [E, out, groups]"
        )
    codes, exponents = blocks.read((experts,)), scales.read((experts,))
    if (exponents == NOT_A_NUMBER).any():
        raise ValueError(f"{scales.file}: a scale is NaN; the file is damaged: download it again")
    powers = np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)
    return QuantisedMatrix(
        codes=jnp.asarray(codes.reshape(*codes.shape[:2], -1)),
        scale=jnp.asarray(powers),
        group=GROUP,
        floating=True,
    )
