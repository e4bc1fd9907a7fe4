"""From a finished run to its result, and from rounds as they come to what they added."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, Protocol

import numpy as np

from longspec_jax.generation import runner
from longspec_jax.generation.inputs import Prompts
from longspec_jax.generation.job import Job
from longspec_jax.generation.progress import Run, statistics
from longspec_jax.generation.result import GenerateResult, StreamRound
from longspec_jax.generation.runner import Ready, Waiting
from longspec_jax.generation.text import Detokenizer, Piece, continuation


class Streamer(Protocol):
    """What transformers calls a streamer."""

    def put(self, value: np.ndarray) -> None:
        """Take the prompt, then the tokens of every round."""
        ...

    def end(self) -> None:
        """The row has ended."""
        ...


def collect(job: Job, run: Run, tokenizer: Any) -> GenerateResult:
    """The result of a run.

    Args:
      job: the call.
      run: where it has got to.
      tokenizer: a transformers tokenizer, or None for no text.
    """
    progress = run.progress
    sequences = _rows(progress.output, progress.emitted)
    text = [
        None if tokenizer is None else continuation(tokenizer, prompt.tolist(), tokens)
        for prompt, tokens in zip(job.prompts, sequences, strict=True)
    ]
    drafted = _rows(progress.drafted, progress.emitted)
    return GenerateResult(sequences, tuple(text), drafted, statistics(job, run))


def follow(
    start: Ready | Waiting, tokenizer: Any, on_round: Callable[[StreamRound], None] | None
) -> Run:
    """Run to the end: round by round if someone listens, in one executable otherwise.

    Args:
      start: the call, ready to run.
      tokenizer: a transformers tokenizer, or None for no text.
      on_round: called with what every round adds.
    """
    if on_round is None:
        return runner.run(start)
    collector = RoundCollector(start.job, tokenizer)
    last = None
    with closing(runner.run_rounds(start)) as runs:
        for last in runs:
            on_round(collector.add(last))
    assert last is not None, "a call has at least the round of its first token"
    return last


@contextmanager
def ended(streamer: Streamer | None) -> Iterator[None]:
    """End a streamer whatever happens: somebody may wait for it in another thread."""
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
    """Remembers what each row has shown, and returns what a round adds."""

    def __init__(self, job: Job, tokenizer: Any):
        """Start before the first round.

        Args:
          job: the call whose rounds will be collected.
          tokenizer: a transformers tokenizer, or None for no text.
        """
        rows = len(job.prompts)
        self._job = job
        self._texts = [
            tokenizer and Detokenizer(tokenizer, prompt.tolist()) for prompt in job.prompts
        ]
        self._seen = np.zeros(rows, np.int32)
        self._ended = np.zeros(rows, bool)

    def add(self, run: Run) -> StreamRound:
        """What the run has gained since the last call."""
        progress = run.progress
        tokens = _rows(progress.output, progress.emitted, self._seen)
        drafted = _rows(progress.drafted, progress.emitted, self._seen)
        pieces = tuple(map(_pieces, self._texts, tokens, drafted, progress.done & ~self._ended))
        self._seen, self._ended = progress.emitted, progress.done
        return StreamRound(tokens, drafted, pieces, statistics(self._job, run))


def _rows(
    values: np.ndarray, stop: np.ndarray, start: np.ndarray | None = None
) -> tuple[tuple[Any, ...], ...]:
    """Every row of an output buffer from ``start`` to ``stop``, as Python values."""
    start = np.zeros_like(stop) if start is None else start
    bounds = zip(values, start, stop, strict=True)
    return tuple(tuple(row[first:last].tolist()) for row, first, last in bounds)


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
