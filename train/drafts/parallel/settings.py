"""What a configuration says of a parallel LongSpec draft and of the blocks that it learns from."""

from dataclasses import dataclass
from typing import Annotated

from longspec_jax.checks import Whole

from ...config import AtLeastOne, DraftSettings, Positive, Share, ZeroOrMore


@dataclass(frozen=True)
class ParallelSettings(DraftSettings):
    """The draft and its blocks."""

    window: AtLeastOne
    """Tokens before a block that the first layer sees."""
    layers: Annotated[int, Whole(1, 3)]
    block: Annotated[int, Whole(2, 16)]
    """Slots of a block, the pending token's included; as many tokens are proposed."""
    markov_rank: ZeroOrMore
    """Rank of the correction by the token before a slot; 0 for none."""
    anchor_every: AtLeastOne
    """Tokens of a row for each block. The block begins at a random one of them."""
    decay: Positive
    """Slot ``j`` weighs ``exp(-j / decay)``: the first ones decide how much is accepted."""
    anchor_offset: bool
    """Use anchor-offset positions in the stages that set a ``max_offset``."""
    max_sinks: ZeroOrMore
    """Most positions that stay in place."""
    distillation: Share
    """Share of the distance to the target's own distribution in the loss, 0 to 1. The rest is the
    cross-entropy of the text."""
