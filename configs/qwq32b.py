"""The LongSpec draft of QwQ-32B: a target of the paper without a released draft.

    python -m train.run --config=configs/qwq32b.py

Its three stages are one run. ``configs/qwq32b.py:short``, ``:long`` and ``:sft`` are a run
each, to be started in this order.

Hardware: one host of eight 80 GB GPUs or better, ``mesh.fsdp`` over all of them. An estimate for
eight H200, not measured: short 36 hours, long 16 hours; sft is its file's padded tokens at the rate
of long. Expected acceptance length (paper): AIME24 with 32k new tokens 3.82.
"""

from ml_collections import ConfigDict

from longspec_jax.config import TARGETS
from longspec_jax.recipes import CHATML_TURN, COT_DATA, paper_config


def get_config(variant: str = "all") -> ConfigDict:
    """All three stages, or one: ``short``, ``long``, ``sft``."""
    return paper_config(
        "qwq32b",
        variant,
        target=TARGETS["qwq32b"].repository,
        long_length=32768,
        max_offset=30_000,
        sft_data=COT_DATA,
        data=dict(turn=CHATML_TURN),
    )
