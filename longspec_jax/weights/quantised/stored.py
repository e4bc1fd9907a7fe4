"""How each format stores a linear map, as codes, scales and zero points that are read by slice.

A format turns the stored tensors of a linear ``[out, in]`` into those of
:class:`longspec_jax.ops.matmul.quantised_weights.QuantisedMatrix`: their bytes are moved, shifted
or transposed, and never widened. So the tables of :mod:`longspec_jax.weights.tables` cut and lay
out quantised weights as they do whole ones.

Sources: the packers and dequantisers of compressed-tensors 0.20 (``compressors/``), transformers 5
(``integrations/finegrained_fp8.py``), GPTQModel (``qlinear/__init__.py``) and AutoAWQ 0.2.9
(``modules/linear/gemm.py``, ``utils/packing_utils.py``).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import numpy as np

from longspec_jax.weights.checkpoint import Index, Tensor, Tensors

FLOATS = ("bfloat16", "float16", "float32")
MISMATCH = (
    "the files are of different saves, or not whole: download the model again, or, if it was "
    "published so, choose another checkpoint of it"
)
"""What to do where ``config.json`` and the tensors disagree."""
WORD = "I32"
"""Integers are packed in words of 32 bits, the first in the lowest bits."""
FLOAT_SCALES = "weight_scale", "weight_scale_inv"
AWQ_ORDER = np.asarray([0, 4, 1, 5, 2, 6, 3, 7])
"""Where the 8 columns of an AWQ word are in it, of 4 bits each."""


class Stored(NamedTuple):
    """A quantised linear: what its matrix is made of, each readable by slice."""

    codes: Tensor
    """``[out, in]`` in 8 bits, ``[out, in / 2]`` in 4."""
    scale: Tensor
    """``[out, groups]``."""
    zero: Tensor | None
    """``[out, groups]``, int8."""
    order: np.ndarray | None
    """The input of every code, where they are sorted by group."""
    group: int
    """Inputs that share a scale."""


class Format(Protocol):
    """One way to store a linear."""

    names: ClassVar[tuple[str, ...]]
    """The tensors that it reads, without the name of the linear."""
    marks: ClassVar[tuple[str, ...]]
    """Those of them that a whole linear lacks."""

    @property
    def label(self) -> str:
        """What reports call it, such as ``fp8``."""
        ...

    def read(self, tensors: Tensors, name: str, shape: tuple[int, int]) -> Stored:
        """The linear ``name`` of ``[out, in]``.

        Raises:
          ValueError: if its tensors are missing or not as the format stores them.
        """
        ...


@dataclass(frozen=True)
class Bytes:
    """A code a byte: ``weight`` in e4m3 or int8, scaled by tensor, output, group or block.

    compressed-tensors' ``float-quantized`` and ``int-quantized``, and ``fp8``.
    """

    floating: bool
    scale: str = "weight_scale"
    """The scales' tensor."""
    block: tuple[int, int] | None = None
    """Outputs and inputs that share a scale; one an output or a tensor if absent."""
    symmetric: bool = True

    marks: ClassVar[tuple[str, ...]] = ("weight_scale", "weight_scale_inv", "weight_zero_point")
    names: ClassVar[tuple[str, ...]] = ("weight", *marks)

    @property
    def label(self) -> str:
        """See :class:`Format`."""
        return "fp8" if self.floating else "int8"

    def read(self, tensors: Tensors, name: str, shape: tuple[int, int]) -> Stored:
        """See :class:`Format`."""
        kind = "float8_e4m3fn" if self.floating else "I8"
        codes = _named(tensors, name, "weight", (kind,), shape)
        block = self.block or (1, shape[1])
        grid = -(-shape[0] // block[0]), -(-shape[1] // block[1])
        alike = ((), (1,), (1, 1)) if self.block is None else ()
        # Tools give the scales of fp8 either name, and mean the same factor.
        scales = (self.scale, *FLOAT_SCALES) if self.floating else (self.scale,)
        stored = next((each for each in scales if f"{name}.{each}" in tensors), self.scale)
        scale = _named(tensors, name, stored, FLOATS, grid, *alike)
        zero = None
        if not self.symmetric:
            zero = _named(tensors, name, "weight_zero_point", ("I8",), grid, *alike)
            zero = _tensor(_repeated(zero, shape[0], block[0]), (shape[0], grid[1]), "int8", zero)
        rows = _repeated(scale, shape[0], block[0])
        return Stored(
            codes=_tensor(codes.read, shape, "float8_e4m3fn" if self.floating else "int8", codes),
            scale=_tensor(rows, (shape[0], grid[1]), scale.dtype, scale),
            zero=zero,
            order=None,
            group=block[1],
        )


@dataclass(frozen=True)
class Packed:
    """Integers packed along the inputs, unsigned: compressed-tensors' ``pack-quantized``."""

    bits: int
    group: int
    """Inputs that share a scale; all if 0."""
    symmetric: bool = True
    ordered: bool = False
    """Whether ``weight_g_idx`` names the group of every input."""

    marks: ClassVar[tuple[str, ...]] = (
        *("weight_packed", "weight_scale", "weight_shape"),
        *("weight_zero_point", "weight_g_idx"),
    )
    names: ClassVar[tuple[str, ...]] = marks

    @property
    def label(self) -> str:
        """See :class:`Format`."""
        return f"int{self.bits}"

    def read(self, tensors: Tensors, name: str, shape: tuple[int, int]) -> Stored:
        """See :class:`Format`."""
        out, inputs = shape
        each = 32 // self.bits
        groups, group = _groups(name, inputs, self.group)
        stored = _named(tensors, name, "weight_shape", ("I64", "I32"), (2,))
        if tuple(stored.read((slice(None),))) != shape:
            raise ValueError(
                f"{stored.file}: {name}.weight_shape is {[*stored.read((slice(None),))]}, must be "
                f"{[*shape]}; the files belong to another model"
            )
        words = _named(tensors, name, "weight_packed", (WORD,), (out, -(-inputs // each)))
        scale = _named(tensors, name, "weight_scale", FLOATS, (out, groups))
        zero = None
        if not self.symmetric:
            packed = _named(tensors, name, "weight_zero_point", (WORD,), (-(-out // each), groups))
            zeros = _unpacked(packed.read((slice(None), slice(None))).T, self.bits)[:, :out].T
            zero = _constant(_zero_points(zeros, self.bits), packed)
        order = None
        if self.ordered:
            order = _order(_named(tensors, name, "weight_g_idx", (WORD,), (inputs,)), name, group)

        return _integers(_bytes(words), shape, words, scale, zero, order, group, self.bits)


@dataclass(frozen=True)
class Gptq:
    """GPTQ: codes packed along the inputs, zero points along the outputs."""

    bits: int
    group: int
    """See :class:`Packed`."""
    symmetric: bool
    offset: int
    """What is added to a stored zero point: 1 in files of the first version, 0 of the second."""

    names: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales", "g_idx")
    marks: ClassVar[tuple[str, ...]] = names

    @property
    def label(self) -> str:
        """See :class:`Format`."""
        return f"int{self.bits}"

    def read(self, tensors: Tensors, name: str, shape: tuple[int, int]) -> Stored:
        """See :class:`Format`."""
        out, inputs = shape
        each = 32 // self.bits
        _refuse_uneven(name, each, **{"out_features": out, "in_features": inputs})
        groups, group = _groups(name, inputs, self.group)
        words = _named(tensors, name, "qweight", (WORD,), (inputs // each, out))
        scale = _named(tensors, name, "scales", FLOATS, (groups, out))
        packed = _named(tensors, name, "qzeros", (WORD,), (groups, out // each))
        zeros = _unpacked(packed.read((slice(None), slice(None))), self.bits).T
        # The packed word may have overflowed when one was subtracted: each is masked by itself.
        offset, middle = self.offset, 2 ** (self.bits - 1)
        if self.symmetric and (zeros == middle).all():
            offset = 0  # Some files of the second version bear the name of the first.
        zeros = (zeros.astype(np.int32) + offset) & (2**self.bits - 1)
        if self.symmetric and (zeros != middle).any():
            raise ValueError(
                f"{packed.file}: {name}.qzeros holds zero points other than {middle}, but "
                f"config.json says sym=true; {MISMATCH}"
            )
        zero = None if self.symmetric else _constant(_zero_points(zeros, self.bits), packed)
        order = None
        if f"{name}.g_idx" in tensors:
            order = _order(_named(tensors, name, "g_idx", (WORD,), (inputs,)), name, group)

        read, scale = _bytes(_transposed(words)), _transposed(scale)
        return _integers(read, shape, words, scale, zero, order, group, self.bits)


@dataclass(frozen=True)
class Awq:
    """AWQ in its ``gemm`` layout: 4 bits, packed along the outputs and interleaved."""

    group: int
    """See :class:`Packed`."""
    zero_points: bool

    names: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales")
    marks: ClassVar[tuple[str, ...]] = names

    @property
    def label(self) -> str:
        """See :class:`Format`."""
        return "int4"

    def read(self, tensors: Tensors, name: str, shape: tuple[int, int]) -> Stored:
        """See :class:`Format`."""
        out, inputs = shape
        _refuse_uneven(name, 8, out_features=out)
        groups, group = _groups(name, inputs, self.group)
        words = _named(tensors, name, "qweight", (WORD,), (inputs, out // 8))
        scale = _named(tensors, name, "scales", FLOATS, (groups, out))
        zero = None
        if self.zero_points:
            packed = _named(tensors, name, "qzeros", (WORD,), (groups, out // 8))
            zeros = _interleaved(packed.read((slice(None), slice(None))))
            zero = _constant(zeros.T.astype(np.int8), packed)

        def read(rows: slice, columns: slice) -> np.ndarray:
            first, last = rows.start // 8, -(-rows.stop // 8)
            within = slice(2 * columns.start, 2 * columns.stop)
            codes = _of_outputs(words.read((within, slice(first, last))))
            return codes[rows.start - 8 * first : rows.stop - 8 * first]

        return _integers(read, shape, words, _transposed(scale), zero, None, group, 4)


FORMATS: tuple[type[Format], ...] = Bytes, Packed, Gptq, Awq


def _integers(
    read: Callable[[slice, slice], np.ndarray],
    shape: tuple[int, int],
    words: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    order: np.ndarray | None,
    group: int,
    bits: int,
) -> Stored:
    """A linear of unsigned integers: 4-bit ones stay so, those of a byte become signed.

    Args:
      read: bytes of some outputs and some bytes along the inputs, in the inputs' own order.
    """
    out, inputs = shape
    each = 8 // bits
    if inputs % each:
        raise ValueError(f"{words.file}: {inputs} inputs of {bits} bits are not whole bytes")

    def codes(index: Index) -> np.ndarray:
        rows, columns = (
            slice(*part.indices(size)[:2])
            for part, size in zip(index, (out, inputs // each), strict=True)
        )
        if order is None:
            found = read(rows, columns)
        else:
            place = order[each * columns.start : each * columns.stop]
            found = read(rows, slice(0, inputs // each))
            found = _chosen_pairs(found, place) if bits == 4 else _chosen(found, place)
        return found if bits == 4 else (found ^ 128).view(np.int8)

    kind = "uint8" if bits == 4 else "int8"
    tensor = Tensor((out, inputs // each), kind, codes, words.file)
    return Stored(tensor, scale, zero, order, group)


def _bytes(words: Tensor) -> Callable[[slice, slice], np.ndarray]:
    """Reads words ``[out, words]`` as bytes, in the inputs' own order."""

    def read(rows: slice, columns: slice) -> np.ndarray:
        first, last = columns.start // 4, -(-columns.stop // 4)
        found = np.ascontiguousarray(words.read((rows, slice(first, last)))).view(np.uint8)
        return found[:, columns.start - 4 * first : columns.stop - 4 * first]

    return read


def _named(
    tensors: Tensors, name: str, suffix: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...]
) -> Tensor:
    """A tensor of a linear; raises unless it has one of some dtypes and shapes."""
    full = f"{name}.{suffix}"
    if full not in tensors:
        raise ValueError(
            f"config.json says that {name} is quantised, and the weights hold no {full}; {MISMATCH}"
        )
    tensor = tensors[full]
    if tensor.dtype not in dtypes or tensor.shape not in shapes:
        raise ValueError(
            f"{tensor.file}: {full} is {tensor.dtype} {tensor.shape}, config.json describes "
            f"{' or '.join(dtypes)} {' or '.join(map(str, shapes))}; {MISMATCH}"
        )
    return tensor


def _groups(name: str, inputs: int, group: int) -> tuple[int, int]:
    """Number and size of the groups of a linear's inputs."""
    size = group or inputs
    if inputs % size:
        raise ValueError(
            f"{name} has {inputs} inputs, which groups of {size} do not divide; load a checkpoint "
            "of another group size"
        )
    return inputs // size, size


def _refuse_uneven(name: str, each: int, **sizes: int) -> None:
    for what, size in sizes.items():
        if size % each:
            raise ValueError(
                f"{name} has {what}={size}, which is not a multiple of the {each} codes of a word; "
                "load a checkpoint of another format"
            )


def _repeated(tensor: Tensor, rows: int, block: int) -> Callable[[Index], np.ndarray]:
    """Reads scales of blocks of outputs, or of the whole tensor, as scales of single outputs."""

    def read(index: Index) -> np.ndarray:
        values = tensor.read((slice(None),) * len(tensor.shape))
        values = np.asarray(values).reshape(tensor.shape if len(tensor.shape) == 2 else (1, 1))
        of_rows = np.arange(*index[0].indices(rows)[:2]) // (rows if len(values) == 1 else block)
        return values[of_rows][:, index[1]]

    return read


def _transposed(tensor: Tensor) -> Tensor:
    return Tensor(
        tensor.shape[::-1], tensor.dtype, lambda index: tensor.read(index[::-1]).T, tensor.file
    )


def _tensor(
    read: Callable[[Index], np.ndarray], shape: tuple[int, ...], dtype: str, of: Tensor
) -> Tensor:
    return Tensor(shape, dtype, read, of.file)


def _constant(values: np.ndarray, of: Tensor) -> Tensor:
    """A small tensor that was read whole."""
    return Tensor(values.shape, values.dtype.name, values.__getitem__, of.file)


def _unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """The unsigned integers of ``[rows, words]``, the lowest bits first."""
    if bits == 8:
        return np.ascontiguousarray(words).view(np.uint8)
    halves = np.ascontiguousarray(words).view(np.uint8)
    return np.stack([halves & 15, halves >> 4], axis=-1).reshape(len(halves), -1)


def _interleaved(words: np.ndarray) -> np.ndarray:
    """The 4-bit integers of AWQ's words ``[rows, words]``, in the order of the outputs."""
    codes = _unpacked(words, 4)
    return codes.reshape(len(codes), -1, 8)[..., AWQ_ORDER].reshape(len(codes), -1)


def _of_outputs(words: np.ndarray) -> np.ndarray:
    """AWQ's words ``[inputs, words]`` as bytes ``[outputs, inputs / 2]`` of two inputs each."""
    pairs = np.ascontiguousarray(words).view(np.uint8)
    even, odd = pairs[::2], pairs[1::2]
    # Of every byte of a word the lower half, and the upper.
    halves = [
        each.reshape(len(even), -1, 4) for each in (even & 15 | odd << 4, even >> 4 | odd & 0xF0)
    ]
    codes = np.empty((halves[0].shape[1], 8, len(even)), np.uint8)
    for output, place in enumerate(AWQ_ORDER):
        codes[:, output] = halves[place % 2][:, :, place // 2].T
    return codes.reshape(-1, len(even))


def _chosen(codes: np.ndarray, place: np.ndarray) -> np.ndarray:
    """Columns of ``[rows, inputs]``; by indexing it would take three times as long."""
    return np.take(codes, place, axis=1, mode="clip")


def _chosen_pairs(pairs: np.ndarray, place: np.ndarray) -> np.ndarray:
    """Some inputs of 4-bit codes, two a byte before and after."""
    halves = np.concatenate([pairs & 15, pairs >> 4], axis=1)
    place = (place >> 1) + (place & 1) * pairs.shape[1]
    return _chosen(halves, place[::2]) | _chosen(halves, place[1::2]) << 4


def _zero_points(zeros: np.ndarray, bits: int) -> np.ndarray:
    """Zero points of unsigned codes, as int8 and next to the codes as they are kept."""
    return (zeros - (128 if bits == 8 else 0)).astype(np.int8)


def _order(stored: Tensor, name: str, group: int) -> np.ndarray | None:
    """The inputs, sorted by group; None if they are sorted already."""
    of_inputs = np.asarray(stored.read((slice(None),)))
    order = np.argsort(of_inputs, kind="stable").astype(np.int32)
    if (of_inputs[order] != np.arange(len(order)) // group).any():
        raise ValueError(
            f"{stored.file}: the groups of inputs that {name} names are not all of the size "
            f"{group}; the file is damaged, or of another format"
        )
    return None if (order == np.arange(len(order))).all() else order
