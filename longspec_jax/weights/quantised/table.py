"""Name tables of quantised targets, and their parameters.

A target's table names a stored matrix for every block of a kernel. Where a checkpoint has that
matrix in a quantised format, :func:`as_stored` names its codes, scales and zero points instead, in
the same axes with the inputs last. They are then checked, cut over a mesh and loaded as everything
else is.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from longspec_jax.ops.matmul.quantised_weights import MIDDLE, QuantisedMatrix
from longspec_jax.weights.checkpoint import Index, Tensor, Tensors
from longspec_jax.weights.quantised import mxfp4
from longspec_jax.weights.quantised.formats import REMEDY, Quantisation
from longspec_jax.weights.quantised.stored import (
    FLOATS,
    FORMATS,
    MISMATCH,
    Format,
    Stored,
)
from longspec_jax.weights.tables import Leaf, Part, Table

SCALE_DTYPE = "float32"
KERNEL, HEAD, WEIGHT = "/kernel", "head", ".weight"
EXPERTS = "mlp/expert_gate_up", "mlp/expert_down"
RECURRENCE = "/recurrence/"
MARKS = {mark for format in FORMATS for mark in format.marks}
"""Tensors that only a quantised linear has."""
DROPPED = {
    r".*\.(input_scale|activation_scale|input_zero_point)": "activations are not quantised",
    r".*\.([kv]_scale|kv_scale|output_scale)": "read apart, by weights.quantised.cached",
}


def as_stored(
    table: Table, tensors: Tensors, quantised: Quantisation
) -> tuple[Table, Tensors, dict[str, int]]:
    """The table and the tensors of a quantised checkpoint.

    Args:
      table: of the target as if it were whole.
      tensors: the stored ones.
      quantised: what its ``config.json`` says.

    Returns:
      A table with a parameter each for the codes, scales and zero points of a kernel; tensors that
      read those; and the group size of every quantised kernel, by path. Experts but those of MXFP4
      stay whole, and recurrent layers, and matrices whose inputs come in another order: they are
      dequantised as they are read.

    Raises:
      ValueError: if ``config.json`` and the tensors disagree, or a linear is of another format than
        those it is multiplied with together.
    """
    leaves: list[Leaf] = []
    tensors, groups = _without_zero_biases(table, tensors), {}
    for leaf in table.leaves:
        if quantised.experts and leaf.path.endswith(EXPERTS):
            leaves += _stacked_leaves(leaf, tensors, quantised)
            groups[leaf.path] = mxfp4.GROUP
            continue
        if _stays_whole(leaf):
            leaves.append(leaf)
            for part in {part.source: part for part in leaf.parts}.values():
                _dequantise(part, leaf, tensors, quantised)
            continue
        names = [part.source.removesuffix(WEIGHT) for part in leaf.parts]
        formats = [_format_of(name, leaf, tensors, quantised) for name in names]
        if formats[0] is None and not any(formats):
            leaves.append(leaf)
            continue
        if any(each != formats[0] for each in formats):
            raise ValueError(
                f"{quantised.origin}: {', '.join(names)} are multiplied together and must be "
                f"quantised alike; {REMEDY}"
            )
        matrices = [
            _read(tensors, part, name, format)
            for part, name, format in zip(leaf.parts, names, formats, strict=True)
        ]
        leaves += _leaves(leaf, matrices, quantised)
        groups[leaf.path] = matrices[0].group
        for part, name, format, matrix in zip(leaf.parts, names, formats, matrices, strict=True):
            for suffix in format.names if format else ():
                tensors.pop(f"{name}.{suffix}", None)
            tensors |= dict(_virtual(part.source, matrix))
        if (order := matrices[0].order) is not None:  # Of all that are multiplied together.
            file = matrices[0].codes.file
            tensors[f"{names[0]}.order"] = Tensor(order.shape, "int32", order.__getitem__, file)
    return (
        dataclasses.replace(table, leaves=tuple(leaves), dropped=table.dropped | DROPPED),
        tensors,
        groups,
    )


def _without_zero_biases(table: Table, tensors: Tensors) -> Tensors:
    """The tensors without biases that the model has not: AutoGPTQ gives every linear zeros."""
    parts, kept = table.parts, dict(tensors)
    for name in (part.removesuffix(WEIGHT) for part in parts):
        bias = f"{name}.bias"
        if bias in parts or not any(f"{name}.{mark}" in tensors for mark in MARKS):
            continue
        stored = tensors.get(bias)
        if stored and not np.asarray(stored.read((slice(None),) * len(stored.shape))).any():
            kept.pop(bias, None)
    return kept


def with_matrices(params: Mapping[str, Any], groups: Mapping[str, int], path: str = "") -> Any:
    """Loaded parameters, each kernel's codes, scales and zero points as one matrix."""
    if path in groups:
        return QuantisedMatrix(
            params["codes"],
            params["scale"],
            zero=params.get("zero"),
            order=params.get("order"),
            offset=params.get("offset"),
            unit=params.get("unit"),
            offset_unit=params.get("offset_unit"),
            group=groups[path],
            floating=path.endswith(EXPERTS),
        )
    if not isinstance(params, Mapping):
        return params
    return {
        key: with_matrices(value, groups, f"{path}/{key}" if path else key)
        for key, value in params.items()
    }


