"""Matmuls of row tiles by the weights of one expert each, on Hopper GPUs: a kernel for Mosaic GPU.

As in :mod:`longspec_jax.ops.matmul.quantised_mosaic`: a warpgroup fetches into a ring, others
multiply, outputs are the rows of the matrix instruction, and units are taken in turns. What differs
is that the expert of a row tile, and the number of tiles, are read from memory. A unit is a row
tile and a strip of outputs. Programs take the tiles of a strip at the same time, so the weights of
an expert with several tiles come from memory once.

**Expected time** (H100, 3.15 TB/s): that of reading the weights of the chosen experts. A plain step
of gpt-oss-20b reads 4 of 32 experts, 199 MB a layer: 63 us. One of Qwen3-30B-A3B reads 8 of 128, 75
MB: 24 us. 64 rows read nearly all experts: 505 and 380 us. With 16 rows a tile the rows, which come
from the second-level cache, are 12 to 25 % of the weights' bytes. 4-bit floats with their scales
are 0.28 of the bytes: 18 and 142 us for gpt-oss-20b. Widening them is some 2.5 instructions a
weight, 46 us for all experts at full issue, alongside the reading.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float, Int

from longspec_jax.axes import Array, Ref
from longspec_jax.ops.hardware import WARPGROUP_ROWS
from longspec_jax.ops.launchers import launcher
from longspec_jax.ops.matmul.experts_tiles import FLOAT_GROUP, ExpertWork, expert_work
from longspec_jax.ops.matmul.few_rows import SWISH
from longspec_jax.ops.matmul.ordered_programs import MatmulProgram, gated, persistent
from longspec_jax.ops.matmul.packed import PackedMatrix
from longspec_jax.ops.matmul.widening import (
    BY_OUTPUT,
    WORDS,
    arranged,
    arrive,
    lines,
    scaled_floats,
    widened_floats,
)
from longspec_jax.ops.mosaic import ACC, load, swizzled


@launcher("height", "gated", "limit", "interpret")
def tile_matmul(
    x: Float[Array, "rows K"],
    expert: Int[Array, " tiles"],
    count: Int[Array, " 1"],
    weights: Float[Array, "E ..."] | PackedMatrix,
    bias: Float[Array, "E ..."] | None = None,
    *,
    height: int,
    gated: bool = False,
    limit: float | None = None,
    interpret: Any = None,
) -> Float[Array, "slots N"]:
    """``x @ weights[expert].T (+ bias[expert])`` of every row tile, or with a gate.

    Args:
      x: bfloat16 or float16, ``tiles * height`` rows; or up to 8 rows that are those of all tiles.
      expert: of every tile.
      count: of tiles that there are. The rows of others are not written.
      weights: ``[E, N, K]``, or ``[E, 2, N, K]`` for a gate; or such 4-bit floats, packed.
      bias: ``[E, N]`` or ``[E, 2, N]``.
      height: rows of a tile, a multiple of 8.
      gated: whether the first of two matmuls gates the second.
      limit: of the gate, as for :func:`longspec_jax.ops.matmul.experts.expert_mlp`.
      interpret: how Pallas interprets the kernel without a GPU; None compiles it.

    Raises:
      NotImplementedError: if ``K`` or ``N`` is not a multiple of 64.
    """
    *_, outputs, contracted = weights.shape
    packed = isinstance(weights, PackedMatrix)
    sizes = height, len(expert), contracted, outputs
    work = expert_work(*sizes, gated=gated, packed=packed)
    columns, depth = work.tile.columns, work.tile.depth
    memory = dict(
        # A matmul contracts whole swizzles, and those of packed weights have one scale.
        x_smem=swizzled((work.stages, height, depth), x.dtype, 2 * FLOAT_GROUP if packed else 128),
        out_smem=swizzled((work.warpgroups, height, WARPGROUP_ROWS), x.dtype),
        ready=plgpu.Barrier(num_arrivals=1 + work.copies * work.parts, num_barriers=work.stages),
        free=plgpu.Barrier(num_arrivals=work.warpgroups, num_barriers=work.stages),
    )
    stages = work.stages, work.parts
    if isinstance(weights, PackedMatrix):
        codes = weights.codes.reshape(len(weights.codes), *lines(weights.codes.shape[1]))
        given = dict(weights=codes, scale=weights.scale)
        memory["weights_smem"] = plgpu.SMEM((*stages, *lines(columns)), jnp.uint32)
        memory["scale_smem"] = plgpu.SMEM((*stages, work.groups, columns), x.dtype)
        if interpret is not None:
            # The interpreter's matrix units take no operand from registers.
            shape = work.warpgroups, WARPGROUP_ROWS, FLOAT_GROUP
            memory["operand_smem"] = plgpu.SMEM(shape, x.dtype)
    else:
        given = dict(weights=weights.reshape(-1, contracted))
        memory["weights_smem"] = swizzled((*stages, columns, depth), x.dtype)
    if bias is not None:
        given["bias"] = bias.reshape(-1, outputs)
    kernel = persistent(
        functools.partial(_kernel, work=work, limit=limit, names=tuple(given)),
        work,
        jax.ShapeDtypeStruct((len(expert) * height, outputs), x.dtype),
        memory,
        name="gated_experts" if gated else "experts",
        interpret=interpret,
    )
    return kernel(expert, count, x, *given.values())


def _kernel(
    expert: Ref,
    count: Ref,
    x: Ref,
    *refs: Ref,
    work: ExpertWork,
    limit: float | None,
    names: tuple[str, ...],
    **memory: Ref,
) -> None:
    """A program: a warpgroup that fetches, and one or two that multiply, unit after unit."""
    *given, out = refs
    kind = _PackedExperts if work.packed else _Experts
    program = kind(
        work=work,
        warpgroup=jax.lax.axis_index("warpgroup"),
        limit=limit,
        expert=expert,
        count=count,
        x=x,
        out=out,
        **dict(zip(names, given, strict=True)),
        **memory,
    )
    program.run(program.multiply, program.fetch)


@dataclasses.dataclass(frozen=True)
class _Unit:
    """One unit of work, by its row tile, strip and expert."""

    tile: jax.Array
    strip: jax.Array
    expert: jax.Array


@dataclasses.dataclass(frozen=True)
class _Experts(MatmulProgram):
    """One warpgroup of one program."""

    work: ExpertWork
    limit: float | None
    expert: Ref
    count: Ref
    x: Ref
    weights: Ref
    out: Ref
    x_smem: Ref
    weights_smem: Ref
    out_smem: Ref
    bias: Ref = None

    def each_unit(self, visit: Any) -> jax.Array:
        """As in :class:`MatmulProgram`, for the tiles that there are."""
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

    @property
    def mine(self) -> Any:
        """This warpgroup's outputs, among those of a strip."""
        return pl.ds(self.warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)

    def outputs(self, unit: _Unit, part: int) -> Any:
        """Where the outputs of a unit's strip begin, among those of all experts."""
        matrix = unit.expert * self.work.parts + part
        return matrix * self.work.columns + unit.strip * self.work.tile.columns

    def fetch(self, unit: Any, past: jax.Array) -> None:
        """Bring the unit's rows and weights."""
        work, tile = self.work, self.work.tile
        # Where all tiles have the same rows they have the first ones. The index is not known
        # beforehand, or Pallas would refuse rows beyond the last.
        shared = self.x.shape[0] <= work.rows
        rows = pl.ds((0 * unit.tile if shared else unit.tile) * work.rows, work.rows)

        def bring(step: jax.Array, stage: jax.Array) -> None:
            ready, depth = self.ready.at[stage], pl.ds(step * tile.depth, tile.depth)
            # The weights are further away.
            for part in range(work.parts):
                outputs = pl.ds(self.outputs(unit, part), tile.columns)
                self.fetch_weights(outputs, step, (stage, part))
            plgpu.copy_gmem_to_smem(self.x.at[rows, depth], self.x_smem.at[stage], ready)

        self.each_block(work.steps, past, bring)

    def fetch_weights(self, outputs: Ref, step: jax.Array, to: tuple[Any, int]) -> None:
        """Bring the weights of some outputs and a step's inputs."""
        depth = pl.ds(step * self.work.tile.depth, self.work.tile.depth)
        source = self.weights.at[outputs, depth]
        plgpu.copy_gmem_to_smem(source, self.weights_smem.at[to], self.ready.at[to[0]])

    def multiply(self, unit: Any, past: jax.Array) -> None:
        """Multiply this warpgroup's 64 outputs and write the result."""
        accumulators = [ACC((WARPGROUP_ROWS, self.work.rows), jnp.float32)] * self.work.parts
        parts = pl.run_scoped(functools.partial(self.sums, past), *accumulators)
        self.write(unit, self.finished(unit, *parts))

    def sums(self, past: jax.Array, *accumulators: Ref) -> list[Array]:
        """The products of the unit's weights and rows, ``[64, rows]``."""
        return self.accumulate(self.work.steps, past, self.operands, *accumulators)

    def operands(self, here: jax.Array, part: int) -> tuple[Ref, Ref]:
        """Weights and rows in a place of the ring."""
        rows = self.x_smem.at[here].transpose((1, 0))
        return self.weights_smem.at[here, part, self.mine], rows

    def finished(self, unit: _Unit, *parts: Array) -> Array:
        """The result ``[64, rows]`` with its biases, and its gate."""
        if self.bias is not None:
            parts = tuple(each + self.biases(unit, part) for part, each in enumerate(parts))
        if len(parts) == 1:
            return parts[0]
        if self.limit is None:
            return gated(parts, self.x.dtype)
        # Rounded as the two matmuls are where they are matmuls of their own.
        first, second = (each.astype(self.x.dtype).astype(jnp.float32) for each in parts)
        first = jnp.minimum(first, self.limit)
        second = jnp.maximum(jnp.minimum(second, self.limit), -self.limit)
        return first / (1.0 + jnp.exp(first * -SWISH)) * (second + 1.0)

    def biases(self, unit: _Unit, part: int) -> Array:
        """The biases of this warpgroup's outputs, in every column."""
        # Outputs that do not exist are never written.
        first = jnp.minimum(self.first(unit), self.work.columns - WARPGROUP_ROWS)
        matrix = unit.expert * self.work.parts + part
        bias = load(self.bias.at[matrix, pl.ds(first, WARPGROUP_ROWS)], BY_OUTPUT)
        shape = (WARPGROUP_ROWS, self.work.rows)
        return jax.lax.broadcast_in_dim(bias.astype(jnp.float32), shape, [0])

    def first(self, unit: _Unit) -> jax.Array:
        """The first of this warpgroup's outputs, among those of an expert."""
        return unit.strip * self.work.tile.columns + self.warpgroup * WARPGROUP_ROWS

    def write(self, unit: _Unit, out: Array) -> None:
        """Write the result of this warpgroup's outputs, a row for each of the tile."""
        to = self.out_smem.at[self.warpgroup]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # The last result is from the same place.
        out = plgpu.layout_cast(out.astype(to.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
        to.transpose((1, 0))[...] = out
        plgpu.commit_smem()
        rows = pl.ds(unit.tile * self.work.rows, self.work.rows)

        @pl.when(self.first(unit) < self.work.columns)
        def _() -> None:
            outputs = pl.ds(self.first(unit), WARPGROUP_ROWS)
            plgpu.copy_smem_to_gmem(to, self.out.at[rows, outputs])


@dataclasses.dataclass(frozen=True)
class _PackedExperts(_Experts):
    """The same with weights of 4-bit floats, which are widened in registers."""

    scale: Ref = None
    scale_smem: Ref = None
    operand_smem: Ref = None

    def fetch_weights(self, outputs: Ref, step: jax.Array, to: tuple[Any, int]) -> None:
        """As in :class:`_Experts`: a block of words, and the scales of its groups."""
        ready, groups = self.ready.at[to[0]], self.work.groups
        lines_each = lines(outputs.size)[0]
        of_lines = pl.ds(jax.lax.div(outputs.start, jnp.int32(16)), lines_each)
        plgpu.copy_gmem_to_smem(self.weights.at[step, of_lines], self.weights_smem.at[to], ready)
        scales = self.scale.at[pl.ds(step * groups, groups), outputs]
        plgpu.copy_gmem_to_smem(scales, self.scale_smem.at[to], ready)

    def sums(self, past: jax.Array, *accumulators: Ref) -> list[Array]:
        """See :class:`_Experts`. A group of inputs is multiplied while the next is widened."""
        work, count = self.work, lines(WARPGROUP_ROWS)[0]
        of_half = pl.ds(self.warpgroup * count, count)

        @pl.loop(0, work.steps)
        def _(step: jax.Array) -> None:
            here, before = self.stage(past + step), self.stage(past + step - 1)
            plgpu.barrier_wait(self.ready.at[here])
            for part, accumulator in enumerate(accumulators):
                words = self.weights_smem.at[here, part, of_half]
                pairs = widened_floats(load(words, WORDS))
                for group in range(work.groups):
                    inputs = pl.ds(group * FLOAT_GROUP, FLOAT_GROUP)
                    tokens = self.x_smem.at[here, :, inputs].transpose((1, 0))
                    plgpu.wgmma(accumulator, self.operand(pairs, (here, part, group)), tokens)
                    # It is over before the operand after the next takes its registers.
                    plgpu.wgmma_wait(1)
                    if not group and not part:
                        # A branch here would make all matmuls wait (docs/design/kernels.md).
                        arrive(self.free.at[before], predicate=step > 0)

        return self.results(work.steps, past, accumulators)

    def operand(self, pairs: tuple[Array, ...], at: tuple[Any, int, int]) -> Any:
        """The weights of 64 outputs and a group of inputs in bfloat16."""
        interpreted, group = self.operand_smem is not None, at[-1]
        words = range(group, group + 1)
        floats = arranged(*pairs, words=words, dtype=self.x.dtype, interpreted=interpreted)
        scale = load(self.scale_smem.at[(*at, self.mine)], BY_OUTPUT)
        weights = scaled_floats(floats, scale, interpreted=interpreted)
        if not interpreted:
            return weights
        to = self.operand_smem.at[self.warpgroup]
        to[...] = weights
        return to


def _quotient(count: jax.Array | int, size: jax.Array | int) -> jax.Array:
    """``count / size``, rounded up."""
    return jax.lax.div(count + size - 1, jnp.int32(size))
