"""GGUF's blocks as quantised matrices: the same weights, with their codes in 4 or 8 bits.

A weight of every type here is ``code * scale + offset`` in float32, with integer codes. Scales and
offsets belong to groups of 32 inputs, or of 16 (Q6_K). The products are exact: a scale has at most
19 bits, and codes with such scales five. So the one rounding is that of the sum, as in llama.cpp's
own dequantisation, and :class:`QuantisedMatrix` holds the same float32 numbers bit for bit.

The K types count scales and offsets in units (:class:`QuantisedMatrix`), here of 128 inputs; the
file has a unit for 256. Others have float32 numbers. Bytes a weight: 0.59 of Q4_K, 1.09 of Q5_K and
of Q6_K, 0.63 of Q4_0, 1.13 of Q8_0. In the file they are 0.56, 0.69, 0.82, 0.56 and 1.06.

Source: ggml's ``ggml-quants.c``; the package ``gguf`` dequantises the same way.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float16, Float32, Int8, Shaped, UInt8

from longspec_jax.ops.matmul.quantised_weights import MIDDLE, UNIT, QuantisedMatrix

Blocks = UInt8[np.ndarray, "*rows n size"]
"""Whole blocks, as the file has them."""
Scales = Shaped[np.ndarray, "*rows n g"]
"""A number for each group of a block: float32, or int8 where there are units."""
Unit = Float16[np.ndarray, "*rows n 1"]
"""A block's number of 16 bits."""


