"""Quantised weights in the order in which the Hopper kernel's threads read them.

A thread of the kernel takes 16 bytes of a row of weights at once, and they must be what the matrix
instruction expects of it. The instruction multiplies 16 inputs of 64 outputs at a time. Of each
row, the thread ``c`` of four holds the inputs ``2c, 2c + 1, 2c + 8, 2c + 9``. So within every
*block* of 64 bytes (64 codes of 8 bits or 128 of 4) codes are sorted by thread first. Blocks of all
rows lie side by side, which makes a strip of rows one piece of memory:

    [K / block, N, 16] words of 32 bits

Nothing is lost: :meth:`PackedMatrix.plain` gives the codes back, for XLA's matmuls of a prompt.
"""

import math

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Float, Float16, UInt32

from longspec_jax.axes import Array, Leaf
from longspec_jax.ops.matmul.quantised_weights import (
    FINE,
    QuantisedMatrix,
    QuantisedWeights,
    label_of,
)

BLOCK_BYTES = 64
"""What four threads hold of a row: 16 bytes each."""
DEPTH = 128
"""Inputs are padded to a multiple of this, so that the kernel has no edge in the contraction."""
OPERAND = 64
"""Inputs of one operand of the matrix units, which share a scale; half as many 4-bit floats."""
LARGEST_SCALE = 2.0
"""Of 4-bit floats: the kernel multiplies scales by 2^126, which bfloat16 must hold."""
LARGEST_FINE = 2.0**100
"""Of fine groups in float32: the kernel multiplies scales by 2^24."""


