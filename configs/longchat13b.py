"""The LongSpec draft of LongChat-13B-16k.

    python -m train.run --config=configs/longchat13b.py

Variants: ``all``, the three stages in one run, or one of ``short``, ``long`` and ``sft``, to be
started in this order (``--config=longchat13b:short``).

Hardware: one host of eight 80 GB GPUs or better, ``mesh.fsdp`` over all of them. An estimate for
eight H200, not measured: short 15 hours, long 4 hours; sft is its file's padded tokens at the rate
of long. Expected τ (paper): GovReport 3.58, QMSum 3.15, Multi-News 3.50, LCC 4.01, RepoBench-P
4.46. The paper gives offsets up to 30k for this target; its 16,384 positions leave room for 15,360.
"""

from functools import partial

from longspec_jax.config.known import TARGETS
from longspec_jax.recipes import paper_config

get_config = partial(
    paper_config,
    "longchat13b",
    target=TARGETS["longchat13b"].repository,
    long_length=16384,
    max_offset=15_360,
)
