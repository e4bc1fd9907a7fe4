"""The units of a persistent program on Hopper GPUs, and the warpgroups that fetch and multiply.

What Mosaic GPU kernels of different weights have in common
(:mod:`longspec_jax.ops.matmul.ordered_tiles`).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from longspec_jax.axes import Ref
from longspec_jax.ops.matmul.ordered_tiles import Work

_REGISTERS = {1: (232, 40), 2: (232, 40), 4: (112, 32)}
"""Registers of a thread that multiplies and of one that fetches, by the number of the former's
warpgroups."""


@dataclasses.dataclass(frozen=True)
class Unit:
    """One unit of work, by its row tile, strip and split."""

    row: jax.Array
    strip: jax.Array
    split: jax.Array
    first: jax.Array
    """The first block of its split."""
    steps: jax.Array


_Visit = Callable[[Unit, jax.Array], None]
"""Of a unit, and of the number of blocks before it."""


@dataclasses.dataclass(frozen=True)
class MatmulProgram:
    """One warpgroup of one program: the units that it takes in turns.

    ``ready`` says that a place of the ring was filled, ``free`` that all have read it.
    """

    work: Work
    warpgroup: jax.Array
    ready: Ref
    free: Ref

    def run(self, multiply: _Visit, fetch: _Visit) -> None:
        """Fetch in the last warpgroup and multiply in the others, unit after unit.

        Args:
          multiply: multiplies this warpgroup's part of a unit's blocks and writes the result.
          fetch: brings the blocks of a unit.
        """
        multiplying, fetching = _REGISTERS[self.work.warpgroups]

        @pl.when(self.warpgroup < self.work.warpgroups)
        def _() -> None:
            plgpu.set_max_registers(multiplying, action="increase")
            self.each_unit(multiply)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(self.warpgroup == self.work.warpgroups)
        def _() -> None:
            plgpu.set_max_registers(fetching, action="decrease")
            total = self.each_unit(fetch)

            # Every phase of a barrier is seen before the barrier ends with the program.
            @pl.loop(jnp.maximum(total - self.work.stages, 0), total)
            def _(place: jax.Array) -> None:
                plgpu.barrier_wait(self.free.at[self.stage(place)])

    def each_unit(self, visit: _Visit) -> jax.Array:
        """Call ``visit(unit, past)`` for the program's units; ``past`` blocks came before a unit's.

        Returns the number of blocks of all units.

        Programs take neighbouring units at the same time: row tiles of one strip, so that only the
        first reads the weights from memory, and then strips that lie side by side.
        """
        work, program = self.work, jax.lax.axis_index("program")

        def turn(number: jax.Array, past: jax.Array) -> jax.Array:
            unit = self.unit(program + number * work.programs)
            visit(unit, past)
            return past + unit.steps

        turns = jax.lax.div(work.units - program + work.programs - 1, jnp.int32(work.programs))
        return jax.lax.fori_loop(0, 1 if work.turns == 1 else turns, turn, jnp.int32(0))

    def each_block(
        self, steps: jax.Array | int, past: jax.Array, bring: Callable[[jax.Array, jax.Array], None]
    ) -> None:
        """Call ``bring(step, stage)`` for each block of a unit, once its place is free."""

        @pl.loop(0, steps)
        def _(step: jax.Array) -> None:
            place = past + step
            stage = self.stage(place)
            pl.when(place >= self.work.stages)(lambda: plgpu.barrier_wait(self.free.at[stage]))
            bring(step, stage)

    def accumulate(
        self,
        steps: jax.Array | int,
        past: jax.Array,
        operands: Callable[[jax.Array, int], tuple[Ref, Ref]],
        *accumulators: Ref,
    ) -> list[jax.Array]:
        """The products of a unit's blocks: of each matmul, what is in a place of the ring."""

        @pl.loop(0, steps)
        def _(step: jax.Array) -> None:
            here, before = self.stage(past + step), self.stage(past + step - 1)
            plgpu.barrier_wait(self.ready.at[here])
            for part, accumulator in enumerate(accumulators):
                plgpu.wgmma(accumulator, *operands(here, part))
            # This step's matmuls go on while the step before them is given back.
            plgpu.wgmma_wait(len(accumulators))
            pl.when(step > 0)(lambda: plgpu.barrier_arrive(self.free.at[before]))

        return self.results(steps, past, accumulators)

    def results(
        self, steps: jax.Array | int, past: jax.Array, accumulators: Sequence[Ref]
    ) -> list[jax.Array]:
        """What was accumulated of a unit's blocks; gives back the last one."""
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(self.free.at[self.stage(past + steps - 1)])
        # The compiler sees no connection between the wait and the registers. Without this it rounds
        # the results to 16 bits before they are there (strips of 32 columns on an H200).
        return list(jax.lax.optimization_barrier([each[...] for each in accumulators]))

    def stage(self, place: jax.Array) -> jax.Array:
        """The place in the ring of a block, by the number of blocks before it."""
        return jax.lax.rem(place, jnp.int32(self.work.stages))

    def next(self, stage: jax.Array) -> jax.Array:
        """The place after this one, without the division that :meth:`stage` needs."""
        return jnp.where(stage == self.work.stages - 1, 0, stage + 1)

    def unit(self, index: jax.Array) -> Unit:
        """The unit of this index."""
        work, splits = self.work, self.work.tile.splits
        row = jax.lax.rem(index, jnp.int32(work.row_tiles))
        index = jax.lax.div(index, jnp.int32(work.row_tiles))
        strip = jax.lax.rem(index, jnp.int32(work.strips))
        split = jax.lax.div(index, jnp.int32(work.strips))
        first, last = (jax.lax.div((split + end) * work.steps, jnp.int32(splits)) for end in (0, 1))
        return Unit(row, strip, split, first, last - first)

    def columns(self, unit: Unit) -> Any:
        """The columns of a unit's strip."""
        return pl.ds(unit.strip * self.work.tile.columns, self.work.tile.columns)


def gated(parts: Sequence[jax.Array], dtype: DTypeLike) -> jax.Array:
    """``silu`` of the first times the second, rounded as where they are results of matmuls."""
    gate, factor = (each.astype(dtype).astype(jnp.float32) for each in parts)
    return gate / (1.0 + jnp.exp(-gate)) * factor


def persistent(
    body: Callable[..., None],
    work: Work,
    out: Any,
    memory: dict[str, Any],
    *,
    name: str,
    interpret: Any,
) -> Callable[..., jax.Array]:
    """The kernel of all programs of some work, each with its warpgroups.

    Args:
      body: of one warpgroup.
      work: how many programs and warpgroups there are.
      out: shape and dtype of the result.
      memory: shared memory and barriers of a program, by the name that the body gives them.
      name: what profiles call it.
      interpret: how Pallas interprets the kernel without a GPU; None compiles it.
    """
    return plgpu.kernel(
        body,
        out_type=out,
        scratch_types=memory,
        grid=(work.programs,),
        grid_names=("program",),
        num_threads=work.warpgroups + 1,
        thread_name="warpgroup",
        # Nothing is reduced across warps, and the ring has taken the room.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        kernel_name=name,
        interpret=interpret,
    )
