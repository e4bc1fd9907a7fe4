"""Which blocks are chosen and what lies in them, against loops over rows, heads and slots."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.ops.placement import on_host, to_host
from longspec_jax.ops.selection import blocks, gather_pallas
from longspec_jax.ops.selection.blocks import BlockBudget
from tests.kit import each_row, relative_error
from tests.ops.selection import oracle

BATCH, LAYERS, HEADS, GROUPS, WIDTH, SLOTS = 4, 3, 2, 3, 5, 48
LENGTHS = np.array([43, 17, 1, 0], np.int32)
BUDGET = BlockBudget(slots=24, sinks=4, recent=8, block=4)


def drawn(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def caches(seed: int = 0) -> jax.Array:
    """Keys of all layers ``[L, B, K, S, H]``, not a number beyond the lengths."""
    seen = np.arange(SLOTS) < LENGTHS[:, None]
    keys = drawn(seed, LAYERS, BATCH, HEADS, SLOTS, WIDTH)
    return jnp.where(seen[None, :, None, :, None], keys, jnp.nan)


def chosen(table: blocks.BlockTable, row: int, block: int) -> list[int]:
    """The blocks of a row that hold tokens, in order."""
    held = -(-int(table.length[row]) // block)
    return np.asarray(table.blocks)[row, ..., :held].tolist()


@each_row("slots", [12, 24, 48])
@each_row("heads", [(), (2, 3)])
def test_the_best_blocks_are_chosen_and_none_twice(slots: int, heads: tuple[int, ...]) -> None:
    """In rows of every length: longer than the budget, as long, shorter, empty."""
    budget = BlockBudget(slots, sinks=4, recent=8, block=4)
    choose = jax.jit(partial(blocks.choose_blocks, budget=budget))
    for first in range(0, SLOTS + 1, 7):
        lengths = jnp.arange(first, first + 7) % (SLOTS + 1)
        scores = drawn(first, 7, *heads, SLOTS // 4)
        beyond = jnp.arange(SLOTS // 4) * 4 >= lengths[(slice(None), *[None] * (len(heads) + 1))]
        scores = jnp.where(beyond, jnp.array([jnp.nan, jnp.inf, -jnp.inf])[first % 3], scores)
        found, wanted = choose(scores, lengths), oracle.choose_blocks(scores, lengths, budget)
        np.testing.assert_array_equal(found.length, wanted.length)
        assert int(found.blocks.min()) >= 0 and int(found.blocks.max()) < SLOTS // 4
        for row in range(7):
            mine, theirs = chosen(found, row, 4), chosen(wanted, row, 4)
            np.testing.assert_array_equal(np.sort(mine, axis=-1), theirs)
            if lengths[row]:  # The block that may not be full ends what is read.
                assert (np.asarray(mine)[..., -1] == (int(lengths[row]) - 1) // 4).all()


def test_numbers_beyond_all_bounds_hide_nothing() -> None:
    """Not what is always read; and a block that scores less than all numbers still exists."""
    scores = jnp.array([[1.0, jnp.inf, jnp.nan, jnp.inf, -jnp.inf, 2.0, 0.0, 3.0]])
    budget = BlockBudget(20, sinks=4, recent=8, block=4)
    found = chosen(blocks.choose_blocks(scores, jnp.array([30]), budget), 0, 4)
    assert sorted(found) == [0, 1, 3, 6, 7] and found[-1] == 7
    found = chosen(blocks.choose_blocks(jnp.full((1, 8), -jnp.inf), jnp.array([20]), budget), 0, 4)
    assert sorted(found) == [0, 1, 2, 3, 4]


@each_row(
    ("words", "budget"),
    [
        ("16 slots cannot hold sinks=8 and recent=12", dict(slots=16, sinks=8, recent=12)),
        ("30 slots must be whole blocks of 4 slots: use 28 or 32", dict(slots=30)),
        ("sinks=3 must be whole blocks of 4 slots", dict(sinks=3)),
        ("recent=0 at least one block", dict(recent=0)),
    ],
)
def test_budgets_that_cannot_be_are_refused(words: str, budget: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=words):
        BlockBudget(**{**dict(slots=32, sinks=4, recent=8, block=4), **budget})


def test_a_cache_that_is_not_whole_blocks_is_refused() -> None:
    assert BUDGET.blocks_of(48) == 12
    with pytest.raises(ValueError, match="a cache of 46 slots is not a whole number of blocks"):
        BUDGET.blocks_of(46)


def summarised(keys: jax.Array, lengths: np.ndarray, block: int) -> blocks.Extremes:
    """What the reference finds, laid out as the op's."""
    parts = zip(
        *(oracle.extremes_of(layer, jnp.asarray(lengths), block) for layer in keys), strict=True
    )
    return blocks.Extremes(*(jnp.stack(part, axis=2) for part in parts))


