"""What all kernels for Mosaic GPU ask of Pallas, whose types say less than its documentation."""

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

# Pallas documents it and does not re-export it in the way that type checkers ask for.
ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]


def swizzled(shape: tuple[int, ...], dtype: Any, row_bytes: int = 128) -> Any:
    """Shared memory whose last two axes are cut into rows of some bytes, eight at a time."""
    # By the types of newer jax these are abstract; they are not.
    columns = row_bytes // jnp.dtype(dtype).itemsize
    tiling = plgpu.TilingTransform((8, columns))  # pyright: ignore[reportAbstractUsage]
    swizzle = plgpu.SwizzleTransform(row_bytes)  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle))


def load(ref: Any, layout: Any, *, optimized: bool = False) -> Any:
    """An array in registers; of a layout that no wide load serves, number by number.

    From jax 0.11 on, which these kernels need, ``plgpu.load`` takes no index.
    """
    return plgpu.load(ref, layout=layout, optimized=optimized)  # pyright: ignore[reportCallIssue]
