"""The LongSpec draft of Vicuna-13B-v1.5-16k.

    python -m train.run --config=configs/vicuna13b.py

Variants: ``all``, the three stages in one run, or one of ``short``, ``long`` and ``sft``, to be
started in this order (``--config=vicuna13b:short``).

Hardware: one host of eight 80 GB GPUs or better, ``mesh.fsdp`` over all of them. An estimate for
eight H200, not measured: short 15 hours, long 4 hours; sft is its file's padded tokens at the rate
of long. Expected τ (paper): GovReport 3.31, QMSum 2.76, Multi-News 3.44, LCC 3.57, RepoBench-P
3.59.
"""

from functools import partial

from longspec_jax.config.known import TARGETS
from longspec_jax.recipes import paper_config

get_config = partial(
    paper_config,
    "vicuna13b",
    target=TARGETS["vicuna13b"].repository,
    long_length=16384,
    max_offset=15_000,
)
