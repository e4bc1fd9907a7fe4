"""The requests of OpenAI's protocol that the server takes, and how it refuses what is wrong.

The models say each field once: its type, its range, its default and, in the sentence below it, what
it means. Reading, refusals and the OpenAPI document follow from them. A field is supported, or
accepted at values without effect (:class:`Neutral`), or refused with a remedy. Ranges of sampling
are the library's own. Nothing here knows an engine, a tokenizer or HTTP's transport.
"""

import functools
import secrets
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainValidator,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue, models_json_schema
from pydantic_core import CoreSchema, ErrorDetails, core_schema

import longspec_jax
from longspec_jax.checks import LARGEST_WHOLE, OneOf, Rule, Text, Whole, nearest, shown
from longspec_jax.config.sampling import BIAS, MOST_ALTERNATIVES, OPTIONS, TOKEN

SEEDS = 2**32
MOST_CHOICES = 128
"""Of ``n``."""
MOST_STOPS, LONGEST_STOP = 16, 256
"""Stop strings of a request, and characters of each."""
MOST_STOP_TOKENS = 8
"""The model's own included."""
MOST_BIASES = 1024
MOST_MESSAGES, MOST_PARTS = 4096, 1024
"""Of a request, and of each message."""
LONGEST_PATTERN = 16_384
"""Characters of a regular expression."""

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


# What is read by a rule or a function, beside the rules of the library.


class Neutral(Rule):
    """A field that is not supported: only values at which it has no effect are accepted."""

    def __init__(self, *values: object, remedy: str = "leave the field out") -> None:
        """Bind the values beside null, which every optional field takes."""
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
        """The values; null alone where there are none."""
        return {"enum": list(self.values)} if self.values else {"type": "null"}


TEXT, LIST = "a text", "a list"
"""Tags of what may be either; no field's name has a space."""


def either(words: str) -> Discriminator:
    """What chooses between a text and a list by the value, so that only its fault is reported.

    Args:
      words: for what is neither.
    """

    def kind(value: object) -> str | None:
        return TEXT if isinstance(value, str) else LIST if isinstance(value, list) else None

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


# The models.


class WrongName(ValueError):
    """A field of an object that is unknown or missing; :func:`_refused` says of which object."""

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


class Part(Body):
    """A part of a message."""

    type: Annotated[str, OneOf(("text",), "; images and sound are not supported")]
    """Text."""
    text: str
    """The text of the part."""


Parts = Annotated[list[Part], Field(min_length=1, max_length=MOST_PARTS, fail_fast=True)]
_CONTENT = (
    'must be text, or a list of parts {"type": "text", "text": ...}; images and sound are not '
    "supported"
)
Content = Annotated[Annotated[str, Tag(TEXT)] | Annotated[Parts, Tag(LIST)], either(_CONTENT)]


class Joined:
    """The text of a message: its own, or that of its parts, of which none is kept."""

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        def text(content: str | list[Part]) -> str:
            return content if isinstance(content, str) else "".join(part.text for part in content)

        return core_schema.no_info_after_validator_function(text, handler.generate_schema(Content))


NO_TOOLS = "put what the model must know into its messages"
_ROLES = OneOf(
    ("system", "developer", "user", "assistant"), f"; tools are not supported; {NO_TOOLS}"
)


class Message(Body):
    """What one has said."""

    role: Annotated[str, _ROLES]
    """Who speaks; developer is another name of system."""
    content: Annotated[str, Joined()]
    """The text."""
    name: Annotated[str, Text(0, 256)] = ""
    """Given to the chat template, which may use it."""
    refusal: Annotated[None, Neutral(remedy="leave it out")] = None
    annotations: Annotated[None, Neutral([], remedy="leave it out")] = None
    audio: Annotated[None, Neutral(remedy="send text")] = None
    tool_calls: Annotated[None, Neutral([], remedy=NO_TOOLS)] = None
    function_call: Annotated[None, Neutral(remedy=NO_TOOLS)] = None

    @property
    def turn(self) -> dict[str, str]:
        """As a chat template takes it."""
        role = "system" if self.role == "developer" else self.role
        name = {"name": self.name} if "name" in self.model_fields_set else {}
        return {"role": role, "content": self.content, **name}


Messages = Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]


class Speculation(Body):
    """About speculation."""

    speculation: bool = True
    """false: decode without a draft; the text is the same."""
    rounds: bool = False
    """true: the answer says what every round drafted and accepted."""
    tree: Annotated[str, Text(0, 64)] | None = None
    """The tree to draft: one of those in /v1/models, or none."""
    drafter: Annotated[str, Text(0, 256)] | None = None
    """The draft; must be the server's own."""


