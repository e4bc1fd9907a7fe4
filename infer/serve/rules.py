"""What the JSON values of a request must be: each rule reads a value and describes itself.

The description is a JSON schema, from which the OpenAPI document is made. So the document cannot
differ from what is read. This file knows no field by name, no engine and no HTTP.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from longspec_jax.checks import Real, Whole, nearest, shown

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
"""OpenAI's error types by HTTP status; other statuses from 500 are ``server_error``."""


class Refused(Exception):
    """A request that is not answered; becomes OpenAI's error object.

    Attributes:
      status: of HTTP.
      param: the field in question, if it is one.
      code: a word for programs.
      retry_after: seconds after which the client may try again.
    """

    def __init__(
        self,
        message: str,
        param: str | None = None,
        *,
        status: int = 400,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after = status, param, code, retry_after

    @property
    def body(self) -> dict[str, Any]:
        """The error object."""
        kind = TYPES.get(self.status, TYPES[400] if self.status < 500 else "server_error")
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        }


class Rule(Protocol):
    """What a value must be."""

    @property
    def schema(self) -> dict[str, Any]:
        """The rule as JSON schema."""
        ...

    def read(self, value: Any) -> Any:
        """The value as the server takes it.

        Raises:
          ValueError: says what the value must be, as the end of a sentence about it.
        """
        ...


@dataclass(frozen=True)
class Number:
    """A number in a range. JSON has one kind of numbers, so 4.0 is a whole number."""

    allowed: Whole | Real

    @property
    def schema(self) -> dict[str, Any]:
        """The range."""
        least, most = self.allowed.least, self.allowed.most
        if isinstance(self.allowed, Whole):
            return {"type": "integer", "minimum": least, "maximum": most}
        bound = "minimum" if self.allowed.includes_least else "exclusiveMinimum"
        return {"type": "number", bound: least, "maximum": most}

    def read(self, value: Any) -> Any:
        """The number."""
        whole = isinstance(self.allowed, Whole)
        if whole and isinstance(value, float) and value.is_integer():
            value = int(value)
        if words := self.allowed.refusal(value):
            raise ValueError(f"must be {words}")
        return value if whole else float(value)


@dataclass(frozen=True)
class Flag:
    """True or false."""

    schema: dict[str, Any] = field(default_factory=lambda: {"type": "boolean"})

    def read(self, value: Any) -> bool:
        """The truth value."""
        if not isinstance(value, bool):
            raise ValueError("must be true or false")
        return value


@dataclass(frozen=True)
class Text:
    """Text of bounded length."""

    most: int | None = None
    least: int = 0

    @property
    def schema(self) -> dict[str, Any]:
        """The bounds."""
        most = {} if self.most is None else {"maxLength": self.most}
        return {"type": "string", **most, **({"minLength": self.least} if self.least else {})}

    def read(self, value: Any) -> str:
        """The text."""
        if not isinstance(value, str):
            raise ValueError("must be text")
        if len(value) < self.least:
            raise ValueError("must not be empty")
        if self.most is not None and len(value) > self.most:
            raise ValueError(f"must have at most {self.most} characters, got {len(value)}")
        return value


@dataclass(frozen=True)
class OneOf:
    """One of several words."""

    words: tuple[str, ...]
    remedy: str = ""

    @property
    def schema(self) -> dict[str, Any]:
        """The words."""
        return {"enum": list(self.words)}

    def read(self, value: Any) -> str:
        """The word."""
        if not isinstance(value, str) or value not in self.words:
            known = ", ".join(self.words)
            raise ValueError(f"must be {known}{f'; {self.remedy}' * bool(self.remedy)}")
        return value


@dataclass(frozen=True)
class ListOf:
    """A list whose items all keep one rule."""

    item: Rule
    most: int | None = None
    least: int = 0

    @property
    def schema(self) -> dict[str, Any]:
        """The items' schema and the bounds."""
        most = {} if self.most is None else {"maxItems": self.most}
        return {"type": "array", "items": self.item.schema, "minItems": self.least, **most}

    def read(self, value: Any) -> list[Any]:
        """The items."""
        if not isinstance(value, list):
            raise ValueError("must be a list")
        if len(value) < self.least:
            raise ValueError(f"must have at least {self.least} item{'s' * (self.least > 1)}")
        if self.most is not None and len(value) > self.most:
            raise ValueError(f"must have at most {self.most} items, got {len(value)}")
        found = []
        for index, item in enumerate(value):
            try:
                found.append(self.item.read(item))
            except ValueError as error:
                raise ValueError(f"item {index}, {shown(item)}, {error}") from None
        return found


@dataclass(frozen=True)
class Tokens:
    """A list of token ids; what lies outside the vocabulary is refused where that is known.

    Faster than :class:`ListOf`, because a prompt may have a hundred thousand.
    """

    @property
    def schema(self) -> dict[str, Any]:
        """A list of numbers from 0."""
        item = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
        return {"type": "array", "items": item, "minItems": 1}

    def read(self, value: Any) -> tuple[int, ...]:
        """The ids."""
        if not isinstance(value, list) or not value:
            raise ValueError("must be a list of token ids, at least one")
        if set(map(type, value)) != {int}:
            return tuple(ListOf(Number(Whole(0))).read(value))
        if min(value) < 0 or max(value) >= 2**31:
            raise ValueError("must hold token ids, which are whole numbers from 0")
        return tuple(value)


