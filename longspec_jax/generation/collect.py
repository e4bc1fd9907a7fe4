"""From a finished run to its result, and from rounds as they come to what they added."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, Protocol

import numpy as np

from longspec_jax.generation.inputs import Prompts
from longspec_jax.generation.result import GenerateResult, StreamRound
from longspec_jax.generation.run import Run
from longspec_jax.generation.text import Detokenizer, Piece, continuation


class Streamer(Protocol):
    """What transformers calls a streamer."""

    def put(self, value: np.ndarray) -> None:
        """Take the prompt, then the tokens of every round."""
        ...

    def end(self) -> None:
        """The row has ended."""
        ...


def collect(run: Run, tokenizer: Any) -> GenerateResult:
    """The result of a run, where it has got to.

    Args:
      run: of any call.
      tokenizer: a transformers tokenizer, or None for no text.
    """
    progress = run.progress
    text = [
        None if tokenizer is None else continuation(tokenizer, prompt.tolist(), tokens)
        for prompt, tokens in zip(run.call.prompts, progress.tokens, strict=True)
    ]
    sequences, drafted = tuple(map(tuple, progress.tokens)), tuple(map(tuple, progress.drafted))
    return GenerateResult(sequences, tuple(text), drafted, run.stats)


def follow(run: Run, tokenizer: Any, on_round: Callable[[StreamRound], None] | None) -> None:
    """Run to the end.

    Args:
      run: ready to decode.
      tokenizer: a transformers tokenizer, or None for no text.
      on_round: called with what every round adds.
    """
    collector = RoundCollector(run, tokenizer)
    with closing(run.rounds()) as rounds:
        for now in rounds:
            if on_round is not None:
                on_round(collector.add(now))


@contextmanager
def ended(streamer: Streamer | None) -> Iterator[None]:
    """End a streamer after errors too: another thread may wait for it."""
    try:
        yield
    finally:
        if streamer is not None:
            streamer.end()


def stream_into(
    streamer: Streamer, prompts: Prompts, on_round: Callable[[StreamRound], None] | None
) -> Callable[[StreamRound], None]:
    """Hand the prompt to a streamer, and return what hands it the rounds."""
    rows = len(prompts)
    if rows > 1 or on_round is not None:
        raise ValueError(
            f"a streamer follows one row and takes the place of on_round; {rows} rows and "
            f"on_round={on_round} were given. Use on_round= alone, or stream()"
        )
    streamer.put(prompts[0][None])
    return lambda added: streamer.put(np.asarray(added.tokens[0], np.int32))


class RoundCollector:
    """Remembers the output of each row so far, and returns what a round adds."""

    def __init__(self, run: Run, tokenizer: Any) -> None:
        """Start before the first round.

        Args:
          run: whose rounds will be collected.
          tokenizer: a transformers tokenizer, or None for no text.
        """
        prompts = run.call.prompts
        self._texts = [tokenizer and Detokenizer(tokenizer, row.tolist()) for row in prompts]
        self._seen = [0] * len(prompts)
        self._ended = [False] * len(prompts)

    def add(self, run: Run) -> StreamRound:
        """What the run has emitted since the last call."""
        progress, seen = run.progress, self._seen
        tokens = tuple(tuple(row[start:]) for row, start in zip(progress.tokens, seen, strict=True))
        flags = zip(progress.drafted, seen, strict=True)
        drafted = tuple(tuple(row[start:]) for row, start in flags)
        ending = [done > ended for done, ended in zip(progress.done, self._ended, strict=True)]
        pieces = tuple(map(_pieces, self._texts, tokens, drafted, ending))
        self._seen, self._ended = list(map(len, progress.tokens)), list(progress.done)
        return StreamRound(tokens, drafted, pieces, run.stats)


def _pieces(
    text: Detokenizer | None, tokens: Sequence[int], drafted: Sequence[bool], ending: bool
) -> tuple[Piece, ...]:
    """Text that a round of a row releases, token by token."""
    if text is None:
        return ()
    pieces = [Piece(text.push(token), draft) for token, draft in zip(tokens, drafted, strict=True)]
    if ending:
        pieces.append(Piece(text.flush(), False))
    return tuple(piece for piece in pieces if piece.text)
