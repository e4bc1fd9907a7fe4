"""Cached keys and values in 8 bits: e4m3, with scales that never change.

A number is divided by its scale and rounded to the nearest number of 4 exponent and 3 mantissa
bits, ties to even; what lies beyond 448 becomes 448. Every such number is also one of bfloat16,
float16 and float32, so widening changes nothing, and fresh tokens carry rounded numbers in the
dtype of their queries.

Attention works on stored numbers. Queries are multiplied by the scales of keys instead, and outputs
by those of values.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from longspec_jax.axes import Array
from longspec_jax.config.layers import HeadScales
from longspec_jax.ops import hardware

E4M3 = jnp.float8_e4m3fn
"""The dtype of cached numbers, which has no infinity."""
CODES = jnp.uint8
"""The dtype of the cache, which holds their bits: to write to an array of 8-bit floats XLA converts
all of it to 16 bits and back."""
LARGEST = 448.0
MANTISSA_BITS, LEAST_EXPONENT = 3, -6
"""Of e4m3. Below ``2 ** -6`` its numbers are multiples of ``2 ** -9``."""
FLOAT32_BIAS, FLOAT32_MANTISSA_BITS = 127, 23


def rounded(x: Array) -> Array:
    """The nearest numbers of e4m3, in the dtype of ``x``; NaN stays NaN.

    A conversion there and back would say the same, but compilers drop such pairs.
    """
    wide = x.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(wide, jnp.int32)
    exponent = (bits >> FLOAT32_MANTISSA_BITS) & 0xFF
    step = jnp.maximum(exponent, FLOAT32_BIAS + LEAST_EXPONENT) - MANTISSA_BITS
    step = jax.lax.bitcast_convert_type(step << FLOAT32_MANTISSA_BITS, jnp.float32)
    nearest = jax.lax.round(wide / step, jax.lax.RoundingMethod.TO_NEAREST_EVEN) * step
    return jnp.clip(nearest, -LARGEST, LARGEST).astype(x.dtype)


def codes(x: Array) -> Array:
    """What a cache holds of numbers that are :func:`rounded`."""
    return jax.lax.bitcast_convert_type(x.astype(E4M3), CODES)


def widened(cached: Array, dtype: DTypeLike) -> Array:
    """Cached numbers in the dtype of queries: codes in more bits, others as they are."""
    if cached.dtype == CODES:
        converts = (hardware.compute_capability() or hardware.FLOAT8) >= hardware.FLOAT8
        cached = jax.lax.bitcast_convert_type(cached, E4M3) if converts else by_bits(cached)
    return cached.astype(dtype)


def by_bits(stored: Array) -> Array:
    """The numbers of codes in float32, for GPUs without an instruction that converts e4m3.

    Half precision has room for its exponent, which is too small by the difference of both biases.
    """
    bits = stored.astype(jnp.uint16)
    half = jax.lax.bitcast_convert_type((bits & 0x80) << 8 | (bits & 0x7F) << 7, jnp.float16)
    number = half.astype(jnp.float32) * 256
    return jnp.where((bits & 0x7F) == 0x7F, jnp.nan, number)


def stored(scales: HeadScales | None, keys: Array, values: Array) -> tuple[Array, Array]:
    """What a cache holds of keys and values ``[B, U, K, H]``, in their dtype."""
    if scales is None:
        return rounded(keys), rounded(values)
    return _divided(keys, scales.keys), _divided(values, scales.values)


def _divided(x: Array, factors: tuple[float, ...]) -> Array:
    """Numbers over the factor of their head, rounded once."""
    return rounded(x.astype(jnp.float32) / _factors(factors, x.shape[2])).astype(x.dtype)


def scaled(x: Array, factors: tuple[float, ...]) -> Array:
    """Queries or outputs ``[B, T, N, H]`` times the factor of their key/value head."""
    return (x.astype(jnp.float32) * _factors(factors, x.shape[2])).astype(x.dtype)


def _factors(factors: tuple[float, ...], heads: int) -> Array:
    """A factor for each of these heads, ``[N, 1]``."""
    return jnp.repeat(jnp.asarray(factors, jnp.float32), heads // len(factors))[:, None]
