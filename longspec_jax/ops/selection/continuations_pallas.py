"""The best continuations of a draft's level in three Pallas kernels for Triton.

The first reads every score once; it leaves the maximum of every block of neighbouring tokens, and
of every chunk of blocks its part of the softmax. The second chooses as many blocks as continuations
are wanted, by their maxima, and the third chooses the continuations among the entries of these.

Both choose alike. What is chosen from is a table of some rows, shared out among programs. An
entry's rank is how many of the table are ahead of it, and one whose rank is below ``count`` is
stored there. No two entries are of one rank, because all programs compute an entry's value by the
same expression of the same numbers, bit for bit, none of them is NaN, and ties go to the lower
place: so every rank below ``count`` is stored, and once. Entries that do not exist are after all
others, of which there are at least ``count``.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Float, Int

from longspec_jax.axes import Array, Ref
from longspec_jax.ops.launchers import launcher
from longspec_jax.ops.triton_launch import triton_call

Entries: TypeAlias = tuple[Array, Array]
"""Values and places of some entries of a table."""

BLOCKS = 8
"""Of a chunk."""
PART = 64
"""Tokens of a block that one program of the third kernel looks at."""
COMPARISONS = 8192
"""Of a step of a program: 32 or 64 a thread."""
NOWHERE = 2**31 - 1
"""The place of an entry that does not exist."""


@launcher("count", "block", "interpret")
def best_continuations(
    scores: Float[Array, "B w V"],
    totals: Float[Array, "B w"],
    *,
    count: int,
    block: int,
    interpret: bool = False,
) -> tuple[Float[Array, "B count"], Int[Array, "B count"], Int[Array, "B count"]]:
    """See :func:`longspec_jax.ops.selection.continuations.best_continuations`.

    Args:
      scores: as there.
      totals: as there.
      count: at most as many as there are blocks.
      block: tokens of a block, a power of two.
      interpret: whether to run without a GPU.
    """
    batch, nodes, vocabulary = scores.shape
    blocks = pl.cdiv(vocabulary, block)
    chunks = pl.cdiv(blocks, BLOCKS)
    if count > nodes * blocks:
        raise ValueError(f"{count} continuations, but only {nodes * blocks} blocks of {block}")

    def launch(
        name: str, kernel: Callable[..., None], warps: int, grid: tuple[int, ...], *shapes: Any
    ) -> Any:
        return triton_call(
            kernel,
            grid=grid,
            out_shape=tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes),
            warps=warps,
            stages=1,
            interpret=interpret,
            name=name,
        )

    of_blocks, of_chunks = (((batch, nodes, some), jnp.float32) for some in (blocks, chunks))
    real, whole = ((batch, count), jnp.float32), ((batch, count), jnp.int32)
    kernel = functools.partial(_scan, block=block)
    outputs = of_blocks, of_chunks, of_chunks
    scan = launch("scan_continuations", kernel, 4, (chunks, nodes, batch), *outputs)
    outputs = whole, real, real, real
    choose_blocks = launch("choose_blocks", _choose_blocks, 4, (blocks, batch), *outputs)
    kernel = functools.partial(_choose, block=block, blocks=blocks)
    grid = (pl.cdiv(block, PART), count, batch)
    choose = launch("choose_continuations", kernel, 8, grid, real, whole, whole)

    maxima, largest, mass = scan(scores)
    chosen = choose_blocks(maxima, largest, mass, totals.astype(jnp.float32))
    return choose(scores, *chosen)


def _scan(scores_ref: Ref, maxima_ref: Ref, largest_ref: Ref, mass_ref: Ref, *, block: int) -> None:
    """Reduce one chunk of one node's scores."""
    chunk, node, row = (pl.program_id(axis) for axis in range(3))
    place = chunk * BLOCKS + jnp.arange(BLOCKS)
    token = place[:, None] * block + jnp.arange(block)[None, :]
    score = _scores(scores_ref.at[row, node, token], token < scores_ref.shape[2])
    maxima = score.max(axis=1)
    largest = maxima.max(axis=0)
    mass = jnp.exp(score - _finite(largest)).sum(axis=1).sum(axis=0)
    pltriton.store(maxima_ref.at[row, node, place], maxima, mask=place < maxima_ref.shape[2])
    pltriton.store(largest_ref.at[row, node, chunk], largest)
    pltriton.store(mass_ref.at[row, node, chunk], mass)