@each_row(("block", "seed"), [(1, 0), (4, 1), (16, 0)])
def test_summaries_that_grow_are_those_of_the_whole(block: int, seed: int) -> None:
    """Commits of random sizes, chunks and paths, at an offset of its own in every row."""
    random, keys = np.random.default_rng(seed), drawn(seed, LAYERS, BATCH, HEADS, SLOTS, WIDTH)
    shape = (BATCH, SLOTS // block, LAYERS, HEADS, WIDTH)
    found = blocks.no_extremes(*shape, jnp.float32)
    done = np.zeros(BATCH, np.int32)
    extend = jax.jit(blocks.extend_extremes, static_argnames="block")
    for given in (9, 2, 9, 1, 2, 9, 2, 9, 1, 9, 9, 9):
        count = np.minimum(random.integers(0, given + 1, BATCH), SLOTS - done).astype(np.int32)
        offered = np.full((BATCH, given, LAYERS, HEADS, WIDTH), np.nan, np.float32)
        for row, (at, n) in enumerate(zip(done, count, strict=True)):
            offered[row, :n] = np.asarray(keys)[:, row, :, at : at + n].transpose(2, 0, 1, 3)
        found = extend(found, offered, jnp.asarray(done), jnp.asarray(count), block=block)
        done = done + count
        jax.tree.map(np.testing.assert_array_equal, found, summarised(keys, done, block))
    assert len({*done}) > 1 and done.max() > SLOTS // 2


def test_scores_are_the_average_bounds_of_the_queries() -> None:
    """Of one query and one block the bound is by hand; rows have 5, 1, 3 and no queries."""
    keys = caches()
    queries = drawn(5, BATCH, 5, LAYERS, HEADS * GROUPS, WIDTH)
    counts = jnp.arange(5) < jnp.array([5, 1, 3, 0])[:, None]
    queries = jnp.where(counts[:, :, None, None, None], queries, 7.0)
    summary = summarised(keys, LENGTHS, 4)
    found = np.asarray(blocks.bound_scores(queries, counts, summary))
    high, low = np.asarray(summary.highest), np.asarray(summary.lowest)
    for row in range(3):
        for block in range(-(-int(LENGTHS[row]) // 4)):
            for layer, head in np.ndindex(LAYERS, HEADS):
                at = (row, block, layer, head)
                asked = np.asarray(queries)[row, : int(counts[row].sum()), layer]
                asked = asked[:, head * GROUPS : (head + 1) * GROUPS]
                bounds = [
                    np.mean([oracle.bound(q, high[at], low[at]) for q in heads]) for heads in asked
                ]
                np.testing.assert_allclose(found[row, layer, head, block], np.mean(bounds), 1e-4)


def test_attention_to_blocks_is_one_softmax_a_head() -> None:
    keys, q = caches()[0], drawn(4, BATCH, HEADS * GROUPS, WIDTH)
    found = blocks.attended_scores(q, keys, jnp.asarray(LENGTHS), 4)
    wanted = oracle.attended_scores(q, keys, jnp.asarray(LENGTHS), 4)
    assert relative_error(found, wanted) < 1e-6
    np.testing.assert_allclose(found.sum(axis=1), [1, 1, 1, 0], atol=1e-5)


@each_row("heads", [(), (HEADS,)])
def test_blocks_are_laid_end_to_end(heads: tuple[int, ...]) -> None:
    keys = caches()[1]
    scores = drawn(6, BATCH, *heads, SLOTS // 4)
    table = blocks.choose_blocks(scores, jnp.asarray(LENGTHS), BUDGET)
    found = blocks.gather_blocks(keys, table, 4)
    assert found.shape == (BATCH, HEADS, BUDGET.slots, WIDTH)
    np.testing.assert_array_equal(found, oracle.gather_blocks(keys, table, 4))
    held = np.arange(BUDGET.slots) < np.asarray(table.length)[:, None]
    assert np.isfinite(np.asarray(found).transpose(0, 2, 1, 3)[held]).all()
    some = blocks.BlockTable(table.blocks[1:3], table.length[1:3])
    among = blocks.gather_blocks(keys[::-1], some, 4, jnp.asarray([BATCH - 2, BATCH - 3]))
    np.testing.assert_array_equal(among, found[1:3])


@each_row("heads", [(), (HEADS,)])
def test_blocks_come_from_the_hosts_memory(heads: tuple[int, ...]) -> None:
    """The result is on the device, and none of it was there before."""
    keys = caches()[1]
    scores = drawn(6, BATCH, *heads, SLOTS // 4)
    table = blocks.choose_blocks(scores, jnp.asarray(LENGTHS), BUDGET)
    found = jax.jit(blocks.gather_blocks, static_argnums=2)(to_host(keys), table, 4)
    assert not on_host(found)
    np.testing.assert_array_equal(found, blocks.gather_blocks(keys, table, 4))


def test_the_kernel_that_gathers() -> None:
    """Blocks of five by seven numbers: neither is a power of two."""
    whole, places = drawn(0, 2, 3, 11, 5, 7), np.random.default_rng(0).integers(0, 11, (2, 3, 6))
    found = gather_pallas.gather(whole, jnp.asarray(places), interpret=True)
    np.testing.assert_array_equal(found, blocks.gather.definition(whole, jnp.asarray(places)))
