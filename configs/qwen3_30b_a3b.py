"""The LongSpec draft of Qwen3-30B-A3B, a target of 128 experts.

    python -m train.run --config=configs/qwen3_30b_a3b.py

Variants: ``all``, the three stages in one run, or one of ``short``, ``long`` and ``sft``, to be
started in this order (``--config=qwen3_30b_a3b:short``).

Hardware: one host of eight 80 GB GPUs or better, ``mesh.fsdp`` over all of them: the target takes
61 GB. An estimate for eight H200, not measured, from the operations with experts at half the rate
of dense layers: short 7 hours, long 5 hours; sft is its file's padded tokens at the rate of long.
No acceptance length is published. The last stage learns reasoning traces, as QwQ's does; for use
without thinking, ``--config.stages.sft.data.hub=sail/longspec-data/long_sft_data.jsonl``.
"""

from functools import partial

from longspec_jax.config.known import TARGETS
from longspec_jax.recipes import CHATML_TURN, COT_DATA, paper_config

get_config = partial(
    paper_config,
    "qwen3_30b_a3b",
    target=TARGETS["qwen3-30b-a3b"].repository,
    long_length=32768,
    max_offset=39_000,
    sft_data=COT_DATA,
    data=dict(turn=CHATML_TURN),
)
