"""What a call returns: tokens, text, raw counts and the numbers derived from them.

Also the one warning that these numbers give rise to: about a draft that does not fit its target.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np

from longspec_jax.config.tree import TreeConfig
from longspec_jax.decoding.chooser import TreeTiming
from longspec_jax.decoding.logprobs import TokenLogprob
from longspec_jax.decoding.report import RoundTree
from longspec_jax.generation.inputs import Prompts
from longspec_jax.generation.memory import MemoryPlan
from longspec_jax.generation.text import Piece

ACCEPTANCE_DEFINITION = (
    "emitted tokens / target forward passes of the decode phase, bonus included, prefill excluded"
)
"""Printed next to every acceptance length."""
SHOWN = 40
"""Characters of the text in the ``repr`` of a result."""
ROUNDS = 64
"""Rounds after which a draft is judged."""
FEW_ROUNDS = 24
"""The same of a draft that the clock has given up."""
USELESS = 0.05
"""A draft with fewer accepted tokens per round does not fit its target."""


@dataclass(frozen=True)
class TreeUse:
    """What one drafter with one tree did in a call."""

    drafter: str
    """Name of the drafter; ``plain`` without a tree."""
    tree: TreeConfig
    """Shape of the tree; without levels, plain decoding."""
    rounds: int
    """Target passes; a pass of a batch counts once."""
    tokens: int
    """Tokens emitted by all rows together, those after a stop string included, which are read
    while the next round runs."""
    seconds: float


@dataclass(frozen=True)
class Stats:
    """Raw counts of a call, one entry per row, and the numbers derived from them."""

    prompt_tokens: tuple[int, ...]
    new_tokens: tuple[int, ...]
    """Emitted tokens. The prefill gives the first, decode rounds give the others. Tokens and rounds
    after a stop string do not count."""
    target_passes: tuple[int, ...]
    """Target forward passes of the decode phase that the row took part in."""
    histograms: tuple[tuple[int, ...], ...]
    """Rounds of a row by accepted draft tokens: entry 0 counts the rounds that emitted only the
    bonus. A round that a stop token, a stop string or the budget cuts short counts what it
    emitted."""
    trees: tuple[TreeUse, ...]
    """The trees that the call could use: the chosen one, or the candidates of ``adaptive``."""
    prefill_seconds: float
    decode_seconds: float
    """Decode rounds only, without prefill, compilation and detokenisation."""
    compile_seconds: float
    """Warm-up of new shapes: compilation and one short run."""
    draft_state_bytes: int
    """Bytes of the draft state's arrays, measured."""
    memory: MemoryPlan
    accepted_by_source: Mapping[str, int] = field(default_factory=dict)
    """Accepted draft tokens by who proposed them: ``longspec``, ``ngram``, or both together,
    ``longspec+ngram``."""
    lossless: bool = True
    """Whether the output is the target's own. Only ``retrieve_verify=partial`` may change it."""

    @property
    def decode_tokens(self) -> int:
        """Tokens emitted by decode rounds, all rows together."""
        return sum(self.new_tokens) - len(self.new_tokens)

    @property
    def acceptance_length(self) -> float:
        """Emitted tokens / target passes of the decode phase, bonus included, prefill excluded.

        NaN where no decode round ran.
        """
        passes = sum(self.target_passes)
        return self.decode_tokens / passes if passes else math.nan

    @property
    def acceptance_histogram(self) -> tuple[int, ...]:
        """Rounds by accepted draft tokens, all rows together."""
        return tuple(map(sum, zip(*self.histograms, strict=True)))

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the decode rounds per second, all rows together; NaN if no round ran."""
        return self.decode_tokens / self.decode_seconds if self.decode_tokens else math.nan


@dataclass(frozen=True)
class GenerateResult:
    """Completions of a batch, one entry per row."""

    sequences: tuple[tuple[int, ...], ...]
    """Emitted token ids, without the prompt, with a stop token or the token that completed a stop
    string."""
    text: tuple[str | None, ...]
    """Text of the emitted tokens, which continues the prompt, up to a stop string; None without a
    tokenizer."""
    drafted: tuple[tuple[bool, ...], ...]
    """Whether each emitted token was an accepted draft token."""
    stats: Stats
    logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    """Of every emitted token; empty in rows that did not ask with ``logprobs=``."""
    prompt_logprobs: tuple[tuple[TokenLogprob | None, ...] | None, ...] = ()
    """Of every token of the prompt but the first, which has none; None in rows that did not ask
    with ``prompt_logprobs=``."""
    trees: tuple[tuple[RoundTree, ...], ...] = ()
    """With ``return_trees=True``, all that the target verified in every row's rounds: candidates,
    its own draws and the accepted path. A round without a draft has only its root."""
    scores: tuple[np.ndarray, ...] = ()
    """With ``output_scores=True``, of every row's ``n`` emitted tokens ``[n, V]``, float32: what
    each was drawn from, after biases, penalties, temperature and filters (-inf for what they leave
    out), before the noise. Transformers' ``scores[step][row]`` is ``scores[row][step]`` here."""
    logits: tuple[np.ndarray, ...] = ()
    """The same with ``output_logits=True``, as the target gives them."""

    def __repr__(self) -> str:
        """One line: number of tokens, beginning of the text, acceptance and speed."""
        stats = self.stats
        numbers = [
            _sizes(self.text, self.sequences),
            f"{stats.acceptance_length:.2f} tokens per target pass",
            f"{stats.tokens_per_second:.1f} tokens/s",
        ]
        numbers = numbers[: 3 if stats.decode_tokens else 1]
        return f"GenerateResult({', '.join([*numbers, *['not lossless'] * (not stats.lossless)])})"


