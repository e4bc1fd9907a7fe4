"""Tokens per target pass in real decoding, by the length of the context."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from longspec_jax import LongSpec

ROWS = 16
"""Prompts decoded at once."""


def decoded_acceptance(
    model: LongSpec, prompts: np.ndarray, *, tree: str, new_tokens: int, temperature: float
) -> dict[str, Any]:
    """Raw counts of decoding prompts ``[R, T]`` of one length.

    Args:
      model: a target with one draft.
      prompts: token ids.
      tree: of the draft.
      new_tokens: emitted for every prompt; nothing ends one earlier.
      temperature: 0 draws the argmax. Prompt ``i`` draws with seed ``i``.
    """
    histograms, passes, emitted = [], 0, 0
    for first in range(0, len(prompts), ROWS):
        part = prompts[first : first + ROWS]
        stats = model.generate(
            part.tolist(),
            tree=tree,
            max_new_tokens=new_tokens,
            temperature=temperature,
            seed=[first + index for index in range(len(part))],
            eos_token_id=[],
        ).stats
        histograms.append(stats.acceptance_histogram)
        passes += sum(stats.target_passes)
        emitted += stats.decode_tokens
    histogram = np.sum(histograms, axis=0).tolist()
    return {"histogram": histogram, "target_passes": passes, "tokens": emitted}


def by_depth(histogram: Sequence[int]) -> list[float]:
    """How often each depth was accepted where the one above it was, from rounds by accepted tokens.

    Depth ``d`` counts rounds that accepted at least ``d`` drafted tokens, over those that accepted
    at least ``d - 1``.
    """
    at_least = np.cumsum(histogram[::-1])[::-1]
    return [float(below / above) for above, below in zip(at_least, at_least[1:], strict=False)]
