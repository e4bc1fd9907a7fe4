"""Matmuls of quantised weights on Hopper GPUs: a Pallas kernel for Mosaic GPU.

The weights are the matrix units' first operand, which they take from registers: 64 outputs by 64
inputs of a warpgroup. So a code is widened once, on its way from shared memory, for up to 128
tokens. The tokens are the second operand, in groups of 8 columns, as the copy engine brings them.
The rest is as in :mod:`longspec_jax.ops.matmul.ordered_mosaic`: a warpgroup that fetches into a
ring, others that multiply, units in turns, and sums in an order that follows from the weights'
shape alone. A row's result depends on no other row.

Codes become numbers of 16 bits by operations on whole registers, each of two codes
(:mod:`longspec_jax.ops.matmul.widening`). A thread finds its codes side by side
(:mod:`longspec_jax.ops.matmul.packed`). Scales of groups, and zero points, are applied to the
widened codes, which rounds as the definition does. One scale an output multiplies the sum in
float32, which rounds less.

**Expected time** (H200, 4.3 TB/s, 29 T instructions of a thread a second): a layer of Llama-3-8B,
218 M weights, reads 221 MB in 8 bits and 116 MB in 4 with scales by 128, 51 and 27 us. Two codes
take 5 to 6 instructions in 8 bits and 4 in 4, with 1 for scales by group: 20 to 24 and 15 to 17 us
at full issue, beside the reading. 64 rows are 28 Gflop, 28 us at the peak of the matrix units, also
beside it. They are 0.19 GB from the second-level cache, some 25 us. With 3 us a launch that makes
some 65 and 45 us for 64 rows, where 16 bits take 127.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from longspec_jax.axes import Array
from longspec_jax.ops.hardware import WARPGROUP_ROWS
from longspec_jax.ops.launchers import launcher
from longspec_jax.ops.matmul.ordered_programs import Program, Unit, persistent
from longspec_jax.ops.matmul.ordered_tiles import MatmulTile
from longspec_jax.ops.matmul.packed import OPERAND, PackedMatrix
from longspec_jax.ops.matmul.quantised_tiles import QuantisedWork, row_groups
from longspec_jax.ops.matmul.widening import BY_OUTPUT, WORDS, arranged, arrive, load, widened

# Pallas documents ACC and does not re-export it in the way that type checkers ask for.
_ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]


@launcher("tile", "gated", "dtype", "interpret")
def matmul(
    x: Array,
    weights: PackedMatrix,
    bias: Array | None = None,
    *,
    tile: MatmulTile,
    gated: bool = False,
    dtype: Any,
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
    blocks, outputs, _ = weights.codes.shape
    parts = 2 if gated else 1
    work = QuantisedWork(
        rows=len(x),
        contracted=blocks * 512 // weights.bits,
        columns=outputs // parts,
        tile=tile,
        parts=parts,
        bits=weights.bits,
        group=weights.group,
        zeros=weights.zero is not None,
        wide=dtype == jnp.float32,
        groups=row_groups(len(x)),
    )
    rows = work.rows
    if rows > 8 and rows % 8 and work.groups == 1:
        x = jnp.pad(x, ((0, -rows % 8), (0, 0)))
    x = x.reshape(work.groups, -1, x.shape[-1])
    dtype = jnp.dtype(jnp.float32) if work.out_bytes == 4 else dtype
    stages, scales = (work.stages, parts), (work.scales, tile.columns)
    copies = work.groups + parts * (work.blocks + work.scales * (2 if work.zeros else 1))
    memory = dict(
        x_smem=_swizzled((work.stages, work.height, tile.depth), x.dtype),
        words_smem=plgpu.SMEM((*stages, work.blocks, tile.columns, 16), jnp.uint32),
        out_smem=_swizzled((work.warpgroups, work.height, WARPGROUP_ROWS), dtype),
        ready=plgpu.Barrier(num_arrivals=copies, num_barriers=work.stages),
        free=plgpu.Barrier(num_arrivals=work.warpgroups, num_barriers=work.stages),
    )
    if work.scales:
        memory["scale_smem"] = plgpu.SMEM((*stages, *scales), x.dtype)
    if work.scales and work.zeros:
        memory["zero_smem"] = plgpu.SMEM((*stages, *scales), x.dtype)
    if interpret is not None:
        # The interpreter's matrix units take no operand from registers.
        memory["operand_smem"] = plgpu.SMEM((work.warpgroups, WARPGROUP_ROWS, OPERAND), x.dtype)
    given = dict(words=weights.codes, scale=weights.scale, zero=weights.zero, bias=bias)
    given = {name: each for name, each in given.items() if each is not None}
    kernel = persistent(
        functools.partial(_kernel, work=work, stored=weights.stored, names=tuple(given)),
        work,
        jax.ShapeDtypeStruct((tile.splits * work.groups, x.shape[1], work.columns), dtype),
        memory,
        name="quantised_gated_matmul" if gated else "quantised_matmul",
        interpret=interpret,
    )
    out = kernel(x, *given.values()).reshape(tile.splits, -1, work.columns)[:, :rows]
    return out if tile.splits > 1 else out[0]


def _swizzled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory whose last two axes are cut into rows of 128 bytes, eight at a time."""
    # By the types of newer jax these are abstract; they are not.
    tiling = plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize))  # pyright: ignore
    swizzle = plgpu.SwizzleTransform(128)  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle))


