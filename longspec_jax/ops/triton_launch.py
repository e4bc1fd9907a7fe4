"""What all kernels for Triton ask of Pallas, and how far their offsets reach."""

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.experimental import pallas as pl

FARTHEST = 2**31
"""Elements that an offset of 32 bits, which has a sign, tells apart from an array's first one."""
WIDE_BYTES = 2**32
"""Pallas takes offsets of 64 bits in arrays of more bytes than these, and of 32 in all others. It
counts offsets in elements; so where an element is one byte, it goes wrong between the two."""


def is_reached(array: Any) -> bool:
    """Whether a kernel's offsets reach all elements of an array, or of its shape and dtype."""
    elements = math.prod(array.shape)
    return elements <= FARTHEST or elements * array.dtype.itemsize > WIDE_BYTES


def triton_call(
    kernel: Callable[..., None],
    *,
    grid: tuple[int, ...],
    out_shape: Any,
    warps: int,
    stages: int,
    interpret: bool,
    name: str,
    input_output_aliases: Mapping[int, int] | None = None,
) -> Callable[..., Any]:
    """``pl.pallas_call`` of a kernel that is written for Triton.

    It chooses Triton by name, and silences the warning about its announced removal. For that day
    there are kernels of Mosaic (:func:`longspec_jax.ops.hardware.triton_comes_first`). It refuses
    operands and results that are not :func:`reached <is_reached>`: a kernel would read, and write,
    2 GiB before them.

    Args:
      kernel: the body of a program.
      grid: the programs.
      out_shape: shapes and dtypes of the results.
      warps: of a program.
      stages: depth of the software pipeline.
      interpret: run step by step on any platform.
      name: of the kernel, for profiles and messages.
      input_output_aliases: the result that takes the place of an operand, by their numbers.
    """
    from jax.experimental.pallas import triton as pltriton  # Later versions of jax may lack it.

    warnings.filterwarnings(
        "ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning
    )
    call = pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=out_shape,
        input_output_aliases=dict(input_output_aliases or {}),
        compiler_params=pltriton.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name=name,
    )

    def launch(*operands: Any) -> Any:
        for array in (*operands, *jax.tree.leaves(out_shape)):
            if not is_reached(array):
                raise NotImplementedError(
                    f"{name}: Triton's kernels take arrays of {array.dtype} up to 2^31 elements "
                    f"or of more than 2^32 bytes, not {array.shape}"
                )
        return call(*operands)

    return launch
