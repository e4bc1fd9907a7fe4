"""What a request asks of the engine: rows of tokens and options, within the bounds of a server.

Every bound is checked before work begins: the number of rows, and the tokens of prompt and answer.
Nothing here knows HTTP or jax.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from longspec_jax.checks import shown
from longspec_jax.config.sampling import FILTERS, PENALTIES
from longspec_jax.config.tree import PLAIN, TreeConfig
from longspec_jax.generation.chat import check_no_open_thought, open_thought

from .fields import Prompt, Refused, read
from .gemma import turns_with_responses
from .harmony import turn_with_thinking
from .markup import READ, Markup, grammar_of
from .messages import Reading
from .protocol import (
    MOST_STOP_TOKENS,
    SEEDS,
    Chat,
    Completing,
    Completion,
    Detokenize,
    Message,
    Speculation,
    Tokenize,
)
from .tools import NONE, REQUIRED, named, objects_of

OPTIONS = {"temperature", *FILTERS, *PENALTIES, "logit_bias", "priority"}
"""Fields that the engine takes under the same name."""
Call = Completion | Chat
ChatEncoder = Callable[
    [list[dict[str, object]], list[dict[str, object]], Mapping[str, object]], list[int]
]
"""Token ids of messages; a template may also take tools and other variables."""
FIXED = {"messages", "tools", "documents", "add_generation_prompt"}
"""Variables of a template that other fields say."""
COMPILE_SECONDS = 10.0
"""In which the grammars of a request must have been compiled: each choice has its own."""
MOST_NUMBERS = 2**23
"""Numbers of an answer's log-probabilities and rounds, some 27 bytes of JSON each. With many
choices an answer may be ten thousand times as long as its request."""
OF_ROUNDS = 40
"""As many numbers take as many bytes as a token's share of the rounds that emitted it."""
END = 16
"""Tokens at the end of a prompt that may close the reasoning."""
Found = TypeVar("Found")


@dataclass(frozen=True)
class ServedModel:
    """What a request is checked against, and what makes tokens of its text."""

    names: tuple[str, ...]
    """The first is the model's name in answers."""
    max_len: int
    """Most tokens of a prompt and its answer."""
    vocab_size: int
    stop_tokens: tuple[int, ...]
    most_rows: int
    """Of a request: prompts times choices."""
    encode: Callable[[str, bool], list[int]]
    """Token ids of a text, with or without special tokens."""
    decode: Callable[[Sequence[int]], str]
    """Text of token ids, special tokens included."""
    encode_chat: ChatEncoder | None = None
    """None without a chat template."""
    markup: Markup = Markup()
    """What the model writes around reasoning and calls of tools."""
    stored_bytes: Callable[[int], bytes | None] = lambda token: None
    """The bytes of a token as the tokenizer stores it; None where that is not known."""
    special: frozenset[int] = frozenset()
    """Tokens that are no part of a text."""
    trees: tuple[TreeConfig, ...] = ()
    """What a request may name: the engine chooses among these for all others."""
    tree: str | None = None
    """The tallest of them; None for plain decoding."""
    drafter: str | None = None
    sources: tuple[str, ...] = ()
    """Names of those that propose, in the order of the bits of what answers hold."""
    shared: bool = False
    """Whether requests draft from each other's texts, so that rounds show only accepted tokens."""
    identical: bool = True
    """Whether texts are promised to be those of plain decoding, token for token."""
    grammar: Callable[..., Any] | None = None
    """Makes a grammar of ``json_schema=``, ``regex=`` or ``lark=``, whose ``state`` a row takes;
    None if requests can have none."""

    @property
    def about(self) -> dict[str, Any]:
        """What ``/v1/models`` and the page say of it."""
        return {
            "chat": self.encode_chat is not None,
            "tools": self.markup.calls is not None,
            "max_model_len": self.max_len,
            "tree": self.tree,
            "trees": [*map(str, self.trees)],
            "drafter": self.drafter,
            "identical": self.identical,
            "shared": self.shared,
        }


@dataclass(frozen=True)
class Row:
    """One choice: a prompt and its options for ``engine.submit``."""

    tokens: tuple[int, ...]
    options: dict[str, Any]
    traced: bool = False
    """Whether its answer shows the trees of its rounds."""
    reading: Reading = Reading()
    """How its answer is read."""


