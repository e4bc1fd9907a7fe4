"""Options are declared once: name, type, rule, default and sentence, in one annotation.

A group of options is a frozen dataclass, or a ``TypedDict`` of keyword arguments:

    class Sampling(TypedDict, total=False):
        top_p: Annotated[float, Option(Real(0, 1), 1.0, "keep this share of the probability")]

    @dataclass(frozen=True)
    class Optimizer:
        b1: Annotated[float, Real(0, 1), "decay of the first moment"] = 0.9

:func:`options` reads the declaration. From it come the checks of keyword arguments, flags
(:func:`longspec_jax.cli.add_options`), request fields (an :class:`Option` is pydantic metadata),
sections of configuration files (:func:`build`), documents, refusals and the tests of refusals.
"""

import dataclasses
import functools
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from longspec_jax.checks import (
    LARGEST_NUMBER,
    Each,
    Maybe,
    Real,
    Refused,
    Rule,
    Text,
    Truth,
    Typed,
    Whole,
    nearest,
    shown,
)

REQUIRED = dataclasses.MISSING
"""The default of an option that has none."""
RENAMED = {
    "adjusted": "enable_penalties",
    "max_gap_ms": "max_itl_ms",
    "max_len": "max_model_len",
    "max_tokens": "max_model_len",
    "memory": "gpu_memory_utilization",
    "offload_prefixes": "cpu_prefix_cache_bytes",
    "prefills": "max_concurrent_prefills",
    "row_slots": "max_num_seqs",
    "same_bits": "batch_invariant",
    "slots": "max_num_seqs",
    "traced": "return_trees",
}
"""Options by the names that they had before 0.1.0: refused with the new one, for one release."""
_RULES: dict[Any, Rule] = {
    bool: Truth(),
    int: Whole(0),
    float: Real(0, LARGEST_NUMBER, "0 or more"),
    str: Text(),
}
"""What a field is that says no more than its type: numbers are sizes."""


@dataclass(frozen=True)
class Option:
    """What one option may be, what it is if absent, and what it does."""

    rule: Rule
    default: object = None
    about: str = ""

    def __get_pydantic_core_schema__(self, source: object, handler: object) -> Any:
        """Reads JSON by the option's rule."""
        return self.rule.__get_pydantic_core_schema__(source, handler)

    def __get_pydantic_json_schema__(self, core: object, handler: object) -> dict[str, Any]:
        """The rule's JSON schema, and the sentence."""
        return {**self.rule.json_schema, **({"description": self.about} if self.about else {})}


@dataclass(frozen=True)
class Section(Rule):
    """A dataclass, or a mapping that holds exactly its fields."""

    kind: type[Any]

    def refusal(self, value: object) -> str | None:
        """Neither; :meth:`read` looks into a mapping."""
        good = isinstance(value, Mapping | self.kind)
        return None if good else "a section with fields of its own"

    def read(self, name: str, value: object, row: int | None = None) -> Any:
        """An instance of the dataclass."""
        found = super().read(name, value, row)
        return found if isinstance(found, self.kind) else build(self.kind, found, f"{name}.")


@dataclass(frozen=True)
class _Sections(Each):
    """A list whose items are read one by one, with their place in their names."""

    def read(self, name: str, value: object, row: int | None = None) -> tuple[Any, ...]:
        """The items; typed ones have commas between them."""
        if isinstance(value, Typed):
            value = [Typed(one.strip()) for one in value.split(",")]
        if not isinstance(value, list | tuple):
            raise Refused(name, value, "a list", row)
        return tuple(self.item.read(f"{name}[{index}]", one) for index, one in enumerate(value))


@functools.cache
def options(kind: type[Any]) -> Mapping[str, Option]:
    """The options that a dataclass or a ``TypedDict`` declares, by name and in order."""
    hints = typing.get_type_hints(kind, include_extras=True)
    if not dataclasses.is_dataclass(kind):
        return types.MappingProxyType({name: _option(hint) for name, hint in hints.items()})
    fields = [field for field in dataclasses.fields(kind) if field.init]
    return types.MappingProxyType(
        {field.name: _option(hints[field.name], _default(field)) for field in fields}
    )


def _default(field: dataclasses.Field[object]) -> object:
    made = field.default_factory
    return field.default if made is REQUIRED else made()


