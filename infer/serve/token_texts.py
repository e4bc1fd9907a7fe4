"""The texts and bytes of a server's tokens, and where each begins in a text.

A token may be a part of a character. Its text is then U+FFFD, which says nothing, and its bytes are
what a client needs: those of all tokens together are the text's.
"""

import functools
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import partial

TokenText = Callable[..., str]
"""The text of one token or of several in a row, special ones included."""
INCOMPLETE = "\ufffd"
"""Text of a part of a character."""
LONGEST_RUN = 4
"""Most tokens of a character: UTF-8 has four bytes."""
LONGEST_OPEN = 64
"""Tokens of a run that may go on inside a character: where tokens end one and begin the next."""
MOST_TEXTS = 2**16
"""Texts that are kept, some 10 MB. Runs of tokens have no end of different texts."""


class TokenTexts:
    """The texts of tokens, of which the latest are kept; called as a :data:`TokenText`."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stored: Callable[[int], bytes | None] = lambda token: None,
        special: Set[int] = frozenset(),
    ) -> None:
        """Bind the tokenizer.

        Args:
          decode: the text of token ids.
          stored: the bytes of a token as the tokenizer stores it; None where that is not known.
          special: tokens that are no part of a text.
        """
        self._text = functools.lru_cache(MOST_TEXTS)(partial(token_text, decode))
        self._stored, self.special = stored, special

    def __call__(self, *tokens: int) -> str:
        """The text of one token or of several in a row."""
        return self._text(*tokens)

    def bytes_of(self, token: int) -> list[int] | None:
        """What a token adds to the UTF-8 of a text; None where that is not known.

        Also None of a special token, which adds nothing.
        """
        if token in self.special:
            return None
        text = self._text(token)
        found = text.encode("utf-8", "replace") if INCOMPLETE not in text else self._stored(token)
        return None if found is None else [*found]


@dataclass
class Offsets:
    """Where each token of a text begins, in characters, as the tokens come."""

    characters: int = 0
    """Of the tokens before the open run."""
    run: tuple[int, ...] = ()
    """Tokens behind them, of which the last ends inside a character."""

    def add(self, token: int, text_of: TokenText) -> int:
        """Where the next token begins; of one inside a character that is where this begins."""
        run = (*self.run, token)
        text, own = text_of(*run), text_of(token)
        if INCOMPLETE not in own:
            at = self.characters + len(text) - len(own)
        else:
            at = self.here(text_of)
        if text.endswith(INCOMPLETE) and len(run) < LONGEST_OPEN:
            self.run = run
        else:
            self.characters, self.run = self.characters + len(text), ()
        return at

    def here(self, text_of: TokenText) -> int:
        """Where the text so far ends, or the character begins that it ends in."""
        return self.characters + len(text_of(*self.run).rstrip(INCOMPLETE) if self.run else "")


def token_text(decode: Callable[[Sequence[int]], str], *tokens: int) -> str:
    """The text of tokens inside a text, with its space: SentencePiece drops one at the start."""
    return decode([*tokens, *tokens])[len(decode(tokens)) :]


def completed_text(text_of: TokenText, tokens: Sequence[int]) -> str:
    """The text that the last token completes; empty where it ends inside a character."""
    runs = (text_of(*tokens[-count:]) for count in range(1, min(len(tokens), LONGEST_RUN) + 1))
    return next((text for text in runs if INCOMPLETE not in text), "")
