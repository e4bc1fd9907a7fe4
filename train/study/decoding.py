"""Tokens per target pass in real decoding, by the length of the context."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from longspec_jax import LongSpec

ROWS = 32
"""Decoded at once."""


def decoded_acceptance(
    model: LongSpec,
    prompts: np.ndarray,
    *,
    tree: str,
    new_tokens: int,
    temperatures: Sequence[float],
) -> list[dict[str, Any]]:
    """Raw counts of decoding prompts ``[R, T]`` of one length, for every temperature.

    All temperatures are rows of the same calls, and share a program.

    Args:
      model: a target with one draft.
      prompts: token ids.
      tree: of the draft.
      new_tokens: emitted for every prompt; nothing ends one earlier.
      temperatures: 0 draws the argmax. Prompt ``i`` draws with seed ``i``.
    """
    counts = [_Counts() for _ in temperatures]
    together = max(1, ROWS // len(temperatures))
    for first in range(0, len(prompts), together):
        part = prompts[first : first + together].tolist()
        seeds = [first + index for index in range(len(part))]
        stats = model.generate(
            part * len(temperatures),
            tree=tree,
            max_new_tokens=new_tokens,
            temperature=[each for each in temperatures for _ in part],
            seed=seeds * len(temperatures),
            eos_token_id=[],
        ).stats
        rows = zip(stats.histograms, stats.target_passes, stats.new_tokens, strict=True)
        for index, row in enumerate(rows):
            counts[index // len(part)].add(*row)
    return [each.as_json() for each in counts]


@dataclass
class _Counts:
    """Sums over rows."""

    histogram: np.ndarray | int = 0
    target_passes: int = 0
    tokens: int = 0

    def add(self, histogram: Sequence[int], target_passes: int, new_tokens: int) -> None:
        """Count a row; its first token is the prefill's."""
        self.histogram = self.histogram + np.asarray(histogram)
        self.target_passes += target_passes
        self.tokens += new_tokens - 1

    def as_json(self) -> dict[str, Any]:
        histogram = np.atleast_1d(self.histogram).tolist()
        return {
            "histogram": histogram,
            "target_passes": self.target_passes,
            "tokens": self.tokens,
        }


def by_depth(histogram: Sequence[int]) -> list[float]:
    """How often each depth was accepted where the one above it was, from rounds by accepted tokens.

    Depth ``d`` counts rounds that accepted at least ``d`` drafted tokens, over those that accepted
    at least ``d - 1``.
    """
    at_least = np.cumsum(histogram[::-1])[::-1]
    return [float(below / above) for above, below in zip(at_least, at_least[1:], strict=False)]
