"""Samples: what is asked, before a protocol turns it into tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from longspec_jax.checks import shown


@dataclass(frozen=True)
class Wording:
    """How a task asks its question."""

    question: str
    """With the names of fields in braces."""
    answer: str = ""
    """What the answer begins with, so that it follows the question."""
    between: str = "\n\n"
    """What stands between the two where both are one text."""

    def asked(self, fields: Mapping[str, str]) -> str:
        """The question with its fields filled in."""
        return self.question.format(**fields)

    def whole(self, fields: Mapping[str, str]) -> str:
        """Question and beginning of the answer as one text."""
        return self.asked(fields) + (self.between + self.answer if self.answer else "")


@dataclass(frozen=True)
class Sample:
    """One question: a wording and what it is filled with, or a prompt that is taken as it is."""

    name: str
    references: tuple[str, ...] = ()
    """What counts as an answer."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """For the wordings of its task."""
    prompt: Any = None
    """Text, chat messages or token ids, taken as they are instead of a wording."""


def text_field(row: Mapping[str, Any], name: str, where: str) -> str:
    """A field of a row that must be text with something in it.

    Raises:
      ValueError: if it is missing, no text, or empty.
    """
    if name not in row:
        found = ", ".join(sorted(map(str, row))) or "nothing"
        raise ValueError(
            f"{where} lacks the field {name!r}; it has {found}. Rename the field, or ask for the "
            "task that this file belongs to"
        )
    value = row[name]
    if not isinstance(value, str):
        raise ValueError(f"{where}: {name!r} must be text, got {shown(value)}; convert it first")
    if not value.strip():
        raise ValueError(f"{where}: {name!r} is empty; remove the row, or fill it in")
    return value


def references(row: Mapping[str, Any], name: str, where: str) -> tuple[str, ...]:
    """The answers of a row; none if it has no such field.

    An answer is text, a number, or an object that holds its text under ``text``; a field holds one
    or a list of them.

    Raises:
      ValueError: for anything else.
    """
    value = row.get(name)
    if value is None:
        return ()
    found = []
    for each in value if isinstance(value, Sequence) and not isinstance(value, str) else [value]:
        answer = each.get("text") if isinstance(each, dict) else each
        if not isinstance(answer, str | int | float):
            kind = type(answer).__name__
            raise ValueError(
                f"{where}: {name!r} must hold texts and holds a {kind}; convert it to a string or "
                "a list of strings"
            )
        found.append(str(answer))
    return tuple(found)


def sample_name(row: Mapping[str, Any], number: int) -> str:
    """A row's own identifier, or its number in the file, from 0."""
    for key in ("_id", "id", "bid"):
        if isinstance(row.get(key), str | int) and str(row[key]).strip():
            return str(row[key])
    return str(number)