@dataclass(frozen=True)
class StreamRound:
    """What one round added, one entry per row; the first round holds the prefill's token."""

    tokens: tuple[tuple[int, ...], ...]
    drafted: tuple[tuple[bool, ...], ...]
    pieces: tuple[tuple[Piece, ...], ...]
    """New text by token; empty without a tokenizer and while a character is incomplete."""
    stats: Stats
    """Counts of the call so far."""
    logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    """Of every token; empty in rows that did not ask with ``logprobs=``."""

    @property
    def text(self) -> tuple[str, ...]:
        """New text of every row."""
        return tuple("".join(piece.text for piece in row) for row in self.pieces)

    def __repr__(self) -> str:
        """One line: number of tokens, and the new text if there is any."""
        text = self.text if any(self.pieces) else (None,) * len(self.tokens)
        return f"StreamRound({_sizes(text, self.tokens)})"


def _sizes(text: Sequence[str | None], tokens: Sequence[Sequence[int]]) -> str:
    """Rows, tokens, and the beginning of the first row's text."""
    count = sum(map(len, tokens))
    words = [f"{len(tokens)} rows"] if len(tokens) > 1 else []
    words.append(f"{count} token{'s' * (count != 1)}")
    if text[0] is not None:
        words.append(repr(text[0][:SHOWN]) + "..." * (len(text[0]) > SHOWN))
    return ", ".join(words)


class Notices:
    """Warns once about a draft whose tokens the target does not accept."""

    def __init__(self) -> None:
        """Start without a warning given."""
        self._warned = False

    def look_at(self, stats: Stats) -> None:
        """Warn if a call of many rounds accepted next to none of the draft's tokens."""
        rounds = sum(use.rounds for use in stats.trees if use.tree.num_levels)
        accepted = sum(depth * count for depth, count in enumerate(stats.acceptance_histogram))
        if rounds >= ROUNDS and accepted <= USELESS * rounds:
            self._warn(f"{accepted} of the draft's tokens were accepted in {rounds} rounds")

    def look_at_speeds(self, known: Sequence[TreeTiming]) -> None:
        """Warn if next to no draft token was accepted, however soon a draft was given up."""
        trees = [one for one in known if one.tree.num_levels]
        accepted = [one.tokens - 1 for one in trees]
        if sum(one.rounds for one in trees) >= FEW_ROUNDS and max(accepted) <= USELESS:
            self._warn(f"at most {max(accepted):.2f} of the draft's tokens were accepted per round")

    def _warn(self, found: str) -> None:
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"{found}: this draft seems to belong to another target and slows decoding down; load "
            "the draft that was trained for this target, or decode plainly",
            UserWarning,
            stacklevel=5,
        )


OnRound: TypeAlias = Callable[[StreamRound], None]


class Streamer(Protocol):
    """What transformers calls a streamer."""

    def put(self, value: np.ndarray) -> None:
        """Take the prompt, then the tokens of every round."""
        ...

    def end(self) -> None:
        """The row has ended."""
        ...


@contextmanager
def ended(streamer: Streamer) -> Iterator[None]:
    """End a streamer after errors too: another thread may wait for it."""
    try:
        yield
    finally:
        streamer.end()


def stream_into(streamer: Streamer, prompts: Prompts, on_round: OnRound | None) -> OnRound:
    """Hand the prompt to a streamer, and return what hands it the rounds."""
    rows = len(prompts)
    if rows > 1 or on_round is not None:
        raise ValueError(
            f"a streamer follows one row and takes the place of on_round; {rows} rows and "
            f"on_round={on_round} were given. Use only on_round=, or stream()"
        )
    streamer.put(prompts[0][None])
    return lambda added: streamer.put(np.asarray(added.tokens[0], np.int32))
