"""A JSON object of a file: every value is checked where it is read, and an error names it.

A size is never a string, an epsilon never NaN, and a number never ``true``. Null and absent mean
the same, as in transformers. A configuration's fields have their rules where they are declared:
:data:`Keys` say where a file has them, for reading and for writing.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from longspec_jax.checks import (
    LARGEST_NUMBER,
    LARGEST_WHOLE,
    Real,
    Rule,
    Whole,
    finite_number,
    is_whole,
    shown,
)
from longspec_jax.schema import REQUIRED, rules

T = TypeVar("T")
C = TypeVar("C")
Keys: TypeAlias = Mapping[str, str | tuple[str, object]]
"""Our fields by name, and the key of each in a file; with a default for files without it."""

REMEDY = "use the file that was saved with the weights, or correct it"
_AGAIN = "correct what was changed in it, or download it again"
MOST_REPEATS = 6
QUANTISATION = "quantization_config", "compression_config"
"""Where a ``config.json`` has its quantisation; compressed-tensors before 0.6 wrote the second."""


@dataclass(frozen=True)
class JsonObject:
    """A JSON object and where it stands."""

    values: Mapping[str, Any]
    origin: str = "config.json"
    """The file, and the key in it if the object is a part of another; errors begin with it."""

    def has(self, key: str) -> bool:
        """Whether the file gives a value."""
        return self.values.get(key) is not None

    def require(self, keys: tuple[str, ...], who: str) -> None:
        """Refuse a file that leaves out what has no safe default."""
        missing = [key for key in keys if not self.has(key)]
        if missing:
            raise ValueError(f"{self.origin}: {who} lacks {', '.join(missing)}; {REMEDY}")

    def whole(
        self, key: str, default: int | None = None, least: int = 1, most: int = LARGEST_WHOLE
    ) -> int:
        """A whole number; required if there is no default."""
        return self.ruled(Whole(least, most), key, REQUIRED if default is None else default)

    def number(
        self, key: str, default: float | None = None, least: float = 0, most: float = LARGEST_NUMBER
    ) -> float:
        """A finite number; required if there is no default."""
        return self.ruled(Real(least, most), key, REQUIRED if default is None else default)

    def numbers(self, key: str, least: float, most: float) -> tuple[float, ...]:
        """A list of finite numbers."""
        found = self._typed(key, [], list, "a list of numbers")
        return tuple(finite_number(f"{self.origin}: {key}", one, least, most) for one in found)

    def tokens(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """Token ids, of which a file may name one without a list; empty if absent."""
        found = self.values.get(key)
        listed = [] if found is None else found if isinstance(found, list) else [found]
        if not all(is_whole(token) and 0 <= token < vocab_size for token in listed):
            rule = f"must be token ids, whole numbers from 0 to {vocab_size - 1} (vocab_size - 1)"
            raise self.error(key, rule)
        return tuple(listed)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        return self._typed(key, default, bool, "true or false")

    def text(self, key: str, default: str) -> str:
        """A text."""
        return self._typed(key, default, str, "a text")

    def texts(self, key: str) -> list[str]:
        """A list of texts; empty if absent."""
        found = self._typed(key, [], list, "a list of texts")
        if not all(isinstance(text, str) for text in found):
            raise self.error(key, "must be a list of texts")
        return found

    def ruled(self, rule: Rule, key: str, default: object = REQUIRED) -> Any:
        """A value that keeps a rule, or the default."""
        if default is REQUIRED:
            self.require((key,), "the file")
        given = self.values[key] if self.has(key) else default
        try:
            found = rule.read(f"{self.origin}: {key}", given)
        except ValueError as error:
            raise ValueError(f"{error}; {REMEDY}") from None
        return tuple(found) if isinstance(found, list) else found

    def fields(self, kind: type[Any], keys: Keys, who: str = "the file") -> dict[str, Any]:
        """Fields of a dataclass, each by the rule that it declares.

        Args:
          kind: the dataclass.
          keys: of the fields; all that have no default are required.
          who: lacks them, for the message.
        """
        self.require(tuple(key for key in keys.values() if isinstance(key, str)), who)
        of = rules(kind)
        return {
            name: self.ruled(of[name], *key)
            if isinstance(key, tuple)
            else self.ruled(of[name], key)
            for name, key in keys.items()
        }

    def made(
        self, kind: type[C], keys: Keys, more: Mapping[str, object] = {}, who: str = "the file"
    ) -> C:
        """A dataclass of the fields that the file has, as in :meth:`fields`, and of more."""
        return self.build(kind, {**self.fields(kind, keys, who), **more}, keys)

    def build(self, make: Callable[..., C], fields: Mapping[str, object], keys: Keys) -> C:
        """A dataclass; where it refuses how its fields fit together, file and keys are named."""
        try:
            return make(**fields)
        except ValueError as error:
            named = zip(keys, keys_of(keys), strict=True)
            said = [f"{ours} is {theirs}" for ours, theirs in named if ours in str(error)]
            raise ValueError("; ".join([f"{self.origin}: {error}", *said])) from error

    @contextmanager
    def named(self) -> Iterator[None]:
        """Name the file in front of every ValueError that is raised inside."""
        try:
            yield
        except ValueError as error:
            raise ValueError(f"{self.origin}: {error}") from error

    def part(self, key: str) -> "JsonObject":
        """An object inside this one; empty if absent."""
        values = self._typed(key, {}, dict, "an object")
        return JsonObject(values, f"{self.origin}, {key}")

    def assuming(self, defaults: Mapping[str, Any]) -> "JsonObject":
        """The same, with values for keys that are absent or null."""
        missing = {key: value for key, value in defaults.items() if not self.has(key)}
        return JsonObject({**self.values, **missing}, self.origin)

    def error(self, key: str, rule: str, remedy: str = REMEDY) -> ValueError:
        """What is wrong with a value, to be raised."""
        return ValueError(f"{self.origin}: {key}={shown(self.values.get(key))} {rule}; {remedy}")

    def _typed(self, key: str, default: T, kind: type, rule: str) -> T:
        """A value of a type, or the default."""
        found = self.values[key] if self.has(key) else default
        if not isinstance(found, kind):
            raise self.error(key, f"must be {rule}")
        return found


def keys_of(keys: Keys) -> tuple[str, ...]:
    """The keys themselves, in the order of the fields."""
    return tuple(key[0] if isinstance(key, tuple) else key for key in keys.values())


def as_raw(config: object, keys: Keys) -> dict[str, Any]:
    """The inverse of :meth:`JsonObject.fields`: a file's keys, with a configuration's values."""
    values = {key: getattr(config, name) for name, key in zip(keys, keys_of(keys), strict=True)}
    return {key: list(one) if isinstance(one, tuple) else one for key, one in values.items()}


def checked_pattern(text: str) -> str:
    """A regular expression of a file, if names can be matched to it in little time.

    Raises:
      re.error: if it repeats a group, or too many parts: a match may then take for ever.
    """
    plain = re.sub(r"\\.", ".", text, flags=re.DOTALL)
    repeats = len(re.findall(r"[*+?{]", plain.replace("(?", "")))
    # With the flag x a space may be between a group and what repeats it.
    if repeats > MOST_REPEATS or re.search(r"\)[*+{]|\(\?[a-zL]*x", plain):
        raise re.error(
            f"a match may take for ever: no group may repeat, nor more than {MOST_REPEATS} parts"
        )
    return text


def read_json(path: Path) -> JsonObject:
    """The JSON object in a file.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: if it holds anything but one JSON object of finite numbers.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"{path.parent} has no {path.name}; a model folder holds it next to the weights: "
            f"{what_to_do(path.parent)}"
        )
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique_keys)
        strange = _not_finite(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); {_AGAIN}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds {shown(value)}, must hold an object; {_AGAIN}")
    if strange:
        raise ValueError(f"{path}: {strange} is not a finite number, as JSON's are; {REMEDY}")
    return JsonObject(value, str(path))


