"""Codes of 8 or 4 bits as the operand that Hopper's matrix units take from registers.

Codes become numbers of 16 bits by operations on whole registers, each of two codes. A thread finds
its codes side by side (:mod:`longspec_jax.ops.matmul.packed`).
"""

import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from longspec_jax.axes import Array
from longspec_jax.ops.hardware import WARPGROUP_ROWS
from longspec_jax.ops.matmul.quantised_weights import MIDDLE

BY_OUTPUT = plgpu.Layout.WGMMA.reduce(1)
"""Layout of one number for each of 64 outputs."""
WORDS = plgpu.Layout.TILED(
    plgpu.Tiling(((4, 256), (128,), (4,))), warp_dims=(-4,), lane_dims=(-2,), vector_dim=-1
)
"""Layout of the words of 64 outputs, ``[4, 256]``: 16 of an output, four in a row for a thread."""

# From jax 0.11 on, which these kernels need, it takes a predicate.
arrive: Callable[..., None] = plgpu.barrier_arrive


def lines(outputs: int) -> tuple[int, int]:
    """The shape of a block's words of some outputs, 16 of each.

    The copy engine brings lines of 1 KB faster than the 64 bytes of an output.
    """
    return outputs // 16, 256


def widened(
    words: Array,
    stored: DTypeLike,
    dtype: DTypeLike,
    zero: Array | float | None,
    *,
    chosen: range,
    interpreted: bool,
) -> Array:
    """Codes as numbers of 16 bits, without their scales.

    Args:
      words: ``[4, 256]``, each of four codes of 8 bits or eight of 4.
      stored: the dtype of the codes, as in :class:`QuantisedMatrix`.
      dtype: bfloat16 or float16.
      zero: what is subtracted from integer codes; if none, of 4 bits their middle.
      chosen: which of a thread's words, as in :func:`arranged`.
      interpreted: whether this is no GPU.
    """
    arrange = functools.partial(arranged, words=chosen, dtype=dtype, interpreted=interpreted)
    masked = functools.partial(_masked, interpreted=interpreted)
    number = functools.partial(np.asarray, dtype=dtype)
    half = dtype == jnp.float16
    if stored == jnp.uint8:
        # The code becomes the lowest bits of a number whose last bit counts 1: 128 or 1024 more.
        base, offset = (0x6400, 1024) if half else (0x4300, 128)
        wide = arrange(*(masked(words >> 4 * i, 0xF, base) for i in range(4)))
        return wide - (number(offset + MIDDLE) if zero is None else zero + number(offset))
    pairs = words << 8, words  # Codes in the upper bytes: the first and third, second and fourth.
    if stored == jnp.float8_e4m3fn:
        # The exponent has its place, and is too small by the difference of both biases.
        right, factor = (1, 2.0**8) if half else (4, 2.0**120)
        bits = ((each >> right) & pair(0x7F00 >> right) for each in pairs)
        signed = (each & pair(0x8000) | rest for each, rest in zip(pairs, bits, strict=True))
        return arrange(*signed) * number(factor)
    if half:
        # With its sign bit flipped a code is 128 more, and the last bit of 1024 counts 1.
        wide = arrange(*((each >> 8) & pair(0xFF) ^ pair(0x6480) for each in pairs))
        wide -= number(1024 + 128)
    else:
        # 128 has room for the lower seven bits. A sign bit subtracts 128 more.
        low = arrange(*(masked(each >> 8, 0x7F, 0x4300) for each in pairs))
        sign = arrange(*(masked(each >> 8, 0x80, 0x4300) for each in pairs))
        wide = low - sign
    return wide if zero is None else wide - zero


def _masked(words: Array, mask: int, bits: int, *, interpreted: bool) -> Array:
    """``words & mask | bits`` in both halves of a word, as one instruction.

    The assembler would make two of it, because an instruction holds one constant.
    """
    if interpreted:
        return words & pair(mask) | pair(bits)

    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm, vector

    @plgpu.inline_mgpu(
        arg_types=(WORDS,),
        return_type=plgpu.ShapeDtypeStruct(words.shape, words.dtype, layout=WORDS),
    )
    def mask_all(_: Any, words: Any) -> Any:
        word = ir.IntegerType.get_signless(32)
        lop3 = f"lop3.b32 $0, $1, {pair(mask)}, {pair(bits)}, 0xEA;"
        registers = np.empty_like(words.registers)
        for place, four in np.ndenumerate(words.registers):
            for at in range(4):
                old = vector.extract(words.registers[place], [], [at])
                new: Any = llvm.inline_asm(word, [old], lop3, "=r,r")
                four = vector.insert(new, four, [], [at])
            registers[place] = four
        return mgpu.FragmentedArray(_registers=registers, _layout=words.layout, _is_signed=False)

    return cast(Callable[[Array], Array], mask_all)(words)