class StreamOptions(Body):
    """Only with stream."""

    include_usage: bool = False
    """End with a chunk that has the usage and no choices."""
    continuous_usage_stats: bool = False
    """Every chunk has the usage so far."""
    include_obfuscation: Annotated[None, Neutral(False)] = None


class SchemaFormat(Body):
    """A JSON schema."""

    name: Annotated[str, Text(0, 64)] = ""
    """Has no effect."""
    description: str = ""
    """Has no effect; say it in the messages."""
    definition: Annotated[dict[str, object], Field(alias="schema")]
    """The JSON schema that the text satisfies."""
    strict: bool = True
    """Has no effect: the schema always binds."""


class Form(Body):
    """Tokens that would break the form are never drawn."""

    type: Annotated[str, OneOf(("text", "json_object", "json_schema", "regex"))]
    """What the text is."""
    json_schema: SchemaFormat | None = None
    """Of the type json_schema."""
    regex: Annotated[str, Text(1, LONGEST_PATTERN)] | None = None
    """What matches the whole text, of the type regex."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.type in ("json_schema", "regex") and getattr(self, self.type) is None:
            raise Refused(
                f"response_format of type {self.type} needs the field {self.type}",
                "response_format",
            )
        return self

    @property
    def grammar(self) -> dict[str, object]:
        """The form as :meth:`longspec_jax.LongSpec.grammar` takes it; empty for any text."""
        if self.type == "json_object":
            return {"json_schema": {"type": "object"}}
        if self.type == "json_schema" and self.json_schema is not None:
            return {"json_schema": self.json_schema.definition}
        return {"regex": self.regex} if self.type == "regex" else {}


Biases = Annotated[
    dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], Annotated[float, BIAS]],
    Field(max_length=MOST_BIASES),
]
Stop = Annotated[str, Text(1, LONGEST_STOP)]
Name = Annotated[str, Text(0, 512)]
NewTokens = Annotated[int, OPTIONS["max_new_tokens"]]
Alternatives = Annotated[int, Whole(0, MOST_ALTERNATIVES)]
Choices = Annotated[int, Whole(1, MOST_CHOICES)]


class Completing(Body):
    """The fields of both kinds of completions."""

    chat: ClassVar[bool]
    model: Name | None = None
    """As in /v1/models; the only one if absent."""
    stream: bool = False
    """Answer in server-sent events."""
    stream_options: StreamOptions = StreamOptions()
    """Only with stream."""
    temperature: Annotated[float, OPTIONS["temperature"]] = 1.0
    top_p: Annotated[float, OPTIONS["top_p"]] | None = None
    top_k: Annotated[int, Whole(-1, note=" (0 and -1 keep all tokens)")] = 0
    """0 keeps all tokens."""
    min_p: Annotated[float, OPTIONS["min_p"]] | None = None
    seed: Annotated[int, OPTIONS["seed"]] = Field(default_factory=lambda: secrets.randbelow(SEEDS))
    """Of the draws; a new one if absent."""
    n: Choices = 1
    """Choices of each prompt; choice i has seed + i."""
    stop: Annotated[
        Annotated[Stop, Tag(TEXT)]
        | Annotated[list[Stop], Field(max_length=MOST_STOPS, fail_fast=True), Tag(LIST)],
        either("must be text, or a list of texts, none empty"),
    ] = []
    """The text ends before the first of these."""
    stop_token_ids: Annotated[list[Token], Field(max_length=MOST_STOP_TOKENS, fail_fast=True)] = []
    """Tokens that end the text, as the model's own."""
    ignore_eos: bool = False
    """Go on past the model's own stop tokens."""
    logit_bias: Annotated[
        dict[int, float], PlainValidator(read_biases, json_schema_input_type=Biases)
    ] = {}
    """What is added to the logits of tokens, from -100 to 100 by token id."""
    presence_penalty: Annotated[float, OPTIONS["presence_penalty"]] | None = None
    frequency_penalty: Annotated[float, OPTIONS["frequency_penalty"]] | None = None
    repetition_penalty: Annotated[float, OPTIONS["repetition_penalty"]] | None = None
    priority: Annotated[int, Whole(-(2**31), 2**31 - 1)] = 0
    """Lower goes first."""
    longspec: Speculation = Speculation()
    """About speculation."""
    user: str = ""
    """Has no effect."""
    safety_identifier: str = ""
    """Has no effect."""
    prompt_cache_key: str = ""
    """Has no effect: prompts are met again by their tokens."""
    cache_salt: Annotated[str, Text(1, 256)] | None = None
    """Prompts of different ones are not reused for each other."""
    response_format: Form = Form(type="text")
    """Tokens that would break the form are never drawn."""
    min_tokens: Annotated[None, Neutral(0)] = None
    length_penalty: Annotated[None, Neutral(1.0)] = None
    use_beam_search: Annotated[None, Neutral(False)] = None
    skip_special_tokens: Annotated[None, Neutral(True)] = None
    spaces_between_special_tokens: Annotated[None, Neutral(True)] = None
    include_stop_str_in_output: Annotated[None, Neutral(False)] = None
    truncate_prompt_tokens: Annotated[
        None, Neutral(remedy="shorten the prompt before you send it")
    ] = None

    @model_validator(mode="after")
    def _check_streamed(self) -> Self:
        if "stream_options" in self.model_fields_set and not self.stream:
            raise Refused("stream_options needs stream=true; leave it out", "stream_options")
        return self


