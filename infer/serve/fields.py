"""How fields of requests are read, and how the server refuses what is wrong.

The one place that words what pydantic finds. Token ids are read here and not by pydantic, whose
reading of long lists lets no other thread run. Ranges of sampling are the library's own. Nothing
here knows an engine, a tokenizer or HTTP's transport.
"""

import functools
from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, ErrorDetails

from longspec_jax.checks import LARGEST_WHOLE, Rule, nearest, shown
from longspec_jax.config.sampling import BIAS, TOKEN

MOST_BIASES = 1024

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


def defect(error: Exception) -> Refused:
    """The refusal where the server itself is wrong; what happened is in its log."""
    return Refused(f"the server has a defect: {type(error).__name__}", status=500)


# What is read by a rule or a function, besides the rules of the library.


class Neutral(Rule):
    """A field that is not supported: only values at which it has no effect are accepted."""

    def __init__(self, *values: object, remedy: str = "leave the field out") -> None:
        """Bind the values besides null, which every optional field takes."""
        self.values, self._remedy = values, remedy

    def refusal(self, value: object) -> str | None:
        """The values, and what to do instead."""
        # 0 equals False in Python, and JSON has one kind of numbers.
        number = isinstance(value, int | float) and not isinstance(value, bool)
        for one in self.values:
            if one == value and (type(one) is type(value) or (number and one is not False)):
                return None
        allowed = "".join(f"{one!r} or " for one in self.values)
        return f"{allowed}absent: nothing else is supported; {self._remedy}"

    def plain(self, value: object) -> None:
        """Nothing: the value has no effect."""

    @property
    def json_schema(self) -> JsonSchemaValue:
        """The values; only null where there are none."""
        return {"enum": list(self.values)} if self.values else {"type": "null"}


TEXT, LIST, OBJECT = "a text", "a list", "an object"
"""Tags of what may be either; no field's name has a space."""


def either(words: str) -> Discriminator:
    """What chooses by the value's type among those of a field, so that only its fault is reported.

    Args:
      words: for what is neither.
    """

    def kind(value: object) -> str | None:
        kinds = {str: TEXT, list: LIST, dict: OBJECT}
        return next((tag for kind, tag in kinds.items() if isinstance(value, kind)), None)

    return Discriminator(kind, custom_error_type="words", custom_error_message=words)


Token = Annotated[int, TOKEN]
Tokens = Annotated[list[Token], Field(min_length=1)]
Texts = Annotated[list[str], Field(min_length=1)]
Prompt = str | tuple[int, ...]
_PROMPT = "must be text, token ids, or a list of one of these, none empty"


def read_tokens(value: object) -> tuple[int, ...]:
    """A list of token ids; what lies outside the vocabulary is refused where that is known.

    Not by pydantic, which looks at one after the other and lets no other thread run meanwhile: a
    prompt may have a hundred thousand.
    """
    if not isinstance(value, list) or not value:
        raise ValueError("must be a list of token ids, at least one")
    if {*map(type, value)} != {int}:
        return tuple(TOKEN.read_json(f"item {index}", one) for index, one in enumerate(value))
    if min(value) < 0 or max(value) > LARGEST_WHOLE:
        raise ValueError("must hold token ids, which are whole numbers from 0")
    return tuple(value)


def read_prompts(value: object) -> tuple[Prompt, ...]:
    """The prompts of a request: one, or a list of some."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if all(isinstance(one, str) for one in value):
            return tuple(value)
        try:
            if all(isinstance(one, list) for one in value):
                return tuple(map(read_tokens, value))
            return (read_tokens(value),)
        except ValueError:
            raise ValueError(_PROMPT) from None
    raise ValueError(_PROMPT)


def read_biases(value: object) -> dict[int, float]:
    """Numbers by token id, the ids written as text, because JSON's keys are."""
    if not isinstance(value, dict):
        raise ValueError("must be an object of numbers by token id")
    if len(value) > MOST_BIASES:
        raise ValueError(f"must have at most {MOST_BIASES} entries, got {len(value)}")
    found = dict[int, float]()
    for key, bias in value.items():
        if not (len(key) < 10 and key.isascii() and key.isdigit()):
            raise ValueError(f"has the name {shown(key)}, which is no token id")
        found[int(key)] = BIAS.read_json(f"token {key}", bias)
    return found


