"""The vocabulary in a GGUF file, and which of its tokens end a text.

Source: llama.cpp's ``src/llama-vocab.cpp`` and ggml's ``docs/gguf.md``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from longspec_jax.checks import shown
from longspec_jax.weights.gguf.file import GgufFile
from longspec_jax.weights.json_files import JsonObject

PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of tokens."""
ENDS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>"),
    *("<|endoftext|>", "<|end_of_text|>", "</s>", "<|eom_id|>", "<eos>", "<turn|>"),
    (_ANSWER := "<|tool_response>"),
)
"""Texts of control tokens that end a text or a turn; a file names only one of them by its id.

The last one is a token of the user: after Gemma 4's calls it asks for what the tools say.
"""
_ENDING = "eos_token_id", "eot_token_id", "eom_token_id"
_HARMONY = "<|return|>", "<|end|>"
"""Where the first is a token, the second ends a message of several, and not the text."""


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a file by their ids."""

    tokens: Sequence[str]
    types: Sequence[int]
    raw: JsonObject
    """All keys of the file."""

    def of_type(self, kind: int) -> list[str]:
        """Texts of all tokens of a type."""
        return [text for text, each in zip(self.tokens, self.types, strict=True) if each == kind]

    def named(self, name: str) -> str | None:
        """The token whose id is the key ``..._token_id``; None without such a key."""
        ids = self.raw.tokens(f"{PREFIX}{name}_token_id", len(self.tokens))
        return self.tokens[ids[0]] if ids else None


def vocabulary(file: GgufFile) -> Vocabulary | None:
    """The tokens of a file; None if it has none.

    Raises:
      ValueError: if they are damaged, or more than the model has embeddings.
    """
    raw = file.metadata
    tokens = raw.texts(f"{PREFIX}tokens")
    if not tokens:
        return None
    embeddings = file.tensors.get("token_embd.weight")
    if embeddings is not None and len(tokens) > embeddings.shape[0]:
        raise ValueError(
            f"{file.path}: {PREFIX}tokens has {len(tokens)} texts, and the model "
            f"{embeddings.shape[0]} embeddings; download the file again"
        )
    types = raw.values.get(f"{PREFIX}token_type", [NORMAL] * len(tokens))
    known = range(NORMAL, BYTE + 1)
    # Sets, because there are hundreds of thousands of tokens and few kinds.
    if not _is_list(types, len(tokens), {int}) or {*types} - {*known}:
        raise ValueError(
            f"{file.path}: {PREFIX}token_type must be a number from {NORMAL} to {BYTE} for each of "
            f"the {len(tokens)} tokens; download the file again"
        )
    return Vocabulary(tokens, types, raw)


def scores(vocab: Vocabulary) -> list[float]:
    """A number of every token: of two pieces that may be joined, those of the highest one are."""
    key = f"{PREFIX}scores"
    found = vocab.raw.values.get(key)
    if not _is_list(found, len(vocab.tokens), {int, float}):
        raise ValueError(
            f"{vocab.raw.origin}: {key} must be a number for each of the {len(vocab.tokens)} "
            f"tokens, got {shown(found)}; download the file again"
        )
    return found


def _is_list(found: object, length: int, types: set[type]) -> TypeGuard[list[Any]]:
    return isinstance(found, list) and len(found) == length and {*map(type, found)} <= types


def stop_tokens(file: GgufFile) -> tuple[int, ...]:
    """Ids of the tokens that end a text: those that keys name, and control tokens by their text."""
    vocab = vocabulary(file)
    if vocab is None:
        return ()
    named = [file.metadata.tokens(PREFIX + key, len(vocab.tokens)) for key in _ENDING]
    found = [token for tokens in named for token in tokens]
    control = {
        text: token
        for token, (text, kind) in enumerate(zip(vocab.tokens, vocab.types, strict=True))
        if kind == CONTROL or text == _ANSWER
    }
    if all(text in control for text in _HARMONY):
        del control[_HARMONY[1]]
    found += [control[text] for text in ENDS if text in control]
    return tuple(dict.fromkeys(found))
