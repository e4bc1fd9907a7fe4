"""A cache in 8 bits, widened in registers for the Mosaic GPU kernels.

The matrix units read keys and values of 16 bits from shared memory. The copy engine brings codes
there, and threads widen them into the place where an unwidened block would have come.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from longspec_jax.axes import Array, Ref
from longspec_jax.ops.attention.float8 import CODES
from longspec_jax.ops.mosaic import load, swizzled

BLOCK = 64
"""Slots that are brought and widened at once."""
_ROW_BYTES = 64
"""Most bytes of a row of codes that lie together, eight rows after one another. Then threads that
read 8 bytes each, and write 16, meet no other in a bank."""
_THREAD_CODES = 8
"""Codes of a row that a thread widens at once."""


def shared_codes(*shape: int) -> Any:
    """Shared memory for codes ``[..., slots, width]``."""
    return swizzled(shape, CODES, min(shape[-1], _ROW_BYTES))


class Ring(NamedTuple):
    """Blocks of codes in shared memory, which one warpgroup brings and another one widens.

    ``came`` says that a place was filled, ``read`` that it was widened. Both are counted by the
    number of a block since the kernel began.
    """

    blocks: Ref
    came: Ref
    read: Ref

    @classmethod
    def memory(cls, places: int, width: int) -> "Ring":
        """What a kernel asks for."""
        barriers = (plgpu.Barrier(num_barriers=places) for _ in range(2))
        return cls(shared_codes(places, BLOCK, width), *barriers)

    def bring(self, number: jax.Array, source: Any) -> None:
        """Copy a block from device memory as soon as there is room."""
        places = self.blocks.shape[0]
        place = jax.lax.rem(number, places)
        pl.when(number >= places)(lambda: plgpu.barrier_wait(self.read.at[place]))
        plgpu.copy_gmem_to_smem(source, self.blocks.at[place], self.came.at[place])

    def widen(self, number: jax.Array, to: Any) -> None:
        """Write a block's numbers as :func:`widen` does, as soon as it is there."""
        place = jax.lax.rem(number, self.blocks.shape[0])
        plgpu.barrier_wait(self.came.at[place])
        widen(self.blocks.at[place], to)
        plgpu.barrier_arrive(self.read.at[place])


def widen(codes: Any, to: Any, swizzle: int = 128) -> None:
    """Write the numbers of some codes to shared memory, as the matrix units want them.

    Args:
      codes: codes ``[slots, width]`` in shared memory.
      to: numbers of 16 bits of the same shape, whose rows lie together by ``swizzle`` bytes.
      swizzle: likewise.
    """
    layout = plgpu.Layout.SMEM_GMEM_COPY(to.shape, to.dtype, swizzle)
    to[...] = widened(load(codes, layout), to.dtype, layout)


def widened(codes: Array, dtype: Any, layout: Any) -> Array:
    """Codes ``[slots, width]`` in registers as the same numbers of 16 bits; NaN becomes 480."""
    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import vector

    @plgpu.inline_mgpu(
        arg_types=(layout,),
        return_type=plgpu.ShapeDtypeStruct(codes.shape, dtype, layout=layout),
    )
    def spread(_: Any, codes: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        words, pairs = (ir.VectorType.get((_THREAD_CODES // n,), i32) for n in (4, 2))
        numbers = ir.VectorType.get((_THREAD_CODES,), mgpu.utils.dtype_to_ir_type(dtype))

        def halves(register: Any) -> Any:
            """A code in every half of a word, whose upper byte repeats the sign."""
            four = vector.bitcast(words, register)
            each = [vector.extract(four, [], [n]) for n in range(_THREAD_CODES // 4)]
            orders = [mgpu.utils.c(order, i32) for order in (0x9180, 0xB3A2)]
            return vector.from_elements(
                pairs, [mgpu.utils.prmt(word, word, order) for word in each for order in orders]
            )

        held = np.empty(codes.registers.size, dtype=object)
        held[:] = [halves(register) for register in codes.registers.flat]
        # A layout of as many words as there are, whichever they are.
        some = mgpu.WGStridedFragLayout((held.size * 64 * _THREAD_CODES,), _THREAD_CODES // 2)
        wide = in_place(
            mgpu.FragmentedArray(_registers=held, _layout=some, _is_signed=False), dtype
        )
        registers = np.empty_like(codes.registers)
        registers.flat[:] = [vector.bitcast(numbers, each) for each in wide.registers]
        return mgpu.FragmentedArray(_registers=registers, _layout=codes.layout, _is_signed=None)

    # The exponent is too small by the difference of both biases.
    wide: Any = spread(codes)  # pyright: ignore[reportCallIssue]
    return wide * np.asarray(2.0**8 if dtype == jnp.float16 else 2.0**120, dtype)


def in_place(words: Any, dtype: Any) -> Any:
    """Two numbers of 16 bits in every word, from codes whose sign fills the upper byte of a half.

    Exponents and mantissas have their places. The numbers are too small by a power of two.
    """
    left = 7 if dtype == jnp.float16 else 4
    return (words << left) & ((0x8000 | 0x7F << left) * 0x10001)
