"""Matmuls of few rows on Hopper GPUs: a Pallas kernel for Mosaic GPU that streams the weights.

One warpgroup fetches blocks of rows and weights with the copy engine into a ring that takes all
shared memory, so that every multiprocessor has some 130 KiB of weights on their way whenever it
waits. One other warpgroup multiplies up to 64 rows, two multiply up to 128. A program takes several
units of work in turns (:mod:`longspec_jax.ops.matmul.ordered_tiles`), and the blocks of the next
unit are on their way while a result is written.

Rows are multiplied 64 at a time. Those that do not exist are garbage that is never stored: a row of
a result depends on no other row. The copy engine fills what lies beyond an edge of the weights with
zeros, and does not write beyond an edge of the result.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from longspec_jax.axes import Array, Ref
from longspec_jax.ops.hardware import WARPGROUP_ROWS
from longspec_jax.ops.launchers import launcher
from longspec_jax.ops.matmul.ordered_programs import MatmulProgram, Unit, gated, persistent
from longspec_jax.ops.matmul.ordered_tiles import (
    WHOLE,
    MatmulTile,
    Work,
    refuse_uneven,
    refuse_uneven_head,
)
from longspec_jax.ops.mosaic import ACC, load, swizzled


@launcher("tile", "interpret")
def matmul(
    x: Array, weights: Array, bias: Array | None = None, *, tile: MatmulTile, interpret: Any = None
) -> Array:
    """``x[rows, K] @ weights[K, N] (+ bias[N])``, or with a gate.

    Args:
      x: bfloat16 or float16.
      weights: ``[K, N]``, or ``[K, 2, N]`` for ``silu(x @ weights[:, 0]) * (x @ weights[:, 1])``.
      bias: of every column, or none.
      tile: what of the weights a unit reads.
      interpret: how Pallas interprets the kernel without a GPU; None compiles it.

    Returns:
      ``[rows, N]`` in the dtype of ``x``, or ``[splits, rows, N]`` in float32, whose sum is the
      result, if the tile splits the contraction.

    Raises:
      NotImplementedError: if ``K`` or ``N`` is not a multiple of 64, or of the columns of a
        narrower tile.
    """
    contracted, columns = weights.shape[0], weights.shape[-1]
    refuse_uneven(contracted, columns, whole=min(WHOLE, tile.columns))
    work = Work(len(x), contracted, columns, tile, parts=weights.ndim - 1)
    beyond = work.strips * tile.columns - columns
    if bias is not None and beyond:
        # A strip over the edge reads its bias there, too.
        bias = jnp.pad(bias, (0, beyond))
    out = _launch(work, x, weights, bias, interpret=interpret)
    return out if tile.splits > 1 else out[0]


@launcher("tile", "interpret")
def head_matmul(x: Array, table: Array, *, tile: MatmulTile, interpret: Any = None) -> Array:
    """``x[rows, K] @ table[V, K].T`` in float32, for an LM head.

    Args:
      x: bfloat16 or float16.
      table: the head.
      tile: what of the table a unit reads.
      interpret: how Pallas interprets the kernel without a GPU; None compiles it.

    Raises:
      NotImplementedError: if ``K`` is not a multiple of 64 or ``V`` of 8.
    """
    vocabulary, contracted = table.shape
    refuse_uneven_head(contracted, vocabulary)
    # The result is swizzled in rows of 128 bytes.
    work = Work(len(x), contracted, vocabulary + -vocabulary % 32, tile, head=True)
    return _launch(work, x, table, interpret=interpret)[0, :, :vocabulary]


def _launch(
    work: Work, x: Array, weights: Array, bias: Array | None = None, *, interpret: Any
) -> Array:
    """``[splits, rows, N]`` of the matmul."""
    tile, height = work.tile, work.warpgroups * WARPGROUP_ROWS
    if work.rows > 8 and work.rows % 8:
        # The copy engine takes whole groups of 8 rows, or a single one that is not whole.
        x = jnp.pad(x, ((0, -work.rows % 8), (0, 0)))
    dtype = jnp.dtype(jnp.float32) if work.out_bytes == 4 else x.dtype
    block = (tile.columns, tile.depth) if work.head else (tile.depth, tile.columns)
    parts = (2,) if work.parts == 2 else ()
    # The tensor cores read blocks of both in swizzled rows of one length.
    row_bytes = 2 * min(WHOLE, tile.columns)
    kernel = persistent(
        functools.partial(_kernel, work=work, has_bias=bias is not None),
        work,
        jax.ShapeDtypeStruct((tile.splits, len(x), work.columns), dtype),
        dict(
            x_smem=swizzled((work.stages, height, tile.depth), x.dtype, row_bytes),
            weights_smem=swizzled((work.stages, *parts, *block), x.dtype, row_bytes),
            out_smem=plgpu.SMEM((work.warpgroups, WARPGROUP_ROWS, tile.columns), dtype),
            ready=plgpu.Barrier(num_arrivals=1 + work.parts, num_barriers=work.stages),
            free=plgpu.Barrier(num_arrivals=work.warpgroups, num_barriers=work.stages),
        ),
        name="head" if work.head else "gated_matmul" if parts else "matmul",
        interpret=interpret,
    )
    out = kernel(x, weights, *([] if bias is None else [bias]))
    return out[:, : work.rows]


def _kernel(*refs: Ref, work: Work, has_bias: bool, **memory: Ref) -> None:
    """A program: a warpgroup that fetches, and one or two that multiply, unit after unit."""
    x, weights, *bias, out = refs
    program = _Matmul(
        work=work,
        x=x,
        weights=weights,
        bias=bias[0] if has_bias else None,
        out=out,
        warpgroup=jax.lax.axis_index("warpgroup"),
        **memory,
    )
    program.run(program.multiply, program.fetch)


@dataclasses.dataclass(frozen=True)
class _Matmul(MatmulProgram):
    """One warpgroup of one program of the matmul; the warpgroups have a result each."""

    x: Ref
    weights: Ref
    bias: Ref
    out: Ref
    x_smem: Ref
    weights_smem: Ref
    out_smem: Ref

    def fetch(self, unit: Unit, past: jax.Array) -> None:
        """Bring the unit's rows and weights."""
        work, tile = self.work, self.work.tile
        # Of a single row tile, the rows that exist.
        height = min(work.warpgroups * WARPGROUP_ROWS, -(-work.rows // 8) * 8)
        rows = pl.ds(unit.row * work.warpgroups * WARPGROUP_ROWS, height)

        def bring(step: jax.Array, stage: jax.Array) -> None:
            ready = self.ready.at[stage]
            depth = pl.ds((unit.first + step) * tile.depth, tile.depth)
            # The weights are further away.
            for part in ((0,), (1,)) if work.parts == 2 else ((),):
                columns = self.columns(unit)
                at = (columns, depth) if work.head else (depth, *part, columns)
                to = self.weights_smem.at[(stage, *part)]
                plgpu.copy_gmem_to_smem(self.weights.at[at], to, ready)
            to = self.x_smem.at[stage, pl.ds(0, height)]
            plgpu.copy_gmem_to_smem(self.x.at[rows, depth], to, ready)

        self.each_block(unit.steps, past, bring)

    def multiply(self, unit: Unit, past: jax.Array) -> None:
        """Multiply this warpgroup's 64 rows and write the result."""
        shape = (WARPGROUP_ROWS, self.work.tile.columns)
        accumulators = [ACC(shape, jnp.float32)] * self.work.parts
        parts = pl.run_scoped(functools.partial(self.sums, unit, past), *accumulators)
        self.write(unit, self.finished(unit, *parts))

    def sums(self, unit: Unit, past: jax.Array, *accumulators: Ref) -> list[Array]:
        """The products of the unit's rows and weights."""
        rows = pl.ds(self.warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)

        def operands(here: jax.Array, part: int) -> tuple[Ref, Ref]:
            weights = self.weights_smem.at[(here, part) if self.work.parts == 2 else (here,)]
            weights = weights.transpose((1, 0)) if self.work.head else weights
            return self.x_smem.at[here, rows], weights

        return self.accumulate(unit.steps, past, operands, *accumulators)

    def finished(self, unit: Unit, out: Array, *up: Array) -> Array:
        """The result with its gate, or its bias."""
        if up:
            out = gated((out, *up), self.x.dtype)
        if self.bias is not None:
            row = load(self.bias.at[self.columns(unit)], plgpu.Layout.WGMMA.reduce(0))
            out += jax.lax.broadcast_in_dim(row.astype(jnp.float32), out.shape, [1])
        return out

    def write(self, unit: Unit, out: Array) -> None:
        """Write the result of this warpgroup's rows."""
        source = self.out_smem.at[self.warpgroup]
        if self.work.turns > 1:  # The last result may be on its way from the same place.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        source[...] = out.astype(source.dtype)
        plgpu.commit_smem()
        row = unit.row * self.work.warpgroups + self.warpgroup
        rows = pl.ds(row * WARPGROUP_ROWS, WARPGROUP_ROWS)
        plgpu.copy_smem_to_gmem(source, self.out.at[unit.split, rows, self.columns(unit)])
