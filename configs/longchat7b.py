"""The LongSpec draft of LongChat-7B-v1.5-32k.

    python -m train.run --config=configs/longchat7b.py

Its three stages are one run. ``configs/longchat7b.py:short``, ``:long`` and ``:sft`` are a run
each, to be started in this order.

Hardware: one host of eight 80 GB GPUs or better, ``mesh.fsdp`` over all of them. An estimate for
eight H200, not measured: short 8 hours, long 4 hours; sft is its file's padded tokens at the rate
of long. Expected τ (paper): GovReport 3.59, QMSum 3.06, Multi-News 3.41, LCC 4.21, RepoBench-P
4.03.
"""

from ml_collections import ConfigDict

from longspec_jax.config import TARGETS
from longspec_jax.recipes import paper_config


def get_config(variant: str = "all") -> ConfigDict:
    """All three stages, or one: ``short``, ``long``, ``sft``."""
    return paper_config(
        "longchat7b",
        variant,
        target=TARGETS["longchat7b"].repository,
        long_length=32768,
        max_offset=15_000,
    )
