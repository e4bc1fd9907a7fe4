"""MXFP4's experts: values, order and scales by the format's own table."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.weights.checkpoint import Tensor
from longspec_jax.weights.quantised.mxfp4 import read_experts

VALUES = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def stored(values: np.ndarray, dtype: str = "U8") -> Tensor:
    return Tensor(values.shape, dtype, values.__getitem__, Path("model.safetensors"))


def test_experts_are_tables_values_times_powers_of_two() -> None:
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (3, 5, 2, 16)).astype(np.uint8)
    exponents = random.integers(120, 130, (3, 5, 2)).astype(np.uint8)
    pairs = np.stack([VALUES[blocks & 15], VALUES[blocks >> 4]], axis=-1).reshape(3, 5, 2, 32)
    expected = pairs * np.float32(2) ** (exponents.astype(np.float32) - 127)[..., None]
    found = read_experts(stored(blocks), stored(exponents), slice(1, 3))
    assert found.label == "mxfp4" and found.inputs == 64 and found.out_axes == (2, 5)
    # A power of two and three bits: nothing is lost in 16 bits.
    for dtype in (jnp.float32, jnp.bfloat16):
        np.testing.assert_array_equal(
            found.dequantised(dtype).astype(jnp.float32), expected[1:].reshape(2, 5, 64)
        )


def test_other_tensors_are_refused() -> None:
    blocks, exponents = np.zeros((1, 2, 1, 16), np.uint8), np.full((1, 2, 1), 127, np.uint8)
    with pytest.raises(ValueError, match=r"blocks are U8 \(1, 2, 1, 16\) and scales F32"):
        read_experts(stored(blocks), stored(exponents.astype(np.float32), "F32"))
    exponents[0, 1] = 255
    with pytest.raises(ValueError, match="a scale is NaN"):
        read_experts(stored(blocks), stored(exponents))