def _kernel(
    x: Any, *refs: Any, work: QuantisedWork, stored: Any, names: tuple[str, ...], **memory: Any
) -> None:
    """A program: a warpgroup that fetches, and one or two that multiply, unit after unit."""
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
    program.run(program.multiply, program.fetch, program.free)


@dataclasses.dataclass(frozen=True)
class _Quantised(Program):
    """One warpgroup of one program.

    ``ready`` says that a place of the ring was filled, ``free`` that all have read it.
    """

    work: QuantisedWork
    stored: Any
    x: Any
    out: Any
    words: Any
    scale: Any
    x_smem: Any
    words_smem: Any
    out_smem: Any
    ready: Any
    free: Any
    zero: Any = None
    bias: Any = None
    scale_smem: Any = None
    zero_smem: Any = None
    operand_smem: Any = None

    def outputs(self, unit: Unit, part: int) -> Any:
        """The outputs of a unit's strip, among those of both matmuls."""
        columns = self.work.tile.columns
        return pl.ds(part * self.work.columns + unit.strip * columns, columns)

    def fetch(self, unit: Unit, past: jax.Array) -> None:
        """Bring the unit's tokens and weights, as soon as there is room in the ring."""
        work, depth = self.work, self.work.tile.depth

        @pl.loop(0, unit.steps)
        def _(step: jax.Array) -> None:
            place = past + step
            stage = self.stage(place)
            pl.when(place >= work.stages)(lambda: plgpu.barrier_wait(self.free.at[stage]))
            ready, first = self.ready.at[stage], unit.first + step
            # The weights are further away.
            for part in range(work.parts):
                outputs = self.outputs(unit, part)
                for block in range(work.blocks):
                    source = self.words.at[first * work.blocks + block, outputs]
                    to = self.words_smem.at[stage, part, block]
                    plgpu.copy_gmem_to_smem(source, to, ready)
                for index in range(work.scales):
                    place = first * depth + index * OPERAND
                    # Padding behind the last group has that one's scale.
                    group = jnp.minimum(place // work.group, self.scale.shape[0] - 1)
                    for source, to in ((self.scale, self.scale_smem), (self.zero, self.zero_smem)):
                        if source is not None:
                            to = to.at[stage, part, index]
                            plgpu.copy_gmem_to_smem(source.at[group, outputs], to, ready)
            for group, rows, here in self.rows(unit):
                source = self.x.at[group, rows, pl.ds(first * depth, depth)]
                plgpu.copy_gmem_to_smem(source, self.x_smem.at[stage, here], ready)

    def rows(self, unit: Unit) -> Iterator[tuple[int, Any, Any]]:
        """A unit's groups of rows, where each is in memory, and where among the unit's."""
        size = self.work.height // self.work.groups
        for group in range(self.work.groups):
            yield group, pl.ds(unit.row * size, size), pl.ds(group * size, size)

    def multiply(self, unit: Unit, past: jax.Array) -> None:
        """Multiply this warpgroup's 64 outputs and write the result."""
        accumulators = [_ACC((WARPGROUP_ROWS, self.work.height), jnp.float32)] * self.work.parts
        parts = pl.run_scoped(functools.partial(self.accumulate, unit, past), *accumulators)
        self.write(unit, self.finished(unit, *parts))

    def accumulate(self, unit: Unit, past: jax.Array, *accumulators: Any) -> list[Array]:
        """The products of the unit's weights and tokens, ``[64, tokens]``."""
        work = self.work
        zeros = [None] * work.parts
        if self.zero is not None and not work.group:
            zeros = [
                self.by_output(self.zero.at[0, self.mine(unit, part)], OPERAND)
                for part in range(work.parts)
            ]

        @pl.loop(0, unit.steps)
        def _(step: jax.Array) -> None:
            here, before = self.stage(past + step), self.stage(past + step - 1)
            plgpu.barrier_wait(self.ready.at[here])
            for index in range(work.operands):
                tokens = self.x_smem.at[here, :, pl.ds(index * OPERAND, OPERAND)]
                for part, accumulator in enumerate(accumulators):
                    operand = self.operand(here, part, index, zeros[part])
                    plgpu.wgmma(accumulator, operand, tokens.transpose((1, 0)))
                    # One matmul goes on while the next operand is widened. It is over before the
                    # operand after that, which may take the same registers.
                    plgpu.wgmma_wait(1)
                    if not index and not part:
                        # With a branch here, matmuls would wait for each other: the assembler
                        # cannot follow their registers across it (its warning C7513).
                        arrive(self.free.at[before], predicate=step > 0)

        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(self.free.at[self.stage(past + unit.steps - 1)])
        # The compiler sees no connection between the wait and the registers.
        return list(jax.lax.optimization_barrier([each[...] for each in accumulators]))

    def operand(self, stage: jax.Array, part: int, index: int, zero: Any) -> Any:
        """The weights of 64 outputs and 64 inputs in 16 bits."""
        work, dtype = self.work, self.x.dtype
        rows = pl.ds(self.warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)
        block, half = divmod(index, work.operands // work.blocks)
        words = load(self.words_smem.at[stage, part, block, rows], WORDS)
        group = index % max(work.scales, 1)
        if self.zero_smem is not None:
            zero = self.by_output(self.zero_smem.at[stage, part, group, rows], OPERAND)
        interpreted = self.operand_smem is not None
        each = 4 * work.blocks // work.operands
        of_words = range(half * each, (half + 1) * each)
        arrange = functools.partial(arranged, words=of_words, dtype=dtype, interpreted=interpreted)
        weights = widened(words, self.stored, dtype, arrange, zero)
        if work.scales:
            weights *= self.by_output(self.scale_smem.at[stage, part, group, rows], OPERAND)
        if not interpreted:
            return weights
        to = self.operand_smem.at[self.warpgroup]
        to[...] = weights
        return to

    def by_output(self, numbers: Any, columns: int) -> Array:
        """Numbers of this warpgroup's 64 outputs, each in as many columns."""
        of_outputs = load(numbers, BY_OUTPUT)
        return jax.lax.broadcast_in_dim(of_outputs, (WARPGROUP_ROWS, columns), [0])

    def mine(self, unit: Unit, part: int = 0) -> Any:
        """This warpgroup's outputs, among those of both matmuls."""
        strip = unit.strip * self.work.tile.columns + self.warpgroup * WARPGROUP_ROWS
        return pl.ds(part * self.work.columns + strip, WARPGROUP_ROWS)

    def finished(self, unit: Unit, *parts: Array) -> Array:
        """The result ``[64, tokens]`` with its scales, and its gate or its bias."""
        work = self.work
        if not work.group:
            parts = tuple(
                each * self.by_output(self.scale.at[0, self.mine(unit, part)], work.height)
                for part, each in enumerate(parts)
            )
        out, *up = parts
        if up:
            # Rounded as the two matmuls are where they are matmuls of their own.
            dtype = self.x.dtype
            gate, factor = (each.astype(dtype).astype(jnp.float32) for each in (out, *up))
            out = gate / (1.0 + jnp.exp(-gate)) * factor
        if self.bias is not None:
            bias = self.by_output(self.bias.at[self.mine(unit)], work.height)
            out += bias.astype(jnp.float32)
        return out

    def write(self, unit: Unit, out: Array) -> None:
        """Write the result of this warpgroup's outputs, a row for each token."""
        to = self.out_smem.at[self.warpgroup]
        if self.work.turns > 1:  # The last result may be on its way from the same place.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        out = plgpu.layout_cast(out.astype(to.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
        to.transpose((1, 0))[...] = out
        plgpu.commit_smem()
        for group, rows, here in self.rows(unit):
            place = unit.split * self.work.groups + group
            plgpu.copy_smem_to_gmem(to.at[here], self.out.at[place, rows, self.mine(unit)])
