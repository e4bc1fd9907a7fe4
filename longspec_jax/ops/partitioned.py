"""Kernels on a mesh of devices: each computes its share of a call that the compiler cannot read.

To the compiler a kernel is opaque: left to itself it gathers every operand on every device, whole
caches in every layer of every step. :func:`partitioned` names the axes of the operands. Batch rows
and key/value heads are cut where the rest of the model cuts them, query heads with the key/value
head they read, and every device runs the op on its share, with the tiles of the share's shape. All
other axes, and one that does not divide over its devices, are whole on each.

Without a mesh in use (:func:`use_mesh`), or on one of a single device, a call is the op itself.
"""

import contextlib
import dataclasses
import functools
import inspect
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from longspec_jax.axes import Array
from longspec_jax.config.names import BATCH_AXES

Given = ParamSpec("Given")
R = TypeVar("R")
Term = tuple[tuple[str, ...], ...]
"""The axes of one array; the query heads are two of them, ``("k", "g")``."""

CUT = {"b": BATCH_AXES, "k": ("tp",), "v": ("tp",), "f": ("tp",), "e": ("tp",)}
"""The axes of operands that are cut, and the axes of the mesh over which."""


def partitioned(rule: str) -> Callable[[Callable[Given, R]], Callable[Given, R]]:
    """Let every device of the mesh in use compute its share of an op.

    Args:
      rule: a term for each positional argument, for each field of one that is a dataclass, and,
        after ``->``, for each result, or one for all of them: ``"b t (k g) h, b k s h -> b t (k g)
        h"``. The term of a sequence of arrays, or of a tree, holds for each of them; the axes that
        ``...`` at its end stands for are whole. An argument or a field may be None. Batch rows are
        ``b``, key/value heads ``k``, experts ``e``, what else ``tp`` cuts ``f``; each is somewhere
        an array's whole axis.
    """
    operands, results = (
        [_parse(term) for term in side.split(",")] for side in rule.split("->", maxsplit=1)
    )

    def decorate(op: Callable[Given, R]) -> Callable[Given, R]:
        signature = inspect.signature(op)

        @functools.wraps(op)
        def call(*args: Given.args, **options: Given.kwargs) -> R:
            bound = signature.bind(*args, **options)
            if one_device():
                return op(*bound.args, **bound.kwargs)
            parts = [part for argument in bound.args for part in _parts(argument)]
            terms = [
                term
                for term, part in zip(operands, parts, strict=False)
                for _ in jax.tree.leaves(part)
            ]
            arrays, structure = jax.tree.flatten(bound.args)
            axes = _mesh_axes(terms, [array.shape for array in arrays])
            out_specs = tuple(_spec(term, axes) for term in results)
            results_structure = None

            def share(*full: Any) -> Any:
                nonlocal results_structure
                given = iter(full)
                own = [
                    next(given) if array.size else _empty_share(array, term, axes)
                    for array, term in zip(arrays, terms, strict=True)
                ]
                shares = op(*structure.unflatten(own), **bound.kwargs)
                leaves, results_structure = jax.tree.flatten(shares)
                return tuple(leaves)

            # Empty arrays are made in the shares: where nothing reads one, jaxlib 0.11.2 (Shardy)
            # crashes.
            taken = [index for index, array in enumerate(arrays) if array.size]
            leaves = jax.shard_map(
                share,
                in_specs=tuple(_spec(terms[index], axes) for index in taken),
                out_specs=out_specs if len(results) > 1 else out_specs[0],
                check_vma=False,  # A kernel does not say along which axes its results vary.
            )(*(arrays[index] for index in taken))
            return jax.tree.unflatten(results_structure, leaves)

        return call

    return decorate


def with_sharding(terms: str, *arrays: Array) -> tuple[Array, ...]:
    """Cut arrays over the mesh in use: their batch rows, heads, vocabulary and MLP width.

    Without it the compiler would infer the sharding of activations from the weights. Where these
    are cut along the model's width it would compute every device's rows on every device. Weights
    that are read more than once are gathered here, once.

    Args:
      terms: of each array, as in :func:`partitioned`; the vocabulary is ``v``, the MLP's width
        ``f``.
      *arrays: what belongs together: one axis, one size.
    """
    if one_device():
        return arrays
    parsed = [_parse(term) for term in terms.split(",")]
    axes = _mesh_axes(parsed, [array.shape for array in arrays])
    return tuple(
        jax.lax.with_sharding_constraint(array, _spec(term, axes))
        for term, array in zip(parsed, arrays, strict=True)
    )


