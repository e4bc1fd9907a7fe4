"""Instructions that every GPU from Ampere on has, for kernels of Mosaic GPU: copies and matmuls.

A Hopper GPU's own instructions (:mod:`longspec_jax.ops.mosaic`) exist only on 9.x. Those here,
``cp.async``, ``ldmatrix`` and ``mma.sync``, are the same on 8.x, 9.x, 10.x and 12.x, so one kernel
serves all of them and can be tried on any.

A program is one warpgroup. Matrices are ``[rows, columns]`` in 16 bits, cut in shared memory into
swizzled rows of 64 or 128 bytes. A tile of 16 rows leaves all four warps the columns of a result;
one of 64 has a warp for every 16 rows. An element is the same sum in either: its products are added
16 at a time, in ascending order.
"""

import math
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from longspec_jax.axes import Array, Ref
from longspec_jax.ops.hardware import WARPGROUP_ROWS
from longspec_jax.ops.mosaic import load

Layout: TypeAlias = Any
"""Which thread holds which elements of an array: one of Pallas', with arguments or without."""
Block: TypeAlias = Any
"""Where a part of an array lies along an axis: a number or a slice."""
_Lowered: TypeAlias = Any
"""What Mosaic knows of a kernel or an array while it writes instructions."""
_LAYOUTS: _Lowered = plgpu.Layout
"""Older versions of jax lack those of these matmuls."""
SHARED_BYTES = 99 << 10
"""Of a program on the GPUs with the least (8.6, 8.9, 12.0). All GPUs share one tile."""


def compiler_params(reduced: int = 0) -> plgpu.CompilerParams:
    """What is lowered as it is written: barriers stand where the kernels ask for them.

    Args:
      reduced: bytes of shared memory for sums over all warps; they have barriers of their own.
    """
    return plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Lane,
        approx_math=True,
        reduction_scratch_bytes=reduced,
        unsafe_no_auto_barriers=True,
    )


def shared(*shape: int, dtype: DTypeLike) -> Ref:
    """Shared memory for matrices, which a swizzle of whole rows of 64 columns or 32 cuts."""
    return plgpu.SMEM(shape, dtype, transforms=_transforms(shape[-1], dtype))


def copy(source: Ref, at: tuple[Block, ...], target: Ref) -> None:
    """Begin to copy a block of device memory into shared memory; :func:`wait` for it.

    Args:
      source: in device memory.
      at: the block: numbers, then two slices of a matrix. All of it must be there.
      target: in shared memory; at least four tiles of 8 rows.
    """
    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith

    sizes: list[Block] = [each.size if isinstance(each, pl.Slice) else None for each in at]
    starts = [each.start if isinstance(each, pl.Slice) else each for each in at]
    tiling, swizzle = transforms = _transforms(target.shape[-1], target.dtype)

    def begin(context: _Lowered, source: _Lowered, target: _Lowered, *starts: _Lowered) -> None:
        index = ir.IndexType.get()
        first = [arith.index_cast(index, each.registers.item()) for each in starts]
        # By name: Pallas' own copies take this one only below 9.0.
        context.async_copy(
            src_ref=source,
            dst_ref=target,
            gmem_slice=tuple(
                each if size is None else mgpu.ds(each, size)
                for each, size in zip(first, sizes, strict=True)
            ),
            gmem_transform=mgpu.TileTransform(tiling.tiling),
            swizzle=swizzle.swizzle,
            implementation=mgpu.AsyncCopyImplementation.CP_ASYNC,
        )

    types = plgpu.RefType(), plgpu.RefType(transforms), *[plgpu.Layout.WG_SPLAT(())] * len(at)
    numbers = [jnp.asarray(each, jnp.int32) for each in starts]
    _emitted(begin, types)(source, target, *numbers)


def skip() -> None:
    """Count one more copy, of nothing, so that waits may count where nothing is left to copy."""
    from jaxlib.mlir.dialects import nvvm

    _emitted(lambda context: nvvm.cp_async_commit_group())()


def copy_if(there: Array, *copies: tuple[Ref, tuple[Block, ...], Ref]) -> None:
    """Begin some copies, or as many of nothing, so that a wait counts alike either way.

    Args:
      there: whether there is something to copy.
      copies: the operands of :func:`copy`.
    """

    @pl.when(there)
    def _() -> None:
        for each in copies:
            copy(*each)

    @pl.when(jnp.logical_not(there))
    def _() -> None:
        for _ in copies:
            skip()


