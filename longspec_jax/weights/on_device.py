"""Stored tensors to a GPU as they lie in their files: it casts, transposes and stacks them itself.

A processor transposes half a gigabyte a second in each of a few threads, for a 7B model ten seconds
of every start. The GPU does it while the next tensors are on their way.
"""

from functools import partial
from threading import BoundedSemaphore
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from longspec_jax.axes import Array
from longspec_jax.weights.tables import Leaf
from longspec_jax.weights.tensors import Tensor, Tensors

Layout: TypeAlias = tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]
"""Groups and order of a part."""

KNOWN = ("bfloat16", "float16", "float32")
"""Stored types that the device has."""
ROOM = BoundedSemaphore(2)
"""Parameters that are on the device twice, as stored and as wanted: memory may be short there."""


def arranges(device: Any) -> bool:
    """Whether a device is faster at it than the processors beside it."""
    return device.platform == "gpu"


def arranged(leaf: Leaf, tensors: Tensors, dtype: str, device: Any) -> Array | None:
    """A parameter on a device.

    Returns:
      None if a stored type is unknown to the device, or a value not finite in ``dtype``: what
      assembles the parameter on the host says which.
    """
    if any(tensors[part.source].dtype not in KNOWN for part in leaf.parts):
        return None
    parts = sorted(leaf.parts, key=lambda part: part.start)
    read = [_whole(tensors[part.source]) for part in parts]
    # Without the tensors' names: the equal parameters of all layers are one program.
    layout = tuple((part.groups, part.order) for part in parts)
    with ROOM:
        array, finite = _arranged(jax.device_put(read, device), layout, leaf.stack, dtype)
        return array if finite else None


def _whole(tensor: Tensor) -> np.ndarray:
    return tensor.read((slice(None),) * len(tensor.shape))


@partial(jax.jit, static_argnames=("layout", "stack", "dtype"))
def _arranged(
    stored: list[Array], layout: tuple[Layout, ...], stack: int, dtype: str
) -> tuple[Array, Array]:
    """The parameter, and whether all of it is finite."""
    blocks = []
    for tensor, (groups, order) in zip(stored, layout, strict=True):
        factors = [size for group in groups for size in group]
        blocks.append(tensor.astype(dtype).reshape(factors).transpose(order))
    array = jnp.concatenate(blocks, axis=stack)
    return array, jnp.isfinite(array).all()
