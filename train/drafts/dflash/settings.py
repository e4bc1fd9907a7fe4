"""What a configuration says of a DFlash draft and of the blocks that it learns from."""

from dataclasses import dataclass
from typing import Annotated

from longspec_jax.checks import Whole

from ...config import AtLeastOne, DraftSettings, LayerNumbers, Positive


@dataclass(frozen=True)
class DFlashSettings(DraftSettings):
    """The draft and its blocks (arXiv 2602.06036). The first four are a fresh draft's."""

    layers: Annotated[int, Whole(1, 32)]
    """Layers of the draft."""
    features: LayerNumbers
    """Layers of the target after which it takes the hidden states, counted from 0; as
    many as it has layers, evenly spread, if empty."""
    block: Annotated[int, Whole(2, 64)]
    """Slots of a block, the pending token's included; one token less is proposed."""
    mask_token: Annotated[int, Whole(-1)]
    """The target's token that stands in the slots to be filled; -1 for the last of its vocabulary,
    which is mostly padding."""
    anchor_every: AtLeastOne
    """Tokens of a row for each block. The block begins at a random one of them."""
    decay: Positive
    """Slot ``j`` weighs ``exp(-(j - 1) / decay)``: the first ones decide how much is accepted."""
