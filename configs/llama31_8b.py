"""The LongSpec draft of Llama-3.1-8B-Instruct: a target of the paper without a released draft.

    python -m train.run --config=configs/llama31_8b.py

Variants: ``all``, the three stages in one run, or one of ``short``, ``long`` and ``sft``, to be
started in this order (``--config=llama31_8b:short``). ``--config=llama31_8b:eagle3`` trains an
EAGLE-3 draft instead, on 200,000 conversations; ``python -m benchmarks train --draft=eagle3`` says
how fast.
``dflash`` trains a DFlash draft on the same conversations, ``parallel`` a parallel LongSpec draft
in the three stages.

Hardware: one host of eight 80 GB GPUs or better, ``mesh.fsdp`` over all of them. An estimate for
eight H200, not measured: short 11 hours, long 5 hours; sft is its file's padded tokens at the rate
of long. Expected τ (paper): GovReport 3.25, QMSum 2.99, Multi-News 3.36, LCC 3.28, RepoBench-P
3.39. The target is gated: accept its licence on the hub and log in, or name a local copy with
``--config.target=FOLDER``.
"""

from functools import partial

from longspec_jax.config.known import TARGETS
from longspec_jax.recipes import LLAMA3_TURN, paper_config

get_config = partial(
    paper_config,
    "llama31_8b",
    target=TARGETS["llama31-8b"].repository,
    long_length=32768,
    max_offset=30_000,
    chat_turn=LLAMA3_TURN,
)