@dataclass(frozen=True)
class Either:
    """One of several rules; the refusal is that of the whole."""

    rules: tuple[Rule, ...]
    words: str
    """What the value must be: ``must be text, or a list of texts``."""

    @property
    def schema(self) -> dict[str, Any]:
        """Any of the schemas."""
        return {"anyOf": [rule.schema for rule in self.rules]}

    def read(self, value: Any) -> Any:
        """The value as the first rule reads it that can."""
        reasons = []
        for rule in self.rules:
            try:
                return rule.read(value)
            except ValueError as error:
                reasons.append(str(error))
        # A list of texts that is too long is answered by its length, not by "must be text".
        told = next((reason for reason in reasons if "at most" in reason), "")
        raise ValueError(f"{self.words}{f' ({told})' * bool(told)}")


@dataclass(frozen=True)
class Neutral:
    """A field that is not supported: only values at which it has no effect are accepted."""

    values: tuple[Any, ...] = ()
    """Beside null, which every optional field takes."""
    remedy: str = "leave the field out"

    @property
    def schema(self) -> dict[str, Any]:
        """The values; null alone where there are none."""
        return {"enum": list(self.values)} if self.values else {"type": "null"}

    def read(self, value: Any) -> None:
        """Nothing: the value has no effect."""
        # 0 equals False in Python.
        same = [one for one in self.values if one == value and type(one) is type(value)]
        numbers = isinstance(value, int | float) and not isinstance(value, bool)
        if same or (numbers and any(one == value for one in self.values if one is not False)):
            return
        raise ValueError(f"is not supported; {self.remedy}")


@dataclass(frozen=True)
class Biases:
    """Numbers by token id, the ids written as text, because JSON's keys are."""

    value: Number
    most: int

    @property
    def schema(self) -> dict[str, Any]:
        """Names of digits, with numbers."""
        return {
            "type": "object",
            "patternProperties": {"^[0-9]{1,9}$": self.value.schema},
            "additionalProperties": False,
            "maxProperties": self.most,
        }

    def read(self, value: Any) -> dict[int, float]:
        """The numbers by id."""
        if not isinstance(value, dict):
            raise ValueError("must be an object of numbers by token id")
        if len(value) > self.most:
            raise ValueError(f"must have at most {self.most} entries, got {len(value)}")
        found = {}
        for key, bias in value.items():
            if not (len(key) < 10 and key.isascii() and key.isdigit()):
                raise ValueError(f"has the name {shown(key)}, which is no token id")
            try:
                found[int(key)] = self.value.read(bias)
            except ValueError as error:
                raise ValueError(f"of token {key}, {shown(bias)}, {error}") from None
        return found


@dataclass(frozen=True)
class Field:
    """A field of an object: its rule, and what it means."""

    rule: Rule
    about: str = ""
    required: bool = False

    @property
    def schema(self) -> dict[str, Any]:
        """The rule's schema, and null unless the field is required."""
        own = self.rule.schema
        if not self.required and own != {"type": "null"}:
            own = {"anyOf": [own, {"type": "null"}]}
        return {**own, **({"description": self.about} if self.about else {})}


@dataclass(frozen=True)
class AnyObject:
    """An object whose fields are read by somebody else."""

    schema: dict[str, Any] = field(default_factory=lambda: {"type": "object"})

    def read(self, value: Any) -> dict[str, Any]:
        """The object."""
        if not isinstance(value, dict):
            raise ValueError("must be an object")
        return value


@dataclass(frozen=True)
class Object:
    """An object with known fields; null of any other is as absent."""

    fields: Mapping[str, Field]

    @property
    def schema(self) -> dict[str, Any]:
        """The fields' schemas; of others nothing but null is allowed."""
        required = [name for name, one in self.fields.items() if one.required]
        return {
            "type": "object",
            "properties": {name: one.schema for name, one in self.fields.items()},
            "additionalProperties": {"type": "null"},
            **({"required": required} if required else {}),
        }

    def read(self, value: Any) -> dict[str, Any]:
        """The fields that were given, as their rules read them.

        Raises:
          ValueError: names the first field that is wrong.
        """
        if not isinstance(value, dict):
            raise ValueError("must be an object with named fields")
        try:
            return read_fields(value, self.fields)
        except Refused as error:
            raise ValueError(f"is wrong: {error}") from None


def read_fields(given: dict[str, Any], fields: Mapping[str, Field]) -> dict[str, Any]:
    """The given fields of an object, as their rules read them; null is as absent.

    Also null of an unknown field: clients send back what they were given with all that their own
    types know, such as ``annotations: null`` of a message.

    Raises:
      Refused: names the first field that is unknown, missing or wrong.
    """
    found = {}
    for name, value in given.items():
        if value is None and not (name in fields and fields[name].required):
            continue
        if name not in fields:
            close = nearest(name, fields)
            hint = f"did you mean {close}?" if close else "leave it out"
            raise Refused(f"unknown field {shown(name)}; {hint}", f"{name:.80}")
        try:
            found[name] = fields[name].rule.read(value)
        except ValueError as error:
            raise Refused(f"{name}={shown(value)} {error}", name) from None
    for name, one in fields.items():
        if one.required and name not in found:
            raise Refused(f"the field {name} is missing: {one.about}", name)
    return found
