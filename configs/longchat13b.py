"""The LongSpec draft of LongChat-13B-16k.

    python -m train.run --config=configs/longchat13b.py

Its three stages are one run. ``configs/longchat13b.py:short``, ``:long`` and ``:sft`` are a run
each, to be started in this order.

Hardware: one host of eight 80 GB GPUs or better, ``mesh.fsdp`` over all of them. An estimate for
eight H200, not measured: short 15 hours, long 4 hours; sft is its file's padded tokens at the rate
of long. Expected τ (paper): GovReport 3.58, QMSum 3.15, Multi-News 3.50, LCC 4.01, RepoBench-P
4.46. The paper gives offsets up to 30k for this target; its 16,384 positions leave room for 15,360.
"""

from ml_collections import ConfigDict

from longspec_jax.config import TARGETS
from longspec_jax.recipes import paper_config


def get_config(variant: str = "all") -> ConfigDict:
    """All three stages, or one: ``short``, ``long``, ``sft``."""
    return paper_config(
        "longchat13b",
        variant,
        target=TARGETS["longchat13b"].repository,
        long_length=16384,
        max_offset=15_360,
    )