def weighted(
    words: Array,
    stored: DTypeLike,
    dtype: DTypeLike,
    scales: Callable[[float], list[Array]],
    offsets: list[Array],
    *,
    chosen: range,
    interpreted: bool,
) -> Array:
    """Integer codes with the scales, and offsets, of several groups, rounded once.

    That is the definition of the weights, ``code * scale + offset`` in float32: the product is
    exact, and the sum of both is one instruction, which rounds once as well.

    A code whose bits are the lowest of a float16 is a subnormal number, 2^-24 times as large. So it
    needs no exponent, and nothing that takes one away again: the scale is 2^24 times as large.
    Codes that are not signed are so much larger than those that are meant; without offsets that
    difference times the scale is the number which is added.

    Args:
      words: ``[4, 256]``, each of four codes of 8 bits or eight of 4.
      stored: the dtype of the codes, int8 or uint8.
      dtype: of the weights, bfloat16 or float16.
      scales: those of each group times a power of two, by output, float32.
      offsets: likewise without a factor, or none. With them 4-bit codes are not signed.
      chosen: which of a thread's words, as in :func:`arranged`.
      interpreted: whether this is no GPU.
    """
    if interpreted:
        zero = 0.0 if offsets else None  # Integers up to 2048 are exact in float16.
        codes = widened(words, stored, jnp.float16, zero, chosen=chosen, interpreted=True)
        of_groups = jnp.stack(scales(1.0), axis=1)
        group = codes.shape[1] // of_groups.shape[1]
        weights = codes.astype(jnp.float32) * jnp.repeat(of_groups, group, axis=1)
        if offsets:
            weights += jnp.repeat(jnp.stack(offsets, axis=1), group, axis=1)
        return weights.astype(dtype)

    four = stored == jnp.uint8
    middle = MIDDLE if four else 128
    added = offsets or scales(-float(middle))
    # Of 4-bit codes the upper ones of a byte are 2^4 times as large.
    factors = [scales(2.0**24), scales(2.0**20)] if four else [scales(2.0**24)]
    return _weigh(words, factors, added, dtype, signed=bool(offsets) and not four, chosen=chosen)


