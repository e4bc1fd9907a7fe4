"""Matmuls of a few rows with weights of 8 or 4 bits as a Pallas kernel for Triton.

For machines, versions of jax and shapes that the Hopper kernel does not serve. A program owns some
outputs and streams their codes, which become 16-bit numbers on the way to the matrix units: every
code is exact in them, and so is its difference from a zero point. Sums are multiplied by scales in
float32. Of groups of 16 or 32 inputs sums would be many: there codes get their scales and offsets
in float32 before they are rounded, as the definition says. What XLA leaves to launches of their own
is done here, a bias, the gate of a SwiGLU: next to weights that take ten microseconds to read, a
launch counts.

Of codes of 4 bits a byte holds two, of neighbouring inputs. Rows are read in pairs as well, and
those of the lower and of the upper halves are multiplied apart.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jax.typing import DTypeLike

from longspec_jax.axes import Array, Ref
from longspec_jax.ops.hardware import MULTIPROCESSORS
from longspec_jax.ops.launchers import launcher
from longspec_jax.ops.matmul.quantised_weights import MIDDLE, UNIT, QuantisedMatrix
from longspec_jax.ops.triton_launch import triton_call

MOST_ROWS = 64
"""Rows that are multiplied together at most: the nodes of a tree."""
_MATRIX_ROWS = 16
"""Height of Ampere's matrix instruction."""


@dataclasses.dataclass(frozen=True)
class TritonTile:
    """How one program works.

    Attributes:
      rows: rows of the result, with padding.
      outputs: outputs of a program; of each of two matmuls where they are gated.
      depth: inputs per step.
      splits: programs that share outputs, each with a part of the contraction.
      stages: depth of the software pipeline.
    """

    rows: int
    outputs: int
    depth: int
    splits: int
    stages: int


def triton_tile(
    rows: int, weights: QuantisedMatrix, gated: bool = False, split: bool = False
) -> TritonTile:
    """Choose the tile only from shapes.

    Args:
      rows: rows of the result.
      weights: what they are multiplied by.
      gated: whether there are two matmuls, one of which gates the other.
      split: whether the contraction may be split and leave partials.

    Raises:
      NotImplementedError: if the kernel does not serve them.
    """
    if not 0 < rows <= MOST_ROWS:
        raise NotImplementedError(
            f"Triton's kernel for quantised weights takes 1 to {MOST_ROWS} rows, not {rows}"
        )
    if weights.floating:
        raise NotImplementedError("Triton's kernel for quantised weights takes no 4-bit floats")
    height = max(_MATRIX_ROWS, pl.next_power_of_2(rows))
    depth = 256 if height == _MATRIX_ROWS else 128
    if weights.fine:
        depth = 128
    elif weights.groups > 1:
        fitting = [size for size in (depth, 128, 64, 32) if weights.group % size == 0]
        if not fitting:
            raise NotImplementedError(
                "Triton's kernel for quantised weights takes groups in multiples of 32 inputs, or "
                f"of 16 without zero points, not {weights.group}"
            )
        depth = fitting[0]
    outputs = weights.scale.size // weights.groups // (2 if gated else 1)
    if split and outputs <= 32 * MULTIPROCESSORS and weights.inputs <= 12288:
        return TritonTile(height, 32, depth, 4, 4)
    if split and outputs <= 64 * MULTIPROCESSORS:
        return TritonTile(height, 64, depth, 4, 3)
    if split and outputs <= 128 * MULTIPROCESSORS:
        return TritonTile(height, 64, depth, 2, 3)
    if gated:
        return TritonTile(height, 32, depth, 1, 3)
    if outputs < 128 * MULTIPROCESSORS:
        return TritonTile(height, 32, depth, 1, 4)
    return TritonTile(height, 64, depth, 1, 3)


