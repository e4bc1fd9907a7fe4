"""Matmuls of row tiles by the weights of one expert each, on Hopper GPUs: a kernel for Mosaic GPU.

As in :mod:`longspec_jax.ops.matmul.quantised_mosaic`: a warpgroup fetches into a ring, others
multiply, outputs are the rows of the matrix instruction, and units are taken in turns. What differs
is that the expert of a row tile, and the number of tiles, are read from memory. A unit is a row
tile and a strip of outputs. Programs take the tiles of a strip at the same time, so the weights of
an expert with several tiles come from memory once.

**Expected time** (H100, 3.15 TB/s): that of reading the weights of the chosen experts. A plain step
of gpt-oss-20b reads 4 of 32 experts, 199 MB a layer: 63 us. One of Qwen3-30B-A3B reads 8 of 128, 75
MB: 24 us. 64 rows read nearly all experts: 505 and 380 us. With 16 rows a tile the rows, which come
from the second-level cache, are 12 to 25 % of the weights' bytes.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float, Int

from longspec_jax.axes import Array
from longspec_jax.ops.hardware import WARPGROUP_ROWS
from longspec_jax.ops.launchers import launcher
from longspec_jax.ops.matmul.experts_tiles import ExpertWork, expert_work
from longspec_jax.ops.matmul.few_rows import SWISH
from longspec_jax.ops.matmul.ordered_programs import Program

# Pallas documents ACC and does not re-export it in the way that type checkers ask for.
_ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]


@launcher("height", "limit", "interpret")
def tile_matmul(
    x: Float[Array, "rows K"],
    expert: Int[Array, " tiles"],
    count: Int[Array, " 1"],
    weights: Float[Array, "E ..."],
    bias: Float[Array, "E ..."] | None = None,
    *,
    height: int,
    limit: float | None = None,
    interpret: Any = None,
) -> Float[Array, "slots N"]:
    """``x @ weights[expert].T (+ bias[expert])`` of every row tile, or with a gate.

    Args:
      x: bfloat16 or float16, ``tiles * height`` rows; or up to 8 rows that are those of all tiles.
      expert: of every tile.
      count: of tiles that there are. The rows of others are not written.
      weights: ``[E, N, K]``, or ``[E, 2, N, K]`` for a gate.
      bias: ``[E, N]`` or ``[E, 2, N]``.
      height: rows of a tile, a multiple of 8.
      limit: of the gate, as for :func:`longspec_jax.ops.matmul.experts.expert_mlp`.
      interpret: how Pallas interprets the kernel without a GPU; None compiles it.

    Raises:
      NotImplementedError: if ``K`` or ``N`` is no multiple of 64.
    """
    *_, outputs, contracted = weights.shape
    tiles, gated = len(expert), weights.ndim == 4
    work = expert_work(height, tiles, contracted, outputs, gated=gated)
    tile = work.tile

    def shared(*shape: int) -> Any:
        # By the types of newer jax these are abstract; they are not.
        tiling = plgpu.TilingTransform((8, 64))  # pyright: ignore[reportAbstractUsage]
        swizzle = plgpu.SwizzleTransform(128)  # pyright: ignore[reportAbstractUsage]
        return plgpu.SMEM(shape, x.dtype, transforms=(tiling, swizzle))

    kernel = plgpu.kernel(
        functools.partial(_kernel, work=work, limit=limit, has_bias=bias is not None),
        out_type=jax.ShapeDtypeStruct((tiles * height, outputs), x.dtype),
        scratch_types=dict(
            x_smem=shared(work.stages, height, tile.depth),
            weights_smem=shared(work.stages, work.parts, tile.columns, tile.depth),
            out_smem=shared(work.warpgroups, height, WARPGROUP_ROWS),
            ready=plgpu.Barrier(num_arrivals=1 + work.parts, num_barriers=work.stages),
            free=plgpu.Barrier(num_arrivals=work.warpgroups, num_barriers=work.stages),
        ),
        grid=(work.programs,),
        grid_names=("program",),
        num_threads=work.warpgroups + 1,
        thread_name="warpgroup",
        # Nothing is reduced across warps, and the ring has taken the room.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        kernel_name="gated_experts" if gated else "experts",
        interpret=interpret,
    )
    given = [weights.reshape(-1, contracted)]
    if bias is not None:
        given.append(bias.reshape(-1, outputs))
    return kernel(expert, count, x, *given)


def _kernel(
    *refs: Any, work: ExpertWork, limit: float | None, has_bias: bool, **memory: Any
) -> None:
    """A program: a warpgroup that fetches, and one or two that multiply, unit after unit."""
    expert, count, x, weights, *bias, out = refs
    program = _Experts(
        work=work,
        warpgroup=jax.lax.axis_index("warpgroup"),
        limit=limit,
        expert=expert,
        count=count,
        x=x,
        weights=weights,
        bias=bias[0] if has_bias else None,
        out=out,
        **memory,
    )
    program.run(program.multiply, program.fetch, program.free)


@dataclasses.dataclass(frozen=True)
class _Unit:
    """One unit of work, by its row tile, strip and expert."""

    tile: jax.Array
    strip: jax.Array
    expert: jax.Array


@dataclasses.dataclass(frozen=True)
class _Experts(Program):
    """One warpgroup of one program.

    ``ready`` says that a place of the ring was filled, ``free`` that all have read it.
    """

    work: ExpertWork
    limit: float | None
    expert: Any
    count: Any
    x: Any
    weights: Any
    bias: Any
    out: Any
    x_smem: Any
    weights_smem: Any
    out_smem: Any
    ready: Any
    free: Any

    def each_unit(self, visit: Any) -> jax.Array:
        """As of :class:`Program`, for the tiles that there are."""
        work, program = self.work, jax.lax.axis_index("program")
        tiles = self.count[0]
        units = tiles * work.strips
        # As many programs as take equal numbers of units: some 90 read at nearly the full rate.
        turns = jnp.maximum(_quotient(units, work.programs), 1)
        programs = _quotient(units, turns)
        own = _quotient(units - program, jnp.maximum(programs, 1))

        def turn(number: jax.Array, past: jax.Array) -> jax.Array:
            index = program + number * programs
            tile, strip = jax.lax.rem(index, tiles), jax.lax.div(index, tiles)
            visit(_Unit(tile, strip, self.expert[tile]), past)
            return past + work.steps

        return jax.lax.fori_loop(0, jnp.where(program < programs, own, 0), turn, jnp.int32(0))

    def outputs(self, unit: Any, part: int) -> Any:
        """Where the outputs of a unit's strip begin, among those of all experts."""
        matrix = unit.expert * self.work.parts + part
        return matrix * self.work.columns + unit.strip * self.work.tile.columns

    def fetch(self, unit: Any, past: jax.Array) -> None:
        """Bring the unit's rows and weights, as soon as there is room in the ring."""
        work, tile = self.work, self.work.tile
        # Where all tiles have the same rows they have the first ones. The index is not known
        # beforehand, or Pallas would refuse rows beyond the last.
        shared = self.x.shape[0] <= work.rows
        rows = pl.ds((0 * unit.tile if shared else unit.tile) * work.rows, work.rows)

        @pl.loop(0, work.steps)
        def _(step: jax.Array) -> None:
            place = past + step
            stage = self.stage(place)
            pl.when(place >= work.stages)(lambda: plgpu.barrier_wait(self.free.at[stage]))
            ready, depth = self.ready.at[stage], pl.ds(step * tile.depth, tile.depth)
            # The weights are further away.
            for part in range(work.parts):
                outputs = pl.ds(self.outputs(unit, part), tile.columns)
                to = self.weights_smem.at[stage, part]
                plgpu.copy_gmem_to_smem(self.weights.at[outputs, depth], to, ready)
            plgpu.copy_gmem_to_smem(self.x.at[rows, depth], self.x_smem.at[stage], ready)

    def multiply(self, unit: Any, past: jax.Array) -> None:
        """Multiply this warpgroup's 64 outputs and write the result."""
        accumulators = [_ACC((WARPGROUP_ROWS, self.work.rows), jnp.float32)] * self.work.parts
        parts = pl.run_scoped(functools.partial(self.accumulate, past), *accumulators)
        self.write(unit, self.finished(unit, *parts))

    def accumulate(self, past: jax.Array, *accumulators: Any) -> list[Array]:
        """The products of the unit's weights and rows, ``[64, rows]``."""
        work = self.work
        mine = pl.ds(self.warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)

        @pl.loop(0, work.steps)
        def _(step: jax.Array) -> None:
            here, before = self.stage(past + step), self.stage(past + step - 1)
            plgpu.barrier_wait(self.ready.at[here])
            rows = self.x_smem.at[here].transpose((1, 0))
            for part, accumulator in enumerate(accumulators):
                plgpu.wgmma(accumulator, self.weights_smem.at[here, part, mine], rows)
            # This step's matmuls go on while the step before them is given back.
            plgpu.wgmma_wait(work.parts)
            pl.when(step > 0)(lambda: plgpu.barrier_arrive(self.free.at[before]))

        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(self.free.at[self.stage(past + work.steps - 1)])
        # The compiler sees no connection between the wait and the registers.
        return list(jax.lax.optimization_barrier([each[...] for each in accumulators]))

    def finished(self, unit: Any, *parts: Array) -> Array:
        """The result ``[64, rows]`` with its biases, and its gate."""
        if self.bias is not None:
            parts = tuple(each + self.biases(unit, part) for part, each in enumerate(parts))
        if len(parts) == 1:
            return parts[0]
        # Rounded as the two matmuls are where they are matmuls of their own.
        first, second = (each.astype(self.x.dtype).astype(jnp.float32) for each in parts)
        if self.limit is None:
            return first / (1.0 + jnp.exp(-first)) * second
        first = jnp.minimum(first, self.limit)
        second = jnp.maximum(jnp.minimum(second, self.limit), -self.limit)
        return first / (1.0 + jnp.exp(first * -SWISH)) * (second + 1.0)

    def biases(self, unit: Any, part: int) -> Array:
        """The biases of this warpgroup's outputs, in every column."""
        outputs = unit.strip * self.work.tile.columns + self.warpgroup * WARPGROUP_ROWS
        of_outputs = self.bias.at[
            unit.expert * self.work.parts + part, pl.ds(outputs, WARPGROUP_ROWS)
        ]
        # From jax 0.11 on, which this kernel needs, load takes no index.
        bias = plgpu.load(  # pyright: ignore[reportCallIssue]
            of_outputs, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False
        )
        shape = (WARPGROUP_ROWS, self.work.rows)
        return jax.lax.broadcast_in_dim(bias.astype(jnp.float32), shape, [0])

    def write(self, unit: Any, out: Array) -> None:
        """Write the result of this warpgroup's outputs, a row for each of the tile."""
        to = self.out_smem.at[self.warpgroup]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # The last result is from the same place.
        out = plgpu.layout_cast(out.astype(to.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
        to.transpose((1, 0))[...] = out
        plgpu.commit_smem()
        rows = pl.ds(unit.tile * self.work.rows, self.work.rows)
        outputs = unit.strip * self.work.tile.columns + self.warpgroup * WARPGROUP_ROWS
        plgpu.copy_smem_to_gmem(to, self.out.at[rows, pl.ds(outputs, WARPGROUP_ROWS)])


def _quotient(count: Any, size: Any) -> jax.Array:
    """``count / size``, rounded up."""
    return jax.lax.div(count + size - 1, jnp.int32(size))
