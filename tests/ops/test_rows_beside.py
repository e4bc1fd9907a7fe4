"""Which kernels give a row the same bits alongside any number of rows: ``docs/design/kernels.md``.

With the same tile. What runs interpreted here shows that the order of summation is the row's own;
that the compiled kernel keeps it is seen on a GPU.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.ops import layer_pallas
from longspec_jax.ops.attention import fresh_pallas, kernels
from longspec_jax.ops.attention.operands import Fresh, Prefix
from longspec_jax.ops.attention.tiles import MosaicTile, PrefixTile, TreeTile
from longspec_jax.ops.matmul import few_rows, quantised_pallas
from longspec_jax.ops.matmul.quantised_weights import QuantisedMatrix
from longspec_jax.ops.selection import continuations_pallas
from tests.kit import COMPILED, hopper_or_skip, normal

MOST = 16
"""Rows, or tokens of a row; every kernel here takes them in one tile or more."""
PREFIX_TILE, TREE_TILE = PrefixTile((16,), 32, 64, 4, 2), TreeTile(16, 32, 4, 4, 2)

bfloat16 = functools.partial(normal, dtype="bfloat16")
Q, K, V = bfloat16(0, 1, MOST, 6, 64), bfloat16(1, 1, 2, 131, 64), bfloat16(2, 1, 2, 131, 64)
PREFIX = Prefix(K, V, jnp.asarray([117]))
FRESH_K, FRESH_V = bfloat16(3, 1, MOST, 2, 64), bfloat16(4, 1, MOST, 2, 64)
MASK = jnp.tril(jax.random.bernoulli(jax.random.key(5), 0.5, (1, MOST, MOST)))


def fresh(rows: int) -> Fresh:
    """Nodes come after their ancestors: the first ones are a tree of their own."""
    return Fresh(FRESH_K[:, :rows], FRESH_V[:, :rows], MASK[:, :rows, :rows])


def tree(rows: int, interpret: bool) -> list[jax.Array]:
    found = fresh_pallas.tree_attention(
        Q[:, :rows], fresh(rows), tile=TREE_TILE, interpret=interpret
    )
    return [part[0] for part in found]


def speculative(rows: int, interpret: bool) -> list[jax.Array]:
    tiles = dict(prefix_tile=PREFIX_TILE, tree_tile=TREE_TILE)
    return [
        kernels.speculative_attention(
            Q[:, :rows], PREFIX, fresh(rows), **tiles, interpret=interpret
        )[0]
    ]


def joined(rows: int, interpret: bool) -> list[jax.Array]:
    found = kernels.speculative_attention(
        *(Q[:, :rows], PREFIX, fresh(rows)), prefix_tile=PREFIX_TILE, interpret=interpret
    )
    return [found[0]]


def chunk(rows: int, interpret: bool) -> list[jax.Array]:
    tiles = dict(prefix_tile=PREFIX_TILE, tree_tile=TREE_TILE)
    operands = PREFIX, Fresh(FRESH_K[:, :rows], FRESH_V[:, :rows])
    return [kernels.speculative_attention(Q[:, :rows], *operands, **tiles, interpret=interpret)[0]]


def quantised(
    rows: int, interpret: bool, *, gated: bool = False, split: bool = False
) -> list[jax.Array]:
    width = 600
    weights = QuantisedMatrix.rounded(normal(6, 96, width))
    # The tile that is chosen: from one row to all of them it is the same.
    tile = quantised_pallas.triton_tile(rows, weights, gated=gated, split=split)
    options = dict(tile=tile, gated=gated, dtype=jnp.bfloat16, interpret=interpret)
    return list(quantised_pallas.matmul(bfloat16(7, MOST, width)[:rows], weights, **options))


def norm(rows: int, interpret: bool, *, first: bool = False) -> list[jax.Array]:
    x, partials = bfloat16(8, 1, MOST, 100), normal(9, 3, 1, MOST, 100)
    added = None if first else partials[:, :, :rows]
    found = layer_pallas.residual_norm(
        *(x[:, :rows], added, bfloat16(10, 100)), eps=1e-5, interpret=interpret
    )
    return [part[0] for part in found]


def heads(rows: int, interpret: bool, *, normed: bool = False) -> list[jax.Array]:
    angle = normal(11, 1, MOST, 12)[:, :rows]
    found = layer_pallas.split_heads(
        *(bfloat16(12, 1, MOST, 3, 6, 24)[:, :rows], jnp.cos(angle), jnp.sin(angle)),
        (bfloat16(15, 24), bfloat16(16, 24)) if normed else None,
        eps=1e-5,
        interpret=interpret,
    )
    return [part[0] for part in found]


def continuations(rows: int, interpret: bool) -> list[jax.Array]:
    scores, totals = normal(13, MOST, 4, 300), normal(14, MOST, 4)
    return list(
        continuations_pallas.best_continuations(
            scores[:rows], totals[:rows], count=7, block=64, interpret=interpret
        )
    )


KERNELS = {
    "tree": tree,
    "speculative": speculative,
    "joined": joined,
    "chunk": chunk,
    "quantised gated": functools.partial(quantised, gated=True),
    "quantised partials": functools.partial(quantised, split=True),
    "norm": norm,
    "first norm": functools.partial(norm, first=True),
    "heads": heads,
    "normed heads": functools.partial(heads, normed=True),
    "continuations": continuations,
}


@pytest.mark.parametrize("interpret", COMPILED)
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_a_row_keeps_its_bits(
    kernel: Callable[[int, bool], list[jax.Array]], interpret: bool
) -> None:
    for alone, whole in zip(kernel(1, interpret), kernel(MOST, interpret), strict=True):
        assert alone.shape == (1, *whole.shape[1:]) and whole.shape[0] == MOST
        np.testing.assert_array_equal(np.float32(alone), np.float32(whole[:1]))


@pytest.mark.gpu
def test_a_row_keeps_its_bits_in_the_hopper_kernels() -> None:
    hopper_or_skip()
    q, keys, values = (
        bfloat16(0, 1, 69, 32, 128),
        bfloat16(1, 1, 8, 4096, 128),
        bfloat16(2, 1, 8, 4096, 128),
    )
    cache = Prefix(keys, values, jnp.asarray([4001]))
    run = functools.partial(kernels.prefix_attention, tile=MosaicTile(2, 128, 512, 2))
    x, weights = bfloat16(3, 64, 4096), bfloat16(4, 4096, 4096) / 64
    for few, whole in (
        *zip(run(q[:, :5], cache), run(q, cache), strict=True),
        (few_rows.matmul(x[:8], weights, split=True), few_rows.matmul(x, weights, split=True)),
    ):
        np.testing.assert_array_equal(np.float32(few), np.float32(whole[:, : few.shape[1]]))