def _stays_whole(leaf: Leaf) -> bool:
    """Whether no kernel reads the parameter in its own bits."""
    inputs = len(leaf.parts[0].groups[-1])
    reordered = any(part.shuffle is not None and part.heads < inputs for part in leaf.parts)
    return leaf.path.endswith(EXPERTS) or RECURRENCE in leaf.path or reordered


def is_matrix(leaf: Leaf) -> bool:
    """Whether a layer's kernel or the LM head, which a target multiplies by in its own bits."""
    return leaf.path == HEAD or leaf.path.endswith(KERNEL) and not _stays_whole(leaf)


def _format_of(name: str, leaf: Leaf, tensors: Tensors, quantised: Quantisation) -> Format | None:
    """The format of a stored matrix; raises where the configuration and the file disagree."""
    found = sorted(mark for mark in MARKS if f"{name}.{mark}" in tensors)
    is_linear = leaf.path.endswith((KERNEL, *EXPERTS))
    format = quantised.format_of(name) if is_linear else None
    stored = tensors.get(f"{name}{WEIGHT}")
    if not found and stored is not None and stored.dtype in FLOATS:
        return None  # Not every tool that leaves a linear whole says so.
    if not is_linear and found:
        raise ValueError(
            f"{quantised.origin}: {name} is quantised ({', '.join(found)}), and LM heads, "
            f"embeddings and experts are read whole; {REMEDY}"
        )
    if (format is None) == bool(found):
        says = "whole" if format is None else f"quantised as {format.label}"
        holds = ", ".join(found) or "none of the tensors of a quantised linear"
        raise ValueError(
            f"{quantised.origin}: {name} is {says}, and the weights hold {holds} of it; {MISMATCH}"
        )
    return format


def _dequantise(part: Part, leaf: Leaf, tensors: Tensors, quantised: Quantisation) -> None:
    """Put a whole matrix, which is dequantised in pieces, in the place of a quantised one."""
    name = part.source.removesuffix(WEIGHT)
    format = _format_of(name, leaf, tensors, quantised)
    if format is None:
        return
    matrix = _read(tensors, part, name, format)
    for suffix in format.names:
        tensors.pop(f"{name}.{suffix}", None)
    tensors[part.source] = Tensor(
        part.shape, SCALE_DTYPE, partial(_dequantised, matrix, part.shape[1]), matrix.codes.file
    )


def _stacked_leaves(leaf: Leaf, tensors: Tensors, quantised: Quantisation) -> list[Leaf]:
    """The codes and scales of MXFP4's stacked experts, in the axes of the whole ones.

    Their inputs are the last axis of the parameter and the second one of the stored tensor.
    """
    source = leaf.parts[0].source
    blocks, scales = (tensors.pop(f"{source}_{kind}", None) for kind in ("blocks", "scales"))
    if blocks is None or scales is None:
        raise ValueError(
            f"{quantised.origin}: {source} is of MXFP4, and the weights lack its blocks or "
            f"scales; {MISMATCH}"
        )
    found = mxfp4.stored(blocks, scales)
    leaves = []
    for field, tensor in zip(("codes", "scale"), found, strict=True):
        tensors[f"{source}.{field}"] = tensor
        parts = tuple(
            dataclasses.replace(
                part,
                source=f"{source}.{field}",
                groups=(part.groups[0], (tensor.shape[1],), *part.groups[2:]),
            )
            for part in leaf.parts
        )
        shape = (*leaf.shape[:-1], tensor.shape[1])
        leaves.append(Leaf(f"{leaf.path}/{field}", shape, leaf.stack, parts, tensor.dtype))
    return leaves


