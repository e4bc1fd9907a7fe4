"""Caches in 8 bits: how numbers are rounded, and attention that reads them."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from longspec_jax.config.layers import HeadScales
from longspec_jax.ops import hardware, layer_pallas
from longspec_jax.ops.attention import dispatch, float8, kernels, reference, tiles
from longspec_jax.ops.attention.float8 import CODES, E4M3
from longspec_jax.ops.attention.operands import Fresh, Prefix
from tests.kit import TOLERANCE, each_row, lowered, relative_error
from tests.ops.attention.oracle import Shape, inputs

GPU = pytest.mark.gpu
CASES = [
    ("reference", "float32", 9),
    ("xla", "float32", 9),
    ("xla", "bfloat16", 1),
    ("interpret", "float32", 1),
    ("interpret", "bfloat16", 9),
    *(
        pytest.param("pallas", dtype, tokens, marks=GPU)
        for dtype in ("float32", "bfloat16")
        for tokens in (1, 9, 69)
    ),
]


def numbers() -> np.ndarray:
    """All numbers of e4m3, the middles between them, and many others."""
    codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    codes = np.unique(codes[np.isfinite(codes)])
    random = np.random.default_rng(0)
    drawn = random.normal(size=5000) * np.exp(4 * random.normal(size=5000))
    edges = [0.0, -0.0, 448, 449, 464, 1e9, 1e-40, np.inf, -np.inf, np.nan]
    return np.concatenate([codes, (codes[1:] + codes[:-1]) / 2, drawn, edges]).astype(np.float32)


@each_row("dtype", ["float32", "bfloat16", "float16"])
def test_numbers_are_rounded_as_ml_dtypes_rounds_them(dtype: str) -> None:
    """Compiled, too: of a conversion there and back the compiler would leave nothing."""
    x = np.clip(numbers(), -6e4, 6e4) if dtype == "float16" else numbers()
    x = jnp.asarray(x, dtype)
    exact = np.asarray(x, np.float32)
    expected = np.clip(exact, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    for rounded in (float8.rounded, jax.jit(float8.rounded)):
        found = rounded(x)
        assert found.dtype == x.dtype
        np.testing.assert_array_equal(np.asarray(found, np.float32), expected)
        back = float8.widened(float8.codes(found), dtype)
        np.testing.assert_array_equal(np.asarray(back, np.float32), expected)


def test_stored_numbers_times_their_scales_are_near_the_given_ones() -> None:
    random = np.random.default_rng(0)
    keys, values = (jnp.asarray(random.normal(size=(2, 5, 3, 7)), jnp.float32) for _ in range(2))
    scales = HeadScales((0.01,), (0.02, 0.5, 7.0))
    found = float8.stored(scales, keys, values)
    for stored, given, each in zip(
        found, (keys, values), (scales.keys, scales.values), strict=True
    ):
        back = np.asarray(float8.scaled(stored, each))
        np.testing.assert_allclose(back, given, rtol=2**-4, atol=2**-10 * max(each))
        assert np.abs(back - given).max() > 1e-3


def in_8_bits(prefix: Prefix) -> tuple[Prefix, Prefix]:
    """A prefix in 8 bits, and the same numbers in the dtype of queries."""
    dtype = prefix.keys.dtype
    keys, values = (jnp.clip(x, -448, 448).astype(E4M3) for x in (prefix.keys, prefix.values))
    small = dataclasses.replace(prefix, keys=keys.view(CODES), values=values.view(CODES))
    wide = dataclasses.replace(prefix, keys=keys.astype(dtype), values=values.astype(dtype))
    return small, wide


@pytest.mark.parametrize(("implementation", "dtype", "tokens"), CASES)
def test_attention_widens_what_it_reads(implementation: str, dtype: str, tokens: int) -> None:
    """Bit for bit what the same implementation makes of the same numbers in more bits.

    On a GPU the tile may be another one, as the numbers are narrower.
    """
    every = np.ones((2, tokens, tokens), bool)
    x = inputs(Shape(tokens=tokens, keys=tokens), dtype, [131, 77], mask=every)
    (q, whole), (_, fresh) = x.prefix, x.tree
    small, wide = in_8_bits(whole)
    options: Any = {"implementation": implementation}
    for op, more in (
        (dispatch.prefix_attention, ()),
        (dispatch.speculative_attention, (fresh,)),
        (dispatch.speculative_attention, (Fresh(fresh.keys, fresh.values),)),
    ):
        found, expected = (
            jax.jit(lambda q, p, *m, op=op: op(q, p, *m, **options))(q, p, *more)
            for p in (small, wide)
        )
        if implementation != "pallas":
            jax.tree.map(np.testing.assert_array_equal, found, expected)
        exact, other = (getattr(reference, op.__name__)(q, p, *more) for p in (small, whole))
        first = jax.tree.leaves(found)[0]
        assert relative_error(first, jax.tree.leaves(exact)[0]) <= TOLERANCE[dtype]
        assert relative_error(first, jax.tree.leaves(other)[0]) > 1e-3


@pytest.mark.parametrize("implementation", ["xla", "interpret", pytest.param("pallas", marks=GPU)])
def test_rings_and_rows_of_a_larger_cache_in_8_bits(implementation: str) -> None:
    every = np.ones((2, 3, 3), bool)
    x = inputs(Shape(tokens=3, keys=3), "float32", [131, 77], mask=every)
    (q, whole), (_, fresh) = x.prefix, x.tree
    small, wide = in_8_bits(whole)
    there, oldest = jnp.asarray([1, 0]), jnp.asarray([[100] * 3, [40, 41, 42]])
    for more in ({"cache_rows": there}, {"oldest": oldest}):
        found, expected = (
            dispatch.speculative_attention(
                q, dataclasses.replace(p, **more), fresh, implementation=implementation
            )
            for p in (small, wide)
        )
        np.testing.assert_allclose(found, expected, atol=implementation == "pallas" and 1e-5)


def test_a_reader_that_knows_nothing_of_scales_reads_what_is_meant() -> None:
    every = np.ones((2, 3, 3), bool)
    x = inputs(Shape(tokens=3, keys=3), "float32", [131, 77], mask=every)
    q, whole = x.prefix
    scales = HeadScales((0.05, 0.2), (0.01,))
    keys, values = float8.stored(scales, whole.keys.swapaxes(1, 2), whole.values.swapaxes(1, 2))
    meant = [
        float8.scaled(each, factors).swapaxes(1, 2)
        for each, factors in ((keys, scales.keys), (values, scales.values))
    ]
    keys, values = (float8.codes(each.swapaxes(1, 2)) for each in (keys, values))
    prefix = dataclasses.replace(whole, keys=keys, values=values, scales=scales)
    found = dispatch.prefix_attention(q, prefix)
    expected = reference.prefix_attention(
        q, dataclasses.replace(whole, keys=meant[0], values=meant[1])
    )
    assert relative_error(found.out, expected.out) <= TOLERANCE["float32"]
    np.testing.assert_allclose(found.lse, expected.lse, atol=1e-5)
    rows = jnp.zeros((2, 3, 2, q.shape[3]))
    fresh = Fresh(rows, rows, jnp.ones((2, 3, 3), bool))
    with pytest.raises(ValueError, match="in the cache's units"):
        dispatch.speculative_attention(q, prefix, fresh)


def test_fresh_tokens_are_never_in_8_bits() -> None:
    every = np.ones((2, 3, 3), bool)
    x = inputs(Shape(tokens=3, keys=3), "float32", [131, 77], mask=every)
    q, fresh = x.tree
    small = dataclasses.replace(
        fresh, keys=fresh.keys.astype(E4M3), values=fresh.values.astype(E4M3)
    )
    with pytest.raises(ValueError, match="cast one of them"):
        dispatch.tree_attention(q, small)


@pytest.mark.parametrize("tokens", [1, 69])
def test_the_triton_kernels_lower_for_cuda(tokens: int) -> None:
    """Those that read a cache in 8 bits, one launch or two, and the one that appends to it."""
    operand = jax.ShapeDtypeStruct
    cache, row = operand((2, 2, 512, 128), CODES), operand((2, tokens, 2, 128), jnp.bfloat16)
    tile = tiles.triton_prefix_tile(tokens, 8, 2, 128, 512, 2, (9, 0))

    def attend(q, k, v, length, *fresh):
        prefix = Prefix(k, v, length)
        return kernels.speculative_attention(q, prefix, Fresh(*fresh), prefix_tile=tile)

    lengths = operand((2,), jnp.int32)
    mask = operand((2, tokens, tokens), jnp.bool_)
    q = operand((2, tokens, 8, 128), jnp.bfloat16)
    text = lowered(attend, q, cache, cache, lengths, row, row, mask)
    assert text.count("custom_call @") == (1 if tokens == 1 else 2)
    # The cache goes to the kernels as it is.
    assert not re.search(r"convert .*(ui8|f8E4M3FN)", text)

    def append(cache, fresh, path, length):
        return layer_pallas.append_rows([cache], [fresh], path, length)

    fresh, path = operand(row.shape, CODES), operand((2, 1), jnp.int32)
    assert lowered(append, cache, fresh, path, lengths).count("custom_call @") == 1


@each_row("dtype", ["float32", "bfloat16", "float16"])
def test_older_gpus_widen_by_bits(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which have no instructions that convert e4m3; every number is the same, and NaN is NaN."""
    codes = jnp.arange(256, dtype=jnp.uint8)
    converted = float8.widened(codes, dtype)
    monkeypatch.setattr(hardware, "compute_capability", lambda: (8, 6))
    assert "f8_e4m3fn" not in str(jax.make_jaxpr(lambda each: float8.widened(each, dtype))(codes))
    by_bits = float8.widened(codes, dtype)
    assert by_bits.dtype == converted.dtype
    np.testing.assert_array_equal(by_bits.astype(jnp.float32), converted.astype(jnp.float32))
