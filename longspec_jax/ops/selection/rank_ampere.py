"""The best of some thousand numbers as a Pallas kernel for Mosaic GPU, by comparing all pairs.

An entry's rank is how many entries are ahead of it. No two have the same, so every rank below
``count`` is stored, and once. A program ranks 16 entries. Most of them reach no number that is
known to be one of the best, and end at once.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float, Int

from longspec_jax.axes import Array, Ref
from longspec_jax.ops import ampere
from longspec_jax.ops.launchers import launcher

ENTRIES, COMPARED = 16, 256
"""Entries of a program, and those with which it compares them in a step."""


@launcher("count")
def top_by_rank(
    values: Float[Array, "B n"], order: Int[Array, "B n"], least: Float[Array, " B"], *, count: int
) -> tuple[Float[Array, "B count"], Int[Array, "B count"]]:
    """The ``count`` best of every row, best first, and where they are.

    Args:
      values: float32, none of them NaN.
      order: ties go to the number that is lower in this, of which no two are alike.
      least: the best reach it, in every row.
      count: how many; there must be as many that reach ``least``.
    """
    batch, entries = values.shape
    # A thread reads eight side by side.
    wider = (0, 0), (0, -entries % 8)
    values = jnp.pad(values, wider, constant_values=-jnp.inf)
    order = jnp.pad(order.astype(jnp.int32), wider, constant_values=jnp.iinfo(jnp.int32).max)
    launch = plgpu.kernel(
        functools.partial(_kernel, entries=entries),
        out_type=(
            jax.ShapeDtypeStruct((batch, count), jnp.float32),
            jax.ShapeDtypeStruct((batch, count), jnp.int32),
        ),
        grid=(pl.cdiv(entries, ENTRIES), batch),
        grid_names=("block", "row"),
        compiler_params=ampere.compiler_params(reduced=64),
        kernel_name="top_by_rank",
    )
    return launch(values, order, least)


def _kernel(values: Ref, order: Ref, least: Ref, best: Ref, index: Ref, *, entries: int) -> None:
    """Rank 16 entries of a row."""
    block, row = (jax.lax.axis_index(name) for name in ("block", "row"))
    shape, layout = (ENTRIES, COMPARED), ampere.rows_layout(COMPARED)
    one = layout.reduce(1)
    at = plgpu.broadcasted_iota(jnp.int32, (ENTRIES,), 0, layout=one) + block * ENTRIES
    known = jnp.minimum(at, entries - 1)
    mine, place = (ampere.gather(ref, (row, known), one) for ref in (values, order))

    @pl.when(jnp.max(mine) >= least[row])
    def _() -> None:
        own, own_place = (ampere.along_rows(each, shape, layout) for each in (mine, place))
        column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)

        def compare(step: jax.Array, ahead: Array) -> Array:
            other_at = column + step * COMPARED
            there = other_at < entries
            known = jnp.where(there, other_at, 0)
            other, other_place = (
                ampere.gather(ref, (row, known), layout) for ref in (values, order)
            )
            before = (other > own) | ((other == own) & (other_place < own_place))
            return ahead + jnp.where(there & before, 1, 0)

        ahead = plgpu.layout_cast(jnp.zeros(shape, jnp.int32), layout)
        ahead = jax.lax.fori_loop(0, pl.cdiv(entries, COMPARED), compare, ahead)
        rank = jnp.sum(ahead, axis=1)
        chosen = (at < entries) & (rank < best.shape[1])
        ampere.scatter(best, (row, rank), mine, chosen, one)
        ampere.scatter(index, (row, rank), at, chosen, one)
