"""The LongSpec draft of Vicuna-7B-v1.5-16k.

    python -m train.run --config=configs/vicuna7b.py

Its three stages are one run. ``configs/vicuna7b.py:short``, ``:long`` and ``:sft`` are a run
each, to be started in this order.

Hardware: one host of eight 80 GB GPUs or better, ``mesh.fsdp`` over all of them. An estimate for
eight H200, not measured: short 8 hours, long 2 hours; sft is its file's padded tokens at the rate
of long. Expected τ (paper): GovReport 3.57, QMSum 3.14, Multi-News 3.51, LCC 3.73, RepoBench-P
3.86.
"""

from ml_collections import ConfigDict

from longspec_jax.config import TARGETS
from longspec_jax.recipes import paper_config


def get_config(variant: str = "all") -> ConfigDict:
    """All three stages, or one: ``short``, ``long``, ``sft``."""
    return paper_config(
        "vicuna7b",
        variant,
        target=TARGETS["vicuna7b"].repository,
        long_length=16384,
        max_offset=15_000,
    )
