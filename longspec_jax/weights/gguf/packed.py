"""Matrices of a GGUF file in the bits that it stores them in, for the kernels of quantised weights.

The kernels of a table whose stored matrices all have a packed form become codes, scales and offsets
(:mod:`longspec_jax.weights.gguf.matrices`), in the same axes with the inputs last. Embeddings,
LM head, experts and recurrent layers are dequantised as they are read.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np

from longspec_jax.weights.checkpoint import Index, Tensor, Tensors
from longspec_jax.weights.gguf import matrices
from longspec_jax.weights.gguf.matrices import Form
from longspec_jax.weights.quantised.table import SCALE_DTYPE, is_kernel, with_inputs_last
from longspec_jax.weights.tables import Leaf, Table


class Blocks(NamedTuple):
    """A stored matrix, its rows in the order of a Hugging Face folder."""

    type: str
    bytes: Tensor
    """``[out, blocks of a row, bytes of a block]``."""


Stored: TypeAlias = Mapping[str, Blocks]
"""The matrices of a file by their names in a Hugging Face folder."""


def as_packed(
    table: Table, tensors: Tensors, stored: Stored
) -> tuple[Table, Tensors, dict[str, int]]:
    """A table and its tensors with every kernel packed that has a form.

    Returns:
      As :func:`longspec_jax.weights.quantised.table.as_stored`.
    """
    leaves: list[Leaf] = []
    tensors, groups = dict(tensors), {}
    for leaf in table.leaves:
        form = _form(leaf, stored)
        if form is None:
            leaves.append(leaf)
            continue
        for source in {part.source for part in leaf.parts}:
            del tensors[source]
            tensors |= dict(_virtual(source, stored[source], form))
        inputs = leaf.parts[0].shape[-1]
        codes, scales = form.widths(inputs)
        kind = "uint8" if form.narrow else "int8"
        leaves.append(with_inputs_last(leaf, "codes", codes, kind))
        leaves.append(with_inputs_last(leaf, "scale", scales, SCALE_DTYPE))
        if form.offset:
            leaves.append(with_inputs_last(leaf, "offset", scales, SCALE_DTYPE))
        groups[leaf.path] = form.group
    return replace(table, leaves=tuple(leaves)), tensors, groups


def _form(leaf: Leaf, stored: Stored) -> Form | None:
    """The form of a kernel's matrices; None for what is no kernel, or has none."""
    sources = [part.source for part in leaf.parts]
    if not is_kernel(leaf) or any(source not in stored for source in sources):
        return None
    try:
        return Form.of([stored[source].type for source in sources])
    except NotImplementedError:
        return None


def _virtual(source: str, matrix: Blocks, form: Form) -> Iterator[tuple[str, Tensor]]:
    """Codes, scales and offsets of a stored matrix, read by slice."""
    outputs, count, _ = matrix.bytes.shape
    inputs = count * matrices.TYPES[matrix.type].inputs
    codes, scales = form.widths(inputs)
    read: Callable[..., Tensor] = partial(_part, matrix, form, outputs)
    yield f"{source}.codes", read(matrices.codes, codes, "uint8" if form.narrow else "int8")
    yield f"{source}.scale", read(matrices.scales, scales, SCALE_DTYPE)
    if form.offset:
        yield f"{source}.offset", read(matrices.offsets, scales, SCALE_DTYPE)


def _part(
    matrix: Blocks,
    form: Form,
    outputs: int,
    numbers: Callable[[np.ndarray, str, Form], np.ndarray],
    width: int,
    dtype: str,
) -> Tensor:
    """What a function gives of the blocks, ``[outputs, width]``."""
    each = width // matrix.bytes.shape[1]

    def read(index: Index) -> np.ndarray:
        rows, columns = index
        start, stop, _ = columns.indices(width)
        first, last = start // each, -(-stop // each)
        blocks = np.ascontiguousarray(matrix.bytes.read((rows, slice(first, last), slice(None))))
        found = numbers(blocks, matrix.type, form)
        return found[:, start - first * each : stop - first * each]

    return Tensor((outputs, width), dtype, read, matrix.bytes.file)
