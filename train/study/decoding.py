"""Tokens per target pass in real decoding, by the length of the context."""

from collections.abc import Sequence
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
    sums = []
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
        # A row's first token is the prefill's.
        counts = stats.histograms, stats.target_passes, np.subtract(stats.new_tokens, 1)
        sums.append([_by_group(each, len(temperatures)) for each in counts])
    totals = (np.sum(each, axis=0).tolist() for each in zip(*sums, strict=True))
    names = "histogram", "target_passes", "tokens"
    return [dict(zip(names, each, strict=True)) for each in zip(*totals, strict=True)]


def _by_group(counts: Any, groups: int) -> np.ndarray:
    """Counts of rows ``[R, ...]``, summed over each of so many groups of equal size."""
    counts = np.asarray(counts)
    return counts.reshape(groups, -1, *counts.shape[1:]).sum(axis=1)


def by_depth(histogram: Sequence[int]) -> list[float]:
    """How often each depth was accepted where the one above it was, from rounds by accepted tokens.

    Depth ``d`` counts rounds that accepted at least ``d`` drafted tokens, over those that accepted
    at least ``d - 1``.
    """
    at_least = np.cumsum(histogram[::-1])[::-1]
    return [float(below / above) for above, below in zip(at_least, at_least[1:], strict=False)]
