"""Matmuls of one order on GPUs without Hopper's instructions: tiles of ``mma.sync``.

A program multiplies up to 64 rows by a strip of 64 columns of the weights, of each of two where one
gates the other. Blocks of 64 contracted rows come in turns into a ring in shared memory. The order
in which an element's products are added up follows only from the weights' shape: blocks in
ascending order, of a share of the contraction. The height of a row tile changes no element.

**Expected times.** They are those of reading the weights. A block of 8 KB takes a multiprocessor
800 clocks on an A100 (10 bytes a clock), 290 on a B200 and 2,600 on an RTX 4090. Multiplying it by
64 rows takes 256, 256 and 512 clocks of the tensor cores, and by 16 rows a quarter.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from longspec_jax.axes import Array, Ref
from longspec_jax.ops import ampere
from longspec_jax.ops.hardware import MULTIPROCESSORS, WARPGROUP_ROWS
from longspec_jax.ops.launchers import launcher
from longspec_jax.ops.matmul.ordered_tiles import HALF, WHOLE, refuse_uneven, refuse_uneven_head
from longspec_jax.ops.mosaic import load

_MOST_SPLITS, _MOST_STAGES = 8, 8
_ALONE = 108
"""As many programs as an A100 has multiprocessors."""
_DEPTH_OF_A_SPLIT = 512
"""The least contracted rows of a share: shorter ones would cost more than their programs gain."""


@dataclasses.dataclass(frozen=True)
class Work:
    """A matmul of ``[rows, contracted]`` by weights of ``[contracted, columns]``, and its programs.

    Attributes:
      rows: rows of the result.
      contracted: size of the contracted axis.
      columns: columns of the result, of each of two matmuls where they are gated.
      parts: matmuls of a program: two if one gates the other, otherwise one.
      head: whether the weights are an LM head, ``[columns, contracted]``.
      split: whether the contraction may be split and leave partials.
    """

    rows: int
    contracted: int
    columns: int
    parts: int = 1
    head: bool = False
    split: bool = False

    @property
    def height(self) -> int:
        """Rows of a tile. Copies take four groups of eight, and more."""
        return WARPGROUP_ROWS if self.rows > WARPGROUP_ROWS // 2 else WARPGROUP_ROWS // 2

    @property
    def size(self) -> int:
        """Columns of a strip, and contracted rows of a block."""
        whole = self.contracted % WHOLE == 0 and (self.head or self.columns % WHOLE == 0)
        return WHOLE if whole else HALF

    @property
    def strips(self) -> int:
        """Strips of columns; the last of a head begins earlier, so that all of it is there."""
        return -(-self.columns // self.size)

    @property
    def splits(self) -> int:
        """Shares of the contraction that give twice as many programs as multiprocessors."""
        if not self.split:
            return 1
        most = max(1, min(_MOST_SPLITS, self.contracted // _DEPTH_OF_A_SPLIT))
        return min(most, -(-2 * MULTIPROCESSORS // self.strips))

    @property
    def stages(self) -> int:
        """Places of the ring: of few programs each has a multiprocessor, of more two share one."""
        block = 2 * self.size * (self.height + self.parts * self.size)
        sharing = 1 if self.strips * self.splits <= _ALONE else 2
        return min(_MOST_STAGES, (ampere.SHARED_BYTES // sharing - 1024) // block)


@launcher("split")
def matmul(x: Array, weights: Array, bias: Array | None = None, *, split: bool = False) -> Array:
    """``x[rows, K] @ weights[K, N] (+ bias[N])``, or with a gate.

    Args:
      x: bfloat16 or float16.
      weights: ``[K, N]``, or ``[K, 2, N]`` for ``silu(x @ weights[:, 0]) * (x @ weights[:, 1])``.
      bias: of every column, or none.
      split: whether the contraction may be split.

    Returns:
      ``[splits, rows, N]``, whose sum is the result: one of the dtype of ``x``, or several float32.

    Raises:
      NotImplementedError: if ``K`` or ``N`` is not a multiple of 32.
    """
    contracted, columns = weights.shape[0], weights.shape[-1]
    refuse_uneven(contracted, columns, whole=HALF)
    work = Work(len(x), contracted, columns, parts=weights.ndim - 1, split=split)
    return _launch(work, x, weights.reshape(contracted, -1), bias)


@launcher()
def head_matmul(x: Array, table: Array) -> Array:
    """``x[rows, K] @ table[V, K].T`` in float32, for an LM head.

    Raises:
      NotImplementedError: if ``K`` is not a multiple of 64 or ``V`` of 8.
    """
    vocabulary, contracted = table.shape
    refuse_uneven_head(contracted, vocabulary)
    return _launch(Work(len(x), contracted, vocabulary, head=True), x, table)[0]


def _launch(work: Work, x: Array, weights: Array, bias: Array | None = None) -> Array:
    """``[splits, rows, N]`` of the matmul."""
    dtype = jnp.dtype(jnp.float32) if work.head or work.splits > 1 else x.dtype
    x = jnp.pad(x, ((0, -work.rows % work.height), (0, 0)))
    kernel = plgpu.kernel(
        functools.partial(_kernel, work=work),
        out_type=jax.ShapeDtypeStruct((work.splits, len(x), work.columns), dtype),
        scratch_types=dict(
            x_smem=ampere.shared(work.stages, work.height, work.size, dtype=x.dtype),
            weights_smem=ampere.shared(
                work.stages, work.parts, work.size, work.size, dtype=x.dtype
            ),
        ),
        # Row tiles of one strip run at the same time: the first reads the weights from memory.
        grid=(len(x) // work.height, work.strips, work.splits),
        grid_names=("row", "strip", "split"),
        compiler_params=ampere.compiler_params(),
        kernel_name="head" if work.head else "gated_matmul" if work.parts == 2 else "matmul",
    )
    return kernel(x, weights, *([] if bias is None else [bias]))[:, : work.rows]


def _kernel(x: Ref, weights: Ref, *refs: Ref, work: Work, x_smem: Ref, weights_smem: Ref) -> None:
    """One row tile by one strip, over one share of the contraction."""
    *bias, out = refs
    size, stages = work.size, work.stages
    row, strip, split = (jax.lax.axis_index(name) for name in ("row", "strip", "split"))
    rows = pl.ds(row * work.height, work.height)
    column = jnp.minimum(strip * size, work.columns - size)
    blocks = work.contracted // size
    first, last = ((split + end) * blocks // work.splits for end in (0, 1))

    def fetch(step: jax.Array) -> None:
        """Bring a block, as a copy for each matmul and one of the rows."""
        place, depth = jax.lax.rem(step, jnp.int32(stages)), pl.ds((first + step) * size, size)
        copies = []
        for part in range(work.parts):
            columns = pl.ds(part * work.columns + column, size)
            at = (columns, depth) if work.head else (depth, columns)
            copies.append((weights, at, weights_smem.at[place, part]))
        copies.append((x, (rows, depth), x_smem.at[place]))
        ampere.copy_if(first + step < last, *copies)

    def multiply(step: jax.Array, accumulators: tuple[Array, ...]) -> tuple[Array, ...]:
        ampere.wait((work.parts + 1) * (stages - 2))
        # All have read the place of the step before.
        fetch(step + stages - 1)
        place = jax.lax.rem(step, jnp.int32(stages))
        a = ampere.left(x_smem.at[place], work.height)
        found = []
        for part, acc in enumerate(accumulators):
            block = weights_smem.at[place, part]
            b = ampere.right(block.transpose((1, 0)) if work.head else block, work.height)
            found.append(ampere.mma(acc, a, b))
        return tuple(found)

    for step in range(stages - 1):
        fetch(jnp.int32(step))
    begin = tuple(ampere.zeros(work.height, size, x.dtype) for _ in range(work.parts))
    result, *up = jax.lax.fori_loop(0, last - first, multiply, begin)
    if up:
        # Rounded as the two matmuls are where they are matmuls of their own.
        gate, factor = (each.astype(x.dtype).astype(jnp.float32) for each in (result, *up))
        result = gate / (1.0 + jnp.exp(-gate)) * factor
    if bias:
        layout = ampere.accumulator(x.dtype, work.height)
        added = load(bias[0].at[pl.ds(column, size)], layout.reduce(0)).astype(jnp.float32)
        result += ampere.along_columns(added, result.shape, layout)
    ampere.store(out.at[split, rows, pl.ds(column, size)], result.astype(out.dtype))