def what_to_do(folder: Path) -> str:
    """What helps where a folder lacks a file of a model, by what it holds instead."""
    names = [path.name for path in folder.glob("*")]
    if any(name.endswith(".gguf") for name in names):
        return "name the .gguf file itself"
    if "adapter_config.json" in names:
        return "an adapter is not read alone, merge it into its model and name that folder"
    if "snapshots" in names:
        return "this is the hub's cache of a model: name the folder below snapshots, or the hub id"
    if "params.json" in names or any(name.startswith("consolidated") for name in names):
        return "the authors' own format is not read: take the files in Hugging Face's format"
    return "download the whole model again, or name the folder that has both"


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs, for ``json.loads``: readers disagree about repeated keys.

    Raises:
      ValueError: for a key that is given twice.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, times = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {shown(twice)} is given {times} times")
    return found


def _not_finite(value: object, name: str = "") -> str | None:
    """The first NaN or infinity of a parsed file, which Python reads though they are no JSON."""
    match value:
        case dict() | list():
            items = value.items() if isinstance(value, dict) else enumerate(value)
            found = (
                _not_finite(item, f"{name}.{key}" if name else str(key)) for key, item in items
            )
            return next(filter(None, found), None)
        case float() if not math.isfinite(value):
            return f"{name}={value}"
    return None