@struct.dataclass
class PackedMatrix(QuantisedWeights):
    """A :class:`QuantisedMatrix` in the kernel's order."""

    codes: Leaf[UInt32[Array, "*shares blocks N 16"]]
    """Words of four codes of 8 bits or eight of 4."""
    scale: Leaf[Array]
    """``[*shares, G, N]``: float32 where an output has one scale or groups are fine, otherwise in
    the dtype of the activations. Of fine groups there are as many as padded inputs have. Where
    there are units, ``[*shares, G / 4, N]`` words of four groups of 8 bits, the first one lowest:
    a thread reads them at once."""
    zero: Leaf[Float[Array, "*shares G N"]] | None
    """What is subtracted from integer codes, in the dtype of the activations; absent as there."""
    order: Leaf[Array] | None
    """As in :class:`QuantisedMatrix`."""
    shape: tuple[int, ...] = struct.field(pytree_node=False)
    """``[*out, C]``, without padding."""
    group: int = struct.field(pytree_node=False)
    """Inputs that share a scale; of all inputs if 0."""
    stored: DTypeLike = struct.field(pytree_node=False)
    """The dtype of the codes as in :class:`QuantisedMatrix`: 4 bits if it is ``uint8``."""
    floating: bool = struct.field(pytree_node=False, default=False)
    """Whether 4-bit codes are floats."""
    offset: Leaf[Array] | None = None
    """What is added to products of fine groups, as ``scale``."""
    unit: Leaf[Float16[Array, "*shares U N"]] | None = None
    """As in :class:`QuantisedMatrix`; of whole units, as inputs are padded to :data:`DEPTH`."""
    offset_unit: Leaf[Float16[Array, "*shares U N"]] | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """``[*out, C]``, without padding."""
        return self.shape

    @property
    def label(self) -> str:
        """The kind of codes, as reports name it."""
        return label_of(self.stored, self.floating)

    @property
    def fine(self) -> bool:
        """Whether an operand has several groups, and weights are computed in float32."""
        return self.group in FINE and not self.floating

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 4 if self.stored == jnp.uint8 else 8

    @property
    def counted(self) -> bool:
        """Whether scales are multiples of units."""
        return self.unit is not None

    def plain(self) -> QuantisedMatrix:
        """The same weights in the order of their inputs, for XLA's matmuls."""
        blocks = jax.lax.bitcast_convert_type(self.codes.swapaxes(0, 1), jnp.uint8)
        blocks = blocks.reshape(*blocks.shape[:2], BLOCK_BYTES)
        codes = _by_input(_nibbles(blocks) if self.bits == 4 else blocks, self.bits)
        codes = codes[:, : self.inputs]
        if self.bits == 4:
            codes = codes[:, 0::2] | codes[:, 1::2] << 4
        else:
            codes = jax.lax.bitcast_convert_type(codes, self.stored)
        groups = -(-self.inputs // self.group) if self.group else 1

        def shaped(rows: Array) -> Array:
            return rows.reshape(*self.out_axes, -1)

        def by_output(numbers: Array | None) -> Array | None:
            return None if numbers is None else shaped(numbers.T)

        def of_groups(numbers: Array) -> Array:
            rows = numbers.T
            if self.counted:
                rows = jax.lax.bitcast_convert_type(rows, jnp.int8).reshape(len(rows), -1)
            return shaped(rows[:, :groups])

        scale = of_groups(self.scale)
        return QuantisedMatrix(
            shaped(codes),
            scale if self.counted else scale.astype(jnp.float32),
            None if self.zero is None else shaped(self.zero.T.astype(jnp.int8)),
            self.order,
            self.group,
            self.floating,
            None if self.offset is None else of_groups(self.offset),
            by_output(self.unit),
            by_output(self.offset_unit),
        )


def pack(matrix: QuantisedMatrix, dtype: DTypeLike) -> PackedMatrix:
    """Reorder the codes, and lay out scales and zero points by group.

    Args:
      matrix: the weights as they were loaded.
      dtype: of the activations, bfloat16 or float16. Scales of groups are rounded to it. That
        changes nothing where the file has them in this dtype. Those of fine groups stay as they
        are.

    Raises:
      NotImplementedError: if the kernel cannot read such weights.
    """
    refuse_unpackable(matrix)
    if matrix.floating and dtype != jnp.bfloat16:
        raise NotImplementedError(f"4-bit floats become bfloat16, not {dtype}")
    flat, inputs = matrix.flat(), matrix.inputs
    rows = jnp.pad(_bytes(flat.codes), ((0, 0), (0, -inputs % DEPTH // (2 if flat.packed else 1))))
    blocks = _by_thread(_nibbles(rows) if flat.packed else rows, 4 if flat.packed else 8)
    if flat.packed:
        blocks = blocks[..., 0::2] | blocks[..., 1::2] << 4
    words = jax.lax.bitcast_convert_type(blocks.reshape(*blocks.shape[:2], 16, 4), jnp.uint32)
    fine = flat.fine
    single = flat.groups == 1 and not fine
    scale = _by_group(flat.scale, flat)
    return PackedMatrix(
        codes=words.swapaxes(0, 1),
        scale=scale if fine else scale.astype(jnp.float32 if single else dtype),
        zero=None if flat.zero is None else flat.zero.T.astype(dtype),
        order=flat.order,
        shape=(*matrix.out_axes, inputs),
        group=0 if single else flat.group,
        stored=flat.codes.dtype,
        floating=flat.floating,
        offset=None if flat.offset is None else _by_group(flat.offset, flat),
        unit=None if flat.unit is None else flat.unit.T,
        offset_unit=None if flat.offset_unit is None else flat.offset_unit.T,
    )


def refuse_unpackable(matrix: QuantisedMatrix) -> None:
    """Raise for weights that the kernel cannot read."""
    outputs = math.prod(matrix.out_axes)
    if matrix.floating and (len(matrix.out_axes) != 2 or matrix.group != 32):
        raise NotImplementedError(
            "of 4-bit floats a kernel reads those of stacked experts, in groups of 32 inputs"
        )
    if matrix.out_axes[-1] % 64 or outputs % 64:
        raise NotImplementedError(
            "the kernel for quantised weights takes outputs in multiples of 64, not "
            f"{matrix.out_axes[-1]}"
        )
    if matrix.inputs % 8:
        raise NotImplementedError(
            f"the kernel for quantised weights takes inputs in multiples of 8, not {matrix.inputs}"
        )
    fine = matrix.fine
    small = matrix.groups > 1 and matrix.group % OPERAND > 0 and not matrix.floating
    if small and matrix.group not in FINE:
        raise NotImplementedError(
            f"the kernel for quantised weights takes groups of 16 or 32 inputs, or in multiples of "
            f"{OPERAND}, not {matrix.group}"
        )
    if (small or matrix.offset is not None) and not fine:
        raise NotImplementedError(
            "the kernel for quantised weights takes no zero points and no 8-bit floats in groups "
            "of 16 or 32 inputs, and offsets in no others"
        )


def _by_group(numbers: Array, flat: QuantisedMatrix) -> Array:
    """Scales or offsets, groups first, as :class:`PackedMatrix` has them."""
    if flat.fine:
        numbers = jnp.pad(numbers, ((0, 0), (0, -flat.groups % (DEPTH // flat.group))))
    if flat.unit is not None:
        fours = numbers.reshape(len(numbers), -1, 4)
        numbers = jax.lax.bitcast_convert_type(fours, jnp.uint32)
    return numbers.T


def _bytes(codes: Array) -> Array:
    """Codes as bytes."""
    return codes if codes.dtype == jnp.uint8 else jax.lax.bitcast_convert_type(codes, jnp.uint8)


def _nibbles(rows: Array) -> Array:
    """Two codes of every byte, the lower four bits first."""
    return jnp.stack([rows & 15, rows >> 4], axis=-1).reshape(*rows.shape[:-1], -1)


def _by_thread(codes: Array, bits: int) -> Array:
    """Codes ``[N, K]`` as blocks ``[N, K / block, block]``, sorted by thread."""
    # Within a block: word of the thread, pair in the word, thread, element of the pair.
    digits = codes.reshape(len(codes), -1, 4, 16 // bits, 4, 2)
    return digits.transpose(0, 1, 4, 2, 5, 3).reshape(len(codes), digits.shape[1], -1)


def _by_input(blocks: Array, bits: int) -> Array:
    """The inverse of :func:`_by_thread`, ``[N, K]``."""
    digits = blocks.reshape(*blocks.shape[:2], 4, 4, 2, 16 // bits)
    return digits.transpose(0, 1, 3, 5, 2, 4).reshape(len(blocks), -1)
