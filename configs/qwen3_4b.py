"""The LongSpec draft of Qwen3-4B, a target that came after the paper.

    python -m train.run --config=configs/qwen3_4b.py

Variants: ``all``, the three stages in one run, or one of ``short``, ``long`` and ``sft``, to be
started in this order (``--config=qwen3_4b:short``).

Hardware: one GPU of 80 GB or more, or one host of eight, ``mesh.fsdp`` over all of them.
An estimate for eight H200, not measured: short 6 hours, long 4 hours; sft is its file's padded
tokens at the rate of long. No acceptance length is published. The last stage learns reasoning
traces, as QwQ's does; for use without thinking,
``--config.stages.sft.data.hub=sail/longspec-data/long_sft_data.jsonl``.
"""

from functools import partial

from longspec_jax.config.known import TARGETS
from longspec_jax.recipes import CHATML_TURN, COT_DATA, paper_config

get_config = partial(
    paper_config,
    "qwen3_4b",
    target=TARGETS["qwen3-4b"].repository,
    long_length=32768,
    max_offset=39_000,
    sft_data=COT_DATA,
    data=dict(turn=CHATML_TURN),
)
