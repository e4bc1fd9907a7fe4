"""Prompts: read from text, JSON and JSON lines, checked, and turned into tokens.

What can be refused without a model is refused before one is loaded, with the option, the file and
its line.

Three styles turn a conversation into tokens: the tokenizer's own chat template, Vicuna v1.1's, and
that of the published LongSpec drafts, which is neither (use it to reproduce their acceptance).
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from longspec_jax.checks import Each, Tokenizer, require_tokenizer, shown
from longspec_jax.config.sampling import NUMBERS, OPTIONS, TOKEN
from longspec_jax.files import expanded
from longspec_jax.generation.chat import VICUNA_TEMPLATE, plain_messages
from longspec_jax.schema import unknown
from longspec_jax.weights.json_files import unique_keys

ROLES = ("system", "user", "assistant")
SOURCES = ("prompt", "messages", "input_ids")
"""What a row of a batch file may be made of."""
ROW_OPTIONS = (*NUMBERS, "eos_token_id", "stop_strings")
"""What a row of a batch file may choose for itself."""
STDIN = "-"
MOST_BYTES = 2**28
"""Of a file of prompts: hundreds of times what any model reads, and a bound on ``/dev/zero``."""

RELEASE_SYSTEM = "You are a helpful assistant"
Messages = Sequence[Mapping[str, Any]]
Encode = Callable[[Tokenizer, Messages], list[int]]
Item: TypeAlias = str | Sequence[int] | Messages
"""A prompt: text, token ids or chat messages."""


@dataclass(frozen=True)
class Prompt:
    """Something to complete, and where it was written."""

    name: str
    """For reading: the option, the file, or the file and its line."""
    item: Item
    options: dict[str, Any] = field(default_factory=dict)
    """Generation options of its own."""


_STACK = '''class Stack:
    """A stack of numbers."""

    def __init__(self):
        self.items = []

    def push(self, item):
        """Put an item on top."""
        self.items.append(item)

    def pop(self):
        """Take the top item off."""
        return self.items.pop()

    def is_empty(self):
        """Whether nothing is left."""
        return len(self.items) == 0
'''
CODE = Prompt("code", _STACK)
CHATS = (
    Prompt("chat", [{"role": "user", "content": "What is a prime number? Give examples."}]),
    Prompt(
        "edit",
        [
            {
                "role": "user",
                "content": f"Add type annotations to this class.\n\n```python\n{_STACK}```",
            }
        ],
    ),
)
"""What a released model completes where no prompt is named: short, for processors."""


def check_text(text: str, where: str) -> str:
    """Text that is one: not empty, and encodable, which a lone surrogate is not."""
    if not text:
        raise ValueError(f"{where}: the prompt is empty; pass at least one character")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where} is not UTF-8 text: character {error.start + 1} is half of one "
            f"({text[error.start]!r}); convert it first"
        ) from None
    return text


def read_text(path: str | Path, option: str = "--prompt_file") -> str:
    """A text file as it is, or standard input for ``-``.

    Raises:
      ValueError: if it is too large or no UTF-8 text.
      OSError: if it cannot be read.
    """
    try:
        if str(path) == STDIN:
            data = sys.stdin.buffer.read(MOST_BYTES + 1)
        else:
            with expanded(path).open("rb") as file:
                data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise ValueError(
                f"{option}: {path} holds more than {MOST_BYTES / 1e6:.0f} MB, which no model "
                "reads; name a shorter file"
            )
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{option}: {path} is not UTF-8 text ({error}); convert it first"
        ) from error
    except OSError as error:
        reason = error.strerror or error
        raise type(error)(f"{option}: {path} cannot be read: {reason}") from error


def read_prompt_file(path: str) -> Prompt:
    """The text of a file as a prompt."""
    name = "standard input" if path == STDIN else Path(path).name
    return Prompt(name, check_text(read_text(path), f"--prompt_file: {path}"))


def check_messages(messages: object, where: str = "messages") -> list[dict[str, Any]]:
    """Refuse what is no conversation of the roles there are that ends with the user.

    Returns:
      The messages, each with its content as one text.
    """
    checked = plain_messages(messages, where, _as_json)
    for index, message in enumerate(checked):
        if message["role"] not in ROLES:
            raise ValueError(
                f"{where}: message {index} has role {shown(message['role'])}; roles are "
                f"{', '.join(ROLES)}"
            )
        # An empty turn is a turn.
        check_text(message["content"] or " ", f"{where}: message {index}")
    if checked[-1]["role"] != "user":
        raise ValueError(
            f"{where}: the last message must be the user's: the answer is what is generated"
        )
    return checked


def _as_json(value: object) -> str:
    """A value in a message: as its file has it, and short."""
    return json.dumps(value) if value is None or isinstance(value, bool) else shown(value)


def read_messages(source: str) -> Messages:
    """Chat messages from a JSON file, or from the argument itself if it is JSON."""
    inline = source.lstrip().startswith(("[", "{"))
    text = source if inline else read_text(source, "--messages")
    where = "--messages" if inline else f"--messages: {source}"
    messages = _parse(text, where)
    if isinstance(messages, dict):  # Chat files often hold an object with the list.
        messages = messages.get("messages", messages)
    return check_messages(messages, where)


def read_batch(path: str) -> list[Prompt]:
    """Prompts and their options from a JSONL file.

    A line is a JSON string, or an object with one of ``prompt``, ``messages`` and ``input_ids``,
    and any generation option for its row. Lines end only with a line feed: JSON strings may hold
    the other characters that Unicode ends lines with.
    """
    prompts = list(_rows(read_text(path, "--batch"), Path(path).name))
    if not prompts:
        raise ValueError(f"--batch: {path} holds no prompts; write one JSON object per line")
    return prompts


def _rows(text: str, name: str) -> Iterator[Prompt]:
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), start=1):
        if line.strip():
            where = f"{name}, line {number}"
            yield _row(_parse(line, where), where)


def _row(row: object, where: str) -> Prompt:
    if isinstance(row, str):
        return Prompt(where, check_text(row, where))
    if not isinstance(row, dict) or sum(source in row for source in SOURCES) != 1:
        raise ValueError(f"{where}: a row needs exactly one of {', '.join(SOURCES)}")
    source = next(source for source in SOURCES if source in row)
    options = {key: _option(key, row[key], where) for key in row if key != source}
    return Prompt(where, item_of(source, row[source], where), options)


def item_of(source: str, value: object, where: str) -> Item:
    """The prompt of a row: text, checked messages or token ids."""
    if source == "messages":
        return check_messages(value, where)
    if source == "prompt":
        if not isinstance(value, str):
            raise ValueError(f"{where}: prompt {_as_json(value)} must be text; a row is one prompt")
        return check_text(value, where)
    if isinstance(value, list) and any(isinstance(token, list) for token in value):
        raise ValueError(
            f"{where}: input_ids {shown(value)} holds lists; a row is one prompt, a list of ids"
        )
    return Each(TOKEN, 1).read_json(f"{where}: input_ids", value)


def _option(key: str, value: object, where: str) -> Any:
    """A generation option of a row."""
    if key not in ROW_OPTIONS:
        raise ValueError(f"{where}: {unknown('key', key, [*ROW_OPTIONS, *SOURCES])}")
    if value is None:
        remedy = " ([] never stops)" if key == "eos_token_id" else ""
        raise ValueError(f"{where}: {key} is null; leave it out to take the command's{remedy}")
    if key not in NUMBERS and not isinstance(value, list):
        value = [value]
    return OPTIONS[key].rule.read_json(f"{where}: {key}", value)


def _parse(text: str, where: str) -> Any:
    """The value of a JSON text, strictly: no constants JSON lacks, no key given twice."""
    try:
        return json.loads(
            text.removeprefix("\ufeff"), parse_constant=_no_constant, object_pairs_hook=unique_keys
        )
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply to be read") from None
    except ValueError as error:
        raise ValueError(f"{where} is not valid JSON: {error}") from error


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def encode_native(tokenizer: Tokenizer, messages: Messages) -> list[int]:
    """The tokenizer's own template; refuses a tokenizer that has none."""
    if not getattr(require_tokenizer(tokenizer), "chat_template", None):
        raise ValueError(
            "the target's tokenizer has no chat template; choose --prompt_style vicuna or "
            "longspec, or pass the whole prompt as text"
        )
    return _encode_chat(tokenizer, messages)