class Completion(Completing):
    """A request of ``/v1/completions``."""

    chat = False
    prompt: Annotated[
        tuple[Prompt, ...],
        PlainValidator(read_prompts, json_schema_input_type=str | Tokens | Texts | list[Tokens]),
    ]
    """What to continue."""
    max_tokens: Annotated[int, Whole(0, note=" (0 only with echo)")] | None = None
    """Most tokens to generate; what the context leaves if absent."""
    echo: bool = False
    """Begin the text with the prompt."""
    logprobs: Alternatives | None = None
    """Log-probabilities of the tokens, and of this number of alternatives."""
    add_special_tokens: bool = True
    """false: add no beginning-of-text token to a text."""
    best_of: Choices | None = None
    """Must be n: nothing is ranked."""
    suffix: Annotated[None, Neutral("", remedy="put everything into prompt")] = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise Refused(
                "max_tokens=0 generates nothing; pass at least 1, or echo=true for the prompt "
                "alone",
                "max_tokens",
            )
        if self.best_of not in (None, self.n):
            raise Refused(
                f"best_of={self.best_of} must be n={self.n}: nothing is ranked; leave it out",
                "best_of",
            )
        return self

    @property
    def most_new(self) -> int | None:
        """Most tokens to generate; None for what the context leaves."""
        return self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """Of each token in the answer; None for no log-probabilities."""
        return self.logprobs


