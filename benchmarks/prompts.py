"""Real text as prompts: source code, a manual's prose, and chats about source code.

Code is that of the distributions which the recipes hold out from training, as far as they are
installed; tests are left out. Prose is Python's language reference, which comes with every Python
as the topics of its ``help`` and is too large a file for a training corpus. Documents follow one
another, in an order that is the same everywhere. Pieces of as many tokens as are asked for are
spread evenly over them. Where the documents are long enough, pieces of other lengths end at the
same places, so that what differs between two contexts is not the text; short documents overlap.
"""

import importlib.metadata
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from longspec_jax.recipes import HELD_OUT

from .arguments import CHAT, CODE, KINDS_OF_TEXT, PROSE

QUESTIONS = (
    "Explain what this code does, step by step.",
    "Rename the main names in this code to clearer ones, and write it out again.",
    "Write unit tests for this code.",
)
"""One after the other, each about the next piece."""
SHORTEST = 256
"""Characters of a document."""
LEAST_PIECE = 16
"""Tokens of what a question is about, however few a prompt has."""
APART = 32_768
"""Tokens between the ends of two pieces, if the documents have as many."""


class Reader(Protocol):
    """What has a tokenizer, such as a :class:`longspec_jax.LongSpec`."""

    @property
    def tokenizer(self) -> Any:
        """Called as transformers' tokenizers are."""


class Prompt(NamedTuple):
    """A piece of some documents, or a question about it."""

    document: str
    """The one in which it ends."""
    tokens: np.ndarray
    seed: int
    """Of its draws."""


def kinds_of(spec: Reader, named: Sequence[str], files: Sequence[Path]) -> list[str]:
    """The kinds that are named; else code where files are, and all that the model can read.

    Raises:
      ValueError: for chats with a model that has no chat template.
    """
    chats = getattr(spec.tokenizer, "chat_template", None) is not None
    if CHAT in named and not chats:
        raise ValueError("--text chat needs a target with a chat template; name code or prose")
    if named or files:
        return list(named or [CODE])
    return [kind for kind in KINDS_OF_TEXT if kind != CHAT or chats]


def prompts(
    spec: Reader, kind: str, context: int, count: int, files: Sequence[Path] = ()
) -> list[Prompt]:
    """Prompts of one kind of text, each of about the wanted number of tokens.

    Args:
      context: tokens of a prompt; of a chat, with the words around the piece.
      count: prompts.
      files: the documents, in place of those that are installed.

    Raises:
      ValueError: where all documents together are shorter than one prompt.
    """
    ask = [_chat(spec, question) for question in QUESTIONS] if kind == CHAT else []
    begin = [] if ask else spec.tokenizer("")["input_ids"]
    around = max(len(_encoded(spec, before + after)) for before, after in ask) if ask else 0
    size = max(LEAST_PIECE, context - around - len(begin))
    names, ends, stream = [], [], list[int]()
    for name, text in _documents(kind, files):
        stream += _encoded(spec, f"{text}\n\n")
        names.append(name)
        ends.append(len(stream))
        if len(stream) >= max(count * APART, size):
            break
    if len(stream) < size:
        raise ValueError(
            f"the {kind} has {len(stream)} tokens, a prompt {context}: give --files with more "
            "text, or a smaller --context"
        )
    total = min(len(stream), max(count * APART, size))
    least = 0 if size <= total // count else size
    found = []
    for number in range(count):
        end = least + (total - least) * (number + 1) // count
        piece = stream[end - size : end]
        name = names[int(np.searchsorted(ends, end))]
        if ask:
            before, after = ask[number % len(ask)]
            piece = _encoded(spec, before + spec.tokenizer.decode(piece) + after)
        found.append(Prompt(name, np.asarray([*begin, *piece], np.int32), number))
    return found


def _encoded(spec: Reader, text: str) -> list[int]:
    """The tokens of a text, without those that begin or end a prompt."""
    return spec.tokenizer(text, add_special_tokens=False)["input_ids"]


def _chat(spec: Reader, question: str) -> tuple[str, str]:
    """What stands before and after the code of a question in the model's chat form."""
    code = "\N{OBJECT REPLACEMENT CHARACTER}"
    messages = [{"role": "user", "content": f"{question}\n\n```python\n{code}\n```"}]
    text = spec.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    before, _, after = text.partition(code)
    return before, after


def _documents(kind: str, files: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """The names and texts of all documents, in their order."""
    if files:
        for file in files:
            yield file.name, file.read_text("utf-8", errors="replace")
    elif kind == PROSE:
        topics: dict[str, Any] = importlib.import_module("pydoc_data.topics").topics
        yield from ((f"help({name!r})", text) for name, text in _shuffled([*topics.items()]))
    else:
        yield from ((path.name, text) for path, text in _held_out())


def _held_out() -> Iterator[tuple[Path, str]]:
    """Source files that drafts of the recipes have not been trained on."""
    names, found = HELD_OUT, dict[str, Path]()
    for name in names:
        try:
            listed = importlib.metadata.distribution(name).files or ()
        except importlib.metadata.PackageNotFoundError:
            continue
        sources = (path for path in listed if path.suffix == ".py" and "tests" not in path.parts)
        found.update((str(path), Path(str(path.locate()))) for path in sources)
    if not found:
        raise ValueError(
            f"none of {', '.join(names)} is installed, whose source is held out from training; "
            "install one of them, or name text with --files"
        )
    for _, path in _shuffled(sorted(found.items())):
        text = path.read_text("utf-8", errors="replace") if path.is_file() else ""
        if len(text) >= SHORTEST:
            yield path, text


def _shuffled(items: list[Any]) -> list[Any]:
    """The same order everywhere, that of no alphabet."""
    random.Random(0).shuffle(items)
    return items