@launcher("tile", "gated", "dtype", "interpret")
def matmul(
    x: Array,
    weights: QuantisedMatrix,
    bias: Array | None = None,
    *,
    tile: TritonTile,
    gated: bool = False,
    dtype: DTypeLike,
    interpret: bool = False,
) -> Array:
    """Launch the kernel.

    Args:
      x: ``[rows, C]`` in 16 bits, in the order of the codes.
      weights: with one axis of outputs.
      bias: what is added to each output.
      tile: how a program works.
      gated: whether the first half of the outputs gates the second: ``silu(first) * second``.
      dtype: of the result; split-K partials are float32.
      interpret: run step by step on any platform.

    Returns:
      ``[splits, rows, N]``, the sum over ``splits`` being the result; ``N / 2`` if gated.
    """
    rows, outputs = len(x), len(weights.scale) // (2 if gated else 1)
    codes = weights.codes
    if codes.dtype == jnp.float8_e4m3fn:
        codes = jax.lax.bitcast_convert_type(codes, jnp.uint8)
    dtype_of_rows = x.dtype
    if weights.packed:
        x = jax.lax.bitcast_convert_type(x.reshape(rows, -1, 2), jnp.uint32)
    given = dict(zero=weights.zero, offset=weights.offset, bias=bias)
    given |= dict(unit=weights.unit, offset_unit=weights.offset_unit)
    given = {name: each for name, each in given.items() if each is not None}
    kernel = functools.partial(
        _kernel,
        names=tuple(given),
        tile=tile,
        stored=weights.codes.dtype,
        dtype=dtype_of_rows,
        group=weights.group if weights.groups > 1 or weights.fine else 0,
        middle=weights.middle if weights.fine else None,
        gated=gated,
    )
    return triton_call(
        kernel,
        grid=(pl.cdiv(outputs, tile.outputs), tile.splits),
        out_shape=jax.ShapeDtypeStruct(
            (tile.splits, rows, outputs), jnp.float32 if tile.splits > 1 else dtype
        ),
        warps=4,
        stages=tile.stages,
        interpret=interpret,
        name="quantised_gated_matmul" if gated else "quantised_matmul",
    )(x, codes, weights.scale, *given.values())