# Objects.


class WrongName(ValueError):
    """A field of an object that is unknown or missing; :func:`_refused` names the object."""

    def __init__(self, name: str, *, begin: str, end: str) -> None:
        super().__init__(f"{begin}{end}")
        self.name, self.begin, self.end = name, begin, end


@functools.cache
def _fields(kind: type[BaseModel]) -> dict[str, str | None]:
    """The fields as clients write them, and what each means that is required."""
    found = dict[str, str | None]()
    for name, one in kind.model_fields.items():
        about = f"{one.description}"
        words = f"{about[:1].lower()}{about[1:].rstrip('.')}"
        found[one.alias or name] = words if one.is_required() else None
    return found


class Body(BaseModel):
    """An object with known fields; null of any other is as absent.

    Also null of an unknown field: clients send back what they were given with all that their own
    types know, such as ``annotations: null`` of a message.
    """

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, given: object) -> object:
        """Refuse an unknown and a missing field, and leave out null."""
        if not isinstance(given, dict):
            return given
        fields = _fields(cls)
        for name, one in given.items():
            if one is not None and name not in fields:
                close = nearest(name, fields)
                hint = f"did you mean {close}?" if close else "leave it out"
                raise WrongName(name, begin=f"unknown field {shown(name)}", end=f"; {hint}")
        for name, about in fields.items():
            if about is not None and name not in given:
                raise WrongName(name, begin=f"the field {name}", end=f" is missing: {about}")
        if None not in given.values():
            return given
        return {name: one for name, one in given.items() if one is not None or fields.get(name)}

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """The fields' schemas, with null of each optional one; of others nothing but null."""
        found = handler(schema)
        own = handler.resolve_ref_schema(found)
        own["additionalProperties"] = {"type": "null"}
        for name, one in own["properties"].items():
            about = {key: one.pop(key) for key in ("description", "default") if key in one}
            one.pop("title", None)
            null = {"type": "null"}
            if name not in own.get("required", ()) and null not in (one, *one.get("anyOf", ())):
                one = {"anyOf": [one, null]}
            own["properties"][name] = one | about
        return found


Found = TypeVar("Found", bound=Body)


# Reading, and the one place that words what pydantic finds.

WORDS = {
    "bool_type": "must be true or false",
    "dict_type": "must be an object",
    "list_type": "must be a list",
    "model_type": "must be an object with named fields",
    "string_type": "must be text",
    "too_long": "must have at most {max_length} items, got {actual_length}",
    "too_short": "must have at least {min_length} item",
}
"""What a value must be, by the error that pydantic has found."""


def read(kind: type[Found], given: dict[str, Any]) -> Found:
    """The request that an object holds.

    Raises:
      Refused: names the first field that is unknown, missing or wrong.
    """
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise _refused(error.errors(include_url=False)[0]) from None


def _refused(error: ErrorDetails) -> Refused:
    """A refusal that says the value, the rule and the remedy, and names the field."""
    where = [one for one in error["loc"] if one not in (TEXT, LIST, OBJECT)]
    path = "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in where)[1:]
    context = error.get("ctx", {})
    cause = context.get("error")
    if isinstance(cause, WrongName):
        of = f" of {path}" if path else ""
        return Refused(f"{cause.begin}{of}{cause.end}", f"{where[0] if where else cause.name:.80}")
    found = WORDS[error["type"]].format_map(context) if error["type"] in WORDS else error["msg"]
    return Refused(f"{path}={shown(error['input'])} {cause or found}", str(where[0]))
