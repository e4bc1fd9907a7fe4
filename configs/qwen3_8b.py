"""The LongSpec draft of Qwen3-8B, a target that came after the paper.

    python -m train.run --config=configs/qwen3_8b.py

Variants: ``all``, the three stages in one run, or one of ``short``, ``long`` and ``sft``, to be
started in this order (``--config=qwen3_8b:short``). ``--config=qwen3_8b:eagle3`` trains an EAGLE-3
draft instead, on 200,000 conversations; ``python -m benchmarks train --draft=eagle3`` says how
fast.
``dflash`` trains a DFlash draft on the same conversations, ``parallel`` a parallel LongSpec draft
in the three stages.

Hardware: one host of eight 80 GB GPUs or better, ``mesh.fsdp`` over all of them. An estimate for
eight H200, not measured: short 11 hours, long 5 hours; sft is its file's padded tokens at the rate
of long. No acceptance length is published. The last stage learns reasoning traces, as QwQ's does;
for use without thinking, ``--config.stages.sft.data.hub=sail/longspec-data/long_sft_data.jsonl``.
"""

from functools import partial

from longspec_jax.config.known import TARGETS
from longspec_jax.recipes import CHATML_TURN, COT_DATA, paper_config

get_config = partial(
    paper_config,
    "qwen3_8b",
    target=TARGETS["qwen3-8b"].repository,
    long_length=32768,
    max_offset=39_000,
    sft_data=COT_DATA,
    data=dict(turn=CHATML_TURN),
)
