"""The LongSpec draft of LongChat-7B-v1.5-32k.

    python -m train.run --config=configs/longchat7b.py

Variants: ``all``, the three stages in one run, or one of ``short``, ``long`` and ``sft``, to be
started in this order (``--config=longchat7b:short``).

Hardware: one host of eight 80 GB GPUs or better, ``mesh.fsdp`` over all of them. An estimate for
eight H200, not measured: short 8 hours, long 4 hours; sft is its file's padded tokens at the rate
of long. Expected τ (paper): GovReport 3.59, QMSum 3.06, Multi-News 3.41, LCC 4.21, RepoBench-P
4.03.
"""

from functools import partial

from longspec_jax.config.known import TARGETS
from longspec_jax.recipes import paper_config

get_config = partial(
    paper_config,
    "longchat7b",
    target=TARGETS["longchat7b"].repository,
    long_length=32768,
    max_offset=15_000,
)
