"""Shape of the parallel LongSpec draft: frozen and hashable."""

from dataclasses import dataclass

from longspec_jax.checks import whole_number
from longspec_jax.config.target import TargetConfig
from longspec_jax.drafters.longspec import DraftConfig, check_vocab_size

MOST_LAYERS = 3
"""More would cost a round more than they were ever seen to gain."""
MOST_SLOTS = 16


@dataclass(frozen=True)
class ParallelConfig:
    """LongSpec layers over a block: the pending token, and learnt slots behind it."""

    layer: DraftConfig
    """Of every layer; the first one's window counts the committed tokens before the block."""
    vocab_size: int
    """Tokens of the target."""
    num_layers: int = 3
    block: int = 6
    """Slots of a block, the pending token's included. Each proposes the token behind its own."""
    markov_rank: int = 64
    """Rank of the head that corrects a slot's logits by the token before it; 0 without one."""

    def __post_init__(self) -> None:
        whole_number("num_hidden_layers", self.num_layers, 1, MOST_LAYERS)
        whole_number("longspec_block", self.block, 2, MOST_SLOTS)
        whole_number("longspec_markov_rank", self.markov_rank, 0)

    def check_fits(self, target: TargetConfig) -> None:
        """Raise unless this draft can read the target's embedding, head and last-layer K/V."""
        self.layer.check_fits(target)
        check_vocab_size(self.vocab_size, target)
