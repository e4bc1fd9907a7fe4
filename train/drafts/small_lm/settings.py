"""What a configuration says of a small language model that is trained to draft."""

from dataclasses import dataclass
from typing import Annotated

from longspec_jax.checks import Whole

from ...config import AtLeastOne, DraftSettings, Share


@dataclass(frozen=True)
class SmallLMSettings(DraftSettings):
    """The model: Llama's layers over the target's vocabulary. Sizes are a fresh one's."""

    layers: Annotated[int, Whole(1, 64)]
    width: AtLeastOne
    """Of its hidden states; ``heads`` of equal and even width divide it."""
    mlp_width: AtLeastOne
    heads: AtLeastOne
    kv_heads: AtLeastOne
    """Heads of keys and values, a divisor of ``heads``."""
    distillation: Share
    """Share of the divergence from the target's own distribution in the loss, 0 to 1. The rest is
    the cross-entropy of the text. At 0 the target never runs, but where rows are measured."""
