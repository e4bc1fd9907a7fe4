"""What a call returns: tokens, text and the raw counts every derived number comes from."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from longspec_jax.config import TreeConfig
from longspec_jax.generation.memory import MemoryPlan
from longspec_jax.generation.text import Piece

ACCEPTANCE_DEFINITION = (
    "emitted tokens / target forward passes of the decode phase, bonus included, prefill excluded"
)
"""Printed wherever the acceptance length is."""
SHOWN = 40
"""Characters of a text that a result shows of itself."""


@dataclass(frozen=True)
class TreeUse:
    """What a drafter did in a call with one of its trees."""

    drafter: str
    """Its name; ``plain`` without a tree."""
    tree: TreeConfig
    """Its shape; without levels, plain decoding."""
    rounds: int
    """Target passes, of all rows at once."""
    tokens: int
    """Emitted by all rows together."""
    seconds: float


@dataclass(frozen=True)
class Stats:
    """Raw counts of a call, one entry per row, and the numbers derived from them."""

    prompt_tokens: tuple[int, ...]
    new_tokens: tuple[int, ...]
    """Emitted tokens; the first is drawn from the prefill, the others by decode rounds."""
    target_passes: tuple[int, ...]
    """Target forward passes of the decode phase a row took part in."""
    histograms: tuple[tuple[int, ...], ...]
    """Rounds of a row by accepted draft tokens: entry 0 counts the rounds that emitted the bonus
    alone. A round cut short by a stop token or the budget counts what it emitted."""
    trees: tuple[TreeUse, ...]
    """All that could be used: the tree asked for, or what ``adaptive`` chose among."""
    prefill_seconds: float
    decode_seconds: float
    """Decode rounds alone: no prefill, no compilation, no detokenisation."""
    compile_seconds: float
    """The warm-up of shapes not seen before: compilation and one short run."""
    draft_state_bytes: int
    """Measured from the arrays of the draft's state."""
    memory: MemoryPlan
    lossless: bool = True
    """Whether the output is the target's own; only what is asked for by ``retrieve_verify=partial``
    may change it."""

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
        """Tokens of the decode rounds by their seconds, all rows together; NaN if none ran."""
        return self.decode_tokens / self.decode_seconds if self.decode_tokens else math.nan


@dataclass(frozen=True)
class GenerateResult:
    """Completions of a batch, one entry per row."""

    sequences: tuple[tuple[int, ...], ...]
    """Emitted token ids, the prompt not included, a stop token included."""
    text: tuple[str | None, ...]
    """What the emitted tokens read behind the prompt; None without a tokenizer."""
    drafted: tuple[tuple[bool, ...], ...]
    """Whether each emitted token was an accepted draft token."""
    stats: Stats

    def __repr__(self) -> str:
        """One line: how much text, how it begins, how fast it came."""
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
    """What one round added, one entry per row; the first round is the prefill's token."""

    tokens: tuple[tuple[int, ...], ...]
    drafted: tuple[tuple[bool, ...], ...]
    pieces: tuple[tuple[Piece, ...], ...]
    """Released text by token; empty without a tokenizer and while a character is incomplete."""
    stats: Stats
    """Of the call so far."""

    @property
    def text(self) -> tuple[str, ...]:
        """Released text of every row."""
        return tuple("".join(piece.text for piece in row) for row in self.pieces)

    def __repr__(self) -> str:
        """One line: what the round added; no text where no character became complete."""
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