def wait(pending: int) -> None:
    """Wait until each thread has at most ``pending`` copies in flight, then for all threads."""
    _emitted(lambda context: context.await_cp_async_copy(pending))()
    barrier()


def barrier() -> None:
    """Wait for all threads, and for what they have written to shared memory."""
    from jax.experimental.mosaic import gpu as mgpu

    _emitted(lambda context: mgpu.warpgroup_barrier())()


def left_layout(dtype: DTypeLike, height: int) -> Layout:
    """The layout of a left operand of :func:`mma` of this height, of this dtype."""
    return _LAYOUTS.MMA_LHS(dtype, m_warps=height // 16)


def accumulator(dtype: DTypeLike, height: int) -> Layout:
    """The layout of a result of :func:`mma` of this height, of operands of this dtype."""
    return _LAYOUTS.MMA_ACC(dtype, m_warps=height // 16)


def left(ref: Ref, height: int) -> Array:
    """The left operand of :func:`mma`, ``[height, K]``, from shared memory."""
    return load(ref, left_layout(ref.dtype, height), optimized=True)


def right(ref: Ref, height: int) -> Array:
    """The right operand of :func:`mma`, ``[K, N]``, for results of this height."""
    return load(ref, _LAYOUTS.MMA_RHS(ref.dtype, m_warps=height // 16), optimized=True)


def zeros(height: int, columns: int, dtype: DTypeLike) -> Array:
    """An accumulator to begin with."""
    return plgpu.layout_cast(jnp.zeros((height, columns), jnp.float32), accumulator(dtype, height))


def mma(acc: Array, a: Array, b: Array) -> Array:
    """``acc + a @ b`` in float32."""
    return plgpu.mma(acc, a, b)  # pyright: ignore[reportAttributeAccessIssue]


def as_left(value: Array) -> Array:
    """A result of 64 rows, in 16 bits, as a left operand: every thread has what it needs."""
    from jax.experimental.mosaic import gpu as mgpu

    layout = left_layout(value.dtype, WARPGROUP_ROWS)

    def rename(_: _Lowered, value: _Lowered) -> _Lowered:
        target = layout.to_mgpu()
        # By blocks of 8 columns and halves of 16 rows there, by two blocks and halves here.
        registers = value.registers.reshape(target.registers_shape(value.shape))
        return mgpu.FragmentedArray(_registers=registers, _layout=target, _is_signed=None)

    returned = plgpu.ShapeDtypeStruct(value.shape, value.dtype, layout=layout)
    return _emitted(rename, (accumulator(value.dtype, WARPGROUP_ROWS),), returned)(value)


def along_rows(numbers: Array, shape: tuple[int, ...], layout: Layout) -> Array:
    """A number of every row, for all of its columns."""
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(numbers, shape, [0]), layout)


def along_columns(numbers: Array, shape: tuple[int, ...], layout: Layout) -> Array:
    """A number of every column, for all of its rows."""
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(numbers, shape, [1]), layout)


def store(target: Ref, value: Array) -> None:
    """Write to device memory from registers as they are; the cache puts sectors together."""
    if hasattr(plgpu, "store"):  # From jax 0.12 on a plain assignment refuses partial sectors.
        plgpu.store(target, value, optimized=False)  # pyright: ignore[reportAttributeAccessIssue]
    else:
        target[...] = value


def rows_layout(columns: int) -> Layout:
    """The layout of ``[16 n, columns]`` numbers: eight threads share a row, each warp has four.

    Args:
      columns: a multiple of 8.
    """
    from jax.experimental.mosaic.gpu import fragmented_array as mgpu

    each = math.gcd(columns, 64) // 8
    tiling = mgpu.Tiling(((16, 8 * each), (4, 8 * each), (each,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def gather(source: Ref, at: tuple[Block, ...], layout: Layout) -> Array:
    """Numbers from any places of device memory.

    Args:
      source: in device memory.
      at: the places along every axis, as arrays of this layout, or the same one for all. Numbers
        side by side in a thread of this layout lie side by side in memory.
      layout: of the result.
    """
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import vector

    [shape], source_dtype = {jnp.shape(each) for each in at} - {()}, source.dtype

    def read(_: _Lowered, source: _Lowered, *places: _Lowered) -> _Lowered:
        from jax.experimental.mosaic import gpu as mgpu

        held, element = layout.to_mgpu(), ir.MemRefType(source.type).element_type
        registers = np.empty(held.registers_shape(shape), object)
        together = held.registers_element_type(element)
        for register in np.ndindex(registers.shape):
            first = _indices(places, register)
            registers[register] = vector.load(together, source, first, alignment=_bytes(together))
        whole = isinstance(element, ir.IntegerType)
        signed = jnp.issubdtype(source_dtype, jnp.signedinteger) if whole else None
        return mgpu.FragmentedArray(_registers=registers, _layout=held, _is_signed=signed)

    returned = plgpu.ShapeDtypeStruct(shape, source.dtype, layout=layout)
    return _emitted(read, (plgpu.RefType(), *_place_types(at, layout)), returned)(
        source, *(jnp.asarray(each, jnp.int32) for each in at)
    )


def scatter(target: Ref, at: tuple[Block, ...], value: Array, there: Array, layout: Layout) -> None:
    """Write numbers to any places of device memory.

    Args:
      target: in device memory.
      at: the places, as in :func:`gather`.
      value: the numbers, of this layout.
      there: which of them are written; alike for those that lie side by side in a thread.
      layout: of the numbers.
    """
    from jaxlib.mlir.dialects import scf, vector

    def write(
        _: _Lowered, target: _Lowered, value: _Lowered, there: _Lowered, *at: _Lowered
    ) -> None:
        for register in np.ndindex(value.registers.shape):
            written = scf.IfOp(vector.extract(there.registers[register], [], [0]))
            with ir.InsertionPoint(written.then_block):
                numbers, first = value.registers[register], _indices(at, register)
                vector.store(numbers, target, first, alignment=_bytes(numbers.type))
                scf.yield_([])

    from jaxlib.mlir import ir

    types = plgpu.RefType(), layout, layout, *_place_types(at, layout)
    places = (jnp.asarray(each, jnp.int32) for each in at)
    _emitted(write, types)(target, value.astype(target.dtype), there, *places)


def _place_types(at: tuple[Block, ...], layout: Layout) -> list[Layout]:
    """The layouts of places: of arrays, and of the same number for all threads."""
    return [layout if jnp.ndim(each) else plgpu.Layout.WG_SPLAT(()) for each in at]


def _indices(places: tuple[_Lowered, ...], register: tuple[int, ...]) -> list[_Lowered]:
    """Where the first number of a thread's register lies, along every axis."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, vector

    firsts = (
        vector.extract(each.registers[register], [], [0]) if each.shape else each.registers.item()
        for each in places
    )
    return [arith.index_cast(ir.IndexType.get(), each) for each in firsts]


def _bytes(vector: _Lowered) -> int:
    """At how many bytes numbers begin that lie side by side in a thread."""
    from jax.experimental.mosaic.gpu import utils

    return min(16, math.prod(vector.shape) * utils.bitwidth(vector.element_type) // 8)


def _emitted(
    write: Callable[..., _Lowered], types: tuple[_Lowered, ...] = (), returned: _Lowered = None
) -> Callable[..., Array]:
    """What writes instructions itself, as a function of arrays and references of these types."""

    def written(*operands: _Lowered) -> _Lowered:
        found = write(*operands)
        return None if returned is None else found

    inline = plgpu.inline_mgpu(arg_types=types, return_type=returned)
    return cast(Callable[..., Array], inline(written))


def _transforms(columns: int, dtype: DTypeLike) -> tuple[_Lowered, _Lowered]:
    """Tiling and swizzle of a matrix in shared memory, by its number of columns."""
    itemsize = jnp.dtype(dtype).itemsize
    row_bytes = min(128, columns * itemsize)
    # By the types of newer jax these are abstract; they are not.
    tiling = plgpu.TilingTransform((8, row_bytes // itemsize))  # pyright: ignore[reportAbstractUsage]
    return tiling, plgpu.SwizzleTransform(row_bytes)  # pyright: ignore[reportAbstractUsage]
