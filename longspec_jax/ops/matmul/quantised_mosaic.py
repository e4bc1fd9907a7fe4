"""Matmuls of quantised weights on Hopper GPUs: a Pallas kernel for Mosaic GPU.

The weights are the matrix units' first operand, which they take from registers: 64 outputs by 64
inputs of a warpgroup. So a code is widened once, on its way from shared memory, for up to 128
tokens. The tokens are the second operand, in groups of 8 columns, as the copy engine brings them.
The rest is as in :mod:`longspec_jax.ops.matmul.ordered_mosaic`: a warpgroup that fetches into a
ring, others that multiply, units in turns, and sums in an order that follows only from the
weights' shape. A row's result depends on no other row.

Four warpgroups multiply, since one of them waits half of its time. Those of the same 64 outputs are
a *team*: each has one matmul of a gate, or every other block of the inputs. The first of a team
reads the sums of the others from shared memory, and writes the result.

Codes become numbers of 16 bits by operations on whole registers, each of two codes
(:mod:`longspec_jax.ops.matmul.widening`). A thread finds its codes side by side
(:mod:`longspec_jax.ops.matmul.packed`). Scales of groups, and zero points, are applied to the
widened codes, which rounds as the definition does. One scale an output multiplies the sum in
float32, which rounds less.

**Expected time** (H200, 4.3 TB/s, 33 T instructions of a thread a second): a layer of Llama-3-8B,
218 M weights, reads 221 MB in 8 bits, 116 MB in 4 with scales by 128 and 129 MB in Q4_K, 51, 27 and
30 us. In the machine code a code takes 3.0 instructions in 4 bits with a scale by 128, 5.0 in Q4_K
and 5.8 in Q6_K: 20, 33 and 38 us at full issue, during the reading, if all multiprocessors have as
many codes. 64 rows are 28 Gflop, 28 us at the peak of the matrix units, also during it. They are
0.19 GB from the second-level cache, some 25 us. A launch takes 4 us more
(``docs/archive/kernels.md``).
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from longspec_jax.axes import Array, Ref
from longspec_jax.ops.hardware import WARPGROUP_ROWS
from longspec_jax.ops.launchers import launcher
from longspec_jax.ops.matmul.ordered_programs import MatmulProgram, Unit, gated, persistent
from longspec_jax.ops.matmul.ordered_tiles import MatmulTile
from longspec_jax.ops.matmul.packed import OPERAND, PackedMatrix
from longspec_jax.ops.matmul.quantised_tiles import QuantisedWork, row_groups
from longspec_jax.ops.matmul.quantised_weights import UNIT
from longspec_jax.ops.matmul.widening import (
    BY_OUTPUT,
    WORDS,
    arrive,
    lines,
    signed_byte,
    weighted,
    widened,
)
from longspec_jax.ops.mosaic import ACC, load, swizzled


@launcher("tile", "gated", "dtype", "interpret")
def matmul(
    x: Array,
    weights: PackedMatrix,
    bias: Array | None = None,
    *,
    tile: MatmulTile,
    gated: bool = False,
    dtype: DTypeLike,
    interpret: Any = None,
) -> Array:
    """``x[rows, K] @ dequantised.T (+ bias[N])``, or with a gate.

    Args:
      x: bfloat16 or float16.
      weights: packed for the dtype of ``x``.
      bias: of every output, or none.
      tile: what of the weights a unit reads.
      gated: whether the first half of the outputs gates the second: ``silu(first) * second``.
      dtype: of the result, that of ``x`` or float32.
      interpret: how Pallas interprets the kernel without a GPU; None compiles it.

    Returns:
      ``[rows, N]`` in this dtype (``N / 2`` outputs if gated), or ``[splits, rows, N]`` in
      float32, whose sum is the result, if the tile splits the contraction.
    """
    if weights.order is not None:
        x = jnp.take(x, weights.order, axis=-1)
    work = _work(len(x), weights, tile, gated=gated, wide=dtype == jnp.float32)
    rows = work.rows
    if rows > 8 and rows % 8 and work.groups == 1:
        x = jnp.pad(x, ((0, -rows % 8), (0, 0)))
    x = x.reshape(work.groups, -1, x.shape[-1])
    dtype = jnp.dtype(jnp.float32) if work.out_bytes == 4 else dtype
    given = _given(work, weights, bias)
    kernel = persistent(
        functools.partial(_kernel, work=work, stored=weights.stored, names=tuple(given)),
        work,
        jax.ShapeDtypeStruct((tile.splits * work.groups, x.shape[1], work.columns), dtype),
        _memory(work, weights, x.dtype, dtype, interpreted=interpret is not None),
        name="quantised_gated_matmul" if gated else "quantised_matmul",
        interpret=interpret,
    )
    out = kernel(x, *given.values()).reshape(tile.splits, -1, work.columns)[:, :rows]
    return out if tile.splits > 1 else out[0]


def _work(
    rows: int, weights: PackedMatrix, tile: MatmulTile, *, gated: bool, wide: bool
) -> QuantisedWork:
    blocks, outputs, _ = weights.codes.shape
    parts = 2 if gated else 1
    return QuantisedWork(
        rows=rows,
        contracted=blocks * 512 // weights.bits,
        columns=outputs // parts,
        tile=tile,
        parts=parts,
        bits=weights.bits,
        group=weights.group,
        zeros=weights.zero is not None or weights.offset is not None,
        fine=weights.fine,
        counted=weights.counted,
        wide=wide,
        groups=row_groups(rows),
    )


def _given(work: QuantisedWork, weights: PackedMatrix, bias: Array | None) -> dict[str, Array]:
    """The operands besides the tokens, by the names that :class:`_Quantised` gives them."""
    given = dict(
        words=weights.codes.reshape(-1, work.parts, *lines(work.columns)),
        bias=bias,
        scale=weights.scale,
        zero=weights.offset if work.fine else weights.zero,
        scale_unit=weights.unit,
        zero_unit=weights.offset_unit,
    )
    return {
        name: each if name in ("words", "bias") else each.reshape(-1, work.parts, work.columns)
        for name, each in given.items()
        if each is not None
    }


def _memory(
    work: QuantisedWork,
    weights: PackedMatrix,
    dtype: DTypeLike,
    out_dtype: DTypeLike,
    *,
    interpreted: bool,
) -> dict[str, Any]:
    """Shared memory and barriers of a program."""
    parts, columns = work.parts, work.tile.columns
    memory = dict(
        x_smem=swizzled((work.stages, work.height, work.tile.depth), dtype),
        words_smem=plgpu.SMEM((work.stages, work.blocks, parts, *lines(columns)), jnp.uint32),
        out_smem=swizzled((work.halves, work.height, WARPGROUP_ROWS), out_dtype),
        ready=plgpu.Barrier(num_arrivals=work.copies, num_barriers=work.stages),
        free=plgpu.Barrier(num_arrivals=work.warpgroups, num_barriers=work.stages),
    )
    for name in ("scale_smem", "zero_smem")[: work.of_group if work.scales else 0]:
        scales = work.stages, work.scale_rows, parts, columns
        memory[name] = plgpu.SMEM(scales, weights.scale.dtype)
    for name in ("scale_unit_smem", "zero_unit_smem")[: work.of_group if work.counted else 0]:
        memory[name] = plgpu.SMEM((work.stages, work.scale_units, parts, columns), jnp.float16)
    if work.handed:
        memory["sums_smem"] = plgpu.SMEM((work.handed, WARPGROUP_ROWS, work.pitch), jnp.float32)
        memory["met"] = plgpu.Barrier(num_arrivals=work.warpgroups)
    if interpreted:  # The interpreter's matrix units take no operand from registers.
        memory["operand_smem"] = plgpu.SMEM((work.warpgroups, WARPGROUP_ROWS, OPERAND), dtype)
    return memory


def _kernel(
    x: Ref,
    *refs: Ref,
    work: QuantisedWork,
    stored: DTypeLike,
    names: tuple[str, ...],
    **memory: Ref,
) -> None:
    """A program: a warpgroup that fetches, and others that multiply, unit after unit."""
    *given, out = refs
    program = _Quantised(
        work=work,
        warpgroup=jax.lax.axis_index("warpgroup"),
        stored=stored,
        x=x,
        out=out,
        **dict(zip(names, given, strict=True)),
        **memory,
    )
    program.run(program.multiply, program.fetch)


@dataclasses.dataclass(frozen=True)
class _Quantised(MatmulProgram):
    """One warpgroup of one program."""

    work: QuantisedWork
    stored: DTypeLike
    x: Ref
    out: Ref
    words: Ref
    scale: Ref
    x_smem: Ref
    words_smem: Ref
    out_smem: Ref
    zero: Ref = None
    bias: Ref = None
    scale_unit: Ref = None
    zero_unit: Ref = None
    scale_smem: Ref = None
    zero_smem: Ref = None
    scale_unit_smem: Ref = None
    zero_unit_smem: Ref = None
    sums_smem: Ref = None
    met: Ref = None
    operand_smem: Ref = None

    @property
    def team(self) -> tuple[jax.Array, jax.Array]:
        """Which 64 outputs of a strip are this warpgroup's, and its place among their team."""
        size = jnp.int32(self.work.team)
        return jax.lax.div(self.warpgroup, size), jax.lax.rem(self.warpgroup, size)

    def fetch(self, unit: Unit, past: jax.Array) -> None:
        """Bring the unit's tokens and weights."""
        work, depth, columns = self.work, self.work.tile.depth, self.work.tile.columns
        outputs = pl.ds(unit.strip * columns, columns)
        of_lines = pl.ds(unit.strip * lines(columns)[0], lines(columns)[0])
        numbers, units = (
            [(source, to) for source, to in pairs if source is not None]
            for pairs in (
                ((self.scale, self.scale_smem), (self.zero, self.zero_smem)),
                ((self.scale_unit, self.scale_unit_smem), (self.zero_unit, self.zero_unit_smem)),
            )
        )

        def bring(step: jax.Array, stage: jax.Array) -> None:
            ready, first = self.ready.at[stage], unit.first + step
            # The weights are further away.
            source = self.words.at[pl.ds(first * work.blocks, work.blocks), :, of_lines]
            plgpu.copy_gmem_to_smem(source, self.words_smem.at[stage], ready)
            for index in range(0 if work.fine else work.scales):
                group = jax.lax.div(first * depth + index * work.scaled, jnp.int32(work.group))
                # Padding after the last group has that one's scale.
                group = jnp.minimum(group, self.scale.shape[0] - 1)
                for source, to in numbers:
                    source = source.at[group, :, outputs]
                    plgpu.copy_gmem_to_smem(source, to.at[stage, index], ready)
            for source, to in numbers if work.fine else ():
                source = source.at[pl.ds(first * work.scale_rows, work.scale_rows), :, outputs]
                plgpu.copy_gmem_to_smem(source, to.at[stage], ready)
            of_units = pl.ds(first * work.scale_units, work.scale_units)
            for source, to in units:
                plgpu.copy_gmem_to_smem(source.at[of_units, :, outputs], to.at[stage], ready)
            for group, rows, here in self.rows(unit):
                source = self.x.at[group, rows, pl.ds(first * depth, depth)]
                plgpu.copy_gmem_to_smem(source, self.x_smem.at[stage, here], ready)

        self.each_block(unit.steps, past, bring)

    def rows(self, unit: Unit) -> Iterator[tuple[int, Any, Any]]:
        """A unit's groups of rows, where each is in memory, and where among the unit's."""
        size = self.work.height // self.work.groups
        for group in range(self.work.groups):
            yield group, pl.ds(unit.row * size, size), pl.ds(group * size, size)

    def multiply(self, unit: Unit, past: jax.Array) -> None:
        """Multiply with this warpgroup's weights, and write the result of a whole team."""
        work = self.work
        last = self.last(unit)
        accumulators = [ACC((WARPGROUP_ROWS, work.height), jnp.float32)] * work.held
        sums = pl.run_scoped(functools.partial(self.sums, unit, past), *accumulators)
        if work.team == 1:
            self.write(unit, self.finished(last, self.parts(sums)))
            return
        own = sums[0] if len(sums) == 1 else sums[0] + sums[1]
        half, member = self.team
        first = half * (work.team - 1)
        if work.turns > 1:  # The last sums were read.
            self.meet()

        @pl.when(member > 0)
        def _() -> None:
            self.handed(first + member - 1)[...] = own
            plgpu.commit_smem()

        self.meet()

        @pl.when(member == 0)
        def _() -> None:
            others = [
                load(self.handed(first + index), plgpu.Layout.WGMMA)
                for index in range(work.team - 1)
            ]
            self.write(unit, self.finished(last, self.parts([own, *others])))

    def handed(self, index: jax.Array) -> Any:
        """Where a warpgroup leaves its sums for the first of its team."""
        return self.sums_smem.at[index, :, pl.ds(0, self.work.height)]

    def meet(self) -> None:
        """Wait for the other warpgroups that multiply."""
        plgpu.barrier_arrive(self.met)
        plgpu.barrier_wait(self.met)

    def parts(self, sums: list[Array]) -> list[Array]:
        """The sums of each matmul: those of neighbouring ways are added, then of neighbours."""
        while len(sums) > self.work.parts:
            sums = [one + other for one, other in zip(sums[::2], sums[1::2], strict=True)]
        return sums

    def sums(self, unit: Unit, past: jax.Array, *accumulators: Ref) -> list[Array]:
        """The products of the unit's weights and tokens, ``[64, tokens]``."""
        work = self.work
        shares = []
        for index in range(work.held):
            if work.team == 1:
                shares.append(divmod(index, work.ways))
            else:
                place = self.team[1] * work.held + index
                ways = jnp.int32(work.ways)
                shares.append((jax.lax.div(place, ways), jax.lax.rem(place, ways)))
        zeros: list[Array | None] = [None] * work.held
        groups: list[_Groups | None] = [None] * work.held
        if self.zero is not None and not work.group:
            zeros = [self.by_output(self.zero.at[0, part, self.mine(unit)]) for part, _ in shares]

        @pl.loop(0, unit.steps, init_carry=self.stage(past + work.stages - 1))
        def last(step: jax.Array, before: jax.Array) -> jax.Array:
            here = self.next(before)
            plgpu.barrier_wait(self.ready.at[here])
            for index in range(work.operands):
                turn, quarter = divmod(index, work.block_operands)
                for number, (part, way) in enumerate(shares):
                    block = turn * work.ways + way
                    inputs = pl.ds((block * work.block_operands + quarter) * OPERAND, OPERAND)
                    tokens = self.x_smem.at[here, :, inputs]
                    if work.fine and not quarter:
                        groups[number] = self.of_block(here, part, block)
                    operand = self.operand(
                        here, part, block, quarter, zeros[number], groups[number]
                    )
                    plgpu.wgmma(accumulators[number], operand, tokens.transpose((1, 0)))
                    # One matmul goes on while the next operand is widened. It is over before the
                    # operand after that, which takes the same registers; so does the very next
                    # one where an iteration has a single operand.
                    plgpu.wgmma_wait(1 if work.operands * work.held > 1 else 0)
                    if not index and not number:
                        # With a branch here, matmuls would wait for each other: the assembler
                        # cannot follow their registers across it (its warning C7513).
                        arrive(self.free.at[before], predicate=step > 0)
            return here

        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(self.free.at[last])
        # The compiler sees no connection between the wait and the registers.
        return list(jax.lax.optimization_barrier([each[...] for each in accumulators]))

    def operand(
        self,
        stage: jax.Array,
        part: Any,
        block: Any,
        quarter: int,
        zero: Any,
        groups: "_Groups | None",
    ) -> Any:
        """The weights of 64 outputs and 64 inputs in 16 bits."""
        work, dtype, (half, _) = self.work, self.x.dtype, self.team
        count, _ = lines(WARPGROUP_ROWS)
        of_half = pl.ds(half * count, count)
        words = load(self.words_smem.at[stage, block, part, of_half], WORDS)
        interpreted = self.operand_smem is not None
        each = 4 // work.block_operands
        of_words = range(quarter * each, (quarter + 1) * each)
        if groups is not None:
            scales, offsets = (numbers.of_operand(quarter, work) for numbers in groups)
            weights = weighted(
                words,
                self.stored,
                dtype,
                scales.times,
                offsets.times(1.0),
                chosen=of_words,
                interpreted=interpreted,
            )
        else:
            rows = self.of_team
            place = (block * work.block_operands + quarter) * OPERAND
            group = jax.lax.div(place, work.scaled) if work.scaled else 0
            if self.zero_smem is not None:
                zero = self.by_output(self.zero_smem.at[stage, group, part, rows])
            weights = widened(
                words, self.stored, dtype, zero, chosen=of_words, interpreted=interpreted
            )
            if work.scales:
                weights *= self.by_output(self.scale_smem.at[stage, group, part, rows])
        if not interpreted:
            return weights
        to = self.operand_smem.at[self.warpgroup]
        to[...] = weights
        return to

    def of_block(self, stage: jax.Array, part: Any, block: Any) -> "_Groups":
        """Scales and offsets of a block's fine groups."""
        kinds = (self.scale_smem, self.scale_unit_smem), (self.zero_smem, self.zero_unit_smem)
        scales, offsets = (
            _Numbers([], None) if each is None else self.loaded(each, units, stage, part, block)
            for each, units in kinds
        )
        return scales, offsets

    def loaded(
        self, numbers: Ref, units: Ref, stage: jax.Array, part: Any, block: Any
    ) -> "_Numbers":
        """Scales or offsets of this warpgroup's 64 outputs, of every group of a block."""
        work, rows = self.work, self.of_team
        first, count = block * work.block_groups, work.block_groups
        if units is None:
            each = [
                load(numbers.at[stage, first + at, part, rows], BY_OUTPUT) for at in range(count)
            ]
            return _Numbers(each, None)
        words = [
            load(numbers.at[stage, jax.lax.div(first, 4) + at, part, rows], BY_OUTPUT)
            for at in range(-(-count // 4))
        ]
        if count < 4:  # Half of a word.
            words = [words[0] >> (8 * jax.lax.rem(first, 4)).astype(jnp.uint32)]
        unit = jax.lax.div(block * work.block_operands * OPERAND, UNIT)
        unit = load(units.at[stage, unit, part, rows], BY_OUTPUT).astype(jnp.float32)
        interpreted = self.operand_smem is not None
        each = [signed_byte(words[at // 4], at % 4, interpreted=interpreted) for at in range(count)]
        return _Numbers(each, unit)

    @property
    def of_team(self) -> Any:
        """This warpgroup's 64 outputs, among those of a strip."""
        return pl.ds(self.team[0] * WARPGROUP_ROWS, WARPGROUP_ROWS)

    def by_output(self, numbers: Ref) -> Array:
        """Numbers of this warpgroup's 64 outputs, each in as many columns as an operand has."""
        return self.across(load(numbers, BY_OUTPUT), OPERAND)

    def across(self, of_outputs: Array, columns: int) -> Array:
        """Numbers of 64 outputs, each in as many columns."""
        return jax.lax.broadcast_in_dim(of_outputs, (WARPGROUP_ROWS, columns), [0])

    def mine(self, unit: Unit) -> Any:
        """This warpgroup's outputs, among those of a matmul."""
        strip = unit.strip * self.work.tile.columns + self.team[0] * WARPGROUP_ROWS
        return pl.ds(strip, WARPGROUP_ROWS)

    def last(self, unit: Unit) -> dict[str, Array | None]:
        """Scales and biases that a result gets, asked for before they are needed."""
        mine = self.mine(unit)
        last: dict[str, Array | None] = dict(bias=None, scale=None, other=None)
        if self.bias is not None:
            last["bias"] = load(self.bias.at[mine], BY_OUTPUT)
        if not self.work.group:
            for part, name in zip(range(self.work.parts), ("scale", "other"), strict=False):
                last[name] = load(self.scale.at[0, part, mine], BY_OUTPUT)
        return last

    def finished(self, last: dict[str, Array | None], parts: list[Array]) -> Array:
        """The result ``[64, tokens]`` with its scales, and its gate or its bias."""
        scales = last["scale"], last["other"]
        parts = [
            each if scale is None else each * self.across(scale, self.work.height)
            for each, scale in zip(parts, scales, strict=False)
        ]
        out, *up = parts
        if up:
            out = gated((out, *up), self.x.dtype)
        if last["bias"] is not None:
            out += self.across(last["bias"], self.work.height).astype(jnp.float32)
        return out

    def write(self, unit: Unit, out: Array) -> None:
        """Write the result of this warpgroup's outputs, a row for each token."""
        to = self.out_smem.at[self.team[0]]
        if self.work.turns > 1:  # The last result may be on its way from the same place.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        out = plgpu.layout_cast(out.astype(to.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
        to.transpose((1, 0))[...] = out
        plgpu.commit_smem()
        for group, rows, here in self.rows(unit):
            place = unit.split * self.work.groups + group
            plgpu.copy_smem_to_gmem(to.at[here], self.out.at[place, rows, self.mine(unit)])


@dataclasses.dataclass(frozen=True)
class _Numbers:
    """Scales or offsets of 64 outputs, float32, for each of some groups; or none.

    Counted ones are to be multiplied by a unit of all of them.
    """

    counts: list[Array]
    unit: Array | None

    def of_operand(self, quarter: int, work: QuantisedWork) -> "_Numbers":
        """Those of an operand of a block."""
        count = len(self.counts) // work.block_operands
        return _Numbers(self.counts[quarter * count : (quarter + 1) * count], self.unit)

    def times(self, factor: float) -> list[Array]:
        """All times a power of two, which is exact."""
        unit = factor if self.unit is None else self.unit if factor == 1 else self.unit * factor
        return self.counts if self.unit is None and factor == 1 else [x * unit for x in self.counts]


_Groups = tuple[_Numbers, _Numbers]
"""Scales and offsets."""
