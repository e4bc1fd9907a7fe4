"""Which kernels give a row the same bits however many rows run beside it: ``docs/kernels.md``.

With the same tile. What runs interpreted here shows that the order of summation is the row's own;
that the compiled kernel keeps it is seen on a GPU.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.ops import hardware
from longspec_jax.ops.attention import kernels, tree_pallas
from longspec_jax.ops.attention.operands import Fresh, Prefix
from longspec_jax.ops.attention.tiles import MosaicTile, PrefixTile, TreeTile
from longspec_jax.ops.layer import (
    residual_norm_pallas,
    split_heads_pallas,
    table_heads_pallas,
    table_query_pallas,
)
from longspec_jax.ops.layer.angles import Angles
from longspec_jax.ops.products import int8_pallas, skinny
from longspec_jax.ops.products.int8 import Int8Rows, round_rows
from longspec_jax.ops.products.tiles import int8_tile
from longspec_jax.ops.selection import continuations_pallas
from tests.kit import COMPILED, normal

MOST = 16
"""Rows, or tokens of a row; every kernel here takes them in one tile or more."""
PREFIX_TILE, TREE_TILE = PrefixTile((16,), 32, 64, 4, 2), TreeTile(16, 32, 4, 4, 2)

bfloat16 = functools.partial(normal, dtype="bfloat16")
Q, K, V = bfloat16(0, 1, MOST, 6, 64), bfloat16(1, 1, 2, 131, 64), bfloat16(2, 1, 2, 131, 64)
PREFIX = Prefix(K, V, jnp.asarray([117]), None)
FRESH_K, FRESH_V = bfloat16(3, 1, MOST, 2, 64), bfloat16(4, 1, MOST, 2, 64)
MASK = jnp.tril(jax.random.bernoulli(jax.random.key(5), 0.5, (1, MOST, MOST)))


def fresh(rows: int) -> Fresh:
    """Nodes come after their ancestors: the first ones are a tree of their own."""
    return Fresh(FRESH_K[:, :rows], FRESH_V[:, :rows], MASK[:, :rows, :rows])


def prefix(rows: int, interpret: bool) -> list[jax.Array]:
    found = kernels.prefix_attention(Q[:, :rows], PREFIX, tile=PREFIX_TILE, interpret=interpret)
    return [part[0] for part in found]


def tree(rows: int, interpret: bool) -> list[jax.Array]:
    found = tree_pallas.tree_attention(
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
    tiles = dict(prefix_tile=PREFIX_TILE, chunk_tile=TREE_TILE)
    keys, values = FRESH_K[:, :rows], FRESH_V[:, :rows]
    return [
        kernels.chunk_attention(Q[:, :rows], PREFIX, keys, values, **tiles, interpret=interpret)[0]
    ]


def int8(
    rows: int, interpret: bool, *, gated: bool = False, split: bool = False
) -> list[jax.Array]:
    outputs, width = 96, 600
    weights, scale = round_rows(normal(6, outputs, width))
    # The tile that is chosen: from one row to all of them it is the same.
    tile = int8_tile(rows, width, outputs // (2 if gated else 1), gated=gated, split=split)
    options = dict(tile=tile, gated=gated, dtype=jnp.bfloat16, interpret=interpret)
    return list(int8_pallas.product(bfloat16(7, MOST, width)[:rows], weights, scale, **options))


def norm(rows: int, interpret: bool) -> list[jax.Array]:
    x, summands = bfloat16(8, 1, MOST, 100), normal(9, 3, 1, MOST, 100)
    found = residual_norm_pallas.residual_norm(
        *(x[:, :rows], summands[:, :, :rows], bfloat16(10, 100)), eps=1e-5, interpret=interpret
    )
    return [part[0] for part in found]


def heads(rows: int, interpret: bool) -> list[jax.Array]:
    angle = normal(11, 1, MOST, 12)[:, :rows]
    found = split_heads_pallas.split_heads(
        *(bfloat16(12, 1, MOST, 3, 6, 24)[:, :rows], jnp.cos(angle), jnp.sin(angle)),
        interpret=interpret,
    )
    return [part[0] for part in found]


TOKENS = jnp.arange(MOST)[None] * 5 % 29


def table_of_heads(rows: int, interpret: bool) -> list[jax.Array]:
    table = Int8Rows.of(normal(15, 29, 3, 6, 24))
    found = table_heads_pallas.table_heads(
        *(table, bfloat16(16, 3, 6, 24), TOKENS[:, :rows], turned(17)), place=1, interpret=interpret
    )
    return [part[0] for part in found]


def table_of_queries(rows: int, interpret: bool) -> list[jax.Array]:
    tables = Int8Rows.of(normal(18, 29, 12, 24)), bfloat16(19, 12, 24), bfloat16(20, 29, 100)
    summands = normal(21, 3, 1, MOST, 100 + 12 * 24)[:, :, :rows]
    found = table_query_pallas.table_query(
        *(*tables, TOKENS[:, :rows], summands, turned(22)),
        **dict(place=1, eps=1e-5, kv_heads=3, interpret=interpret),
    )
    return [part[0] for part in found]


def turned(seed: int) -> Angles:
    angle = normal(seed, 1, 2, 12)
    return Angles(jnp.cos(angle), jnp.sin(angle))


def continuations(rows: int, interpret: bool) -> list[jax.Array]:
    scores, totals = normal(13, MOST, 4, 300), normal(14, MOST, 4)
    return list(
        continuations_pallas.best_continuations(
            scores[:rows], totals[:rows], count=7, block=64, interpret=interpret
        )
    )


KERNELS = {
    "prefix": prefix,
    "tree": tree,
    "speculative": speculative,
    "joined": joined,
    "chunk": chunk,
    "int8": int8,
    "int8 gated": functools.partial(int8, gated=True),
    "int8 summands": functools.partial(int8, split=True),
    "norm": norm,
    "heads": heads,
    "table of heads": table_of_heads,
    "table of queries": table_of_queries,
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
    if not (hardware.is_hopper() and hardware.mosaic_is_supported()):
        pytest.skip("written for Hopper GPUs and jax 0.11 or newer")
    q, keys, values = (
        bfloat16(0, 1, 69, 32, 128),
        bfloat16(1, 1, 8, 4096, 128),
        bfloat16(2, 1, 8, 4096, 128),
    )
    cache = Prefix(keys, values, jnp.asarray([4001]), None)
    run = functools.partial(kernels.prefix_attention, tile=MosaicTile(2, 128, 512, 2))
    x, weights = bfloat16(3, 64, 4096), bfloat16(4, 4096, 4096) / 64
    for few, whole in (
        *zip(run(q[:, :5], cache), run(q, cache), strict=True),
        (skinny.summands(x[:8], weights), skinny.summands(x, weights)),
    ):
        np.testing.assert_array_equal(np.float32(few), np.float32(whole[:, : few.shape[1]]))