def read_call(given: dict[str, Any], model: ServedModel, *, chat: bool) -> Call:
    """A request for completions of a model that is served.

    Args:
      given: its fields.
      model: what it is checked against.
      chat: whether it has messages instead of prompts.

    Raises:
      Refused: names the field and the remedy.
    """
    call = read(Chat, given) if chat else read(Completion, given)
    _check_model(call.model, model)
    if isinstance(call, Chat):
        require_template(model)
        _check_markup(call, model.markup)
    rows = call.n * (1 if isinstance(call, Chat) else len(call.prompt))
    if rows > model.most_rows:
        raise Refused(
            f"the request has {rows} rows (prompts times n) and the server takes {model.most_rows} "
            "at once; send fewer in each request, or start the server with a larger "
            "--queue_requests",
            "n" if call.n > 1 else "prompt",
        )
    return call


def _check_model(name: str | None, model: ServedModel) -> None:
    """Refuse a model that is not served."""
    if name is not None and name not in model.names:
        raise Refused(
            f"the model {shown(name)} does not exist; this server has {model.names[0]}",
            "model",
            status=404,
            code="model_not_found",
        )


def _check_markup(call: Chat, markup: Markup) -> None:
    """Refuse tools and variables that the template does not know."""
    said = any(one.tool_calls or one.role == "tool" for one in call.messages)
    if markup.calls is None and (call.tools or said):
        raise Refused(
            "this model's chat template has calls of tools in no form that the server reads; it "
            f"reads {', '.join(READ)}; put what the model must know into "
            "its messages, or start the server with --chat_template=FILE",
            "tools" if call.tools else "messages",
        )
    for name in call.chat_template_kwargs:
        if name in FIXED or not markup.names(name):
            raise Refused(
                f"chat_template_kwargs has {shown(name)}, which the chat template does not name or "
                "another field says; leave it out",
                "chat_template_kwargs",
            )
    if call.reasoning_effort is not None and not markup.names("reasoning_effort"):
        raise Refused(
            f"reasoning_effort={shown(call.reasoning_effort)}: this model's chat template does not "
            "name it; say in the messages how to reason",
            "reasoning_effort",
        )


def require_template(model: ServedModel) -> ChatEncoder:
    """What makes tokens of messages.

    Raises:
      Refused: if the model has no template.
    """
    if model.encode_chat is None:
        raise Refused(
            "this model has no chat template; use /v1/completions, or start the server with "
            "--chat_template=FILE, a Jinja template",
            "messages",
        )
    return model.encode_chat


def options_of(call: Completing, model: ServedModel) -> dict[str, Any]:
    """The options of all rows of a call, under the engine's names.

    Raises:
      Refused: for tokens outside the vocabulary, for more stop tokens than a row takes, and for
        what the server cannot draft.
    """
    _check_vocabulary(call.stop_token_ids, model, "stop_token_ids")
    _check_vocabulary([*call.logit_bias], model, "logit_bias")
    found = call.model_dump(include=OPTIONS, exclude_unset=True)
    found["temperature"] = call.temperature
    if call.top_k == -1:
        found["top_k"] = 0
    if not call.temperature:
        # The likeliest token passes every filter.
        found = {name: value for name, value in found.items() if name not in FILTERS}
    if call.stop:
        found["stop_strings"] = [call.stop] if isinstance(call.stop, str) else call.stop
    if "stop_token_ids" in call.model_fields_set or call.ignore_eos:
        own = () if call.ignore_eos else model.stop_tokens
        stops = sorted({*own, *call.stop_token_ids})
        if len(stops) > MOST_STOP_TOKENS:
            raise Refused(
                f"the request has {len(stops)} stop tokens with the model's own, and a row takes "
                f"{MOST_STOP_TOKENS}; pass fewer, or their texts as stop",
                "stop_token_ids",
            )
        found["eos_token_id"] = stops
    return found | _speculation(call.longspec, model)


def _speculation(about: Speculation, model: ServedModel) -> dict[str, Any]:
    """The options of a row that say how it is drafted for."""
    try:
        named = None if about.tree is None else TreeConfig.parse(about.tree)
    except ValueError as error:
        raise Refused(f"longspec.tree={shown(about.tree)}: {error}", "longspec") from None
    if named not in (None, PLAIN, *model.trees):
        raise Refused(
            f"longspec.tree={shown(about.tree)} is not one of this server's trees, "
            f"{', '.join(map(str, model.trees)) or 'none'}; name one of these, leave it out, or "
            "start a server with --tree",
            "longspec",
        )
    if about.drafter not in (None, model.drafter):
        raise Refused(
            f"longspec.drafter={shown(about.drafter)} is not this server's, {model.drafter}; leave "
            "it out, or start a server with --draft",
            "longspec",
        )
    if model.drafter is None:
        return {}
    if named == PLAIN or not about.speculation:
        return {"speculate": False}
    return {} if named is None else {"tree": named}