def _choose_blocks(
    maxima_ref: Ref,
    largest_ref: Ref,
    mass_ref: Ref,
    totals_ref: Ref,
    chosen_ref: Ref,
    edge_ref: Ref,
    chosen_largest_ref: Ref,
    chosen_total_ref: Ref,
) -> None:
    """Rank one block of every node, by its maximum; the table's rows are nodes, its columns blocks.

    Of a chosen block it is stored which it is, how far it reaches, and what the third kernel needs
    to know of its node.
    """
    column, row = pl.program_id(0), pl.program_id(1)
    nodes, blocks = maxima_ref.shape[1:]
    node = jnp.arange(pl.next_power_of_2(nodes))[:, None]
    exists = node < nodes

    # Every program puts the chunks' parts together for itself: they are few.
    chunks = largest_ref.shape[2]
    chunk = jnp.arange(pl.next_power_of_2(chunks))[None, :]
    part, there = (row, node, chunk), exists & (chunk < chunks)
    parts = pltriton.load(largest_ref.at[part], mask=there, other=-jnp.inf)
    masses = pltriton.load(mass_ref.at[part], mask=there, other=0.0)
    largest = parts.max(axis=1)[:, None]
    mass = _exact_sum(jnp.exp(parts - _finite(largest)) * masses)[:, None]
    total = pltriton.load(totals_ref.at[row, node], mask=exists, other=0.0)
    # A total must not rise above the node's by the rounding of a logarithm.
    total = total - jnp.maximum(jnp.log(mass), 0.0)

    def table(columns: Array) -> Entries:
        there = exists & (columns < blocks)
        maxima = pltriton.load(maxima_ref.at[row, node, columns], mask=there, other=-jnp.inf)
        return _reached(maxima, largest, total), jnp.where(there, node * blocks + columns, NOWHERE)

    mine, place = table(jnp.full((1, 1), column))
    rank = _rank(mine.reshape(-1), place.reshape(-1), table, node.shape[0], blocks)[:, None]
    chosen, won = (row, rank), exists & (rank < chosen_ref.shape[1])
    pltriton.store(chosen_ref.at[chosen], place, mask=won)
    pltriton.store(edge_ref.at[chosen], mine, mask=won)
    pltriton.store(chosen_largest_ref.at[chosen], largest, mask=won)
    pltriton.store(chosen_total_ref.at[chosen], total, mask=won)


