"""Which prefix kernel serves a call: decided by the machine, the version of jax and the shape."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.ops import hardware
from longspec_jax.ops.attention import dispatch, fresh_pallas, kernels
from longspec_jax.ops.attention.operands import Fresh, Prefix
from longspec_jax.ops.attention.packing import pack, unpack
from longspec_jax.ops.attention.tiles import PrefixTile, TreeTile
from tests.kit import ALL_PASSES, COMPILED, TOLERANCE, relative_error
from tests.ops.attention import oracle
from tests.ops.attention.oracle import Shape, inputs
from tests.ops.shapes import half, truth, whole


def test_the_hopper_kernel_by_name_refuses_other_machines() -> None:
    if hardware.compute_capability() == hardware.HOPPER:
        pytest.skip("this machine has the GPU that the kernel is written for")
    x = inputs(Shape(), "bfloat16", [3, 5])
    for op, operands in (("prefix", x.prefix), ("speculative", x.speculative)):
        with pytest.raises(NotImplementedError, match="is written for compute capability 9.x"):
            getattr(dispatch, f"{op}_attention")(*operands, implementation="mosaic")


def test_queries_are_packed_for_nothing() -> None:
    """Where they were unpacked before, as the kernel that rotates heads does."""
    tokens, kv_heads, groups, width = 5, 3, 2, 16
    q = jnp.arange(2.0 * tokens * kv_heads * groups * width).reshape(2, tokens, -1, width)
    packed = pack(q, kv_heads)
    assert packed.shape == (2, kv_heads, tokens * groups, width)
    row = 3 * groups + 1
    np.testing.assert_array_equal(packed[1, 2, row], q[1, 3, 2 * groups + 1])
    np.testing.assert_array_equal(unpack(packed, tokens), q)
    again = jax.jit(lambda packed: pack(unpack(packed, tokens) * 2, kv_heads))
    text = again.lower(packed).compile(ALL_PASSES).as_text()
    assert "multiply" in text and "transpose" not in text and "copy" not in text


ONE_KERNEL, TWO_KERNELS = PrefixTile((16,), 16, 32, 4, 2), PrefixTile((16, 32), 16, 32, 4, 2)
"""Tiles: with one, a program merges a row tile's splits; with the other, a second kernel does."""


@pytest.mark.parametrize("interpret", COMPILED)
@pytest.mark.parametrize("tile", [ONE_KERNEL, TWO_KERNELS], ids=["one", "two"])
def test_splits_are_merged_by_one_kernel_or_two(tile: PrefixTile, interpret: bool) -> None:
    """Over two row tiles, at lengths of no split, a part of one, whole ones and all of them."""
    lengths, starts = [0, 1, 32, 33, 64, 131], [0, 0, 7, 32, 33, 130]
    x = inputs(Shape(batch=6, tokens=9), "float32", lengths)
    bounded = inputs(Shape(batch=6, tokens=9), "float32", lengths, starts)
    options = dict(interpret=interpret)
    for operands in (x, bounded):
        found = kernels.prefix_attention(*operands.prefix, tile=tile, **options)
        expected, lse = oracle.prefix(operands)
        assert relative_error(found.out, expected) <= TOLERANCE["float32"]
        np.testing.assert_array_equal(np.isneginf(found.lse), np.isneginf(lse))
        np.testing.assert_allclose(found.lse, lse, rtol=0, atol=1e-5)
    found = kernels.speculative_attention(*x.speculative, prefix_tile=tile, **options)
    assert relative_error(found, oracle.speculative(x)) <= TOLERANCE["float32"]


@pytest.mark.parametrize("interpret", COMPILED)
@pytest.mark.parametrize("tile", [ONE_KERNEL, TWO_KERNELS], ids=["one", "two"])
def test_a_larger_cache_changes_no_bit(tile: PrefixTile, interpret: bool) -> None:
    """A row has as many splits in one of four times the slots: its length decides their size."""
    q, small = inputs(Shape(batch=4, tokens=9, slots=128), "float32", [0, 1, 50, 128]).prefix
    padding = ((0, 0), (0, 0), (0, 3 * 128), (0, 0))
    keys, values = (
        jnp.pad(x, padding, constant_values=jnp.nan) for x in (small.keys, small.values)
    )
    large = dataclasses.replace(small, keys=keys, values=values)
    found = kernels.prefix_attention(q, small, tile=tile, interpret=interpret)
    tile = dataclasses.replace(tile, split=4 * tile.split)
    again = kernels.prefix_attention(q, large, tile=tile, interpret=interpret)
    jax.tree.map(np.testing.assert_array_equal, again, found)


@pytest.mark.parametrize("interpret", COMPILED)
def test_fresh_keys_are_split_over_programs(interpret: bool) -> None:
    """Five blocks of keys; some rows see nothing. The last program to arrive merges."""
    shape = Shape(tokens=9, keys=69)
    mask = np.random.default_rng().random((2, 9, 69)) < 0.3
    mask[0, :, 16:48] = mask[:, 3] = False
    x = inputs(shape, "float32", [3, 5], mask=mask)
    tile = TreeTile(16, 16, 4, 4, 2)
    found = fresh_pallas.tree_attention(*x.tree, tile=tile, interpret=interpret)
    expected, lse = oracle.tree(x)
    assert relative_error(found.out, expected) <= TOLERANCE["float32"]
    np.testing.assert_array_equal(np.isneginf(found.lse), np.isneginf(lse))
    np.testing.assert_allclose(found.lse, lse, rtol=0, atol=1e-5)


def test_a_plain_step_is_one_kernel() -> None:
    def launches(tokens: int) -> int:
        cache, length = half((1, 2, 4096, 128)), whole((1,))
        rows, mask = half((1, tokens, 2, 128)), truth((1, tokens, tokens))
        call = functools.partial(kernels.speculative_attention, interpret=True)
        operands = Prefix(cache, cache, length), Fresh(rows, rows, mask)
        jaxpr = jax.make_jaxpr(call)(half((1, tokens, 8, 128)), *operands)
        return str(jaxpr).count("pallas_call[")

    assert [launches(tokens) for tokens in (1, 4, 5)] == [1, 1, 2]
