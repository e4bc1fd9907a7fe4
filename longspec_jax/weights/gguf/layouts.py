"""How GGUF lays out what Hugging Face lays out otherwise, undone while a tensor is read by slice.

A change takes a tensor in the file's order and gives the one that a Hugging Face folder has. Sizes
are those of the ``config.json`` that describes the model.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from longspec_jax.weights.checkpoint import Index, Tensor

Sizes: TypeAlias = Mapping[str, Any]
"""Values of a ``config.json`` by key."""
Change: TypeAlias = Callable[[Tensor, Sizes], Tensor]


def same(tensor: Tensor, sizes: Sizes) -> Tensor:
    """The array as it is."""
    return tensor


def without_one(tensor: Tensor, sizes: Sizes) -> Tensor:
    """The scale of a norm that multiplies by ``1 + scale``, which the file has with the 1."""
    return tensor._replace(
        dtype="float32", read=lambda index: tensor.read(index).astype(np.float32) - 1
    )


@dataclass(frozen=True)
class Halves:
    """Rows of heads whose rotated pairs are neighbours in the file, and halves in ours."""

    heads: str
    """The key of their number."""

    def __call__(self, tensor: Tensor, sizes: Sizes) -> Tensor:
        """The change."""
        rows, count = tensor.shape[0], sizes[self.heads]
        if count < 1 or rows % (2 * count):
            return tensor  # Of other sizes than the configuration says, and refused for it.
        pairs = np.arange(rows).reshape(count, rows // (2 * count), 2)
        return with_rows(tensor, pairs.swapaxes(1, 2).reshape(-1))


def moves_rows(change: Change) -> bool:
    """Whether a change moves whole rows, and nothing else: their stored bits stay as they are."""
    return change is same or isinstance(change, Halves)


def with_rows(tensor: Tensor, order: np.ndarray) -> Tensor:
    """A tensor whose row ``i`` is the file's row ``order[i]``."""

    def read(index: Index) -> np.ndarray:
        rows: Any = order[index[0]]  # Only these rows; NumPy takes indices as it takes a slice.
        return tensor.read((rows, *index[1:]))

    return tensor._replace(read=read)


def _grouped(sizes: Sizes, width: int) -> np.ndarray:
    """The file's place of every row of the value heads, which it has key head by key head last."""
    keys, values = sizes["linear_num_key_heads"], sizes["linear_num_value_heads"]
    rows = np.arange(values * width).reshape(values // keys, keys, width)
    return rows.swapaxes(0, 1).reshape(-1)


def value_heads(tensor: Tensor, sizes: Sizes) -> Tensor:
    """Rows of all value heads of a recurrent layer, or one number of each."""
    width = tensor.shape[0] // sizes["linear_num_value_heads"]
    return with_rows(tensor, _grouped(sizes, width))


def behind_keys(tensor: Tensor, sizes: Sizes) -> Tensor:
    """Rows of queries and keys, which stay, and of values after them."""
    still = 2 * sizes["linear_num_key_heads"] * sizes["linear_key_head_dim"]
    values = still + _grouped(sizes, sizes["linear_value_head_dim"])
    return with_rows(tensor, np.concatenate([np.arange(still), values]))


def taps(tensor: Tensor, sizes: Sizes) -> Tensor:
    """A convolution ``[channels, taps]`` as ``[channels, 1, taps]``."""
    tensor = behind_keys(tensor, sizes)

    def read(index: Index) -> np.ndarray:
        return tensor.read((index[0], index[2]))[:, None][:, index[1]]

    channels, count = tensor.shape
    return tensor._replace(shape=(channels, 1, count), read=read)


def value_columns(tensor: Tensor, sizes: Sizes) -> Tensor:
    """Columns of all value heads."""
    order = _grouped(sizes, sizes["linear_value_head_dim"])

    def read(index: Index) -> np.ndarray:
        return tensor.read((index[0], slice(None)))[:, order[index[1]]]

    return tensor._replace(read=read)


def log_of_negative(tensor: Tensor, sizes: Sizes) -> Tensor:
    """``A_log`` of ``-exp(A_log)``, a number of each value head."""
    tensor = value_heads(tensor, sizes)

    def read(index: Index) -> np.ndarray:
        with np.errstate(all="ignore"):  # What is not finite is refused where it is cast.
            return np.log(-tensor.read(index))

    return tensor._replace(read=read)


def part(tensor: Tensor, index: int) -> Tensor:
    """One of several stacked tensors."""
    return tensor._replace(
        shape=tensor.shape[1:],
        read=lambda inner: tensor.read((slice(index, index + 1), *inner))[0],
    )


def inputs_first(tensor: Tensor) -> Tensor:
    """Stacked matrices ``[E, out, in]`` as ``[E, in, out]``."""
    count, out, inputs = tensor.shape

    def read(index: Index) -> np.ndarray:
        experts, rows, columns = index
        return tensor.read((experts, columns, rows)).swapaxes(1, 2)

    return tensor._replace(shape=(count, inputs, out), read=read)


def by_turns(one: Tensor, other: Tensor, axis: int) -> Tensor:
    """Two tensors whose slices take turns along an axis."""
    axis %= len(one.shape)
    shape = (*one.shape[:axis], 2 * one.shape[axis], *one.shape[axis + 1 :])

    def read(index: Index) -> np.ndarray:
        start, stop, _ = index[axis].indices(shape[axis])
        first, last = start // 2, -(-stop // 2)
        inner = (*index[:axis], slice(first, last), *index[axis + 1 :])
        both = np.stack([one.read(inner), other.read(inner)], axis + 1)
        merged = both.reshape(*both.shape[:axis], -1, *both.shape[axis + 2 :])
        cut = slice(start - 2 * first, stop - 2 * first)
        return merged[(*(slice(None),) * axis, cut)]

    return one._replace(shape=shape, read=read)


def blocks(tensor: Tensor) -> Tensor:
    """Codes of MXFP4 in the order of Hugging Face's ``..._blocks [E, out, groups, 16]``.

    A byte holds two neighbours there, and in the file two that are half a block apart.

    Args:
      tensor: the stored bytes ``[E, out, groups, 17]``, the first of which is the scale.
    """

    def read(index: Index) -> np.ndarray:
        *outer, within = index
        found = tensor.read((*outer, slice(1, 17)))
        low, high = found & 15, found >> 4
        both = [half[..., ::2] | half[..., 1::2] << 4 for half in (low, high)]
        return np.concatenate(both, axis=-1)[..., within]

    return tensor._replace(shape=(*tensor.shape[:-1], 16), read=read)


def block_scales(tensor: Tensor) -> Tensor:
    """The scales ``[E, out, groups]`` of the same."""

    def read(index: Index) -> np.ndarray:
        return tensor.read((*index, slice(0, 1)))[..., 0]

    return tensor._replace(shape=tensor.shape[:-1], read=read)
