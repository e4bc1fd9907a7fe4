"""The rules that values keep, in one place: what is whole is whole, what is finite is finite.

Python takes ``True`` for 1, ``nan`` for any comparison and ``"8"`` for a size until something far
away breaks. A rule says what a value must be. It reads the same value from Python, from the text of
a flag and from JSON, and describes itself as JSON schema. :class:`Refused` is the one sentence for
all of them: the name, the value and the rule. :mod:`longspec_jax.schema` gives rules to fields.
"""

import difflib
import itertools
import numbers
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

if TYPE_CHECKING:
    from transformers import GenerationConfig

    class Tokenizer(Protocol):
        """What is asked of a transformers tokenizer."""

        def __call__(
            self, text: str, *, add_special_tokens: bool = True
        ) -> Mapping[str, list[int]]:
            """``input_ids`` of a text."""
            ...

        def __len__(self) -> int:
            """Number of tokens."""
            ...

        def decode(
            self,
            token_ids: list[int],
            *,
            skip_special_tokens: bool = False,
            clean_up_tokenization_spaces: bool = True,
        ) -> str:
            """The text of tokens."""
            ...

        def get_vocab(self) -> Mapping[str, int]:
            """All tokens."""
            ...

        def get_added_vocab(self) -> Mapping[str, int]:
            """The tokens that are cut out of a text first, and their numbers."""
            ...

        def convert_ids_to_tokens(self, ids: int) -> str | None:
            """A token as it is stored."""
            ...

        def get_chat_template(
            self, chat_template: str | None, tools: list[Mapping[str, object]] | None
        ) -> str:
            """The Jinja text of a template."""
            ...

        @property
        def chat_template(self) -> str | Mapping[str, str] | None:
            """The Jinja text of its template; by name where it has several."""
            ...

        @property
        def all_special_ids(self) -> list[int]:
            """Tokens without a text."""
            ...
else:  # Transformers is slow to import, and the types of its classes are wider than their use.
    GenerationConfig = Tokenizer = Any

LARGEST_WHOLE = 2**31 - 1
"""Sizes, positions and token ids are 32-bit integers on the device."""
LARGEST_NUMBER = 1e30
"""Numbers are float32 on the device, which ends at 3e38; this leaves room to multiply."""
LARGEST_FLOAT32 = 3.4028234663852886e38
LONGEST_SHOWN = 80
"""Characters of a value in a message."""
SIMILAR = 0.75
"""Least similarity of a suggested name, as difflib measures it: ``stop`` is not ``top_p``."""
_DIGITS = re.compile(r"\s*[+-]?[0-9]{1,20}\s*")


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a value is an integer, Python's or NumPy's, and no boolean."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a real number, Python's or NumPy's, and no boolean."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


class Refused(ValueError):
    """A value that breaks the rule of its name.

    Attributes:
      name: of the value, as the user writes it: ``top_p``, ``--config.draft.layers``.
      value: what was given.
      words: what it must be instead, and what to do.
      row: of the prompts, where each has a value of its own.
    """

    def __init__(self, name: str, value: object, words: str, row: int | None = None) -> None:
        super().__init__(name, value, words, row)
        self.name, self.value, self.words, self.row = name, value, words, row

    def __str__(self) -> str:
        """Name, value and rule."""
        where = "" if self.row is None else f" of row {self.row}"
        return f"{self.name}={shown(self.value)}{where} must be {self.words}"


class Typed(str):
    """The text of a flag, which stands for a value of the type of what it sets."""


class Rule:
    """What a value must be, and how it is read. A subclass says :meth:`refusal` at least."""

    def refusal(self, value: object) -> str | None:
        """What a value must be instead; None for one that will do."""
        raise NotImplementedError

    @property
    def json_schema(self) -> dict[str, Any]:
        """The rule as JSON schema; empty where JSON schema has no words for it."""
        return {}

    def plain(self, value: object) -> Any:
        """A value that will do, as Python's own type."""
        return value

    def of_text(self, text: str) -> Any:
        """The value that a text stands for; the text itself where it stands for none."""
        return text

    def of_json(self, value: object) -> Any:
        """The value that one of JSON stands for."""
        return value

    def read(self, name: str, value: object, row: int | None = None) -> Any:
        """A value of Python, or a typed one, checked.

        Raises:
          Refused: for a value that breaks the rule.
        """
        if isinstance(value, Typed):
            value = self.of_text(str(value))
        if words := self.refusal(value):
            raise Refused(name, value, words, row)
        return self.plain(value)

    def read_json(self, name: str, value: object) -> Any:
        """A value of JSON, checked.

        Raises:
          Refused: for a value that breaks the rule.
        """
        return self.read(name, self.of_json(value))

    def __get_pydantic_core_schema__(self, source: object, handler: object) -> Any:
        """How pydantic reads a field that is annotated with this rule: as :meth:`of_json` does."""
        from pydantic_core import core_schema

        def read(value: object) -> Any:
            found = self.of_json(value)
            if words := self.refusal(found):
                raise ValueError(f"must be {words}")
            return self.plain(found)

        return core_schema.no_info_plain_validator_function(read)

    def __get_pydantic_json_schema__(self, core: object, handler: object) -> dict[str, Any]:
        """What pydantic puts into a JSON schema for this rule."""
        return self.json_schema