def _dequantised(matrix: Stored, inputs: int, index: Index) -> np.ndarray:
    """Some rows and columns of a matrix, float32, as :class:`QuantisedMatrix` has them."""
    rows, columns = index
    every = (rows, slice(None))

    def of_inputs(numbers: Tensor) -> np.ndarray:
        read = numbers.read(every).astype(np.float32)
        return read if read.shape[1] == 1 else read.repeat(matrix.group, axis=1)[:, :inputs]

    codes = matrix.codes.read(every)
    if packed := codes.dtype == np.uint8:
        codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)
    zero = of_inputs(matrix.zero) if matrix.zero is not None else MIDDLE * packed
    weights = (codes.astype(np.float32) - np.float32(zero)) * of_inputs(matrix.scale)
    if matrix.order is not None:
        sorted_weights, weights = weights, np.empty_like(weights)
        weights[:, matrix.order] = sorted_weights
    return weights[:, columns]


def _read(tensors: Tensors, part: Part, name: str, format: Format | None) -> Stored:
    assert format is not None
    rows, columns = part.shape
    return format.read(tensors, name, (rows, columns))


def _virtual(source: str, matrix: Stored) -> Iterator[tuple[str, Tensor]]:
    """What stands for a stored matrix, by name."""
    yield f"{source}.codes", matrix.codes
    yield f"{source}.scale", matrix.scale
    if matrix.zero is not None:
        yield f"{source}.zero", matrix.zero


def _leaves(leaf: Leaf, matrices: list[Stored], quantised: Quantisation) -> Iterator[Leaf]:
    """The parameters of one kernel."""
    first = matrices[0]
    dtypes = {"codes": first.codes.dtype, "scale": SCALE_DTYPE}
    if first.zero is not None:
        dtypes["zero"] = "int8"
    for field, dtype in dtypes.items():
        widths = {getattr(matrix, field).shape[1] for matrix in matrices}
        [width] = widths
        yield with_inputs_last(leaf, field, width, dtype)
    if any(not _alike(matrix.order, first.order) for matrix in matrices):
        names = ", ".join(part.source for part in leaf.parts)
        raise ValueError(
            f"{quantised.origin}: {names} are multiplied together, and their inputs are grouped "
            f"in different orders; {REMEDY}"
        )
    if first.order is not None:
        size = len(first.order)
        name = leaf.parts[0].source.removesuffix(WEIGHT)
        part = Part(f"{name}.order", ((size,),), (0,), 0, size)
        yield Leaf(f"{leaf.path}/order", (size,), 0, (part,), "int32")


def _alike(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    return one is other or (one is not None and other is not None and np.array_equal(one, other))


def with_inputs_last(leaf: Leaf, field: str, width: int, dtype: str) -> Leaf:
    """A kernel ``[*in, *out]`` of ``[out, in]`` matrices, as ``[*out, width]``.

    An LM head ``[out, in]`` keeps the order of its axes.
    """
    inputs = len(leaf.parts[0].groups[1])
    first = 0 if leaf.path == HEAD else inputs
    produced = slice(first, first + len(leaf.shape) - inputs)
    parts = []
    for part in leaf.parts:
        outputs = part.groups[0]
        order = (*part.order[produced], len(outputs))
        start, depth = (part.start, part.depth) if leaf.stack >= first else (0, leaf.shape[first])
        parts.append(
            dataclasses.replace(
                part,
                source=f"{part.source}.{field}",
                groups=(outputs, (width,)),
                order=order,
                start=start,
                depth=depth,
                heads=max(part.heads - first, 0),
            )
        )
    shape = (*leaf.shape[produced], width)
    stack = max(leaf.stack - first, 0)
    return Leaf(f"{leaf.path}/{field}", shape, stack, tuple(parts), dtype)


def stored_bytes(table: Table, dtype: str) -> int:
    """Bytes of all parameters of a table."""
    return sum(
        int(np.prod(leaf.shape)) * jnp.dtype(leaf.dtype or dtype).itemsize for leaf in table.leaves
    )
