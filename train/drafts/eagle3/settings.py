"""What a configuration says of an EAGLE-3 draft and of its training-time test."""

from dataclasses import dataclass
from typing import Annotated

from longspec_jax.checks import Whole

from ...config import DraftSettings, LayerNumbers, Share, ZeroOrMore

MOST_STEPS = 32


@dataclass(frozen=True)
class Eagle3Settings(DraftSettings):
    """The draft and its training-time test (arXiv 2503.01840)."""

    layers: LayerNumbers
    """Layers of the target after which a fresh draft takes the hidden states, counted from 0; an
    early, a middle and a late one if empty, as published."""
    vocabulary: ZeroOrMore
    """Tokens that a fresh draft can propose: those that are to be predicted most often in the data;
    0 for all of the target's."""
    steps: Annotated[int, Whole(1, MOST_STEPS, ": each is another pass of the draft")]
    """Passes of a training step, each on the output of the one before, as when drafting."""
    decay: Share
    """Weight of a pass in the loss, relative to that of the one before it."""