def _grammar(
    call: Call, model: ServedModel, thinking: bool | None
) -> tuple[Callable[[], Any] | None, str]:
    """What makes the grammar of a call's text, None for any text; and the field that asks for it.

    Args:
      thinking: whether the prompt has begun the reasoning; None where the model itself may.
    """
    form, param = call.response_format.grammar, "response_format"
    if isinstance(call, Chat):
        param = "response_format" if form or not call.tools else "tools"
        form = _made(
            lambda: grammar_of(
                model.markup,
                call.response_format.grammar,
                call.tools,
                call.tool_choice,
                parallel=call.parallel_tool_calls,
                thinking=thinking,
            ),
            param,
        )
    if not form:
        return None, param
    if model.grammar is None:
        raise Refused(
            f"this server knows no grammars, which {param} needs; start it where llguidance is "
            "installed: pip install 'longspec_jax[grammar]'",
            param,
        )
    if call.ignore_eos:
        raise Refused("a text of a form ends with it; leave out ignore_eos", "ignore_eos")
    return partial(model.grammar, **form), param


def _compiled(grammar: Callable[[], Any], call: Call, model: ServedModel) -> Any:
    """The grammar; if it cannot be used, the error names the first tool that is to blame."""
    try:
        return grammar()
    except ValueError:
        make, late = model.grammar, time.monotonic() + COMPILE_SECONDS
        if make is None or not isinstance(call, Chat):
            raise
        for tool in call.tools:
            if time.monotonic() > late:
                break
            own = grammar_of(model.markup, {}, [tool], REQUIRED, parallel=False, thinking=False)
            try:
                make(lark=own["lark"])
            except ValueError as error:
                raise ValueError(f"the tool {tool.function.name}: {error}") from None
        raise


def _thinking(model: ServedModel, prompt: Sequence[int]) -> bool | None:
    """Whether a chat's prompt has begun the reasoning; None where the model itself may."""
    markup, end = model.markup, prompt[-END:]
    if open_thought(model.decode, end) is not None:
        return markup.thought is not None and markup.thought.open.token in end
    text, thought = model.decode([*end]).rstrip(), markup.thought
    closed = thought is not None and text.endswith(thought.close.text)
    return None if markup.may_think and not closed else False


def _encoded(
    model: ServedModel, messages: Sequence[Message], call: Chat | None = None
) -> Sequence[int]:
    """The tokens of messages, with what a call passes to the template."""
    encode, turns = require_template(model), [one.turn for one in messages]
    if model.markup.channels is not None:
        turns = [*map(turn_with_thinking, turns)]
    if model.markup.names("tool_responses"):
        turns = _made(lambda: turns_with_responses(turns), "messages")
    if call is None:
        return _made(lambda: encode(turns, [], {}), "messages")
    effort = {} if call.reasoning_effort is None else {"reasoning_effort": call.reasoning_effort}
    variables = {**call.chat_template_kwargs, **effort}
    return _made(lambda: encode(turns, objects_of(call.tools), variables), "messages")


def rows_of(call: Call, model: ServedModel, client: str = "") -> tuple[Row, ...]:
    """The rows of a call, in the order of its choices. Tokenises, which may take a while.

    Args:
      client: a word for the key that the client has, of several; prompts of others are not found.

    Raises:
      Refused: for a text that is no prompt, and for what exceeds the context.
    """
    common, rows, form, reading = options_of(call, model), [], None, Reading()
    thinking: bool | None = False
    if isinstance(call, Chat):
        param, prompts = "messages", [_encoded(model, call.messages, call)]
        thinking = _thinking(model, prompts[0])
        functions = named(call.tools) if call.tools and call.tool_choice != NONE else None
        reading = Reading(model.markup, functions, thinking is True)
    else:
        param = "prompt"
        prompts = [_tokens(prompt, call, model) for prompt in call.prompt]
    if call.alternatives is not None:
        common["logprobs"] = call.alternatives
        if call.echo:
            common["prompt_logprobs"] = call.alternatives
    if client or call.cache_salt:
        common["cache_salt"] = f"{client} {call.cache_salt or ''}"  # The word has no space.
    lengths = [_checked(tokens, call, model, param) for tokens in prompts]
    _check_numbers(call, sum(map(len, prompts)), sum(lengths))
    grammar, asked = _grammar(call, model, thinking)
    if grammar is not None:
        if call.chat and not thinking:
            _made(lambda: check_no_open_thought(model.decode, prompts[0]), asked)
        form = _made(lambda: _compiled(grammar, call, model), asked)
    late = time.monotonic() + COMPILE_SECONDS
    for tokens, new in zip(prompts, lengths, strict=True):
        for index in range(call.n):
            options = {**common, "max_new_tokens": new, "seed": (call.seed + index) % SEEDS}
            if form is not None:  # Compiled here, and not while others wait for the engine.
                if rows and time.monotonic() > late:
                    raise Refused(
                        f"the forms of {len(prompts) * call.n} choices take longer than "
                        f"{COMPILE_SECONDS:g} s to compile; ask for fewer, or for a simpler form",
                        asked,
                    )
                options["grammar"] = _made(form.state, asked)
            rows.append(Row(tuple(tokens), options, call.longspec.rounds, reading))
    return tuple(rows)