def _kernel(
    x_ref: Ref,
    codes_ref: Ref,
    scale_ref: Ref,
    *refs: Ref,
    names: tuple[str, ...],
    tile: TritonTile,
    stored: DTypeLike,
    dtype: DTypeLike,
    group: int,
    middle: int | None,
    gated: bool,
) -> None:
    """Some outputs of all rows, over a share of the contraction."""
    *given, out_ref = refs
    refs_by_name = dict(zip(names, given, strict=True))
    zero_ref, offset_ref, bias_ref = map(refs_by_name.get, ("zero", "offset", "bias"))
    unit_ref, offset_unit_ref = map(refs_by_name.get, ("unit", "offset_unit"))
    (_, rows, outputs), columns = out_ref.shape, codes_ref.shape[1]
    output = pl.program_id(0) * tile.outputs + jnp.arange(tile.outputs)
    split, row = pl.program_id(1), jnp.arange(tile.rows)
    of_row = (row < rows)[:, None]
    # Nothing is masked where tiles fit: reads are wider then.
    of_output = True if outputs % tile.outputs == 0 else output < outputs
    inputs = 2 if stored == jnp.uint8 else 1  # Of a byte.
    width = tile.depth // inputs
    whole = columns % (tile.splits * width) == 0
    steps = pl.cdiv(pl.cdiv(columns, tile.splits), width)
    parts = (0, outputs) if gated else (0,)

    def step(index: jax.Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        first = (split * steps + index) * width
        place = first + jnp.arange(width)
        inside = True if whole else (place < columns)[None, :]
        vectors = _halves(_read(x_ref.at[row[:, None], place[None, :]], of_row & inside), dtype)
        at_group = jnp.minimum(first * inputs // group, scale_ref.shape[1] - 1) if group else 0
        new = []
        for part, total in zip(parts, sums, strict=True):
            mine = part + output
            mask = inside if of_output is True else of_output[:, None] & inside
            codes = _read(codes_ref.at[mine[:, None], place[None, :]], mask)
            if middle is None:
                zero = None if zero_ref is None else _read(zero_ref.at[mine, at_group], of_output)
                matrices = _widened(codes, stored, dtype, zero)
            else:
                at = mine[:, None], (place * inputs // group)[None, :]
                unit_at = mine[:, None], (place * inputs // UNIT)[None, :]
                scale = _of_groups(scale_ref, at, unit_ref, unit_at, mask)
                offset = None
                if offset_ref is not None:
                    offset = _of_groups(offset_ref, at, offset_unit_ref, unit_at, mask)
                matrices = _weighted(codes, stored, dtype, middle, scale, offset)
            added = sum(_dot(*pair) for pair in zip(vectors, matrices, strict=True))
            if group and middle is None:
                added *= _read(scale_ref.at[mine, at_group], of_output)[None, :]
            new.append(total + added)
        return tuple(new)

    zeros = jnp.zeros((tile.rows, tile.outputs), jnp.float32)
    sums = jax.lax.fori_loop(0, steps, step, (zeros,) * len(parts))
    results = []
    for part, result in zip(parts, sums, strict=True):
        if not group:
            result *= _read(scale_ref.at[part + output, 0], of_output)[None, :]
        if bias_ref is not None:
            bias = _read(bias_ref.at[part + output], of_output)
            result += bias.astype(jnp.float32)[None, :]
        results.append(result)
    if gated:
        # Rounded as the two matmuls are where they are matmuls of their own.
        gate, factor = (each.astype(dtype).astype(jnp.float32) for each in results)
        results = [gate / (1.0 + jnp.exp(-gate)) * factor]
    pltriton.store(
        out_ref.at[split, row[:, None], output[None, :]],
        results[0].astype(out_ref.dtype),
        mask=of_row & (output < outputs)[None, :],
    )


def _of_groups(numbers_ref: Ref, at: Any, unit_ref: Ref, unit_at: Any, mask: Any) -> Array:
    """Scales or offsets of groups, float32, for every weight of a tile."""
    numbers = _read(numbers_ref.at[at], mask)
    if unit_ref is None:
        return numbers
    return numbers.astype(jnp.float32) * _read(unit_ref.at[unit_at], mask).astype(jnp.float32)


def _halves(x: Array, dtype: DTypeLike) -> tuple[Array, ...]:
    """Rows as they are, or those of the lower and of the upper halves of words."""
    if x.dtype == dtype:
        return (x,)
    halves = x & 0xFFFF, x >> 16
    return tuple(jax.lax.bitcast_convert_type(half.astype(jnp.uint16), dtype) for half in halves)


def _widened(
    codes: Array, stored: DTypeLike, dtype: DTypeLike, zero: Array | None
) -> tuple[Array, ...]:
    """Codes ``[outputs, bytes]`` as numbers without their scales; of 4 bits both halves."""
    if stored == jnp.float8_e4m3fn:
        # Half precision has room for its exponent, which is too small by the two biases.
        bits = codes.astype(jnp.uint16)
        bits = (bits & 0x80) << 8 | (bits & 0x7F) << 7
        half = jax.lax.bitcast_convert_type(bits, jnp.float16)
        return ((half.astype(jnp.float32) * 256).astype(dtype),)
    parts = (codes & 15, codes >> 4) if stored == jnp.uint8 else (codes,)
    numbers = tuple(part.astype(dtype) for part in parts)
    if zero is not None:
        return tuple(number - zero.astype(dtype)[:, None] for number in numbers)
    return tuple(number - MIDDLE for number in numbers) if stored == jnp.uint8 else numbers


def _weighted(
    codes: Array,
    stored: DTypeLike,
    dtype: DTypeLike,
    middle: int,
    scale: Array,
    offset: Array | None,
) -> tuple[Array, ...]:
    """Codes as weights, each with its scale and offset; of 4 bits both halves have the same."""
    weights = []
    for part in (codes & 15, codes >> 4) if stored == jnp.uint8 else (codes,):
        weight = (part.astype(jnp.float32) - middle) * scale
        weights.append((weight if offset is None else weight + offset).astype(dtype))
    return tuple(weights)


def _dot(x: Array, matrix: Array) -> Array:
    over = ((1,), (1,)), ((), ())
    return jax.lax.dot_general(x, matrix, over, preferred_element_type=jnp.float32)


def _read(at: Any, mask: Any) -> Array:
    """Read where the mask is true, zeros elsewhere; everything if it is True itself."""
    return pltriton.load(at) if mask is True else pltriton.load(at, mask=mask, other=0)
