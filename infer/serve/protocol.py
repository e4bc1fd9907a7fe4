"""The requests of OpenAI's protocol that the server takes.

The models say each field once: its type, its range, its default and, in the sentence below it, what
it means. Reading, refusals and the OpenAPI document follow from them. A field is supported, or
accepted at values without effect (:class:`~infer.serve.fields.Neutral`), or refused with a remedy.
"""

import secrets
from typing import Annotated, ClassVar, Self

from pydantic import Field, GetCoreSchemaHandler, PlainValidator, Tag, model_validator
from pydantic_core import CoreSchema, core_schema

from longspec_jax.checks import OneOf, Text, Whole
from longspec_jax.config.sampling import BIAS, MOST_ALTERNATIVES, OPTIONS

from .fields import (
    LIST,
    MOST_BIASES,
    TEXT,
    Body,
    Neutral,
    Prompt,
    Refused,
    Texts,
    Token,
    Tokens,
    either,
    read_biases,
    read_prompts,
    read_tokens,
)
from .tools import AUTO, ToolCalls, ToolChoice, Tools, check_choice, turn_of

SEEDS = 2**32
MOST_CHOICES = 128
"""Of ``n``."""
MOST_STOPS, LONGEST_STOP = 16, 256
"""Stop strings of a request, and characters of each."""
MOST_STOP_TOKENS = 8
"""The model's own included."""
MOST_MESSAGES, MOST_PARTS = 4096, 1024
"""Of a request, and of each message."""
MOST_VARIABLES = 32
"""Of a chat template."""
LONGEST_PATTERN = 16_384
"""Characters of a regular expression."""


class Part(Body):
    """A part of a message."""

    type: Annotated[str, OneOf(("text",))]
    """Text."""
    text: str
    """The text of the part."""

    @model_validator(mode="before")
    @classmethod
    def _check_type(cls, given: object) -> object:
        """Refuse an image for what it is, and not for fields that a text has not."""
        if isinstance(given, dict) and given.get("type", "text") != "text":
            raise ValueError('must have the type "text"; images and sound are not supported')
        return given


Parts = Annotated[list[Part], Field(min_length=1, max_length=MOST_PARTS, fail_fast=True)]
_CONTENT = (
    'must be text, or a list of parts {"type": "text", "text": ...}; images and sound are not '
    "supported"
)
Content = Annotated[Annotated[str, Tag(TEXT)] | Annotated[Parts, Tag(LIST)], either(_CONTENT)]


class Joined:
    """The text of a message: its own, or its parts joined, which are not kept."""

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        def text(content: str | list[Part]) -> str:
            return content if isinstance(content, str) else "".join(part.text for part in content)

        return core_schema.no_info_after_validator_function(text, handler.generate_schema(Content))


NO_FUNCTIONS = "use tools, which replaced it"
_ROLES = OneOf(("system", "developer", "user", "assistant", "tool"))


class Message(Body):
    """A message of a conversation."""

    role: Annotated[str, _ROLES]
    """Who speaks; developer is another name of system."""
    content: Annotated[str, Joined()]
    """The text; an assistant that calls tools may leave it out."""
    name: Annotated[str, Text(0, 256)] = ""
    """Given to the chat template, which may use it."""
    refusal: Annotated[None, Neutral(remedy="leave it out")] = None
    annotations: Annotated[None, Neutral([], remedy="leave it out")] = None
    audio: Annotated[None, Neutral(remedy="send text")] = None
    tool_calls: ToolCalls = []
    """The tools that an assistant has called."""
    tool_call_id: Annotated[str, Text(0, 256)] = ""
    """The call that a tool answers; given to the chat template."""
    reasoning: str = ""
    """What an assistant has thought; given to the chat template."""
    reasoning_content: str = ""
    """Another name of reasoning."""
    function_call: Annotated[None, Neutral(remedy=NO_FUNCTIONS)] = None

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, given: object) -> object:
        """An assistant's text is empty where it has called or thought, as the server's answers."""
        if not isinstance(given, dict) or given.get("content") not in (None, []):
            return given
        others = "tool_calls", "reasoning", "reasoning_content"
        return {**given, "content": ""} if any(map(given.get, others)) else given

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("has tool_calls, which only an assistant's message may have")
        return self

    @property
    def turn(self) -> dict[str, object]:
        """The message as a chat template takes it."""
        role = "system" if self.role == "developer" else self.role
        found: dict[str, object] = {"role": role, "content": self.content}
        found |= self.model_dump(include={"name", "tool_call_id"}, exclude_unset=True)
        if thought := self.reasoning or self.reasoning_content:
            found |= {"reasoning": thought, "reasoning_content": thought}
        if self.tool_calls:
            found["tool_calls"] = [*map(turn_of, self.tool_calls)]
        return found


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


Scalar = bool | int | float | str
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
                "max_tokens=0 generates nothing; pass at least 1, or echo=true for only the prompt",
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
        """Alternatives of each token in the answer; None for no log-probabilities."""
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
    tools: Tools = []
    """What the model may call."""
    tool_choice: ToolChoice = AUTO
    """none, auto, required, or the one that it must call."""
    parallel_tool_calls: bool = True
    """false: at most one call in an answer."""
    chat_template_kwargs: Annotated[dict[str, Scalar], Field(max_length=MOST_VARIABLES)] = {}
    """Variables of the chat template, such as enable_thinking."""
    reasoning_effort: Annotated[str, Text(1, 64)] | None = None
    """A variable of the chat template, if it has it."""
    functions: Annotated[None, Neutral([], remedy=NO_FUNCTIONS)] = None
    function_call: Annotated[None, Neutral("none", remedy=NO_FUNCTIONS)] = None
    modalities: Annotated[None, Neutral(["text"], remedy="answers are text")] = None
    audio: Annotated[None, Neutral(remedy="answers are text")] = None
    prediction: Annotated[None, Neutral(remedy="the draft predicts on its own")] = None
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
    add_generation_prompt: Annotated[None, Neutral(True)] = None
    continue_final_message: Annotated[None, Neutral(False, remedy="use /v1/completions")] = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_choice(self.tools, self.tool_choice)
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
        """Alternatives of each token in the answer; None for no log-probabilities."""
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
