"""Matrices of a GGUF file in the bits that it stores them in, for the kernels of quantised weights.

The kernels of a table and the LM head become codes, scales and offsets
(:mod:`longspec_jax.weights.gguf.matrices`), in the same axes with the inputs last. Embeddings,
experts and recurrent layers are dequantised as they are read, and so is what no kernel reads.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from longspec_jax.ops.matmul.packed import refuse_unpackable
from longspec_jax.ops.matmul.quantised_weights import QuantisedMatrix
from longspec_jax.weights.checkpoint import Index, Tensor, Tensors
from longspec_jax.weights.gguf import matrices
from longspec_jax.weights.gguf.matrices import Form
from longspec_jax.weights.quantised.table import SCALE_DTYPE, is_matrix, with_inputs_last
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
    """A table and its tensors with every matrix packed that has a form and a kernel.

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
            form = _form([each.type for each in blocks.values()])
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


def _form(types: list[str]) -> Form | None:
    """The form of matrices that are multiplied together, if they have one."""
    try:
        return Form.of(types)
    except NotImplementedError:
        return None


def _fields(leaf: Leaf, form: Form) -> dict[str, Leaf]:
    """The parameters of a matrix, by the names of :class:`QuantisedMatrix`."""
    codes, scales = form.widths(leaf.parts[0].shape[-1])
    fields = {
        "codes": with_inputs_last(leaf, "codes", codes, form.codes),
        "scale": with_inputs_last(leaf, "scale", scales, SCALE_DTYPE),
    }
    if form.offset:
        fields["offset"] = with_inputs_last(leaf, "offset", scales, SCALE_DTYPE)
    return fields


def _is_read(fields: Mapping[str, Leaf], form: Form) -> bool:
    """Whether the kernel reads such a matrix."""

    def empty() -> QuantisedMatrix:
        zeros = {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in fields.items()}
        offset = zeros.get("offset")
        return QuantisedMatrix(zeros["codes"], zeros["scale"], offset=offset, group=form.group)

    try:
        refuse_unpackable(jax.eval_shape(empty))
    except NotImplementedError:
        return False
    return True


def _virtual(source: str, matrix: Blocks, form: Form) -> Iterator[tuple[str, Tensor]]:
    """Codes, scales and offsets of a stored matrix, read by slice."""
    inputs = matrix.bytes.shape[1] * matrices.TYPES[matrix.type].inputs
    codes, scales = form.widths(inputs)
    read = partial(_part, matrix, form)
    yield f"{source}.codes", read(matrices.codes, codes, form.codes)
    yield f"{source}.scale", read(matrices.scales, scales, SCALE_DTYPE)
    if form.offset:
        yield f"{source}.offset", read(matrices.offsets, scales, SCALE_DTYPE)


def _part(
    matrix: Blocks,
    form: Form,
    numbers: Callable[[np.ndarray, str, Form], np.ndarray],
    width: int,
    dtype: str,
) -> Tensor:
    """What a function gives of the blocks, ``[outputs, width]``."""
    outputs, count, _ = matrix.bytes.shape
    each = width // count

    def read(index: Index) -> np.ndarray:
        rows, columns = index
        start, stop, _ = columns.indices(width)
        first, last = start // each, -(-stop // each)
        blocks = matrix.bytes.read((rows, slice(first, last), slice(None)))
        found = numbers(blocks, matrix.type, form)
        return found[:, start - first * each : stop - first * each]

    return Tensor((outputs, width), dtype, read, matrix.bytes.file)
