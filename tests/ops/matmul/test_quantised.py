"""Matmuls with quantised weights: equal to those with the weights that the codes stand for."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from longspec_jax.models.layers import Projection
from longspec_jax.ops.matmul.quantised import quantised_matmul
from longspec_jax.ops.matmul.quantised_weights import E2M1, QuantisedMatrix
from tests.kit import ALL_PASSES, each_row

INPUTS, GROUP = 76, 32
"""The last group has 12 inputs."""


def drawn(kind: str, *out: int, order: bool = False) -> tuple[QuantisedMatrix, np.ndarray]:
    """Weights of a kind, and the matrix ``[*out, C]`` that they stand for, inputs in order."""
    random = np.random.default_rng(len(kind))
    groups = 1 if kind == "fp8" else -(-INPUTS // GROUP)
    scale = random.uniform(0.01, 0.1, (*out, groups)).astype(np.float32)
    shape, zero = (*out, INPUTS), None
    codes: Any
    wide_zero: Any = 0
    if kind == "fp8":
        codes = random.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn)
    elif kind.startswith("int8"):
        codes = random.integers(-128, 128, shape).astype(np.int8)
    else:
        codes = random.integers(0, 16, shape).astype(np.uint8)
        wide_zero = 8
    values = codes.astype(np.float32)
    if kind == "mxfp4":
        magnitudes, wide_zero = np.asarray(E2M1, np.float32)[codes & 7], 0
        values = np.where(codes & 8, -magnitudes, magnitudes)
    if kind.endswith("asymmetric"):
        low = -100 if kind.startswith("int8") else 0
        zero = random.integers(low, low + 16, scale.shape).astype(np.int8)
        wide_zero = zero[..., np.arange(INPUTS) // GROUP]
    matrix = (values - wide_zero) * scale[..., np.arange(INPUTS) // GROUP % groups]
    place = random.permutation(INPUTS) if order else None
    if codes.dtype == np.uint8:
        codes = codes[..., ::2] | codes[..., 1::2] << 4
    weights = QuantisedMatrix(
        *map(jnp.asarray, (codes, scale)),
        zero=None if zero is None else jnp.asarray(zero),
        order=None if place is None else jnp.asarray(place, jnp.int32),
        group=GROUP,
        floating=kind == "mxfp4",
    )
    if place is not None:
        sorted_back = np.empty_like(matrix)
        sorted_back[..., place] = matrix
        matrix = sorted_back
    return weights, matrix.astype(np.float32)


KINDS = ["fp8", "int8", "int8 asymmetric", "int4", "int4 asymmetric", "mxfp4"]


@each_row("kind", KINDS)
def test_a_matmul_equals_that_of_the_dequantised_weights(kind: str) -> None:
    x = np.random.default_rng(1).standard_normal((3, INPUTS)).astype(np.float32)
    weights, matrix = drawn(kind, 5, 7, order=kind == "int4 asymmetric")
    np.testing.assert_array_equal(weights.kernel(jnp.float32), np.moveaxis(matrix, -1, 0))
    out = quantised_matmul(jnp.asarray(x), weights, jnp.ones((5, 7)))
    np.testing.assert_allclose(out, np.einsum("rc,abc->rab", x, matrix) + 1, rtol=1e-4, atol=1e-4)
    partials = quantised_matmul(jnp.asarray(x), weights.flat(), split=True)
    np.testing.assert_allclose(
        partials.sum(0), x @ matrix.reshape(35, INPUTS).T, rtol=1e-4, atol=1e-4
    )


def test_in_16_bits_weights_are_rounded_once_before_the_matmul() -> None:
    weights, matrix = drawn("int4 asymmetric", 8)
    rounded = weights.dequantised(jnp.bfloat16)
    np.testing.assert_array_equal(rounded, matrix.astype(jnp.bfloat16))
    x = jnp.asarray(np.random.default_rng(2).standard_normal((2, INPUTS)), jnp.bfloat16)
    assert quantised_matmul(x, weights).dtype == jnp.bfloat16


def test_a_loop_dequantises_inside() -> None:
    """Outside the loop over rounds every layer would exist in the activations' dtype at once."""
    weights = [drawn("int4", INPUTS)[0] for _ in range(8)]

    def rounds(x: jax.Array, weights: list[QuantisedMatrix]) -> jax.Array:
        def one(_: int, x: jax.Array) -> jax.Array:
            for each in weights:
                x = quantised_matmul(x, each)
            return x

        return jax.lax.fori_loop(0, 3, one, x)

    compiled = jax.jit(rounds).lower(jnp.ones((1, INPUTS)), weights).compile(ALL_PASSES)
    [memory] = [compiled.memory_analysis()]
    assert memory is not None and memory.temp_size_in_bytes < 4 * 4 * INPUTS * INPUTS


def test_a_projection_multiplies_what_its_parameters_hold() -> None:
    weights, matrix = drawn("int4", 2, 6)
    x = jnp.asarray(np.random.default_rng(3).standard_normal((1, 4, INPUTS)), jnp.float32)
    layer = Projection((INPUTS,), (2, 6), jnp.dtype(jnp.float32))
    whole = {"params": {"kernel": jnp.asarray(np.moveaxis(matrix, -1, 0))}}
    packed = {"params": {"kernel": weights}}
    for method in (None, "gated"):
        expected: Any = layer.apply(whole, x, method=method)
        found: Any = layer.apply(packed, x, method=method)
        np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_array_equal(quantised_matmul(x, weights, gated=True), found)
