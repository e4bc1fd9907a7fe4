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

:class:`TextEngine` is an engine whose requests are read so.
"""

import functools
import os
import re
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from longspec_jax.checks import Tokenizer
from longspec_jax.decoding.constrained import reason_of
from longspec_jax.decoding.engine import Engine
from longspec_jax.decoding.sampling import NO_TOKEN
from longspec_jax.decoding.slots import StepOutput, until
from longspec_jax.generation.stops import StopStrings

CONTEXT = 8
"""Tokens that are decoded before the first new one: SentencePiece drops a space at the start, and a
UTF-8 sequence may have begun up to three tokens back."""
REPLACEMENT = "\ufffd"
"""Text of an incomplete UTF-8 sequence."""
BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
"""A token of byte fallback."""
LOOP_TOKENS, LOOP_TIMES = 16, 3
"""A text loops if a sequence of this many tokens occurs in it more often. Greedy texts of small
targets end so; a draft would learn little else, and lookup is flattered by them."""
LONGEST_RUN = 64
"""Tokens of a run of bytes that is searched for stop strings before it ends."""


class Piece(NamedTuple):
    """What a token adds to the text that is released."""

    text: str
    """Empty of a special token, and of one that completes no character."""
    drafted: bool
    """Whether the token that completed it was an accepted draft token."""
    token: int = NO_TOKEN
    """The token that completed it; ``NO_TOKEN`` where the end of the row did."""


class Detokenizer:
    """The text of one row, token by token.

    The concatenation of everything :meth:`push` and :meth:`flush` return is :func:`continuation`.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()):
        """Start after the given prompt, whose text is not returned.

        Args:
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

    @property
    def run(self) -> str:
        """The text of an open run of byte tokens, as it is if the row ends here.

        Empty where no run is open, and in one of more than :data:`LONGEST_RUN` tokens, whose text
        would take time at every token.
        """
        if not self._window or not self._is_byte(self._window[-1]):
            return ""
        if len(self._window) > CONTEXT + LONGEST_RUN:
            return ""
        text = self._text()
        return "" if self._shown.startswith(text) else _beyond(text, self._shown)

    def _text(self) -> str:
        return _decode(self._tokenizer, self._window)

    def _release(self, text: str) -> str:
        """The new part of the window's text."""
        if self._shown.startswith(text):
            return ""
        released, self._shown = _beyond(text, self._shown), text
        return released


class Added(NamedTuple):
    """What some tokens have added to a row."""

    kept: int
    """How many of them belong to it: up to the one that completed a stop string."""
    pieces: tuple[Piece, ...]
    """Text that can no longer change, nor be the beginning of a stop string."""


class RowText:
    """The text of one row, token by token, up to its first stop string.

    Text is held back while it may be the beginning of a stop string. Without one, all pieces
    together are :func:`continuation`.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int] = (), stop_strings: Sequence[str] = ()
    ):
        """Start after a prompt, whose own text is not searched.

        Args:
          prompt: the tokens before the first added one; the last few matter.
          stop_strings: what ends the row. One that is the name of a special token, which has no
            text, is met with that token.
        """
        self._detokenizer = Detokenizer(tokenizer, prompt)
        self._search = StopStrings(stop_strings) if stop_strings else None
        self._state = 0
        self._held: deque[Piece] = deque()
        self._held_length = 0
        named = tokenizer.get_added_vocab() if stop_strings else {}
        self._special = {named[string] for string in stop_strings if string in named}
        self.stopped = False
        """Whether a stop string has ended the row; nothing may be added any more."""

    def add(self, tokens: Sequence[int], drafted: Sequence[bool], ended: bool) -> Added:
        """Add tokens; return what belongs to the row.

        Args:
          ended: whether the row ends with them.
        """
        pieces: list[Piece] = []
        kept = 0
        for token, draft in zip(tokens, drafted, strict=True):
            kept += 1
            pieces += self._read(Piece(self._detokenizer.push(token), draft, int(token)))
            if self._search is not None and not self.stopped:
                pieces += self._look(self._search, token, draft)
            if self.stopped:
                return Added(kept, tuple(pieces))
        if ended:
            pieces += self._flush(False)
            pieces += self._release(0)
        return Added(kept, tuple(pieces))

    def take(self, output: StepOutput) -> tuple[StepOutput, tuple[Piece, ...]]:
        """Add a step output; return what belongs to the row, and its text."""
        said = output.tokens[: -1 if output.tokens[-1:] == (NO_TOKEN,) else None]
        drafted = output.drafted[: len(said)]
        kept, pieces = self.add(said, drafted, output.finish is not None)
        return until(output, kept) if self.stopped else output, pieces

    def _look(self, search: StopStrings, token: int, draft: bool) -> list[Piece]:
        """End the row with a special token, or inside a run of bytes, if that is a stop string."""
        run = self._detokenizer.run
        _, match = search.read(self._state, run)
        if match is None and token not in self._special:
            return []
        pieces = self._flush(draft)
        if not self.stopped:
            pieces += self._release(0)
        self.stopped = True
        return pieces

    def _flush(self, draft: bool) -> list[Piece]:
        """The text of tokens that the detokenizer has held back."""
        text = self._detokenizer.flush()
        return self._read(Piece(text, draft)) if text else []

    def _read(self, piece: Piece) -> list[Piece]:
        """Search new text, and release what no stop string can begin with."""
        if self._search is None:
            return [piece]
        self._state, match = self._search.read(self._state, piece.text)
        held = self._search.held(self._state)
        if match is not None:
            piece, held = piece._replace(text=piece.text[: match.end]), match.length
            self.stopped = True
        self._held += [piece]
        self._held_length += len(piece.text)
        return self._release(held)

    def _release(self, held: int) -> list[Piece]:
        """All held text but its last characters."""
        count, released = self._held_length - held, list[Piece]()
        self._held_length = held
        while self._held and (count > 0 or not self._held[0].text):
            if len(self._held[0].text) > count and not self.stopped:
                # A token's text stays whole: it may be a mark for who reads it.
                self._held_length += count
                break
            piece = self._held.popleft()
            released += [piece._replace(text=piece.text[:count])]
            if len(piece.text) > count:
                self._held.appendleft(piece._replace(text=piece.text[count:]))
            count -= len(piece.text)
        return released


def continuation(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """The text of ``tokens`` that continue a prompt, as the module's first lines define it."""
    tests = functools.partial(_is_silent, tokenizer), functools.partial(_is_byte, tokenizer)
    context = _tail(prompt, *tests)
    return _beyond(_decode(tokenizer, [*context, *tokens]), _decode(tokenizer, context))


