"""Text of tokens as they arrive, in whole characters; together exactly the text of all tokens.

The text of a completion is the text of prompt and completion without the longest beginning that it
shares with the text of the prompt alone. A character that begins in the prompt and ends in the
completion therefore belongs to the completion.

Text is released once no later token can change it. Two kinds of text can still change:

* A byte-level token may end inside a UTF-8 sequence, which decodes to one U+FFFD until it is
  complete.
* A tokenizer with byte fallback (Llama-2, Vicuna, LongChat) decodes a run of ``<0xE2>`` tokens
  together: one wrong byte turns every byte of the run into U+FFFD. A run is held until it ends.

Decoding starts a few tokens back, never inside a run, so the time is linear in the tokens.
"""

import functools
import os
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

CONTEXT = 8
"""Tokens that are decoded before the first new one: SentencePiece drops a space at the start, and a
UTF-8 sequence may have begun up to three tokens back."""
REPLACEMENT = "\ufffd"
"""Text of an incomplete UTF-8 sequence."""
BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
"""A token of byte fallback."""


class Piece(NamedTuple):
    """A stretch of released text."""

    text: str
    drafted: bool
    """Whether the token that completed it was an accepted draft token."""


class Detokenizer:
    """The text of one row, token by token.

    The concatenation of everything :meth:`push` and :meth:`flush` return is :func:`continuation`.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = ()):
        """Start behind the given prompt, whose text is not returned.

        Args:
          tokenizer: a transformers tokenizer.
          prompt: the tokens before the first pushed one; the last few matter.
        """
        self._tokenizer = tokenizer
        # Needed for every token; the tokenizer computes each once.
        self._is_silent = functools.cache(functools.partial(_is_silent, tokenizer))
        self._is_byte = functools.cache(functools.partial(_is_byte, tokenizer))
        self._window = _tail(prompt, self._is_silent, self._is_byte)
        self._shown = self._text()

    def push(self, token: int) -> str:
        """Add a token; return the text it completes, empty while that may still change."""
        if self._is_silent(token):
            return ""
        self._window.append(int(token))
        if self._is_byte(token):
            return ""
        released = self._release(self._text().removesuffix(REPLACEMENT))
        if released and len(self._window) > 2 * CONTEXT:
            self._window = _tail(self._window, self._is_silent, self._is_byte)
            self._shown = self._text().removesuffix(REPLACEMENT)
        return released

    def flush(self) -> str:
        """Return the text that was held back; the row has ended."""
        return self._release(self._text())

    def pieces(
        self, tokens: Sequence[int], drafted: Sequence[bool], ended: bool
    ) -> tuple[Piece, ...]:
        """Add tokens; return the text that each completes, and what was held back at the end.

        Args:
          tokens: the next ones.
          drafted: whether each was an accepted draft token.
          ended: whether the row has ended.
        """
        pieces = [
            Piece(self.push(token), draft) for token, draft in zip(tokens, drafted, strict=True)
        ]
        if ended:
            pieces += [Piece(self.flush(), False)]
        return tuple(piece for piece in pieces if piece.text)

    def _text(self) -> str:
        return _decode(self._tokenizer, self._window)

    def _release(self, text: str) -> str:
        """The new part of the window's text."""
        if self._shown.startswith(text):
            return ""
        released, self._shown = _beyond(text, self._shown), text
        return released


def continuation(tokenizer: Any, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """The text of ``tokens`` that continue a prompt, as the module's first lines define it."""
    tests = functools.partial(_is_silent, tokenizer), functools.partial(_is_byte, tokenizer)
    context = _tail(prompt, *tests)
    return _beyond(_decode(tokenizer, [*context, *tokens]), _decode(tokenizer, context))


def _beyond(text: str, shown: str) -> str:
    """The rest of ``text`` behind the beginning that both share."""
    return text[len(os.path.commonprefix([text, shown])) :]


def _tail(
    tokens: Sequence[int], is_silent: Callable[[int], bool], is_byte: Callable[[int], bool]
) -> list[int]:
    """The last tokens that have a text, beginning with one that is not inside a run of bytes."""
    tail: list[int] = []
    for token in map(int, reversed(tokens)):
        if not is_silent(token):
            tail.append(token)
            if len(tail) >= CONTEXT and not is_byte(token):
                break
    return tail[::-1]


def _is_silent(tokenizer: Any, token: int) -> bool:
    """Whether a token never has a text: a special one, or an id that the tokenizer lacks.

    Decodes it twice in a row, because a single space may be dropped at the start.
    """
    return not _decode(tokenizer, [token, token])


def _is_byte(tokenizer: Any, token: int) -> bool:
    """Whether a token is one byte of byte fallback."""
    return BYTE.fullmatch(tokenizer.convert_ids_to_tokens(int(token)) or "") is not None


def _decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    return tokenizer.decode(
        list(map(int, tokens)), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
