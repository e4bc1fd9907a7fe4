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
    folded: bool | None = None
    """In 8 bits, keep what its first products make of every token in tables: two products less at
    every level, for memory (0.5 GB beside Vicuna-7B, 1.3 GB beside Llama-3-8B).

    If absent, where 8 bits pay, on one device whose free memory is twenty times that."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.folded and self.int8 is False:
            raise ValueError("a folded draft is one in 8 bits; leave int8=False out, or folded")
