"""What one may choose about a LongSpec draft; none of it changes a token."""

from dataclasses import dataclass

from longspec_jax.drafters.working_options import WorkingCacheOptions


@dataclass(frozen=True)
class LongSpecOptions(WorkingCacheOptions):
    """All make the draft cheaper at every level of a tree.

    With a working cache its cross-attention reads chosen chunks of the target's last layer.
    """

    vocabulary: int | None = None
    """How many tokens it may propose, the first of the table saved beside it; all if absent.

    ``python -m train.vocabulary`` makes the table. A smaller LM head is faster and misses some."""
    int8: bool | None = None
    """Read its weights and a copy of the target's LM head in 8 bits: half the bytes.

    If absent, where it pays: on a GPU, beside a large target in 16 bits."""
