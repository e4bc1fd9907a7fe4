"""The LongSpec draft of gpt-oss-20b, a target of 32 experts, windows and attention sinks.

    python -m train.run --config=configs/gpt_oss_20b.py

Variants: ``all``, the three stages in one run, or one of ``short``, ``long`` and ``sft``, to be
started in this order (``--config=gpt_oss_20b:short``).

Hardware: one host of eight 80 GB GPUs or better, ``mesh.fsdp`` over all of them: the experts are
dequantised to 16 bits, and the target takes 42 GB. An estimate for eight H200, not measured, from
the operations with experts at half the rate of dense layers: short 7 hours. The other stages take
several times as long as those of Qwen3-30B-A3B: attention with sinks is XLA's in training. No
acceptance length is published. The target thinks before it answers, and writes its answers in
channels, which the data lack: ``python -m train.regenerate`` makes answers of its own.
"""

from functools import partial

from longspec_jax.config.known import TARGETS
from longspec_jax.recipes import COT_DATA, HARMONY_TURN, paper_config

get_config = partial(
    paper_config,
    "gpt_oss_20b",
    target=TARGETS["gpt-oss-20b"].repository,
    long_length=32768,
    max_offset=30_000,
    sft_data=COT_DATA,
    data=dict(turn=HARMONY_TURN),
)