def _choose(
    scores_ref: Ref,
    chosen_ref: Ref,
    edge_ref: Ref,
    largest_ref: Ref,
    total_ref: Ref,
    totals_ref: Ref,
    nodes_ref: Ref,
    tokens_ref: Ref,
    *,
    block: int,
    blocks: int,
) -> None:
    """Rank the tokens of a part of a chosen block; the table's rows are blocks, its columns tokens.

    The maxima of the chosen blocks are ``count`` entries that reach the least of them, so an entry
    that does not has these ahead of it. Most programs find none that does; the others rank one
    after the other, the best first, and no more than are wanted of all.
    """
    part, index, row = (pl.program_id(axis) for axis in range(3))
    vocabulary, count = scores_ref.shape[2], chosen_ref.shape[1]

    def entries(chosen: Array, largest: Array, total: Array, columns: Array) -> Entries:
        node, token = chosen // blocks, chosen % blocks * block + columns
        there = (chosen >= 0) & (token < vocabulary)
        scores = _scores(scores_ref.at[row, node, token], there)
        place = jnp.where(there, node * vocabulary + token, NOWHERE)
        return _reached(scores, largest, total), place

    rows = jnp.arange(pl.next_power_of_2(count))[:, None]
    exists = rows < count
    table = functools.partial(
        entries,
        pltriton.load(chosen_ref.at[row, rows], mask=exists, other=-1),
        pltriton.load(largest_ref.at[row, rows], mask=exists, other=0.0),
        pltriton.load(total_ref.at[row, rows], mask=exists, other=0.0),
    )
    one = chosen_ref[row, index], largest_ref[row, index], total_ref[row, index]
    mine, places = entries(*one, part * PART + jnp.arange(PART))
    reaches = (mine >= edge_ref[row, count - 1]) & (places < NOWHERE)
    candidates = jnp.minimum(reaches.astype(jnp.int32).sum(axis=0), count)

    def rank_next(_: Array, previous: tuple[Array, Array]) -> tuple[Array, Array]:
        value, place = previous
        left = (mine < value) | ((mine == value) & (places > place))
        value = jnp.where(left, mine, -jnp.inf).max(axis=0)
        place = jnp.where(left & (mine == value), places, NOWHERE).min(axis=0)
        rank = _rank(value, place, table, rows.shape[0], block)

        @pl.when(rank < count)
        def _() -> None:
            pltriton.store(totals_ref.at[row, rank], value)
            pltriton.store(nodes_ref.at[row, rank], place // vocabulary)
            pltriton.store(tokens_ref.at[row, rank], place % vocabulary)

        return value, place

    jax.lax.fori_loop(0, candidates, rank_next, (jnp.float32(jnp.inf), jnp.int32(-1)))


def _rank(
    mine: Float[Array, "*n"],
    place: Int[Array, "*n"],
    table: Callable[[Array], Entries],
    rows: int,
    columns: int,
) -> Int[Array, "*n"]:
    """How many entries of a table are ahead of each of these.

    Args:
      mine: the entries' values, several or a single one.
      place: their places.
      table: the entries ``[rows, s]`` of columns ``[1, s]``.
      rows: of the table.
      columns: of the table.
    """
    step = min(pl.next_power_of_2(columns), max(1, COMPARISONS // (mine.size * rows)))
    shape = (*mine.shape, rows, step)

    def spread(number: Array) -> Array:
        return jnp.broadcast_to(number[..., None, None] if number.ndim else number, shape)

    def compare(index: Array, ahead: Array) -> Array:
        entries = table(index * step + jnp.arange(step)[None, :])
        other, at = (jnp.broadcast_to(part, shape) for part in entries)
        tied = (other == spread(mine)) & (at < spread(place))
        return ahead + ((other > spread(mine)) | tied).astype(jnp.int32)

    # Added up only at the end: threads meet once and not in every step.
    ahead = jnp.zeros(shape, jnp.int32)
    ahead = jax.lax.fori_loop(0, pl.cdiv(columns, step), compare, ahead)
    return ahead.sum(axis=-1).sum(axis=-1)


def _exact_sum(masses: Float[Array, "n c"]) -> Float[Array, " n"]:
    """Sums of numbers below 2**21 that do not depend on the order of addition, as integers do not.

    A compiler may compute a sum twice, in two layouts of the threads; were they to differ in the
    last bit, so might the values of an entry, and two entries be of one rank.
    """
    coarse = (masses * 2.0**10).astype(jnp.int32)
    fine = ((masses - coarse.astype(jnp.float32) * 2.0**-10) * 2.0**34).astype(jnp.int32)
    high, low = (part.sum(axis=1).astype(jnp.float32) for part in (coarse, fine))
    return high * 2.0**-10 + low * 2.0**-34


def _scores(ref: Ref, mask: Array) -> Array:
    """Scores in float32; -inf where there are none, or no numbers."""
    scores = pltriton.load(ref, mask=mask, other=-jnp.inf).astype(jnp.float32)
    return jnp.where(jnp.isnan(scores), -jnp.inf, scores)


def _reached(scores: Array, largest: Array, total: Array) -> Array:
    """Cumulative log-probabilities, by the one expression that all programs compute."""
    reached = (scores - largest) + total
    return jnp.where(jnp.isnan(reached), -jnp.inf, reached)


def _finite(largest: Array) -> Array:
    """What to subtract before an exponential: if all tokens are impossible the largest is -inf."""
    return jnp.where(largest == -jnp.inf, 0.0, largest)
