"""What all kernels for Mosaic GPU ask of Pallas, whose types say less than its documentation."""

import math
from collections.abc import Callable
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from longspec_jax.axes import Array, Ref

# Pallas documents it and does not re-export it in the way that type checkers ask for.
ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]


def swizzled(shape: tuple[int, ...], dtype: DTypeLike, row_bytes: int = 128) -> Any:
    """Shared memory whose last two axes are cut into rows of some bytes, eight at a time."""
    # By the types of newer jax these are abstract; they are not.
    columns = row_bytes // jnp.dtype(dtype).itemsize
    tiling = plgpu.TilingTransform((8, columns))  # pyright: ignore[reportAbstractUsage]
    swizzle = plgpu.SwizzleTransform(row_bytes)  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle))


def load(ref: Ref, layout: Any, *, optimized: bool = False) -> Any:
    """An array in registers; of a layout that no wide load serves, number by number.

    From jax 0.11 on, which these kernels need, ``plgpu.load`` takes no index.
    """
    return plgpu.load(ref, layout=layout, optimized=optimized)  # pyright: ignore[reportCallIssue]


def capped(products: Array, scale: float, cap: float, layout: Any) -> Array:
    """Scores in base 2 of products of queries and keys, bounded softly by ``cap``.

    That is ``cap * tanh(score / cap)``. The hardware's own tanh has 11 bits.

    Args:
      products: arrays of this layout.
      scale: factor on them, in base 2.
      cap: natural.
      layout: Pallas' layout of the products.
    """
    bound = cap * math.log2(math.e)
    share = 1.0 / (jnp.exp2(products * (2 * scale / cap)) + 1.0)
    twice = plgpu.layout_cast(jnp.full(share.shape, -2 * bound, jnp.float32), layout)
    return bound + product(share, twice, layout)


def row_product(left: Array, right: Array) -> Array:
    """:func:`product` of a number for each of a warpgroup's rows, as Hopper's matmuls have them."""
    return product(left, right, plgpu.Layout.WGMMA.reduce(1))


def product(left: Array, right: Array, layout: Any) -> Array:
    """``left * right`` of arrays of this layout, float32, rounded by itself.

    A plain product may become one instruction with a sum that follows, which rounds once instead of
    twice. The assembler decides that, by what else uses the product, and sees through barriers of
    the compiler. Where the same sum is made in two places, both must round alike.
    """
    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm, vector

    @plgpu.inline_mgpu(
        arg_types=(layout, layout),
        return_type=plgpu.ShapeDtypeStruct(left.shape, jnp.float32, layout=layout),
    )
    def multiply(_: Any, left: Any, right: Any) -> Any:
        number = ir.F32Type.get()
        registers = np.empty_like(left.registers)
        for place, of_left in np.ndenumerate(left.registers):
            for at in range(left.layout.vector_length):
                factors = [vector.extract(x, [], [at]) for x in (of_left, right.registers[place])]
                new: Any = llvm.inline_asm(number, factors, "mul.rn.f32 $0, $1, $2;", "=f,f,f")
                registers[place] = (
                    vector.insert(new, registers[place], [], [at])
                    if at
                    else vector.broadcast(of_left.type, new)
                )
        return mgpu.FragmentedArray(_registers=registers, _layout=left.layout, _is_signed=None)

    return cast(Callable[[Array, Array], Array], multiply)(left, right)


def first_of_pairs(numbers: Array) -> Array:
    """Numbers in which rows 8 to 15 of any 16 repeat rows 0 to 7.

    A thread of a warpgroup has both rows of such a pair. What is computed of them from here on is
    the same computation twice, so the compiler leaves one out.

    Args:
      numbers: of 64 rows as Hopper's matmuls have them, or one for each of these rows.
    """
    from jax.experimental.mosaic import gpu as mgpu

    rows = plgpu.Layout.WGMMA
    layout = rows if numbers.ndim == 2 else rows.reduce(1)
    same = plgpu.ShapeDtypeStruct(numbers.shape, numbers.dtype, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=same)
    def repeat(_: object, numbers: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        registers = numbers.registers.copy()
        axis = registers.ndim - 1 - registers.shape[::-1].index(2)
        registers.swapaxes(0, axis)[1] = registers.swapaxes(0, axis)[0]
        return mgpu.FragmentedArray(_registers=registers, _layout=numbers.layout, _is_signed=None)

    return cast(Callable[[Array], Array], repeat)(numbers)
