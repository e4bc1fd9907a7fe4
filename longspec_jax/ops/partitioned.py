"""Kernels that a mesh of devices may share out: the partitioner's view of a call it cannot read.

To the partitioner a kernel is opaque: without a rule it gathers every operand on every device,
whole caches in every layer of every step. :func:`partitioned` says which axes of which operand are
the same axis. Some of them (batch rows, key/value heads) may then be cut: every device runs the op
on its share, with the tiles of the share's shape. The others are whole on every device, query heads
with the key/value head they read. An axis that does not divide over its devices is whole as well.

A program of one device holds the op itself and nothing else.
"""

import contextlib
import dataclasses
import functools
import inspect
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar, cast

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Op = TypeVar("Op", bound=Callable[..., Any])
Term = tuple[tuple[str, ...], ...]
"""The axes of one array; the query heads are two of them, ``("k", "g")``."""


def partitioned(rule: str, cut: tuple[str, ...] = ("b", "k")) -> Callable[[Op], Op]:
    """Let the partitioner cut some axes of an op.

    Args:
      rule: a term for each positional argument, for each field of one that is a dataclass, and,
        after ``->``, for each result, or one for all of them: ``"b t (k g) h, b k s h -> b t (k g)
        h"``. The term of a sequence of arrays holds for each of them; an argument or a field may
        be None.
      cut: the axes that may be cut; each is somewhere an array's whole axis.
    """
    operands, results = (
        [_parse(term) for term in side.split(",")] for side in rule.split("->", maxsplit=1)
    )

    def decorate(op: Op) -> Op:
        signature = inspect.signature(op)

        @functools.wraps(op)
        def call(*args: Any, **options: Any) -> Any:
            bound = signature.bind(*args, **options)
            # What outlives this call, for the partitioner, must not hold its arrays.
            given, static = bound.args, bound.kwargs

            def share(*arrays: Any) -> Any:
                return op(*arrays, **static)

            if one_device():
                return share(*given)
            parts = [part for argument in given for part in _parts(argument)]
            terms = [
                term
                for term, argument in zip(operands, parts, strict=False)
                for _ in jax.tree.leaves(argument)
            ]

            def sharding_rule(mesh: Mesh, values: Sequence[Any], outs: Sequence[Any]) -> Any:
                every = [*terms, *_for_each(results, len(outs))]
                return _shardy(every, [value.shape for value in (*values, *outs)], len(terms), cut)

            def partition(mesh: Mesh, arrays: Any, outs: Any) -> Any:
                leaves, structure = jax.tree.flatten(arrays)
                out_leaves, out_structure = jax.tree.flatten(outs)
                axes = _mesh_axes(mesh, terms, leaves, cut)
                shardings, out_shardings = (
                    [NamedSharding(mesh, _spec(term, axes)) for term in some]
                    for some in (terms, _for_each(results, len(out_leaves)))
                )
                return (
                    mesh,
                    share,
                    out_structure.unflatten(out_shardings),
                    structure.unflatten(shardings),
                )

            cuttable = custom_partitioning(share)
            cuttable.def_partition(partition, sharding_rule=sharding_rule)
            return cuttable(*given)

        return cast(Op, call)

    return decorate


_DEVICES: ContextVar[int | None] = ContextVar("devices", default=None)


@contextlib.contextmanager
def spread_over(devices: int | None) -> Iterator[None]:
    """Say, while a program is traced, over how many devices its arrays are spread.

    Tracing cannot see it. What traces must itself depend on the number (as a static argument),
    because programs are kept by their arguments.

    Args:
      devices: their number; None for the mesh in use or, without one, all that are visible.
    """
    token = _DEVICES.set(devices)
    try:
        yield
    finally:
        _DEVICES.reset(token)


def one_device() -> bool:
    """Whether there is nothing to cut for; a mesh without devices could not ask the partitioner."""
    devices = _DEVICES.get()
    if devices is None:
        mesh = jax.sharding.get_abstract_mesh()
        devices = jax.device_count() if mesh.empty else mesh.size
    return devices == 1


def _parts(argument: Any) -> Sequence[Any]:
    """The arguments that a term each is about: a dataclass's fields, or the argument itself."""
    if not dataclasses.is_dataclass(argument):
        return (argument,)
    return [getattr(argument, field.name) for field in dataclasses.fields(argument)]


def _parse(term: str) -> Term:
    """``"b t (k g) h"`` as ``(("b",), ("t",), ("k", "g"), ("h",))``."""
    dims = re.findall(r"\(([^)]*)\)|(\w+)", term)
    return tuple(tuple((group or axis).split()) for group, axis in dims)


def _for_each(terms: Sequence[Term], count: int) -> Sequence[Term]:
    """A term for each result; a single one holds for all."""
    return list(terms) * count if len(terms) == 1 else terms


def _sizes(terms: Sequence[Term], shapes: Sequence[Sequence[int]]) -> dict[str, int]:
    """Sizes of the factors that are somewhere a whole axis."""
    return {
        dim[0]: size
        for term, shape in zip(terms, shapes, strict=True)
        for dim, size in zip(term, shape, strict=True)
        if len(dim) == 1
    }


def _shardy(
    terms: Sequence[Term], shapes: Sequence[Sequence[int]], operands: int, cut: tuple[str, ...]
) -> tuple[str, dict[str, Any]]:
    """The rule in Shardy's notation, and the properties of its factors."""
    sizes = _sizes(terms, shapes)
    places = [
        (dim, size)
        for term, shape in zip(terms, shapes, strict=True)
        for dim, size in zip(term, shape, strict=True)
    ]
    sizes |= {dim[1]: size // sizes[dim[0]] for dim, size in places if len(dim) == 2}
    # Shardy takes no factor of size 1 beside another.
    terms = [
        tuple(tuple(f for f in dim if sizes[f] > 1) or dim[:1] for dim in term) for term in terms
    ]
    dims = [dim for term in terms for dim in term]
    inner = {dim[1]: sizes[dim[1]] for dim in dims if len(dim) == 2}
    # In the order of their first appearance, which Shardy asks for.
    uncut = tuple(f for f in dict.fromkeys(f for dim in dims for f in dim) if f not in cut)
    written = [
        " ".join(dim[0] if len(dim) == 1 else f"({' '.join(dim)})" for dim in term)
        for term in terms
    ]
    rule = f"{', '.join(written[:operands])} -> {', '.join(written[operands:])}"
    return rule, {"need_replication_factors": uncut, **inner}


def _mesh_axes(
    mesh: Mesh, terms: Sequence[Term], arrays: Sequence[Any], cut: tuple[str, ...]
) -> dict[str, tuple[str, ...]]:
    """The mesh axes that cut each factor: those of its largest array, which then stays in place."""
    sizes = _sizes(terms, [array.shape for array in arrays])
    found: dict[str, tuple[str, ...]] = {}
    places = zip(terms, arrays, strict=True)
    for term, array in sorted(places, key=lambda place: -math.prod(place[1].shape)):
        for (factor, *_), axes in zip(term, array.sharding.spec, strict=False):
            if not axes or factor not in cut or factor in found:
                continue
            axes = (axes,) if isinstance(axes, str) else tuple(axes)
            taken = {axis for others in found.values() for axis in others}
            divides = sizes[factor] % math.prod(mesh.shape[axis] for axis in axes) == 0
            if divides and taken.isdisjoint(axes):
                found[factor] = axes
    return found


def _spec(term: Term, axes: dict[str, tuple[str, ...]]) -> P:
    """How an array lies when the factors are cut over these mesh axes."""
    return P(*(axes.get(dim[0]) for dim in term))
