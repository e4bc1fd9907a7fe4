"""Requests of OpenAI's protocol, read, checked and turned into rows for the engine.

Nothing here knows HTTP or jax. Every bound is checked before work begins: the number of rows, and
the tokens of prompt and answer.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from longspec_jax.checks import shown
from longspec_jax.config.tree import PLAIN, TreeConfig
from longspec_jax.generation.chat import check_no_open_thought

from .fields import CHAT, COMPLETIONS, DETOKENIZE, MOST_STOP_TOKENS, TOKENIZE
from .rules import Field, Refused, read_fields

SEEDS = 2**32
OPTIONS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "logit_bias",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "priority",
)
"""Fields that the engine takes under the same name."""
FILTERS = "top_p", "top_k", "min_p"
Prompt = str | tuple[int, ...]
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
    encode_chat: Callable[[list[dict[str, Any]]], list[int]] | None = None
    """Token ids of messages; None without a chat template."""
    stored_bytes: Callable[[int], bytes | None] = lambda token: None
    """The bytes of a token as the tokenizer stores it; None where that is not known."""
    special: frozenset[int] = frozenset()
    """Tokens that are no part of a text."""
    trees: tuple[TreeConfig, ...] = ()
    """What a request may name: the engine chooses among these for all others."""
    tree: str | None = None
    """The tallest of them; None for plain decoding."""
    drafter: str | None = None
    shared: bool = False
    """Whether requests draft from each other's texts, so that rounds show accepted tokens alone."""
    grammar: Callable[..., Any] | None = None
    """Makes a grammar of ``json_schema=`` or ``regex=``, whose ``state`` a row takes; None if
    requests can have none."""


@dataclass(frozen=True)
class Row:
    """One choice: a prompt and its options for ``engine.submit``."""

    tokens: tuple[int, ...]
    options: dict[str, Any]
    traced: bool = False
    """Whether its answer shows the trees of its rounds."""


@dataclass(frozen=True)
class Call:
    """A request for completions, checked as far as no tokenizer is needed."""

    chat: bool
    prompts: tuple[Prompt, ...] = ()
    messages: tuple[dict[str, Any], ...] = ()
    n: int = 1
    max_tokens: int | None = None
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    """Of all rows, under the engine's names."""
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False
    logprobs: int | None = None
    """Alternatives of each token in the answer; None for no log-probabilities."""
    rounds: bool = False
    special: bool = True
    cache_salt: str = ""
    """What keeps its prompts apart from others; empty for nothing."""
    form: dict[str, Any] | None = None
    """Of the text, as the model's ``grammar`` takes it; None for any text."""


def read_call(given: dict[str, Any], model: ServedModel, *, chat: bool) -> Call:
    """A request for completions.

    Args:
      given: its fields.
      model: what it is checked against.
      chat: whether it has messages instead of prompts.

    Raises:
      Refused: names the field and the remedy.
    """
    values = read_fields(given, CHAT if chat else COMPLETIONS)
    check_model(values, model)
    own = _chat_values(values, model) if chat else _completion_values(values)
    n = values.get("n", 1)
    rows = n * max(1, len(own.get("prompts", ())))
    if rows > model.most_rows:
        raise Refused(
            f"the request has {rows} rows (prompts times n) and the server takes {model.most_rows} "
            "at once; send fewer in each request, or start the server with a larger "
            "--queue_requests",
            "n" if n > 1 else "prompt",
        )
    stream = values.get("stream", False)
    if "stream_options" in values and not stream:
        raise Refused("stream_options needs stream=true; leave it out", "stream_options")
    streamed, about = values.get("stream_options", {}), values.get("longspec", {})
    seed = values.get("seed")
    return Call(
        chat=chat,
        n=n,
        seed=secrets.randbelow(SEEDS) if seed is None else seed,
        options=_options(values, about, model) | own.pop("options", {}),
        stream=stream,
        include_usage=streamed.get("include_usage", False),
        continuous_usage=streamed.get("continuous_usage_stats", False),
        rounds=about.get("rounds", False),
        cache_salt=values.get("cache_salt", ""),
        form=_form(values, model),
        **own,
    )


def check_model(values: Mapping[str, Any], model: ServedModel) -> None:
    """Refuse a model that is not served."""
    name = values.get("model", model.names[0])
    if name not in model.names:
        raise Refused(
            f"the model {shown(name)} does not exist; this server has {model.names[0]}",
            "model",
            status=404,
            code="model_not_found",
        )


