"""The LongSpec draft of Llama-3-8B-Instruct-262k: the Llama target with a released draft.

    python -m train.run --config=configs/llama3_8b_262k.py

Variants: ``all``, the three stages in one run, or one of ``short``, ``long`` and ``sft``, to be
started in this order (``--config=llama3_8b_262k:short``).

Hardware: one host of eight 80 GB GPUs or better, ``mesh.fsdp`` over all of them. An estimate for
eight H200, not measured: short 11 hours, long 5 hours; sft is its file's padded tokens at the rate
of long. The paper gives no acceptance length for it; for Llama-3.1-8B-Instruct see
``llama31_8b.py``.

The hub repository changed ``rope_theta`` between revisions: an early one says 207112184.0, the one
the released draft was made for 283461213.0. Which commit that is could not be looked up when this
file was written, so ``revision`` is empty and a draft records the rotary base it was trained with:
a draft of another revision is refused on loading, not decoded slowly. Pin the commit you use with
``--config.revision=COMMIT``.
"""

from functools import partial

from longspec_jax.config.known import TARGETS
from longspec_jax.recipes import LLAMA3_TURN, paper_config

get_config = partial(
    paper_config,
    "llama3_8b_262k",
    target=TARGETS["llama3-8b"].repository,
    long_length=32768,
    max_offset=30_000,
    chat_turn=LLAMA3_TURN,
)