def use_mesh(mesh: AbstractMesh | None) -> contextlib.AbstractContextManager[Any]:
    """Name the mesh over which a program's arrays are spread, while it is traced.

    Tracing cannot see the mesh. The traced function must take it as a static argument, because jax
    keeps programs by their arguments.

    Args:
      mesh: an abstract one of the axes :data:`longspec_jax.config.names.MESH_AXES`; None leaves
        the one in use, if any.
    """
    return contextlib.nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh)


def three_axes(rows: Array) -> Array:
    """``[B, T, D]`` of ``[*rows, D]``, as a rule names them."""
    return rows.reshape(rows.shape[0], -1, rows.shape[-1])


def row_shares(rows: int) -> int:
    """How many groups of devices of the mesh in use share this many batch rows."""
    return _shares("b", rows)


def width_shares(width: int) -> int:
    """How many groups of devices of the mesh in use share an MLP of this width, or all heads."""
    return _shares("f", width)


def table_shares(vocabulary: int) -> int:
    """How many groups of devices of the mesh in use share the rows of a table; 1 with ``fsdp``.

    Under ``fsdp`` the width of a table is cut, too, and a device has no whole row.
    """
    if one_device() or jax.sharding.get_abstract_mesh().shape["fsdp"] > 1:
        return 1
    return _shares("v", vocabulary)


def one_device() -> bool:
    """Whether arrays are whole here: no mesh, one of one device, or inside a device's share."""
    return not on_mesh() or jax.sharding.get_abstract_mesh().are_all_axes_manual


def on_mesh() -> bool:
    """Whether the program runs on several devices; true inside a device's share."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and mesh.size > 1


def _shares(axis: str, size: int) -> int:
    """Into how many parts the mesh in use cuts an axis of this size; 1 if it leaves it whole."""
    if one_device():
        return 1
    mesh = jax.sharding.get_abstract_mesh()
    shares = math.prod(mesh.shape[name] for name in CUT[axis])
    return shares if size % shares == 0 else 1


def _parts(argument: Any) -> Sequence[Any]:
    """The arguments that a term each is about: a dataclass's fields, or the argument itself.

    Fields that are not traced have none.
    """
    if not dataclasses.is_dataclass(argument):
        return (argument,)
    fields = dataclasses.fields(argument)
    traced = (field.name for field in fields if field.metadata.get("pytree_node", True))
    return [getattr(argument, name) for name in traced]


def _parse(term: str) -> Term:
    """``"b t (k g) h"`` as ``(("b",), ("t",), ("k", "g"), ("h",))``."""
    dims = re.findall(r"\(([^)]*)\)|(\w+|\.\.\.)", term)
    return tuple(tuple((group or axis).split()) for group, axis in dims)


def _mesh_axes(
    terms: Sequence[Term], shapes: Sequence[Sequence[int]]
) -> dict[str, tuple[str, ...]]:
    """The axes of the mesh in use over which each axis of the operands is cut."""
    mesh = jax.sharding.get_abstract_mesh()
    sizes = {
        dim[0]: size
        for term, shape in zip(terms, shapes, strict=True)
        for dim, size in zip(term, shape, strict=("...",) not in term)
        if len(dim) == 1
    }
    return {
        axis: over
        for axis, over in CUT.items()
        if sizes.get(axis, 1) % math.prod(mesh.shape[name] for name in over) == 0
    }


def _empty_share(array: Array, term: Term, axes: dict[str, tuple[str, ...]]) -> Array:
    """A device's share of an array without elements."""
    mesh = jax.sharding.get_abstract_mesh()
    parts = [math.prod(mesh.shape[name] for name in axes.get(dim[0], ())) for dim in term]
    whole = array.shape[len(parts) :]
    cut = tuple(size // part for size, part in zip(array.shape, parts, strict=False))
    return jnp.zeros(cut + whole, array.dtype)


def _spec(term: Term, axes: dict[str, tuple[str, ...]]) -> P:
    """How an array lies when these of its axes are cut."""
    return P(*(axes.get(dim[0]) for dim in term))