def stored_bytes(tokenizer: Tokenizer | None) -> Callable[[int], bytes | None]:
    """What tells the bytes of a token, as the tokenizer stores it; None where that is not known.

    Known are tokens of byte fallback, and those of byte-level tokenizers: their alphabet has a
    character for every byte (GPT-2's; Radford et al., 2019).
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state = b"" if backend is None or backend.decoder is None else backend.decoder.__getstate__()
    byte_of = _byte_alphabet() if b'"ByteLevel"' in state else {}

    def stored(token: int) -> bytes | None:
        name = "" if tokenizer is None else tokenizer.convert_ids_to_tokens(int(token)) or ""
        if BYTE.fullmatch(name):
            return bytes([int(name[3:5], 16)])
        known = bool(name) and all(character in byte_of for character in name)
        return bytes(byte_of[character] for character in name) if known else None

    return stored


def _byte_alphabet() -> dict[str, int]:
    """The byte that each character stands for: itself where it can be seen, else one from 256."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unseen = [byte for byte in range(256) if byte not in seen]
    return dict(zip(map(chr, [*seen, *range(256, 256 + len(unseen))]), seen + unseen, strict=True))


def _beyond(text: str, shown: str) -> str:
    """The rest of ``text`` after the beginning that both share."""
    if text.startswith(shown):
        return text[len(shown) :]
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


def _is_silent(tokenizer: Tokenizer, token: int) -> bool:
    """Whether a token never has a text: a special one, or an id that the tokenizer lacks.

    Decodes it twice in a row, because a single space may be dropped at the start.
    """
    return not _decode(tokenizer, [token, token])


def _is_byte(tokenizer: Tokenizer, token: int) -> bool:
    """Whether a token is one byte of byte fallback."""
    return BYTE.fullmatch(tokenizer.convert_ids_to_tokens(int(token)) or "") is not None


def _decode(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    return tokenizer.decode(
        list(map(int, tokens)), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


def loops(tokens: Sequence[int]) -> bool:
    """Whether a text repeats itself: see :data:`LOOP_TOKENS`."""
    last = len(tokens) - LOOP_TOKENS + 1
    counts = Counter(tuple(tokens[start : start + LOOP_TOKENS]) for start in range(last))
    return any(count > LOOP_TIMES for count in counts.values())


@dataclass(frozen=True)
class RequestOutput(StepOutput):
    """The output of a request in a step: that of the engine, and its text.

    The request is named as it was submitted, and ``finish`` is ``stop`` at
    a stop string, too. Log-probabilities are of requests that ask with ``logprobs=`` and
    ``prompt_logprobs=``, trees of an engine made with ``return_trees=True``.
    """

    text: str = ""
    """Text that became complete; empty without a tokenizer, while a character is incomplete, and
    while the text may be the beginning of a stop string."""
    pieces: tuple[Piece, ...] = ()
    """The text by the tokens that completed it, and whether each was an accepted draft token."""


@dataclass(eq=False, repr=False)
class TextEngine:
    """An engine whose requests have texts: what calls, streams and servers step alike."""

    engine: Engine
    """Decodes the requests' tokens."""
    _texts: dict[int, RowText] = field(default_factory=dict, init=False)

    def read(self, id: int, text: RowText | None) -> None:
        """Have the tokens of a submitted request read as they come; None for tokens only."""
        if text is not None:
            self._texts[id] = text

    @property
    def busy(self) -> bool:
        """Whether a request waits or runs."""
        return self.engine.busy

    def step(self, *, decode: bool = True) -> list[RequestOutput]:
        """Launch the next rounds and return new output; call it while :attr:`busy`.

        Args:
          decode: whether rounds are launched, not only prompts.
        """
        outputs: list[RequestOutput] = []
        stopped: set[int] = set()  # In this step; of others the engine reports no more.
        for output in self.engine.step(decode=decode):
            if output.id not in stopped:
                outputs.append(self._output(output))
                if outputs[-1].finish is not None:
                    stopped.add(output.id)
        return outputs

    def cancel(self, id: int) -> None:
        """End a request before its time; nothing more is reported of it."""
        self.engine.cancel(id)
        self._texts.pop(id, None)

    def _output(self, output: StepOutput) -> RequestOutput:
        pieces: tuple[Piece, ...] = ()
        ended = output.finish is not None
        if (own := self._texts.get(output.id)) is not None:
            try:
                output, pieces = own.take(output)
            except Exception as error:  # The tokenizer's, and only this request's.
                output = replace(output, finish="error", reason=reason_of(error))
            if output.finish is not None and not ended:
                self.engine.cancel(output.id)
        if output.finish is not None:
            self._texts.pop(output.id, None)
        text = "".join(piece.text for piece in pieces) if pieces else ""
        return RequestOutput(**vars(output), text=text, pieces=pieces)