def _weigh(
    words: Array,
    factors: list[list[Array]],
    added: list[Array],
    dtype: DTypeLike,
    *,
    signed: bool,
    chosen: range,
) -> Array:
    """``code * factor + added`` of every code, in the order of :func:`arranged`.

    Args:
      words: ``[4, 256]``.
      factors: of every group; where codes have 4 bits, of the lower and the upper ones of a byte.
      added: of every group.
      dtype: of the result.
      signed: whether codes of 8 bits are; otherwise their sign bit is flipped.
      chosen: which of a thread's words.
    """
    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm, vector

    kinds, groups = len(factors), len(added)
    pairs = 2 * kinds  # Of a word.
    shape = (WARPGROUP_ROWS, 8 * pairs * len(chosen))
    numbers = [each for of_kind in factors for each in of_kind] + added

    @plgpu.inline_mgpu(
        arg_types=(WORDS, *(BY_OUTPUT,) * len(numbers)),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.dtype(dtype), layout=plgpu.Layout.WGMMA),
    )
    def weigh(_: Any, words: Any, *numbers: Any) -> Any:
        word = ir.IntegerType.get_signless(32)
        alone = ir.VectorType.get((1,), word)
        two = ir.VectorType.get((2,), mgpu.utils.dtype_to_ir_type(dtype))
        layout = plgpu.Layout.WGMMA.to_mgpu()
        flat = []
        for place in range(pairs * len(chosen)):
            at, of_word = divmod(place, pairs)
            group = place * groups // (pairs * len(chosen))
            kind = of_word % kinds
            code = _WEIGH.format(
                shift=8 * (of_word // kinds),
                code=_CODES[kinds, kind, signed],
                kind="f16x2" if dtype == jnp.float16 else "bf16x2",
            )
            for row, of_row in enumerate(words.registers.flat):
                of_group = [
                    vector.extract(each.registers.flat[row], [], [0])
                    for each in (numbers[kind * groups + group], numbers[kinds * groups + group])
                ]
                old = vector.extract(of_row, [], [chosen[at]])
                new: Any = llvm.inline_asm(word, [old, *of_group], code, "=r,r,f,f")
                flat.append(vector.bitcast(two, vector.broadcast(alone, new)))
        registers = np.empty(len(flat), dtype=object)
        registers[:] = flat
        registers = registers.reshape(layout.registers_shape(shape))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return cast(Callable[..., Array], weigh)(words, *numbers)


_WEIGH = (
    "{{ .reg .b32 m; .reg .b16 l, h; .reg .f32 x, y; shr.u32 m, $1, {shift}; {code} "
    "mov.b32 {{l, h}}, m; cvt.f32.f16 x, l; cvt.f32.f16 y, h; fma.rn.f32 x, x, $2, $3; "
    "fma.rn.f32 y, y, $2, $3; cvt.rn.{kind}.f32 $0, y, x; }}"
)
"""Two codes of a word, 16 bits apart, as two weights."""
_CODES = {
    (2, 0, False): "and.b32 m, m, 0x000F000F;",
    (2, 1, False): "and.b32 m, m, 0x00F000F0;",
    (1, 0, False): "lop3.b32 m, m, 0x00FF00FF, 0x00800080, 0x6A;",
    (1, 0, True): "lop3.b32 m, m, 0x00FF00FF, 0x00800080, 0x6A; "
    "{ .reg .b32 k; mov.b32 k, 0x00800080; sub.f16x2 m, m, k; }",
}
"""How a pair of codes is taken from a word."""


def signed_byte(words: Array, index: int, *, interpreted: bool) -> Array:
    """One of the four signed bytes of every word, the lowest first, as float32."""
    if interpreted:
        byte = jax.lax.bitcast_convert_type(words << (24 - 8 * index), jnp.int32) >> 24
        return byte.astype(jnp.float32)

    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm, vector

    code = f"{{ .reg .b32 b; bfe.s32 b, $1, {8 * index}, 8; cvt.rn.f32.s32 $0, b; }}"  # One in all.

    @plgpu.inline_mgpu(
        arg_types=(BY_OUTPUT,),
        return_type=plgpu.ShapeDtypeStruct(words.shape, jnp.float32, layout=BY_OUTPUT),
    )
    def take(_: Any, words: Any) -> Any:
        number = ir.F32Type.get()
        registers = np.empty_like(words.registers)
        for place, old in np.ndenumerate(words.registers):
            new: Any = llvm.inline_asm(number, [vector.extract(old, [], [0])], code, "=f,r")
            registers[place] = vector.broadcast(ir.VectorType.get((1,), number), new)
        return mgpu.FragmentedArray(_registers=registers, _layout=words.layout, _is_signed=None)

    return cast(Callable[[Array], Array], take)(words)


def widened_floats(words: Array) -> tuple[Array, ...]:
    """Pairs of 4-bit floats as bfloat16 of the same bits, whose values are 2^126 times smaller.

    Args:
      words: ``[4, 256]``, each of eight codes.
    """
    pairs = []
    for index in range(4):
        left = 12 - 4 * index
        sign = (words << left if left else words) & pair(0x8000)
        left -= 6  # Two bits of an exponent and one of a mantissa have their places.
        rest = (words << left if left >= 0 else words >> -left) & pair(0x01C0)
        pairs.append(sign | rest)
    return tuple(pairs)


def scaled_floats(floats: Array, scale: Array, *, interpreted: bool) -> Array:
    """Numbers of :func:`widened_floats`, arranged, as 4-bit floats times a scale of every row.

    Some are subnormal. Hopper multiplies such numbers in bfloat16; a CPU takes them for 0, so there
    they are made of their bits.
    """
    if not interpreted:
        scale *= np.asarray(2.0**126, floats.dtype)
        return floats * jax.lax.broadcast_in_dim(scale, floats.shape, [0])
    bits = jax.lax.bitcast_convert_type(floats, jnp.uint16).astype(jnp.int32)
    exponent, mantissa = bits >> 7 & 3, bits >> 6 & 1
    quarters = jnp.where(exponent > 0, (2 + mantissa) << exponent, 2 * mantissa)
    values = jnp.where(bits >> 15 == 1, -quarters, quarters).astype(floats.dtype)
    return values * (0.25 * scale)[:, None]


def pair(bits: int) -> np.uint32:
    """The same bits in both halves of a word."""
    return np.uint32(bits << 16 | bits)


def arranged(*pairs: Array, words: range, dtype: DTypeLike, interpreted: bool) -> Array:
    """Words of two numbers each as the matrix units' operand ``[64, inputs]``.

    A thread has four words in a row, and each array of ``pairs`` has two numbers of every word. The
    numbers stay where they are: the thread holds them as the matrix instruction wants them.

    Args:
      pairs: ``[4, 256]``, the pairs of every word in order.
      words: which of a thread's words. Of 4-bit codes each has 8 of 32 inputs, of 8-bit codes 4 of
        16.
      dtype: of the numbers.
      interpreted: whether this is no GPU, where threads do not exist.
    """
    count = len(pairs)
    shape = (WARPGROUP_ROWS, 8 * count * len(words))
    if interpreted:
        numbers = jax.lax.bitcast_convert_type(jnp.stack(pairs, axis=-1), dtype)
        digits = numbers.reshape(WARPGROUP_ROWS, 4, 4, count, 2)[:, :, words.start : words.stop]
        return digits.transpose(0, 2, 3, 1, 4).reshape(shape)

    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import vector

    @plgpu.inline_mgpu(
        arg_types=(WORDS,) * count,
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.dtype(dtype), layout=plgpu.Layout.WGMMA),
    )
    def rename(_: Any, *pairs: Any) -> Any:
        word = ir.VectorType.get((1,), ir.IntegerType.get_signless(32))
        two = ir.VectorType.get((2,), mgpu.utils.dtype_to_ir_type(dtype))
        layout = plgpu.Layout.WGMMA.to_mgpu()
        flat = [
            vector.bitcast(two, vector.extract_strided_slice(word, of_row, [at], [1], [1]))
            for at in words
            for pair in pairs
            for of_row in pair.registers.flat
        ]
        registers = np.empty(len(flat), dtype=object)
        registers[:] = flat
        registers = registers.reshape(layout.registers_shape(shape))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return rename(*pairs)
