"""Text from tokens as they arrive, without ever showing half a character.

A byte-level token may end inside a UTF-8 sequence, and a SentencePiece token decodes differently at
the start of a text. Both are handled by decoding a short window and releasing text only once the
window's end is whole.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

CONTEXT = 8
"""Prompt tokens the window starts with, so that a continuation keeps its leading space."""
REPLACEMENT = "\ufffd"
"""What an incomplete UTF-8 sequence decodes to."""


class Piece(NamedTuple):
    """A stretch of released text."""

    text: str
    drafted: bool
    """Whether the token that completed it was an accepted draft token."""


class Detokenizer:
    """The text of one row, token by token.

    The concatenation of everything :meth:`push` and :meth:`flush` return is the text of all tokens.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = ()):
        """Start behind the given prompt, whose text is not returned.

        Args:
          tokenizer: a transformers tokenizer.
          prompt: the tokens before the first pushed one; the last few matter.
        """
        self._tokenizer = tokenizer
        self._tokens = [int(token) for token in prompt[-CONTEXT:]]
        self._start = 0
        self._shown = len(self._tokens)

    def push(self, token: int) -> str:
        """Add a token; return the text it completes, empty while a character is incomplete."""
        self._tokens.append(int(token))
        return self._release(hold=True)

    def flush(self) -> str:
        """Return what is still held back; the row has ended."""
        return self._release(hold=False)

    def _release(self, hold: bool) -> str:
        shown = self._decode(self._tokens[self._start : self._shown])
        whole = self._decode(self._tokens[self._start :])
        if len(whole) <= len(shown) or (hold and whole.endswith(REPLACEMENT)):
            return ""
        # The window moves up to the tokens just released, the context of the next ones.
        self._start, self._shown = self._shown, len(self._tokens)
        return whole[len(shown) :]

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


def continuation(tokenizer: Any, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """The text of ``tokens`` behind a prompt: what a :class:`Detokenizer` releases in all."""
    detokenizer = Detokenizer(tokenizer, prompt)
    return "".join(map(detokenizer.push, tokens)) + detokenizer.flush()
