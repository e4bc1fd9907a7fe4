"""Matmuls of few rows on Hopper GPUs: a Pallas kernel for Mosaic GPU that streams the weights.

A program owns a strip of columns and a share of the contraction. One warpgroup fetches blocks of
rows and weights with the copy engine into a ring that takes all shared memory, so that every
multiprocessor has some 200 KiB on their way whenever it waits; the other multiplies. All rows
are one instruction high, 64, and those that do not exist are garbage that is never stored: a row
of a result depends on no other row.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from longspec_jax.axes import Array
from longspec_jax.ops.hardware import HOPPER, MULTIPROCESSORS, SHARED_BYTES, WARPGROUP_ROWS

# Pallas documents ACC and does not re-export it in the way that type checkers ask for.
_ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
_FETCH, _MULTIPLY = 1, 0
"""The warpgroups."""
_REGISTERS = {_FETCH: 40, _MULTIPLY: 232}


@dataclasses.dataclass(frozen=True)
class MatmulTile:
    """How one program of the matmul of few rows works.

    Attributes:
      columns: columns of the result a program owns; of each of two matmuls where they are gated.
      depth: contracted rows of the weights per step.
      splits: programs that share a strip of columns, each with a part of the contraction.
      stages: depth of the ring of blocks in shared memory.
    """

    columns: int
    depth: int
    splits: int
    stages: int


def matmul_tile(
    rows: int, contracted: int, columns: int, gated: bool = False, split: bool = False
) -> MatmulTile:
    """Choose the tile from the shape alone; refuse where XLA's matmul is as good.

    As many programs as there are multiprocessors, or a little fewer: 86 of them read nearly as fast
    as 132, and a second wave starts anew. Narrow strips are the slower ones, 64 columns a row of
    them (128 bytes) at the least.

    Args:
      rows: rows of the result, whole groups of 8 up to one instruction's 64.
      contracted: size of the contracted axis.
      columns: columns of the result, of each of two matmuls where they are gated.
      gated: whether there are two matmuls of which one gates the other.
      split: whether the contraction may be split and leave partials.
    """
    if rows % 8 or not 0 < rows <= WARPGROUP_ROWS:
        raise NotImplementedError(
            f"the Mosaic matmul takes whole groups of 8 rows up to {WARPGROUP_ROWS}, not {rows}"
        )
    fitting: list[tuple[int, int, int]] = []
    for width in (128,) if gated else (64, 128):
        for splits in (1, 2, 4) if split else (1,):
            programs = columns // width * splits
            if columns % width == 0 and contracted % (64 * splits) == 0 and programs >= 64:
                over = programs > MULTIPROCESSORS
                fitting.append((over * programs or -programs, splits, width))
    if not fitting:
        raise NotImplementedError(
            f"no tile of the Mosaic matmul fits {contracted} x {columns} weights and keeps 64 "
            "multiprocessors busy"
        )
    _, splits, width = min(fitting)
    depth = 128 if width == 64 and contracted % (128 * splits) == 0 else 64
    room = SHARED_BYTES[HOPPER] - WARPGROUP_ROWS * width * 4 - 1024
    stage = 2 * depth * (WARPGROUP_ROWS + width * (2 if gated else 1))
    return MatmulTile(width, depth, splits, min(room // stage, contracted // splits // depth))


@functools.partial(jax.jit, static_argnames=("tile",))
def matmul(x: Array, weights: Array, bias: Array | None = None, *, tile: MatmulTile) -> Array:
    """``x[rows, K] @ weights[K, N] (+ bias[N])``, or with a gate.

    Args:
      x: whole groups of 8 rows.
      weights: ``[K, N]``, or ``[K, 2, N]`` for ``silu(x @ weights[:, 0]) * (x @ weights[:, 1])``.
      bias: of every column, or none.
      tile: how a program works.

    Returns:
      ``[rows, N]`` in the dtype of ``x``, or ``[splits, rows, N]`` in float32, whose sum is the
      result, if the tile splits the contraction.
    """
    rows, contracted = x.shape
    columns, gated = weights.shape[-1], weights.ndim == 3
    dtype = jnp.float32 if tile.splits > 1 else x.dtype
    out_shape = (tile.splits, rows, columns) if tile.splits > 1 else (rows, columns)
    parts = (2,) if gated else ()
    # By the types of newer jax these are abstract; they are not.
    tiling = plgpu.TilingTransform((8, 64))  # pyright: ignore[reportAbstractUsage]
    swizzled = (tiling, plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]
    kernel = plgpu.kernel(
        functools.partial(_kernel, tile=tile, has_bias=bias is not None),
        out_type=jax.ShapeDtypeStruct(out_shape, dtype),
        scratch_types=dict(
            x_smem=plgpu.SMEM(
                (tile.stages, WARPGROUP_ROWS, tile.depth), x.dtype, transforms=swizzled
            ),
            weights_smem=plgpu.SMEM(
                (tile.stages, *parts, tile.depth, tile.columns), x.dtype, transforms=swizzled
            ),
            out_smem=plgpu.SMEM((WARPGROUP_ROWS, tile.columns), dtype),
            ready=plgpu.Barrier(num_arrivals=3 if gated else 2, num_barriers=tile.stages),
            free=plgpu.Barrier(num_barriers=tile.stages),
        ),
        grid=(columns // tile.columns, tile.splits),
        grid_names=("strip", "split"),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="gated_matmul" if gated else "matmul",
    )
    return kernel(x, weights, *([] if bias is None else [bias]))


def _kernel(
    x_ref: Any,
    weights_ref: Any,
    *rest: Any,
    x_smem: Any,
    weights_smem: Any,
    out_smem: Any,
    ready: Any,
    free: Any,
    tile: MatmulTile,
    has_bias: bool,
) -> None:
    """One program: a strip of columns, a share of the contraction."""
    bias_ref, out_ref = (rest[0], rest[1]) if has_bias else (None, rest[0])
    rows, gated = x_ref.shape[0], weights_ref.ndim == 3
    share = x_ref.shape[1] // tile.splits
    steps = share // tile.depth
    split = jax.lax.axis_index("split")
    columns = pl.ds(jax.lax.axis_index("strip") * tile.columns, tile.columns)
    warpgroup = jax.lax.axis_index("warpgroup")

    def fetch() -> None:
        @pl.loop(0, steps)
        def _(step: jax.Array) -> None:
            stage = jax.lax.rem(step, tile.stages)
            pl.when(step >= tile.stages)(lambda: plgpu.barrier_wait(free.at[stage]))
            depth = pl.ds(split * share + step * tile.depth, tile.depth)
            whole = rows == WARPGROUP_ROWS
            to = x_smem.at[stage] if whole else x_smem.at[stage, pl.ds(0, rows)]
            plgpu.copy_gmem_to_smem(x_ref.at[:, depth], to, ready.at[stage])
            for part in ((0,), (1,)) if gated else ((),):
                block = weights_ref.at[(depth, *part, columns)]
                plgpu.copy_gmem_to_smem(block, weights_smem.at[(stage, *part)], ready.at[stage])

    def multiply() -> None:
        def accumulate(*accumulators: Any) -> list[Array]:
            @pl.loop(0, steps)
            def _(step: jax.Array) -> None:
                stage = jax.lax.rem(step, tile.stages)
                plgpu.barrier_wait(ready.at[stage])
                for part, accumulator in enumerate(accumulators):
                    index = (stage, part) if gated else (stage,)
                    plgpu.wgmma(accumulator, x_smem.at[stage], weights_smem.at[index])
                # This step's matmuls go on while the step before them is given back.
                plgpu.wgmma_wait(len(accumulators))
                before = jax.lax.rem(step + tile.stages - 1, tile.stages)
                pl.when(step > 0)(lambda: plgpu.barrier_arrive(free.at[before]))

            plgpu.wgmma_wait(0)
            return [accumulator[...] for accumulator in accumulators]

        shape = (WARPGROUP_ROWS, tile.columns)
        out, *up = pl.run_scoped(accumulate, *[_ACC(shape, jnp.float32)] * (2 if gated else 1))
        if gated:
            # Rounded as the two matmuls are where they are matmuls of their own.
            gate, factor = (each.astype(x_ref.dtype).astype(jnp.float32) for each in (out, up[0]))
            out = gate / (1.0 + jnp.exp(-gate)) * factor
        if bias_ref is not None:
            # From jax 0.11 on, which this kernel needs, load takes no index.
            row = plgpu.load(  # pyright: ignore[reportCallIssue]
                bias_ref.at[columns], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False
            )
            out += jax.lax.broadcast_in_dim(row.astype(jnp.float32), out.shape, [1])
        out_smem[...] = out.astype(out_smem.dtype)
        plgpu.commit_smem()
        source = out_smem if rows == WARPGROUP_ROWS else out_smem.at[pl.ds(0, rows)]
        place = (split, slice(None), columns) if tile.splits > 1 else (slice(None), columns)
        plgpu.copy_smem_to_gmem(source, out_ref.at[place])
        plgpu.wait_smem_to_gmem(0)

    for role, work in ((_FETCH, fetch), (_MULTIPLY, multiply)):
        action = "increase" if role == _MULTIPLY else "decrease"

        @pl.when(warpgroup == role)
        def _(role: int = role, work: Any = work, action: Any = action) -> None:
            plgpu.set_max_registers(_REGISTERS[role], action=action)
            work()
