"""Matrices of a GGUF file in the bits that it stores them in, for the kernels of quantised weights.

The kernels of a table and the LM head become codes, scales and offsets
(:mod:`longspec_jax.weights.gguf.matrices`), in the same axes with the inputs last. Embeddings,
experts and recurrent layers are dequantised as they are read, and so is what no kernel reads.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import jax
import numpy as np

from longspec_jax.ops.matmul.packed import refuse_unpackable
from longspec_jax.ops.matmul.quantised_weights import UNIT
from longspec_jax.weights.checkpoint import Index, Tensor, Tensors
from longspec_jax.weights.gguf import matrices
from longspec_jax.weights.gguf.matrices import Field, Form
from longspec_jax.weights.quantised.table import is_matrix, with_inputs_last
from longspec_jax.weights.tables import Leaf, Table


class Blocks(NamedTuple):
    """A stored matrix, its rows in the order of a Hugging Face folder."""

    type: str
    bytes: Tensor
    """``[out, blocks of a row, bytes of a block]``."""


Stored: TypeAlias = Mapping[str, Blocks]
"""The matrices of a file by their names in a Hugging Face folder."""


def as_packed(
    table: Table, tensors: Tensors, stored: Stored, shares: int = 1
) -> tuple[Table, Tensors, dict[str, int]]:
    """A table and its tensors with every matrix packed that has a form and a kernel.

    Args:
      table: of the target as if it were whole.
      tensors: the file's.
      stored: its matrices.
      shares: parts of a mesh that cuts matrices; units that it cannot cut evenly are multiplied
        out.

    Returns:
      As :func:`longspec_jax.weights.quantised.table.as_stored`.
    """
    leaves: list[Leaf] = []
    tensors, groups = dict(tensors), {}
    for leaf in table.leaves:
        sources = {part.source: stored.get(part.source) for part in leaf.parts}
        blocks = {source: each for source, each in sources.items() if each is not None}
        form = None
        if is_matrix(leaf) and len(blocks) == len(sources):
            whole_units = leaf.parts[0].shape[-1] % (UNIT * shares) == 0
            form = _form([each.type for each in blocks.values()], counted=whole_units)
        fields = {} if form is None else _fields(leaf, form)
        if form is None or not _is_read(fields, form):
            leaves.append(leaf)
            continue
        leaves += fields.values()
        groups[leaf.path] = form.group
        for source, each in blocks.items():
            del tensors[source]
            tensors |= dict(_virtual(source, each, form))
    return replace(table, leaves=tuple(leaves)), tensors, groups


def _form(types: list[str], *, counted: bool) -> Form | None:
    """The form of matrices that are multiplied together, if they have one."""
    try:
        return Form.of(types, counted=counted)
    except NotImplementedError:
        return None


def _fields(leaf: Leaf, form: Form) -> dict[str, Leaf]:
    """The parameters of a matrix, by the names of :class:`QuantisedMatrix`."""
    return {
        name: with_inputs_last(leaf, name, field.width, field.dtype)
        for name, field in form.fields(leaf.parts[0].shape[-1]).items()
    }


def _is_read(fields: Mapping[str, Leaf], form: Form) -> bool:
    """Whether the kernel reads such a matrix."""
    arrays = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in fields.items()}
    try:
        refuse_unpackable(form.matrix(arrays))
    except NotImplementedError:
        return False
    return True


def _virtual(source: str, matrix: Blocks, form: Form) -> Iterator[tuple[str, Tensor]]:
    """Codes, scales and offsets of a stored matrix, read by slice."""
    inputs = matrix.bytes.shape[1] * matrices.TYPES[matrix.type].inputs
    for name, field in form.fields(inputs).items():
        yield f"{source}.{name}", _part(matrix, form, field)


def _part(matrix: Blocks, form: Form, field: Field) -> Tensor:
    """A field of a matrix, ``[outputs, width]``."""
    outputs, count, _ = matrix.bytes.shape
    width = field.width
    each = width // count

    def read(index: Index) -> np.ndarray:
        rows, columns = index
        start, stop, _ = columns.indices(width)
        first, last = start // each, -(-stop // each)
        blocks = matrix.bytes.read((rows, slice(first, last), slice(None)))
        found = field.of_blocks(blocks, matrix.type, form)
        return found[:, start - first * each : stop - first * each]

    return Tensor((outputs, width), field.dtype, read, matrix.bytes.file)