@dataclass(frozen=True)
class Whole(Rule):
    """A whole number in a range, its ends included."""

    least: int = 1
    most: int = LARGEST_WHOLE
    note: str = ""
    """What an end means, or what to do instead; follows the rule."""

    def refusal(self, value: object) -> str | None:
        """The range."""
        if is_whole(value) and self.least <= value <= self.most:
            return None
        return f"a whole number from {self.least} to {self.most}{self.note}"

    @property
    def json_schema(self) -> dict[str, Any]:
        """The range."""
        return {"type": "integer", "minimum": self.least, "maximum": self.most}

    def plain(self, value: Any) -> int:
        """An integer of Python."""
        return int(value)

    def of_text(self, text: str) -> Any:
        """Decimal digits."""
        return int(text) if _DIGITS.fullmatch(text) else text

    def of_json(self, value: object) -> Any:
        """JSON has one kind of numbers, so 4.0 is whole."""
        return int(value) if isinstance(value, float) and value.is_integer() else value


@dataclass(frozen=True)
class Real(Rule):
    """A real number in a range whose upper end is included."""

    least: float
    most: float
    rule: str = ""
    """What a number must be, for reading; the range if empty."""
    includes_least: bool = True

    def refusal(self, value: object) -> str | None:
        """The range; NaN is in none."""
        between = "from {:g} to {:g}" if self.includes_least else "above {:g}, at most {:g}"
        words = self.rule or f"a number {between.format(self.least, self.most)}"
        if not is_number(value):
            return words if words.startswith("a number") else f"a number, {words}"
        above = value >= self.least if self.includes_least else value > self.least
        return None if above and value <= self.most else words

    @property
    def json_schema(self) -> dict[str, Any]:
        """The range."""
        bound = "minimum" if self.includes_least else "exclusiveMinimum"
        return {"type": "number", bound: self.least, "maximum": self.most}

    def plain(self, value: Any) -> float:
        """A float of Python."""
        return float(value)

    def of_text(self, text: str) -> Any:
        """The number, by the rules of Python's ``float``."""
        try:
            return float(text)
        except ValueError:
            return text


@dataclass(frozen=True)
class Truth(Rule):
    """True or false."""

    def refusal(self, value: object) -> str | None:
        """Only Python's own two."""
        return None if isinstance(value, bool) else "True or False"

    @property
    def json_schema(self) -> dict[str, Any]:
        """A boolean."""
        return {"type": "boolean"}

    def of_text(self, text: str) -> Any:
        """``true`` and ``false`` in any case."""
        return {"true": True, "false": False}.get(text.lower(), text)


@dataclass(frozen=True)
class Text(Rule):
    """Text of bounded length."""

    least: int = 0
    most: int | None = None

    def refusal(self, value: object) -> str | None:
        """A string, and its length."""
        if not isinstance(value, str):
            return "text"
        if len(value) < self.least:
            return "text that is not empty" if self.least == 1 else f"at least {self.least} long"
        if self.most is not None and len(value) > self.most:
            return f"text of at most {self.most} characters, and has {len(value)}"
        return None

    @property
    def json_schema(self) -> dict[str, Any]:
        """The bounds."""
        bounds = {"minLength": self.least or None, "maxLength": self.most}
        return {"type": "string", **{name: n for name, n in bounds.items() if n is not None}}


@dataclass(frozen=True)
class OneOf(Rule):
    """One of several words."""

    words: tuple[str, ...]
    remedy: str = ""
    """What to do instead; follows the rule."""

    def refusal(self, value: object) -> str | None:
        """The words, and the nearest one."""
        if isinstance(value, str) and value in self.words:
            return None
        close = nearest(value, self.words) if isinstance(value, str) else None
        hint = f"; did you mean {close}?" if close else ""
        return f"one of {', '.join(self.words)}{self.remedy}{hint}"

    @property
    def json_schema(self) -> dict[str, Any]:
        """The words."""
        return {"enum": list(self.words)}


@dataclass(frozen=True)
class That(Rule):
    """A rule of its own: a test, and what passes it."""

    allows: Callable[[Any], bool]
    words: str

    def refusal(self, value: object) -> str | None:
        """The words."""
        return None if self.allows(value) else self.words


