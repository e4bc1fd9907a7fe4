"""What the attention kernels for Triton share: reading rows, and the softmax over slots or keys.

Inside a kernel scores and maxima are in base 2; what :func:`finish` returns is natural.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from longspec_jax.axes import Ref
from longspec_jax.ops.attention.float8 import widened
from longspec_jax.ops.attention.packing import LOG2_E, Problem, flat_rows
from longspec_jax.ops.attention.tiles import PrefixTile

State = tuple[jax.Array, jax.Array, jax.Array]
"""Running maximum [R], sum [R] and unnormalised output [R, H] of an online softmax, in base 2."""

Head = tuple[jax.Array, jax.Array]
"""A row of the batch or of a cache, and one of its key/value heads."""

Windows = tuple[jax.Array, list[jax.Array]]
"""The last position in a ring, and the first that each part of the rows sees, ``[R]`` each."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """Some packed rows that a program attends with.

    Attributes:
      problem: what every program knows.
      batch: their row of the batch.
      kv_head: their key/value head, or that of each.
      packed: their numbers.
      valid: which of them there are.
    """

    problem: Problem
    batch: jax.Array
    kv_head: jax.Array
    packed: jax.Array
    valid: jax.Array

    @property
    def flat(self) -> tuple[jax.Array, jax.Array]:
        """Their numbers on the flattened [T N] axis, and which of them there are."""
        return flat_rows(self.packed, self.kv_head, self.problem), self.valid

    def store(self, refs: Sequence[Ref], split: jax.Array, state: State) -> None:
        """Write what they found in a split: its output and log-sum-exp."""
        place = self.batch, split, self.kv_head
        store_rows(refs, place, (self.packed, self.valid), finish(state))


def load_windows(oldest_ref: Ref, length: jax.Array, parts: list[Rows]) -> Windows | None:
    """What some packed rows see of a ring; None without windows (``oldest_ref`` ``[B, T]``)."""
    if oldest_ref is None:
        return None
    firsts = [
        pltriton.load(
            oldest_ref.at[rows.batch, rows.packed // rows.problem.groups], mask=rows.valid, other=0
        )
        for rows in parts
    ]
    return length - 1, firsts


def load_queries(
    q_ref: Ref, head: Head, first: jax.Array, counts: tuple[int, ...], problem: Problem
) -> tuple[list[jax.Array], list[Rows]]:
    """The packed queries of a key/value head from row ``first`` on, in parts of ``counts``.

    Returns:
      For each part its queries, ``[R, H]`` with ``H`` a power of two, zero where there are none;
      and its rows.
    """
    width = q_ref.shape[3]
    h = jnp.arange(pl.next_power_of_2(width))
    queries, parts = [], []
    for count in counts:
        packed = first + jnp.arange(count)
        valid = packed < problem.packed
        mask = valid[:, None] & (h < width)[None, :]
        source = q_ref.at[*head, packed[:, None], h[None, :]]
        queries.append(pltriton.load(source, mask=mask, other=0.0))
        parts.append(Rows(problem, *head, packed, valid))
        first += count
    return queries, parts


def store_rows(
    refs: Sequence[Ref],
    place: tuple[jax.Array, ...],
    rows: tuple[jax.Array, jax.Array],
    found: tuple[jax.Array, jax.Array],
) -> None:
    """Write the output and log-sum-exp of the rows that there are, at ``[*place, row]``."""
    (out_ref, lse_ref), (row, valid), (out, lse) = refs, rows, found
    h = jnp.arange(out.shape[1])
    mask = valid[:, None] & (h < out_ref.shape[-1])[None, :]
    out = out.astype(out_ref.dtype)
    pltriton.store(out_ref.at[*place, row[:, None], h[None, :]], out, mask=mask)
    pltriton.store(lse_ref.at[*place, row], lse, mask=valid)


def empty_state(rows: int, width: int) -> State:
    """The softmax state of rows that have seen no key."""
    return (
        jnp.full((rows,), -jnp.inf, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        jnp.zeros((rows, width), jnp.float32),
    )


def finish(state: State) -> tuple[jax.Array, jax.Array]:
    """Normalised output and natural log-sum-exp; zero and -inf for rows that saw no key."""
    top, total, acc = state
    safe = jnp.where(total > 0, total, 1.0)
    lse = jnp.where(total > 0, top / LOG2_E + jnp.log(safe), -jnp.inf)
    return acc / safe[:, None], lse


def exp2(x: jax.Array, interpret: bool) -> jax.Array:
    """Two to the x by the GPU's own instruction (relative error 2^-22), which flushes denormals."""
    if interpret:
        return jnp.exp2(x)
    (y,) = pltriton.elementwise_inline_asm(
        "ex2.approx.ftz.f32 $0, $1;",
        args=[x],
        constraints="=f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return y


def finite(top: jax.Array) -> jax.Array:
    """A maximum to subtract: 0 where nothing was seen, since -inf - (-inf) is NaN."""
    return jnp.where(top == -jnp.inf, 0.0, top)


def matmul(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """Multiply matrices, accumulating in float32; float32 operands are multiplied exactly."""
    return jax.lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def update(state: State, scores: jax.Array, v: jax.Array, interpret: bool) -> State:
    """The softmax after more keys, of which a row need not see any."""
    top, total, acc = state
    new_top = jnp.maximum(top, scores.max(axis=1))
    shift = finite(new_top)
    weight = exp2(scores - shift[:, None], interpret)
    keep = exp2(top - shift, interpret)
    acc = acc * keep[:, None] + matmul(weight.astype(v.dtype), v, (1, 0))
    return new_top, total * keep + weight.sum(axis=1), acc


def slots_of_split(
    split: jax.Array, length: jax.Array, start: jax.Array | None, problem: Problem
) -> tuple[jax.Array, jax.Array]:
    """The slots of a split that a row sees from ``start`` to its length: ``lower <= s < upper``."""
    size = problem.split_of(length)
    lower = split * size
    upper = jnp.minimum(jnp.minimum(length, problem.slots), lower + size)
    return lower if start is None else jnp.maximum(lower, start), upper


def attend_to_slots(
    queries: list[jax.Array],
    refs: Sequence[Ref],
    head: Head,
    states: list[State],
    slots: tuple[jax.Array, jax.Array],
    tile: PrefixTile,
    problem: Problem,
    *,
    bounded: bool,
    windows: Windows | None = None,
) -> list[State]:
    """The softmax of each part of the rows after some slots, ``lower <= s < upper``.

    Each part has queries ``[R, H]``, with ``H`` a power of two, and its softmax so far. Keys and
    values are caches ``[rows, K, S, H]``, and ``head`` a row and a head of these. Unless the rows
    are ``bounded`` below, ``lower`` begins a block of ``tile.slots``. With ``windows`` the slots
    are a ring, and each row sees those of its window.
    """
    (k_ref, v_ref), (lower, upper) = refs, slots
    width, padded, dtype = k_ref.shape[3], queries[0].shape[1], queries[0].dtype
    h = jnp.arange(padded)
    within = (h < width)[None, :]

    def visit_ring(block: jax.Array, states: list[State]) -> list[State]:
        slot = block * tile.slots + jnp.arange(tile.slots)
        there = (slot >= lower) & (slot < upper)
        newest, firsts = windows  # pyright: ignore[reportGeneralTypeIssues]: given where this runs
        position = newest - (newest - slot + problem.slots) % problem.slots
        seen = [there[None, :] & (position[None, :] >= first[:, None]) for first in firsts]
        mask = within & there[:, None]
        k, v = (
            pltriton.load(ref.at[*head, slot[:, None], h[None, :]], mask=mask, other=0)
            for ref in (k_ref, v_ref)
        )
        k, v = widened(k, dtype), widened(v, dtype)
        scores = [problem.scores(matmul(q, k, (1, 1))) for q in queries]
        scores = [jnp.where(own, s, -jnp.inf) for own, s in zip(seen, scores, strict=True)]
        each = zip(states, scores, strict=True)
        return [update(state, s, v, problem.interpret) for state, s in each]

    if windows is not None:
        first, last = lower // tile.slots, pl.cdiv(upper, tile.slots)
        return jax.lax.fori_loop(first, last, visit_ring, states)

    def visit(offset: jax.Array, states: list[State], edge: bool) -> list[State]:
        slot = offset + jnp.arange(tile.slots)
        seen = (slot >= lower) & (slot < upper)
        # Slots beyond the length may hold anything, NaN included: they are never read.
        mask = within if not edge else within & seen[:, None]
        plain = not edge and padded == width

        def read(ref: Ref) -> jax.Array:
            source = ref.at[*head, slot[:, None], h[None, :]]
            if plain:
                return widened(pltriton.load(source), dtype)
            return widened(pltriton.load(source, mask=mask, other=0), dtype)

        k = read(k_ref)
        scores = [problem.scores(matmul(q, k, (1, 1))) for q in queries]
        if edge:
            scores = [jnp.where(seen[None, :], s, -jnp.inf) for s in scores]
        return _update_whole(states, scores, read(v_ref), problem.interpret)

    # Whole blocks need no mask; at most one partial block at either end does, at the lower one only
    # where rows are bounded below.
    inner, outer = pl.cdiv(lower, tile.slots), upper // tile.slots
    if bounded:
        ragged = ((lower % tile.slots) > 0) & (inner <= outer)
        states = jax.lax.fori_loop(
            0,
            ragged.astype(jnp.int32),
            lambda _, s: visit((inner - 1) * tile.slots, s, edge=True),
            states,
        )
    states = jax.lax.fori_loop(
        inner, outer, lambda block, s: visit(block * tile.slots, s, edge=False), states
    )
    ragged = upper > jnp.maximum(outer * tile.slots, lower)
    return jax.lax.fori_loop(
        0, ragged.astype(jnp.int32), lambda _, s: visit(outer * tile.slots, s, edge=True), states
    )


def _update_whole(
    states: list[State], scores: list[jax.Array], v: jax.Array, interpret: bool
) -> list[State]:
    """The softmax of each part of the rows after one more block, of which it sees a slot."""
    new = []
    for s, (top, total, acc) in zip(scores, states, strict=True):
        # Every visited block holds a slot the row sees, so this maximum is finite.
        new_top = jnp.maximum(top, s.max(axis=1))
        weight = exp2(s - new_top[:, None], interpret)
        keep = exp2(top - new_top, interpret)
        total = total * keep + weight.sum(axis=1)
        acc = acc * keep[:, None] + matmul(weight.astype(v.dtype), v, (1, 0))
        new.append((new_top, total, acc))
    return new


def attend_to_fresh(
    q: jax.Array,
    rows: Rows,
    refs: Sequence[Ref],
    state: State,
    *,
    steps: jax.Array | int,
    block: int,
) -> State:
    """The softmax of some rows after ``steps`` blocks of ``block`` fresh keys, from the first on.

    Packed queries are ``[R, H]``, with ``H`` a power of two; ``refs`` are fresh keys and values,
    ``[B, U, K, H]``, and their mask, ``[B, T, U]``.
    """

    def step(index: jax.Array, state: State) -> State:
        tree = read_fresh(refs, rows, index, block=block, width=q.shape[1])
        return visit_fresh(q, state, tree, rows.problem)

    return jax.lax.fori_loop(0, steps, step, state)


Block = tuple[jax.Array, jax.Array, jax.Array]
"""Some fresh tokens: which of them each packed row sees, their keys and values."""


def read_fresh(
    refs: Sequence[Ref], rows: Rows, index: jax.Array | int, *, block: int, width: int
) -> Block:
    """One block of fresh tokens."""
    k_ref, v_ref, mask_ref = refs
    h = jnp.arange(width)
    within = (h < k_ref.shape[3])[None, :]
    key = index * block + jnp.arange(block)
    exists = key < k_ref.shape[1]
    seen = pltriton.load(
        mask_ref.at[rows.batch, (rows.packed // rows.problem.groups)[:, None], key[None, :]],
        mask=rows.valid[:, None] & exists[None, :],
        other=False,
    )
    place = (rows.batch, key[:, None], rows.kv_head, h[None, :])
    k = pltriton.load(k_ref.at[place], mask=exists[:, None] & within, other=0.0)
    # Values that no query of the tile sees may be NaN, which a weight of 0 would not silence.
    wanted = (seen.astype(jnp.int32).max(axis=0) > 0)[:, None]
    # Read before they are silenced, so that the reads do not wait for the mask's.
    v = pltriton.load(v_ref.at[place], mask=exists[:, None] & within, other=0.0)
    return seen, k, jnp.where(wanted, v, jnp.zeros_like(v))


def visit_fresh(q: jax.Array, state: State, block: Block, problem: Problem) -> State:
    """The softmax after one block of fresh tokens."""
    seen, k, v = block
    scores = jnp.where(seen, problem.scores(matmul(q, k, (1, 1))), -jnp.inf)
    return update(state, scores, v, problem.interpret)
