"""The LongSpec draft of Qwen3-8B, a target that came after the paper.

    python -m train.run --config=configs/qwen3_8b.py

Its three stages are one run. ``configs/qwen3_8b.py:short``, ``:long`` and ``:sft`` are a run
each, to be started in this order.

Hardware: one host of eight 80 GB GPUs or better, ``mesh.fsdp`` over all of them. An estimate for
eight H200, not measured: short 11 hours, long 5 hours; sft is its file's padded tokens at the rate
of long. No acceptance length is published. The last stage learns reasoning traces, as QwQ's does;
for use without thinking, ``--config.stages.sft.data.hub=sail/longspec-data/long_sft_data.jsonl``.
"""

from ml_collections import ConfigDict

from longspec_jax.config import TARGETS
from longspec_jax.recipes import CHATML_TURN, COT_DATA, paper_config


def get_config(variant: str = "all") -> ConfigDict:
    """All three stages, or one: ``short``, ``long``, ``sft``."""
    return paper_config(
        "qwen3_8b",
        variant,
        target=TARGETS["qwen3-8b"].repository,
        long_length=32768,
        max_offset=39_000,
        sft_data=COT_DATA,
        data=dict(turn=CHATML_TURN),
    )