def _tokens(prompt: Prompt, call: Completion, model: ServedModel) -> Sequence[int]:
    if isinstance(prompt, tuple):
        return prompt
    return _made(lambda: model.encode(prompt, call.add_special_tokens), "prompt")


def _made(make: Callable[[], Found], param: str) -> Found:
    """What is made of a field; what cannot be made of it is refused."""
    try:
        return make()
    except ValueError as error:
        raise Refused(str(error), param) from None


def _check_vocabulary(tokens: Sequence[int], model: ServedModel, param: str) -> None:
    if max(tokens, default=0) >= model.vocab_size:
        outside = next(token for token in tokens if token >= model.vocab_size)
        raise Refused(
            f"token id {outside} is outside the model's vocabulary of {model.vocab_size}; tokenise "
            "with this model's tokenizer",
            param,
        )


def _check_numbers(call: Call, prompt: int, new: int) -> None:
    """Refuse an answer whose log-probabilities or rounds would take gigabytes.

    Args:
      prompt: tokens of all prompts.
      new: most tokens that one choice of each may emit. A stream does not keep what it has sent.
    """
    new = 0 if call.stream else new
    scored = new + (prompt if call.echo else 0)
    # A token's own number and its place come on top of the alternatives.
    of_scores = 0 if call.alternatives is None else scored * (2 + call.alternatives)
    numbers = call.n * (of_scores + new * OF_ROUNDS * call.longspec.rounds)
    if numbers > MOST_NUMBERS:
        raise Refused(
            f"the log-probabilities or rounds of {call.n * scored} tokens are {numbers} numbers, "
            f"and an answer may have {MOST_NUMBERS}; set a smaller max_tokens, send fewer prompts "
            "or choices in each request, or ask for fewer alternatives",
            "logprobs" if of_scores else "longspec",
        )


def _checked(tokens: Sequence[int], call: Call, model: ServedModel, param: str) -> int:
    """The most tokens that a row of a prompt may emit; a prompt that cannot run is refused."""
    if not tokens:
        raise Refused("the prompt is empty; pass at least one token", param)
    _check_vocabulary(tokens, model, param)
    return _new_tokens(call, len(tokens), model, param)


def _new_tokens(call: Call, prompt: int, model: ServedModel, param: str) -> int:
    """The most tokens that a row may emit. A call for none runs one, which is not shown."""
    left = model.max_len - prompt
    new = max(1, left if call.most_new is None else call.most_new)
    if new > left:
        # litellm recognises the first sentence.
        raise Refused(
            f"This model's maximum context length is {model.max_len} tokens. However, you "
            f"requested {prompt + new} tokens ({prompt} in the {param}, {new} in the completion). "
            f"Please reduce the length of the {param} or completion.",
            param,
            code="context_length_exceeded",
        )
    return new


def read_tokenize(given: dict[str, Any], model: ServedModel) -> tuple[list[int], bool]:
    """The tokens of a text or of messages, and whether their texts are wanted too."""
    asked = read(Tokenize, given)
    _check_model(asked.model, model)
    if asked.messages is not None:
        tokens = [*_encoded(model, asked.messages)]
    else:
        text = asked.prompt or ""
        tokens = _made(lambda: model.encode(text, asked.add_special_tokens), "prompt")
    return tokens, asked.return_token_strs


def read_detokenize(given: dict[str, Any], model: ServedModel) -> tuple[int, ...]:
    """The tokens whose text is wanted."""
    asked = read(Detokenize, given)
    _check_model(asked.model, model)
    _check_vocabulary(asked.tokens, model, "tokens")
    return asked.tokens