def _encode_chat(
    tokenizer: Tokenizer, messages: Messages, template: str | None = None
) -> list[int]:
    from longspec_jax.generation.inputs import encode_chat  # Late: it is slow to import.

    return encode_chat(tokenizer, messages, template)


def release_turns(tokenizer: Tokenizer, messages: Messages) -> list[str]:
    """The turns of :func:`encode_release` as text, the opening of the answer last."""
    vocabulary = require_tokenizer(tokenizer).get_vocab()
    opening, closing = ("<s>", "</s>")
    if "<|im_start|>" in vocabulary:
        opening, closing = ("<|im_start|>", "<|im_end|>")
    if messages[0]["role"] != "system":
        messages = [{"role": "system", "content": RELEASE_SYSTEM}, *messages]
    turns = [f"{opening}{turn['role']}\n{turn['content']}{closing}\n" for turn in messages]
    return [*turns, f"{opening}assistant\n"]


def encode_release(tokenizer: Tokenizer, messages: Messages) -> list[int]:
    """The LongSpec release's format: ChatML for Qwen, its own ``<s>role`` turns for all others.

    Every turn is tokenised by itself with special tokens on, as the release does: a Llama tokenizer
    then begins every turn with its beginning-of-text token.
    """
    turns = release_turns(tokenizer, messages)
    return [token for turn in turns for token in tokenizer(turn)["input_ids"]]


STYLES: dict[str, Encode] = {
    "native": encode_native,
    "vicuna": partial(_encode_chat, template=VICUNA_TEMPLATE),
    "longspec": encode_release,
}


def encode(
    tokenizer: Tokenizer | None,
    vocab_size: int,
    item: Item,
    style: str | None = None,
    max_positions: int | None = None,
) -> list[int]:
    """Token ids of one prompt.

    Args:
      tokenizer: a transformers tokenizer, or None if the item is token ids.
      vocab_size: width of the target's logits.
      item: text, chat messages or token ids.
      style: a name from ``STYLES``; text then is a user's message. Without one, text stays as it is
        and messages take the tokenizer's own template.
      max_positions: of the target; plain text that cannot fit is refused before it is tokenised.
    """
    from longspec_jax.generation.inputs import to_prompt

    if style is not None and isinstance(item, str):
        if not item:
            raise ValueError("the prompt is empty; pass at least one character")
        item = [{"role": "user", "content": item}]
    if isinstance(item, Sequence) and item and isinstance(item[0], Mapping):
        messages = check_messages(item)
        item = STYLES[style or "native"](require_tokenizer(tokenizer), messages)
    prompt = item if item else [[]]
    return to_prompt(prompt, tokenizer, vocab_size, max_positions=max_positions).tolist()