class Form(NamedTuple):
    """How the matrices of a type, or of several that are multiplied together, are held."""

    narrow: bool
    """Whether codes have 4 bits; otherwise 8."""
    group: int
    """Inputs that share a scale."""
    offset: bool
    """Whether groups have offsets."""
    counted: bool = False
    """Whether scales and offsets are multiples of units."""

    @classmethod
    def of(cls, types: Sequence[str], *, counted: bool = True) -> "Form":
        """The form that holds matrices of these types exactly.

        Args:
          types: whose rows are multiplied together.
          counted: whether scales are counted in units, if all types count them.

        Raises:
          NotImplementedError: if one of them has no such form, as 2 and 3 bits.
        """
        for name in types:
            if name not in TYPES:
                raise NotImplementedError(f"{name} has no packed form; it is dequantised")
        forms = [TYPES[name].form for name in types]
        return cls(
            narrow=all(each.narrow for each in forms),
            group=min(each.group for each in forms),
            offset=any(each.offset for each in forms),
            counted=counted and all(each.counted for each in forms),
        )

    @property
    def codes(self) -> str:
        """The dtype of codes, or of pairs of them."""
        return "uint8" if self.narrow else "int8"

    def fields(self, inputs: int) -> dict[str, "Field"]:
        """The arrays of a :class:`QuantisedMatrix` with this number of inputs, by name."""
        numbers = "int8" if self.counted else "float32"
        groups, units = inputs // self.group, inputs // UNIT
        found = {
            "codes": Field(inputs // 2 if self.narrow else inputs, self.codes, codes),
            "scale": Field(groups, numbers, scales),
        }
        if self.offset:
            found["offset"] = Field(groups, numbers, offsets)
        if self.counted:
            found["unit"] = Field(units, "float16", scale_units)
        if self.counted and self.offset:
            found["offset_unit"] = Field(units, "float16", offset_units)
        return found

    def matrix(self, arrays: Mapping[str, Any]) -> QuantisedMatrix:
        """The matrix of the arrays that :meth:`fields` names, or of their shapes."""
        return QuantisedMatrix(
            codes=arrays["codes"],
            scale=arrays["scale"],
            offset=arrays.get("offset"),
            unit=arrays.get("unit"),
            offset_unit=arrays.get("offset_unit"),
            group=self.group,
        )


class Field(NamedTuple):
    """An array of a matrix, as a form holds it."""

    width: int
    """Of its last axis."""
    dtype: str
    of_blocks: Callable[[Blocks, str, Form], np.ndarray]
    """What it is of the blocks of a type."""


class Type(NamedTuple):
    """A type of tensors."""

    inputs: int
    """Of a block."""
    size: int
    """Bytes of a block."""
    form: Form
    """Of a matrix whose blocks are only of this type."""
    numbers: Callable[[Blocks], np.ndarray]
    """Codes: pairs in a byte as :class:`QuantisedMatrix` has them, or numbers in 8 bits."""
    scales: Callable[[Blocks], Scales]
    offsets: Callable[[Blocks], Scales] | None = None
    scale_unit: Callable[[Blocks], Unit] | None = None
    """What scales are multiples of; they are int8 then, and so are offsets."""
    offset_unit: Callable[[Blocks], Unit] | None = None


def dequantised(blocks: Blocks, name: str) -> Float32[np.ndarray, "*rows C"]:
    """The weights of whole blocks, as ggml has them."""
    own = TYPES[name].form
    group, offset = own.group, own.offset
    form = Form(False, group, offset)
    weights = codes(blocks, name, form).astype(np.float32)
    of_groups = weights.reshape(*weights.shape[:-1], -1, group)
    of_groups *= scales(blocks, name, form)[..., None]
    if offset:
        of_groups += offsets(blocks, name, form)[..., None]
    return weights


def as_blocks(rows: UInt8[np.ndarray, "*out bytes"], name: str) -> Blocks:
    """Rows as whole blocks of a type."""
    size = TYPES[name].size
    if rows.shape[-1] % size:
        raise ValueError(f"rows of {rows.shape[-1]} bytes are not blocks of {size}, as {name} has")
    return rows.reshape(*rows.shape[:-1], -1, size)


def codes(blocks: Blocks, name: str, form: Form) -> np.ndarray:
    """``int8[*rows, C]``, or ``uint8[*rows, C / 2]`` if the form is narrow."""
    numbers = TYPES[name].numbers(blocks)
    if TYPES[name].form.narrow and not form.narrow:
        numbers = np.stack([numbers & 15, numbers >> 4], axis=-1).astype(np.int8)
        numbers = numbers.reshape(*blocks.shape[:-1], -1)
        if not TYPES[name].form.offset:
            numbers -= MIDDLE
    return numbers.reshape(*blocks.shape[:-2], -1)


def scales(blocks: Blocks, name: str, form: Form) -> Shaped[np.ndarray, "*rows G"]:
    """Scales of a form's groups."""
    own = TYPES[name]
    return _of_groups(own.scales(blocks), own.scale_unit, blocks, name, form)


def offsets(blocks: Blocks, name: str, form: Form) -> Shaped[np.ndarray, "*rows G"]:
    """Offsets of a form's groups, for codes of that form."""
    own = TYPES[name]
    if own.offsets is not None:
        return _of_groups(own.offsets(blocks), own.offset_unit, blocks, name, form)
    of_scales = scales(blocks, name, form)
    middle = MIDDLE if own.form.narrow and form.narrow else 0
    return of_scales * of_scales.dtype.type(-middle)


def scale_units(blocks: Blocks, name: str, form: Form) -> Float16[np.ndarray, "*rows U"]:
    """Units of a counted form's scales."""
    return _units(TYPES[name].scale_unit, blocks, name)


def offset_units(blocks: Blocks, name: str, form: Form) -> Float16[np.ndarray, "*rows U"]:
    """Units of a counted form's offsets; of a type without them any will do."""
    own = TYPES[name]
    return _units(own.offset_unit or own.scale_unit, blocks, name)


def _units(
    unit: Callable[[Blocks], Unit] | None, blocks: Blocks, name: str
) -> Float16[np.ndarray, "*rows U"]:
    if unit is None:
        raise ValueError(f"{name} counts no scales in units")
    found = unit(blocks).repeat(TYPES[name].inputs // UNIT, axis=-1)
    return found.reshape(*blocks.shape[:-2], -1)


def _of_groups(
    numbers: Scales, unit: Callable[[Blocks], Unit] | None, blocks: Blocks, name: str, form: Form
) -> Shaped[np.ndarray, "*rows G"]:
    if unit is not None and not form.counted:
        numbers = numbers.astype(np.float32) * unit(blocks).astype(np.float32)
    times = TYPES[name].form.group // form.group
    return numbers.repeat(times, axis=-1).reshape(*numbers.shape[:-2], -1)


def _unit(at: int, sign: int = 1) -> Callable[[Blocks], Unit]:
    """The float16 at an offset, with this sign."""

    def unit(blocks: Blocks) -> Unit:
        halves = np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2")
        return halves * np.float16(sign)

    return unit


def _half(blocks: Blocks, at: int) -> Float32[np.ndarray, "*rows n 1"]:
    """The same as float32."""
    return _unit(at)(blocks).astype(np.float32)


def _nibbles(blocks: Blocks, at: int, width: int, count: int = 1) -> UInt8[np.ndarray, "*rows n i"]:
    """Codes of 4 bits, a byte each: of ``width`` bytes first the lower halves, then the upper."""
    bytes_ = blocks[..., at : at + width * count].reshape(*blocks.shape[:-1], count, width)
    return np.stack([bytes_ & 15, bytes_ >> 4], axis=-2).reshape(*blocks.shape[:-1], -1)


def _pairs(at: int, width: int, count: int = 1) -> Callable[[Blocks], np.ndarray]:
    """Codes of 4 bits, two neighbours in a byte."""

    def numbers(blocks: Blocks) -> np.ndarray:
        bytes_ = blocks[..., at : at + width * count].reshape(*blocks.shape[:-1], count, width)
        even, odd = bytes_[..., 0::2], bytes_[..., 1::2]
        lower, upper = even & 15 | odd << 4, even >> 4 | odd & 0xF0
        return np.stack([lower, upper], axis=-2).reshape(*blocks.shape[:-1], -1)

    return numbers


def _fives(high: int, low: int, middle: int) -> Callable[[Blocks], np.ndarray]:
    """Codes of 5 bits of 32 inputs, whose fifth bits are a word."""

    def numbers(blocks: Blocks) -> np.ndarray:
        fifth = np.unpackbits(blocks[..., high : high + 4], axis=-1, bitorder="little")
        return (_nibbles(blocks, low, 16) | fifth << 4).astype(np.int8) - np.int8(middle)

    return numbers


def _table(values: Sequence[int]) -> Callable[[Blocks, int], Int8[np.ndarray, "*rows n 32"]]:
    return lambda blocks, at: np.asarray(values, np.int8)[_nibbles(blocks, at, 16)]


def _k_scales(blocks: Blocks) -> Scales:
    """The 8 scales of 6 bits of a block of Q4_K or Q5_K."""
    first, third = blocks[..., 4:8], blocks[..., 12:16]
    return np.concatenate([first & 63, third & 15 | first >> 2 & 0x30], axis=-1).view(np.int8)


def _k_offsets(blocks: Blocks) -> Scales:
    """Its 8 minima of 6 bits, whose unit is negative."""
    second, third = blocks[..., 8:12], blocks[..., 12:16]
    return np.concatenate([second & 63, third >> 4 | second >> 2 & 0x30], axis=-1).view(np.int8)


def _q5_k(blocks: Blocks) -> np.ndarray:
    high = blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    codes = _nibbles(blocks, 48, 32, 4) | high.reshape(*blocks.shape[:-1], -1) << 4
    return codes.astype(np.int8)


def _q6_k(blocks: Blocks) -> np.ndarray:
    low = _nibbles(blocks, 0, 64, 2).reshape(*blocks.shape[:-1], 2, 4, 32)
    high = blocks[..., 128:192].reshape(*blocks.shape[:-1], 2, 1, 32)
    high = high >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    return ((low | high << 4).astype(np.int8) - np.int8(32)).reshape(*blocks.shape[:-1], -1)


def _q6_k_scales(blocks: Blocks) -> Scales:
    return np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)


def _mxfp4_scales(blocks: Blocks) -> Scales:
    """Half a power of two, since codes are twice the 4-bit floats."""
    return np.ldexp(np.float32(1), blocks[..., :1].astype(np.int32) - 128)


_IQ4_NL = _table((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))
_MXFP4 = _table((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12))
_D: Callable[[Blocks], Scales] = lambda blocks: _half(blocks, 0)  # noqa: E731
_M: Callable[[Blocks], Scales] = lambda blocks: _half(blocks, 2)  # noqa: E731
_EIGHT, _FOUR = Form(False, 32, False), Form(True, 32, False)
TYPES: dict[str, Type] = {
    "Q8_0": Type(32, 34, _EIGHT, lambda blocks: blocks[..., 2:].view(np.int8), _D),
    "Q4_0": Type(32, 18, _FOUR, _pairs(2, 16), _D),
    "Q4_1": Type(32, 20, Form(True, 32, True), _pairs(4, 16), _D, _M),
    "Q5_0": Type(32, 22, _EIGHT, _fives(2, 6, 16), _D),
    "Q5_1": Type(32, 24, Form(False, 32, True), _fives(4, 8, 0), _D, _M),
    "IQ4_NL": Type(32, 18, _EIGHT, lambda blocks: _IQ4_NL(blocks, 2), _D),
    "MXFP4": Type(32, 17, _EIGHT, lambda blocks: _MXFP4(blocks, 1), _mxfp4_scales),
    "Q4_K": Type(
        256,
        144,
        Form(True, 32, True, True),
        _pairs(16, 32, 4),
        _k_scales,
        _k_offsets,
        _unit(0),
        _unit(2, -1),
    ),
    "Q5_K": Type(
        256,
        176,
        Form(False, 32, True, True),
        _q5_k,
        _k_scales,
        _k_offsets,
        _unit(0),
        _unit(2, -1),
    ),
    "Q6_K": Type(256, 210, Form(False, 16, False, True), _q6_k, _q6_k_scales, None, _unit(208)),
}
"""By the names of ggml."""