@dataclass(frozen=True)
class Each(Rule):
    """A list whose items keep one rule."""

    item: Rule
    least: int = 0
    most: int | None = None

    def refusal(self, value: object) -> str | None:
        """The length, or the first item that breaks the rule."""
        if not isinstance(value, list | tuple):
            return "a list"
        if not self.least <= len(value) <= (len(value) if self.most is None else self.most):
            most = "" if self.most is None else f" and at most {self.most}"
            return f"a list of at least {self.least}{most} items, and has {len(value)}"
        for index, one in enumerate(value):
            if words := self.item.refusal(one):
                return f"a list of {words}; item {index} is {shown(one)}"
        return None

    @property
    def json_schema(self) -> dict[str, Any]:
        """The items' schema and the bounds."""
        most = {} if self.most is None else {"maxItems": self.most}
        return {"type": "array", "items": self.item.json_schema, "minItems": self.least, **most}

    def plain(self, value: Any) -> list[Any]:
        """The items, each as Python's own type."""
        return list(map(self.item.plain, value))

    def of_json(self, value: object) -> Any:
        """The items, each as its rule reads JSON."""
        return list(map(self.item.of_json, value)) if isinstance(value, list) else value


@dataclass(frozen=True)
class Maybe(Rule):
    """What keeps a rule, or is left out."""

    rule: Rule

    def refusal(self, value: object) -> str | None:
        """As in the rule."""
        words = None if value is None else self.rule.refusal(value)
        return f"{words}, or left out" if words else None

    @property
    def json_schema(self) -> dict[str, Any]:
        """The rule's, or null."""
        return {"anyOf": [self.rule.json_schema, {"type": "null"}]}

    def read(self, name: str, value: object, row: int | None = None) -> Any:
        """None, or what the rule makes of the value, whose own reading may build what it holds."""
        if isinstance(value, Typed):
            value = self.of_text(str(value))
        if words := self.refusal(value):
            raise Refused(name, value, words, row)
        return None if value is None else self.rule.read(name, value, row)

    def plain(self, value: object) -> Any:
        """None, or as in the rule."""
        return None if value is None else self.rule.plain(value)

    def of_text(self, text: str) -> Any:
        """As in the rule."""
        return self.rule.of_text(text)

    def of_json(self, value: object) -> Any:
        """As in the rule."""
        return None if value is None else self.rule.of_json(value)


def check(rules: Mapping[str, Rule], **values: object) -> None:
    """Refuse a value that breaks the rule of its name.

    Raises:
      Refused: names the value and what it must be.
    """
    for name, value in values.items():
        rules[name].read(name, value)


def whole_number(name: str, value: object, least: int = 1, most: int = LARGEST_WHOLE) -> int:
    """The value as an integer.

    Raises:
      Refused: if it is not a whole number, or below ``least`` or above ``most``.
    """
    return Whole(least, most).read(name, value)


def finite_number(name: str, value: object, least: float, most: float = LARGEST_NUMBER) -> float:
    """The value as a float.

    Raises:
      Refused: if it is not a finite number, or below ``least`` or above ``most``.
    """
    return Real(least, most).read(name, value)


def by_row(name: str, value: object, rows: int, allowed: Rule) -> list[Any]:
    """A value per row, from one for all rows or a sequence with one per row.

    Raises:
      ValueError: for a sequence of another length.
      Refused: for a value that breaks the rule; names the row where there are several.
    """
    value = as_plain(value)
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        return [allowed.read(name, value)] * rows
    if len(value) != rows:
        raise ValueError(
            f"{name} has {len(value)} values for {rows} prompt{'s' * (rows != 1)}; pass one "
            "value, or one per prompt"
        )
    several = rows > 1
    return [allowed.read(name, one, row if several else None) for row, one in enumerate(value)]


def in_row(row: int, rows: int) -> str:
    """The row of a bad value, for an error message; empty if there is only one."""
    return f" of row {row}" if rows > 1 else ""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that a misspelt one probably means; None if no name is similar."""
    # A name twice as long is not similar, and difflib would read all of it.
    close = [one for one in known if len(name) < 2 * len(one)]
    return next(iter(difflib.get_close_matches(name, close, 1, SIMILAR)), None) if close else None


def as_plain(value: object) -> Any:
    """Python's own numbers and lists for an array of numpy, jax or torch."""
    listed = getattr(value, "tolist", None)
    return value if listed is None else listed()


def shown(value: object) -> str:
    """A value for a message: as Python writes it, cut after :data:`LONGEST_SHOWN` characters."""
    try:
        text = repr(_beginning(value))
    except RecursionError:
        return f"a {type(value).__name__} that is nested too deeply to show"
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def _beginning(value: object) -> object:
    """Enough of a value to show: a whole one may be a text of megabytes."""
    most = LONGEST_SHOWN + 1
    if type(value) is str or type(value) is bytes:
        return value[:most]
    if type(value) is list:
        return [_beginning(one) for one in value[:most]]
    if type(value) is dict:
        items = itertools.islice(value.items(), most)
        return {_beginning(name): _beginning(one) for name, one in items}
    return value


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def shown_bytes(count: float) -> str:
    """Bytes with a decimal unit: ``75.5 MB``, ``16.06 GB``."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def require_tokenizer(tokenizer: Tokenizer | None) -> Tokenizer:
    """Return the tokenizer, or say how to do without."""
    if tokenizer is None:
        raise ValueError(
            "text needs a tokenizer and none was found next to the target; pass tokenizer= to "
            "from_pretrained, or pass token ids"
        )
    return tokenizer
