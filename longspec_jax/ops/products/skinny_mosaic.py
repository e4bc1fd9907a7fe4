"""Skinny matrix products on Hopper GPUs: a Pallas kernel for Mosaic GPU that streams the weights.

A program owns a strip of columns and a share of the contraction. One warpgroup fetches blocks of
rows and weights with the copy engine into a ring that takes all shared memory, so that every
multiprocessor has some 200 KiB on their way whenever it waits; the other multiplies. All rows
are one instruction high, 64, and those that do not exist are garbage that is never stored: a row
of a product depends on no other row.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from longspec_jax.axes import Array
from longspec_jax.ops.hardware import WARPGROUP_ROWS
from longspec_jax.ops.products.tiles import ProductTile

# Pallas documents ACC and does not re-export it in the way that type checkers ask for.
_ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
_FETCH, _MULTIPLY = 1, 0
"""The warpgroups."""
_REGISTERS = {_FETCH: 40, _MULTIPLY: 232}


@functools.partial(jax.jit, static_argnames=("tile",))
def product(x: Array, weights: Array, bias: Array | None, *, tile: ProductTile) -> Array:
    """``x[rows, K] @ weights[K, N] (+ bias[N])`` in the dtype of ``x``."""
    return _launch(x, weights, bias, tile)


@functools.partial(jax.jit, static_argnames=("tile",))
def summands(x: Array, weights: Array, *, tile: ProductTile) -> Array:
    """``[splits, rows, N]`` whose sum is ``x[rows, K] @ weights[K, N]``, float32 if several."""
    out = _launch(x, weights, None, tile)
    return out if tile.splits > 1 else out[None]


@functools.partial(jax.jit, static_argnames=("tile",))
def gated_product(x: Array, weights: Array, *, tile: ProductTile) -> Array:
    """``silu(x @ weights[:, 0]) * (x @ weights[:, 1])``, ``[rows, F]``, of ``weights[K, 2, F]``."""
    return _launch(x, weights, None, tile)


def _launch(x: Array, weights: Array, bias: Array | None, tile: ProductTile) -> Array:
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
        kernel_name="gated_product" if gated else "product",
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
    tile: ProductTile,
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
                # This step's products go on while the step before them is given back.
                plgpu.wgmma_wait(len(accumulators))
                before = jax.lax.rem(step + tile.stages - 1, tile.stages)
                pl.when(step > 0)(lambda: plgpu.barrier_arrive(free.at[before]))

            plgpu.wgmma_wait(0)
            return [accumulator[...] for accumulator in accumulators]

        shape = (WARPGROUP_ROWS, tile.columns)
        out, *up = pl.run_scoped(accumulate, *[_ACC(shape, jnp.float32)] * (2 if gated else 1))
        if gated:
            # Rounded as the two products are where they are products of their own.
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
