"""What a configuration says of a LongSpec draft and of its random transforms."""

from dataclasses import dataclass

from ...config import AtLeastOne, DraftSettings, Share, ZeroOrMore


@dataclass(frozen=True)
class LongSpecSettings(DraftSettings):
    """The draft and its random transforms."""

    window: AtLeastOne
    """Past tokens its self-attention sees."""
    anchor_offset: bool
    """Use anchor-offset positions in the stages that set a ``max_offset``."""
    max_sinks: ZeroOrMore
    """Most positions that stay in place."""
    max_shift: AtLeastOne
    """Most tokens the draft runs ahead of the target's keys."""
    distillation: Share = 0.0
    """Share of the divergence from the target's own distribution in the loss, 0 to 1. The rest is
    the cross-entropy of the text, which is all the paper learns."""
