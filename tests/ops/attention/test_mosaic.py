"""Attention's Mosaic GPU kernels, interpreted, with caches of 16 and of 8 bits."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.ops.attention import float8, float8_mosaic, path_kernels, reference
from longspec_jax.ops.attention.operands import Fresh, Prefix
from longspec_jax.ops.attention.tiles import MosaicTile
from longspec_jax.ops.hardware import mosaic_is_supported
from tests.kit import TOLERANCE, relative_error

MOSAIC = pytest.mark.skipif(not mosaic_is_supported(), reason="the kernels need jax 0.11 or newer")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_words_of_two_codes_become_two_numbers(dtype: str) -> None:
    codes = np.asarray([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
    signs = np.where(codes & 0x80, 0xFF, 0).astype(np.uint8)
    halves = np.stack([codes, signs], axis=1).reshape(-1).view(np.uint32)
    words = np.concatenate([halves, halves[::-1]])
    found = float8_mosaic.in_place(words, jnp.dtype(dtype)).view(jnp.dtype(dtype))
    factor = np.asarray(2.0**8 if dtype == "float16" else 2.0**120, found.dtype)
    expected = words.view(np.uint8)[::2].view(float8.E4M3)
    np.testing.assert_array_equal(found * factor, expected.astype(found.dtype))


class Case(NamedTuple):
    """A call of path attention."""

    nodes: int
    heads: int
    kv_heads: int
    width: int
    length: int
    dtype: str = "bfloat16"
    batch: int = 1


CASES = [
    Case(1, 4, 4, 128, 203),
    Case(1, 4, 1, 128, 300),
    Case(16, 7, 1, 64, 333, "float16"),
    Case(64, 4, 1, 128, 279),
    Case(69, 1, 1, 64, 150, batch=2),
    Case(64, 3, 1, 64, 410),
    Case(8, 2, 1, 64, 9),
]
