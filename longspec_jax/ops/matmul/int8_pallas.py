"""Matmuls of a few rows with 8-bit weights as a Pallas kernel for Triton.

A program owns some outputs and streams their weights, which become 16-bit numbers on the way to
the matrix units: each of the 255 steps is exact in them. What XLA leaves to launches of their own
is done here, the scales, a bias, the gate of a SwiGLU: beside weights that take ten microseconds
to read, a launch counts.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from longspec_jax.axes import Array
from longspec_jax.ops.hardware import MULTIPROCESSORS, triton_params
from longspec_jax.ops.launchers import launcher

MATRIX_ROWS = 16
"""Rows that are multiplied together: the height of Ampere's matrix instruction."""


@dataclasses.dataclass(frozen=True)
class Int8Tile:
    """How one program of the matmul with 8-bit weights works.

    Attributes:
      outputs: outputs of a program; of each of two matmuls where they are gated.
      depth: elements of the contracted axis per step.
      splits: programs that share outputs, each with a part of the contraction.
      warps: warps per program.
      stages: depth of the software pipeline.
    """

    outputs: int
    depth: int
    splits: int
    warps: int
    stages: int


def int8_tile(
    rows: int, contracted: int, outputs: int, gated: bool = False, split: bool = False
) -> Int8Tile:
    """Choose the tile from the shape alone; refuse where XLA's matmul is as good.

    Args:
      rows: rows of the result.
      contracted: size of the contracted axis.
      outputs: outputs of the matmul, of each of two where they are gated.
      gated: whether there are two matmuls of which one gates the other.
      split: whether the contraction may be split and leave partials.
    """
    if rows > MATRIX_ROWS:
        raise NotImplementedError(
            f"the 8-bit matmul kernel takes up to {MATRIX_ROWS} rows, not {rows}"
        )
    if split and outputs <= 32 * MULTIPROCESSORS and contracted <= 12288:
        return Int8Tile(32, 256, 4, 4, 4)
    if split and outputs <= 64 * MULTIPROCESSORS:
        return Int8Tile(64, 256, 4, 4, 3)
    if split and outputs <= 128 * MULTIPROCESSORS:
        return Int8Tile(64, 256, 2, 4, 3)
    if gated:
        return Int8Tile(32, 256, 1, 4, 3)
    if outputs < 128 * MULTIPROCESSORS:
        return Int8Tile(32, 256, 1, 4, 4)
    return Int8Tile(64, 256, 1, 4, 3)


@launcher("tile", "gated", "dtype", "interpret")
def int8_matmul(
    x: Array,
    weights: Array,
    scale: Array,
    bias: Array | None = None,
    *,
    tile: Int8Tile,
    gated: bool = False,
    dtype: Any,
    interpret: bool = False,
) -> Array:
    """Launch the kernel.

    Args:
      x: ``[rows, D]`` in 16 bits, at most :data:`MATRIX_ROWS` rows.
      weights: ``[v, D]`` in 8 bits.
      scale: what each of the ``v`` outputs is multiplied by.
      bias: what is added to each.
      tile: how a program works.
      gated: whether the first half of the outputs gates the second: ``silu(first) * second``.
      dtype: of the result; split-K partials are float32.
      interpret: run step by step on any platform.

    Returns:
      ``[splits, rows, v]``, the sum over ``splits`` being the result; ``v / 2`` if gated.
    """
    rows = x.shape[0]
    outputs = weights.shape[0] // (2 if gated else 1)
    kernel = functools.partial(_kernel, tile=tile, rows=rows, gated=gated)
    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(outputs, tile.outputs), tile.splits),
        out_shape=jax.ShapeDtypeStruct(
            (tile.splits, rows, outputs), jnp.float32 if tile.splits > 1 else dtype
        ),
        compiler_params=triton_params(tile.warps, tile.stages),
        interpret=interpret,
        name="int8_gated_matmul" if gated else "int8_matmul",
    )(x, weights, scale, *([] if bias is None else [bias]))


def _kernel(
    x_ref: Any, weights_ref: Any, scale_ref: Any, *refs: Any, tile: Int8Tile, rows: int, gated: bool
) -> None:
    """Some outputs of all rows, over a share of the contraction."""
    *bias_refs, out_ref = refs
    outputs, depth = out_ref.shape[2], x_ref.shape[1]
    output = pl.program_id(0) * tile.outputs + jnp.arange(tile.outputs)
    split, row = pl.program_id(1), jnp.arange(MATRIX_ROWS)
    given = (row < rows)[:, None]
    # Nothing is masked where tiles fit: reads are wider then.
    exists = True if outputs % tile.outputs == 0 else (output < outputs)[:, None]
    whole = depth % (tile.splits * tile.depth) == 0
    steps = pl.cdiv(pl.cdiv(depth, tile.splits), tile.depth)
    parts = (0, outputs) if gated else (0,)

    def step(index: jax.Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        place = (split * steps + index) * tile.depth + jnp.arange(tile.depth)
        inside = True if whole else (place < depth)[None, :]
        vectors = _read(x_ref.at[row[:, None], place[None, :]], given & inside)
        added = []
        for first, total in zip(parts, sums, strict=True):
            at = weights_ref.at[first + output[:, None], place[None, :]]
            widened = _read(at, exists & inside).astype(x_ref.dtype)
            over = ((1,), (1,)), ((), ())
            added.append(
                total
                + jax.lax.dot_general(vectors, widened, over, preferred_element_type=jnp.float32)
            )
        return tuple(added)

    zeros = jnp.zeros((MATRIX_ROWS, tile.outputs), jnp.float32)
    sums = jax.lax.fori_loop(0, steps, step, (zeros,) * len(parts))
    of_output = True if exists is True else output < outputs
    results = []
    for first, total in zip(parts, sums, strict=True):
        result = total * _read(scale_ref.at[first + output], of_output)[None, :]
        for bias_ref in bias_refs:
            bias = _read(bias_ref.at[first + output], of_output)
            result += bias.astype(jnp.float32)[None, :]
        results.append(result)
    if gated:
        # Rounded as the two matmuls are where they are matmuls of their own.
        gate, factor = (each.astype(x_ref.dtype).astype(jnp.float32) for each in results)
        results = [gate / (1.0 + jnp.exp(-gate)) * factor]
    pltriton.store(
        out_ref.at[split, row[:, None], output[None, :]],
        results[0].astype(out_ref.dtype),
        mask=given & (output < outputs)[None, :],
    )


def _read(at: Any, mask: Any) -> Array:
    """Read where the mask is true, zeros elsewhere; everything if it is True itself."""
    return pltriton.load(at) if mask is True else pltriton.load(at, mask=mask, other=0)
