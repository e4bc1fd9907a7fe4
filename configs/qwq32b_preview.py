"""The LongSpec draft of QwQ-32B-Preview: the reasoning target with a released draft.

    python -m train.run --config=configs/qwq32b_preview.py

Variants: ``all``, the three stages in one run, or one of ``short``, ``long`` and ``sft``, to be
started in this order (``--config=qwq32b_preview:short``).

Hardware: one host of eight 80 GB GPUs or better, ``mesh.fsdp`` over all of them. An estimate for
eight H200, not measured: short 36 hours, long 16 hours; sft is its file's padded tokens at the rate
of long. Expected acceptance length (paper, for QwQ-32B): AIME24 with 32k new tokens 3.82.
"""

from functools import partial

from longspec_jax.config.known import TARGETS
from longspec_jax.recipes import CHATML_TURN, COT_DATA, paper_config

get_config = partial(
    paper_config,
    "qwq32b_preview",
    target=TARGETS["qwq32b-preview"].repository,
    long_length=32768,
    max_offset=30_000,
    sft_data=COT_DATA,
    data=dict(turn=CHATML_TURN),
)