def _chat_values(values: Mapping[str, Any], model: ServedModel) -> dict[str, Any]:
    require_template(model)
    if values.get("top_logprobs") and not values.get("logprobs"):
        raise Refused("top_logprobs needs logprobs=true", "top_logprobs")
    names = [name for name in ("max_completion_tokens", "max_tokens") if name in values]
    if len({values[name] for name in names}) > 1:
        raise Refused(
            "max_tokens is an older name of max_completion_tokens, and both are given; drop it",
            "max_tokens",
        )
    alternatives = values.get("top_logprobs", 0) if values.get("logprobs") else None
    return {
        "messages": tuple(map(_message, values["messages"])),
        "max_tokens": values[names[0]] if names else None,
        "logprobs": alternatives,
        "options": {} if alternatives is None else {"logprobs": alternatives},
    }


def require_template(model: ServedModel) -> Callable[[list[dict[str, Any]]], list[int]]:
    """What makes tokens of messages.

    Raises:
      Refused: if the server has no chat template.
    """
    if model.encode_chat is None:
        raise Refused(
            "this model has no chat template; use /v1/completions, or start the server with "
            "--chat_template=FILE, a Jinja template",
            "messages",
        )
    return model.encode_chat


def _message(given: dict[str, Any]) -> dict[str, Any]:
    content = given["content"]
    text = content if isinstance(content, str) else "".join(part["text"] for part in content)
    role = "system" if given["role"] == "developer" else given["role"]
    name = {"name": given["name"]} if "name" in given else {}
    return {"role": role, "content": text, **name}


def _completion_values(values: Mapping[str, Any]) -> dict[str, Any]:
    prompt = values["prompt"]
    prompts = tuple(prompt) if isinstance(prompt, list) else (prompt,)
    echo, alternatives = values.get("echo", False), values.get("logprobs")
    if values.get("max_tokens") == 0 and not echo:
        raise Refused(
            "max_tokens=0 generates nothing; pass at least 1, or echo=true for the prompt alone",
            "max_tokens",
        )
    if values.get("best_of", values.get("n", 1)) != values.get("n", 1):
        raise Refused(
            f"best_of={values['best_of']} must be n={values.get('n', 1)}: nothing is ranked; leave "
            "it out",
            "best_of",
        )
    options = {} if alternatives is None else {"logprobs": alternatives}
    if echo and alternatives is not None:
        options["prompt_logprobs"] = alternatives
    return {
        "prompts": prompts,
        "max_tokens": values.get("max_tokens"),
        "echo": echo,
        "logprobs": alternatives,
        "special": values.get("add_special_tokens", True),
        "options": options,
    }


def _options(
    values: Mapping[str, Any], about: Mapping[str, Any], model: ServedModel
) -> dict[str, Any]:
    """The options of all rows, under the engine's names."""
    found = {name: values[name] for name in OPTIONS if name in values}
    found.setdefault("temperature", 1.0)
    if found.get("top_k") == -1:
        found["top_k"] = 0
    if not found["temperature"]:
        # The likeliest token passes every filter.
        found = {name: value for name, value in found.items() if name not in FILTERS}
    if stop := values.get("stop"):
        found["stop_strings"] = [stop] if isinstance(stop, str) else stop
    own = () if values.get("ignore_eos") else model.stop_tokens
    if "stop_token_ids" in values or values.get("ignore_eos"):
        stops = sorted({*own, *values.get("stop_token_ids", ())})
        if len(stops) > MOST_STOP_TOKENS:
            raise Refused(
                f"the request has {len(stops)} stop tokens with the model's own, and a row takes "
                f"{MOST_STOP_TOKENS}; pass fewer, or their texts as stop",
                "stop_token_ids",
            )
        found["eos_token_id"] = stops
    return found | _speculation(about, model)


def _speculation(about: Mapping[str, Any], model: ServedModel) -> dict[str, Any]:
    tree, drafter = about.get("tree"), about.get("drafter", model.drafter)
    named = None if tree is None else _tree(tree)
    if named not in (None, PLAIN, *model.trees):
        raise Refused(
            f"longspec.tree={shown(tree)} is none of this server's trees, "
            f"{', '.join(map(str, model.trees)) or 'none'}; name one of these, leave it out, or "
            "start a server with --tree",
            "longspec",
        )
    if drafter != model.drafter:
        raise Refused(
            f"longspec.drafter={shown(drafter)} is not this server's, {model.drafter}; leave it "
            "out, or start a server with --draft",
            "longspec",
        )
    if model.drafter is None:
        return {}
    if named == PLAIN or about.get("speculation") is False:
        return {"speculate": False}
    return {} if named is None else {"tree": named}


def _tree(text: str) -> TreeConfig:
    try:
        return TreeConfig.parse(text)
    except ValueError as error:
        raise Refused(f"longspec.tree={shown(text)}: {error}", "longspec") from None


