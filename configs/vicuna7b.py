"""The LongSpec draft of Vicuna-7B-v1.5-16k.

    python -m train.run --config=configs/vicuna7b.py

Variants: ``all``, the three stages in one run, or one of ``short``, ``long`` and ``sft``, to be
started in this order (``--config=vicuna7b:short``).

Hardware: one host of eight 80 GB GPUs or better, ``mesh.fsdp`` over all of them. An estimate for
eight H200, not measured: short 8 hours, long 2 hours; sft is its file's padded tokens at the rate
of long. Expected τ (paper): GovReport 3.57, QMSum 3.14, Multi-News 3.51, LCC 3.73, RepoBench-P
3.86.
"""

from functools import partial

from longspec_jax.config.known import TARGETS
from longspec_jax.recipes import paper_config

get_config = partial(
    paper_config,
    "vicuna7b",
    target=TARGETS["vicuna7b"].repository,
    long_length=16384,
    max_offset=15_000,
)