class Chat(Completing):
    """A request of ``/v1/chat/completions``."""

    chat = True
    echo: ClassVar[bool] = False
    messages: Messages
    """The turns so far."""
    max_completion_tokens: NewTokens | None = None
    """Most tokens to generate; what the context leaves if absent."""
    max_tokens: NewTokens | None = None
    """An older name of max_completion_tokens."""
    logprobs: bool = False
    """Log-probabilities of the tokens."""
    top_logprobs: Alternatives = 0
    """Alternatives of each token; needs logprobs."""
    tools: Annotated[None, Neutral([], remedy=NO_TOOLS)] = None
    tool_choice: Annotated[None, Neutral("none", remedy=NO_TOOLS)] = None
    parallel_tool_calls: Annotated[None, Neutral(True, False, remedy=NO_TOOLS)] = None
    functions: Annotated[None, Neutral([], remedy=NO_TOOLS)] = None
    function_call: Annotated[None, Neutral("none", remedy=NO_TOOLS)] = None
    modalities: Annotated[None, Neutral(["text"], remedy="answers are text")] = None
    audio: Annotated[None, Neutral(remedy="answers are text")] = None
    prediction: Annotated[None, Neutral(remedy="the draft predicts on its own")] = None
    reasoning_effort: Annotated[None, Neutral(remedy="say in the messages how to reason")] = None
    verbosity: Annotated[None, Neutral(remedy="say in the messages how much to write")] = None
    web_search_options: Annotated[None, Neutral(remedy="the server has no access to the web")] = (
        None
    )
    store: Annotated[None, Neutral(False, remedy="nothing is stored")] = None
    metadata: Annotated[None, Neutral({}, remedy="nothing is stored")] = None
    service_tier: Annotated[None, Neutral("auto", "default", remedy="use priority")] = None
    chat_template: Annotated[None, Neutral(remedy="start the server with --chat_template=FILE")] = (
        None
    )
    chat_template_kwargs: Annotated[
        None, Neutral({}, remedy="start the server with --chat_template=FILE")
    ] = None
    add_generation_prompt: Annotated[None, Neutral(True)] = None
    continue_final_message: Annotated[None, Neutral(False, remedy="use /v1/completions")] = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise Refused("top_logprobs needs logprobs=true", "top_logprobs")
        if self.max_tokens is not None and self.max_completion_tokens not in (
            None,
            self.max_tokens,
        ):
            raise Refused(
                "max_tokens is an older name of max_completion_tokens, and both are given; drop it",
                "max_tokens",
            )
        return self

    @property
    def most_new(self) -> int | None:
        """Most tokens to generate; None for what the context leaves."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """Of each token in the answer; None for no log-probabilities."""
        return self.top_logprobs if self.logprobs else None


class Tokenize(Body):
    """A request of ``/tokenize``."""

    model: Name | None = None
    """As in /v1/models; the only one if absent."""
    prompt: str | None = None
    """The text; or messages."""
    messages: Messages | None = None
    """Of a chat, by the model's template."""
    add_special_tokens: bool = True
    """Of a text."""
    return_token_strs: bool = False
    """The tokens' texts too."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise Refused("pass either prompt or messages", "prompt")
        return self


class Detokenize(Body):
    """A request of ``/detokenize``."""

    model: Name | None = None
    """As in /v1/models; the only one if absent."""
    tokens: Annotated[tuple[int, ...], PlainValidator(read_tokens, json_schema_input_type=Tokens)]
    """Token ids."""


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
    where = [one for one in error["loc"] if one not in (TEXT, LIST)]
    path = "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in where)[1:]
    context = error.get("ctx", {})
    cause = context.get("error")
    if isinstance(cause, WrongName):
        of = f" of {path}" if path else ""
        return Refused(f"{cause.begin}{of}{cause.end}", f"{where[0] if where else cause.name:.80}")
    found = WORDS[error["type"]].format(**context) if error["type"] in WORDS else error["msg"]
    return Refused(f"{path}={shown(error['input'])} {cause or found}", str(where[0]))


# The OpenAPI document.

POSTS: dict[str, tuple[str, type[Body]]] = {
    "/v1/completions": ("Continue prompts", Completion),
    "/v1/chat/completions": ("Answer messages", Chat),
    "/tokenize": ("Token ids of a text or of messages", Tokenize),
    "/detokenize": ("The text of token ids", Detokenize),
}
GETS = {
    "/v1/models": ("The served model", "application/json"),
    "/health": ("Whether requests are taken", "application/json"),
    "/metrics": ("Counts, for Prometheus", "text/plain"),
    "/stats": ("Rows and tokens per second", "application/json"),
    "/openapi.json": ("This document", "application/json"),
    "/": ("A page to try the model and to watch it", "text/html"),
}
REFUSALS = {
    "400": "a field is wrong; the message names it",
    "401": "the API key is missing or wrong",
    "403": "of several keys this is not the operator's; or there is no key, and the header Host "
    "names another site",
    "404": "there is no such model",
    "408": "the body took too long to send",
    "413": "the body is too large",
    "415": "the body is not JSON, or it is compressed",
    "429": "the queue is full; Retry-After says when to try again",
    "500": "the server has a defect",
    "503": "the server is shutting down",
    "504": "the request took too long",
}


class ErrorObject(BaseModel):
    """What is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """A refusal."""

    error: ErrorObject


def describe(has_key: bool) -> dict[str, Any]:
    """The OpenAPI document of a server.

    Args:
      has_key: whether it wants an API key.
    """
    bodies, shared = models_json_schema(
        [*((kind, "validation") for _, kind in POSTS.values()), (Error, "validation")],
        ref_template="#/components/schemas/{model}",
    )
    paths: dict[str, Any] = {}
    for path, (summary, kind) in POSTS.items():
        answers = {"application/json": {"schema": {"type": "object"}}}
        if issubclass(kind, Completing):
            answers["text/event-stream"] = {"schema": {"type": "string"}}
        paths[path] = {
            "post": {
                "summary": summary,
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": bodies[kind, "validation"]}},
                },
                "responses": {
                    "200": {"description": summary, "content": answers},
                    **_refusals(REFUSALS.keys() - {"403"}),
                },
            }
        }
    for path, (summary, content) in GETS.items():
        ok = {"description": summary, "content": {content: {"schema": {}}}}
        responses = {"200": ok, **_refusals(["401", "403", "503"])}
        paths[path] = {"get": {"summary": summary, "responses": responses}}
    for path in ("/", "/health"):
        paths[path]["get"]["security"] = []
    paths["/health"]["get"]["responses"]["503"] = {
        "description": "the server is shutting down, or has failed",
        "content": {"application/json": {"schema": {"type": "object"}}},
    }
    keys = {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}} if has_key else {}
    return {
        "openapi": "3.1.0",
        "info": {"title": "longspec_jax", "version": longspec_jax.__version__},
        "paths": paths,
        "components": {"schemas": shared["$defs"], **keys},
        "security": [{"key": []}] if has_key else [],
    }


def _refusals(statuses: Iterable[str]) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {status: {"description": REFUSALS[status], "content": content} for status in statuses}