def _form(values: Mapping[str, Any], model: ServedModel) -> dict[str, Any] | None:
    given = values.get("response_format", {"type": "text"})
    kind, source = given["type"], given.get(given["type"])
    if kind == "text":
        return None
    if kind != "json_object" and source is None:
        raise Refused(f"response_format of type {kind} needs the field {kind}", "response_format")
    if model.grammar is None:
        raise Refused(
            "this server knows no grammars, which response_format needs; start it where "
            "llguidance is installed: pip install 'longspec_jax[grammar]'",
            "response_format",
        )
    if values.get("ignore_eos"):
        raise Refused("a text of a form ends with it; leave out ignore_eos", "ignore_eos")
    if kind == "regex":
        return {"regex": source}
    return {"json_schema": {"type": "object"} if source is None else source["schema"]}


def read_tokenize(given: dict[str, Any], model: ServedModel) -> tuple[list[int], bool]:
    """The tokens of a text or of messages, and whether their texts are wanted too."""
    values = read_fields(given, TOKENIZE)
    check_model(values, model)
    if ("prompt" in values) == ("messages" in values):
        raise Refused("pass either prompt or messages", "prompt")
    if "messages" in values:
        encode = require_template(model)
        tokens = _made(lambda: encode(list(map(_message, values["messages"]))), "messages")
    else:
        special = values.get("add_special_tokens", True)
        tokens = _made(lambda: model.encode(values["prompt"], special), "prompt")
    return tokens, values.get("return_token_strs", False)


def read_detokenize(given: dict[str, Any], model: ServedModel) -> tuple[int, ...]:
    """The tokens whose text is wanted."""
    values = read_fields(given, DETOKENIZE)
    check_model(values, model)
    _check_vocabulary(values["tokens"], model, "tokens")
    return values["tokens"]


def rows_of(call: Call, model: ServedModel, client: str = "") -> tuple[Row, ...]:
    """The rows of a call, in the order of its choices. Tokenises, which may take a while.

    Args:
      client: a word for the key that the client has, of several; prompts of others are not found.

    Raises:
      Refused: for a text that is no prompt, and for what exceeds the context.
    """
    param = "messages" if call.chat else "prompt"
    if call.chat:
        encode = require_template(model)
        prompts = [_made(lambda: encode(list(call.messages)), param)]
    else:
        prompts = [_tokens(prompt, call, model) for prompt in call.prompts]
    rows, common, form = [], dict(call.options), None
    if client or call.cache_salt:
        common["cache_salt"] = f"{client} {call.cache_salt}"  # The word has no space.
    if call.form is not None and (grammar := model.grammar) is not None:
        if call.chat:
            _made(lambda: check_no_open_thought(model.decode, prompts[0]), "response_format")
        form = _made(partial(grammar, **call.form), "response_format")
    for tokens in prompts:
        if not tokens:
            raise Refused("the prompt is empty; pass at least one token", param)
        _check_vocabulary(tokens, model, param)
        new = _new_tokens(call, len(tokens), model, param)
        for index in range(call.n):
            options = {**common, "max_new_tokens": new, "seed": (call.seed + index) % SEEDS}
            if form is not None:  # Compiled here, and not while others wait for the engine.
                options["grammar"] = _made(form.state, "response_format")
            rows.append(Row(tuple(tokens), options, call.rounds))
    return tuple(rows)


def _tokens(prompt: Prompt, call: Call, model: ServedModel) -> Sequence[int]:
    if isinstance(prompt, tuple):
        return prompt
    return _made(lambda: model.encode(prompt, call.special), "prompt")


def _made(make: Callable[[], Found], param: str) -> Found:
    """What is made of a field; what cannot be made of it is refused."""
    try:
        return make()
    except ValueError as error:
        raise Refused(str(error), param) from None


def _check_vocabulary(tokens: Sequence[int], model: ServedModel, param: str) -> None:
    if max(tokens) >= model.vocab_size:
        outside = next(token for token in tokens if token >= model.vocab_size)
        raise Refused(
            f"token id {outside} is outside the model's vocabulary of {model.vocab_size}; tokenise "
            "with this model's tokenizer",
            param,
        )


def _new_tokens(call: Call, prompt: int, model: ServedModel, param: str) -> int:
    """The most tokens that a row may emit. A call for none runs one, which is not shown."""
    left = model.max_len - prompt
    new = max(1, left if call.max_tokens is None else call.max_tokens)
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


def fields_of(path: str) -> Mapping[str, Field]:
    """The fields of the request of a path, for its description."""
    return {
        "/v1/completions": COMPLETIONS,
        "/v1/chat/completions": CHAT,
        "/tokenize": TOKENIZE,
        "/detokenize": DETOKENIZE,
    }[path]