def _option(hint: object, default: object = None) -> Option:
    marks = typing.get_args(hint)[1:] if typing.get_origin(hint) is typing.Annotated else ()
    whole = next((mark for mark in marks if isinstance(mark, Option)), None)
    about = next((mark for mark in marks if isinstance(mark, str)), "")
    return whole or Option(rule_of(hint), default, about)


def rule_of(hint: object) -> Rule:
    """The rule of an annotation: the one that it carries, or that of its type.

    Raises:
      TypeError: for a type of no rule, a mistake in a declaration.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        rule = next((mark for mark in args[1:] if isinstance(mark, Rule)), None)
        if rule is None:
            return rule_of(args[0])
        return Maybe(rule) if type(None) in typing.get_args(args[0]) else rule
    if type(None) in args:
        return Maybe(rule_of(next(one for one in args if one is not type(None))))
    if origin is tuple and args[1:] == (...,):
        return _Sections(rule_of(args[0]))
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return Section(hint)
    if hint not in _RULES:
        raise TypeError(f"{hint} has no rule; annotate it with one, as Annotated[..., Whole(1)]")
    return _RULES[hint]


@functools.cache
def rules(kind: type[Any]) -> Mapping[str, Rule]:
    """The rules of a dataclass' fields, of those that carry one."""
    hints = typing.get_type_hints(kind, include_extras=True)
    ruled = {name: hint for name, hint in hints.items() if typing.get_origin(hint) is Annotated}
    return types.MappingProxyType({name: rule_of(hint) for name, hint in ruled.items()})


class Checked:
    """A dataclass whose fields keep the rules that they carry; Refused is raised for others."""

    owner: ClassVar[str] = ""
    """What stands before the name of a field in a message."""

    def __post_init__(self) -> None:
        for name, rule in rules(type(self)).items():
            rule.read(self.owner + name, getattr(self, name))


def read(kind: type[Any], values: Mapping[str, object], owner: str) -> dict[str, Any]:
    """The keyword arguments that a ``TypedDict`` declares, each checked; defaults for the others.

    Args:
      kind: the ``TypedDict``.
      values: those that were given.
      owner: what takes them, as the user calls it.

    Raises:
      TypeError: for an unknown or missing name, as of any call.
      Refused: for a value that breaks its rule.
    """
    declared = options(kind)
    for name in values:
        if name not in declared:
            raise TypeError(unknown("option", name, declared, owner))
    required = (name for name, one in declared.items() if one.default is REQUIRED)
    if missing := [name for name in required if name not in values]:
        raise TypeError(f"{owner} needs {' and '.join(missing)}")
    return {
        name: one.rule.read(name, values[name]) if name in values else one.default
        for name, one in declared.items()
    }


def build(
    kind: type[Any],
    values: Mapping[str, Any],
    where: str,
    owner: str = "",
    others: Iterable[str] = (),
) -> Any:
    """An instance of a dataclass from values by name, each checked.

    Args:
      kind: the dataclass; values may leave out what has a default.
      where: what stands before a name as the user writes it: ``--config.data.``,
        ``draft_options: ``.
      owner: whose options they are, for the message about an unknown one.
      others: names that would be known, too, in the same place.

    Raises:
      ValueError: for an unknown, missing or wrong value, and for values that contradict each other.
    """
    declared = options(kind)
    section = where.rstrip(".: ")
    for name in values:
        if name not in declared:
            known = dict.fromkeys([*declared, *others])
            raise ValueError(f"{section}: {unknown('option', name, known, owner)}")
    required = [name for name, one in declared.items() if one.default is REQUIRED]
    if missing := [name for name in required if name not in values]:
        raise ValueError(f"{section} lacks {', '.join(missing)}; give every one a value")
    read = {name: declared[name].rule.read(where + name, one) for name, one in values.items()}
    try:
        return kind(**read)
    except Refused as error:
        raise Refused(where + error.name, error.value, error.words) from None
    except ValueError as error:
        said = str(error)
        raise ValueError(said if said.startswith("--") else f"{section}: {said}") from None


def unknown(what: str, name: object, known: Iterable[str], owner: str = "") -> str:
    """The message for an unknown name: the nearest known one, or all there are."""
    names = list(known)
    if isinstance(name, str) and RENAMED.get(name) in names:
        return f"{what} {name} is {RENAMED[name]} now"
    close = nearest(name, names) if isinstance(name, str) else None
    every = f"{'it has' if owner else 'known are'} {', '.join(names)}"
    hint = f"did you mean {close!r}?" if close else every
    return f"unknown {what} {shown(name)}{f' for {owner}' if owner else ''}; {hint}"
