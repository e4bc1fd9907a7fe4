"""Prompts of the commands: chat styles, JSON and text files.

Three styles turn a conversation into tokens: the tokenizer's own chat template, Vicuna v1.1's, and
the one the published LongSpec drafts were trained and evaluated with, which is neither (it is the
one to use when reproducing their acceptance).
"""

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from longspec_jax.generation.chat import render_chat
from longspec_jax.generation.inputs import require_tokenizer, to_prompts
from longspec_jax.generation.options import GenerateOptions

VICUNA_TEMPLATE = (
    "{{ bos_token }}"
    "{% if messages[0]['role'] == 'system' %}"
    "{% set system = messages[0]['content'] %}{% set turns = messages[1:] %}"
    "{% else %}"
    "{% set system = 'A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user\\'s questions.' %}"
    "{% set turns = messages %}"
    "{% endif %}"
    "{{ system }}"
    "{% for turn in turns %}"
    "{% if turn['role'] == 'user' %}{{ ' ' if loop.first else '' }}{{ 'USER: ' + turn['content'] }}"
    "{% else %}{{ ' ASSISTANT: ' + turn['content'] + eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ ' ASSISTANT:' }}{% endif %}"
)
"""Vicuna v1.1, for tokenizers that come without a template; a Jinja string."""

RELEASE_SYSTEM = "You are a helpful assistant"
ROLES = ("system", "user", "assistant")
Messages = Sequence[Mapping[str, str]]
Encode = Callable[[Any, Messages], list[int]]


def encode_native(tokenizer: Any, messages: Messages) -> list[int]:
    """The tokenizer's own template; refuses a tokenizer that has none."""
    if not getattr(require_tokenizer(tokenizer), "chat_template", None):
        raise ValueError(
            "the target's tokenizer has no chat template; choose --prompt_style vicuna or longspec, "
            "or pass the whole prompt as text"
        )
    return _apply(tokenizer, messages, None)


def encode_vicuna(tokenizer: Any, messages: Messages) -> list[int]:
    """Vicuna v1.1's format."""
    return _apply(require_tokenizer(tokenizer), messages, VICUNA_TEMPLATE)


def encode_release(tokenizer: Any, messages: Messages) -> list[int]:
    """The LongSpec release's format: ChatML for Qwen, its own ``<s>role`` turns for all others.

    Every turn is tokenised by itself with special tokens on, as the release does: a Llama tokenizer
    then begins every turn with its beginning-of-text token.
    """
    vocabulary = require_tokenizer(tokenizer).get_vocab()
    opening, closing = ("<s>", "</s>")
    if "<|im_start|>" in vocabulary:
        opening, closing = ("<|im_start|>", "<|im_end|>")
    if messages[0]["role"] != "system":
        messages = [{"role": "system", "content": RELEASE_SYSTEM}, *messages]
    turns = [f"{opening}{turn['role']}\n{turn['content']}{closing}\n" for turn in messages]
    turns.append(f"{opening}assistant\n")
    return [token for turn in turns for token in tokenizer(turn)["input_ids"]]


STYLES: dict[str, Encode] = {
    "native": encode_native,
    "vicuna": encode_vicuna,
    "longspec": encode_release,
}


def encode(tokenizer: Any, vocab_size: int, item: Any, style: str | None = None) -> list[int]:
    """Token ids of one prompt.

    Args:
      tokenizer: a transformers tokenizer, or None if the item is token ids.
      vocab_size: width of the target's logits.
      item: text, chat messages or token ids.
      style: a name from ``STYLES``; text then is a user's message. Without one, text stays as it is
        and messages take the tokenizer's own template.
    """
    if style is not None and isinstance(item, str):
        if not item:
            raise ValueError("the prompt is empty; pass at least one character")
        item = [{"role": "user", "content": item}]
    if isinstance(item, Sequence) and item and isinstance(item[0], Mapping):
        check_messages(item)
        item = STYLES[style or "native"](tokenizer, item)
    return to_prompts(item if item else [[]], tokenizer, vocab_size)[0].tolist()


def check_messages(messages: Any) -> None:
    """Refuse what is not a list of ``{"role": ..., "content": ...}`` that ends with the user."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(
            f"messages must be a list of objects with role and content, got {messages!r:.80}"
        )
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise ValueError(f"message {index} must have role and content, got {message!r:.80}")
        if message["role"] not in ROLES:
            raise ValueError(
                f"message {index} has role {message['role']!r}; roles are {', '.join(ROLES)}"
            )
    if messages[-1]["role"] != "user":
        raise ValueError("the last message must be the user's: the answer is what is generated")


def read_text(path: str | Path) -> str:
    """A prompt file, as it is."""
    try:
        return Path(path).expanduser().read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}); convert it first") from error


def read_messages(source: str) -> Any:
    """Chat messages from a JSON file, or from the argument itself if it is JSON."""
    inline = source.lstrip().startswith(("[", "{"))
    text, where = (source, "--messages") if inline else (read_text(source), source)
    messages = _parse(text, where)
    messages = messages.get("messages") if isinstance(messages, dict) else messages
    check_messages(messages)
    return messages


def read_batch(path: str) -> tuple[list[Any], list[dict[str, Any]]]:
    """Prompts and per-row options of a JSONL file.

    A line is a JSON string, or an object with one of ``prompt``, ``messages`` and ``input_ids``, and
    any generation option for its row.
    """
    prompts, options = [], []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if line.strip():
            prompt, row = _batch_row(_parse(line, f"{path}, line {number}"), f"{path}:{number}")
            prompts.append(prompt)
            options.append(row)
    if not prompts:
        raise ValueError(f"{path} holds no prompts; write one JSON object a line")
    return prompts, options


_SOURCES = ("prompt", "messages", "input_ids")


def _batch_row(row: Any, where: str) -> tuple[Any, dict[str, Any]]:
    if isinstance(row, str):
        return row, {}
    if not isinstance(row, dict) or sum(source in row for source in _SOURCES) != 1:
        raise ValueError(f"{where}: a row needs exactly one of {', '.join(_SOURCES)}")
    # Whether to sample is a row's temperature.
    known = [name for name in GenerateOptions.__annotations__ if name != "do_sample"]
    source = next(source for source in _SOURCES if source in row)
    options = {key: value for key, value in row.items() if key != source}
    for key in options:
        if key not in known:
            close = difflib.get_close_matches(key, [*known, *_SOURCES], 1)
            hint = f"did you mean {close[0]!r}?" if close else f"options are {', '.join(known)}"
            raise ValueError(f"{where}: unknown key {key!r}; {hint}")
    if source == "messages":
        check_messages(row[source])
    return row[source], options


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not valid JSON: {error}") from error


def _apply(tokenizer: Any, messages: Messages, template: str | None) -> list[int]:
    return render_chat(tokenizer, messages, template)
