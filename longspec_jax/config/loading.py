"""How models are loaded and where their rows lie: the options of ``LongSpec.from_pretrained``.

Each is declared here, and nowhere else: keyword arguments, flags of the commands, checks and
documentation derive from it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, TypedDict

from longspec_jax.checks import Maybe, OneOf, Text, That, Truth, Whole
from longspec_jax.config.names import ATTENTION, KV_DTYPES
from longspec_jax.schema import Option, options

DTYPES = ("auto", "bfloat16", "float16", "float32")


def _is_path(value: object) -> bool:
    return isinstance(value, str | Path) and str(value) != "" and "\0" not in str(value)


class LoadOptions(TypedDict, total=False):
    """Keyword arguments of ``from_pretrained`` that are one word, number or truth value."""

    revision: Annotated[
        str | None,
        Option(Maybe(Text(1)), None, "branch, tag or commit of the target on the hub"),
    ]
    draft_revision: Annotated[
        str | None, Option(Maybe(Text(1)), None, "branch, tag or commit of the draft on the hub")
    ]
    adapter: Annotated[
        str | Path | None,
        Option(
            Maybe(That(_is_path, "the folder of a LoRA adapter")),
            None,
            "folder of a LoRA adapter of the target, in PEFT's format, which is merged into its "
            "weights (docs/guides/targets.md)",
        ),
    ]
    dtype: Annotated[
        str,
        Option(
            OneOf(DTYPES),
            "auto",
            f"of parameters and activations: {', '.join(DTYPES)}. auto is bfloat16 on GPUs that "
            "have it, else float16; float32 on a CPU, and for the demo",
        ),
    ]
    kv_dtype: Annotated[
        str | None,
        Option(
            Maybe(OneOf(KV_DTYPES)),
            None,
            f"{', '.join(KV_DTYPES)} rounds keys and values to 8 bits before anything attends to "
            "them: half the cache, and a text of its own that drafts do not change "
            "(docs/guides/quantised.md)",
        ),
    ]
    attention: Annotated[
        str | None,
        Option(
            Maybe(OneOf(ATTENTION)),
            None,
            f"attention implementation: {', '.join(ATTENTION)}; automatic if absent",
        ),
    ]
    batch_invariant: Annotated[
        bool | None,
        Option(
            Maybe(Truth()),
            None,
            "kernels with which text in 16 bits is that of plain decoding, token for token: the "
            "default on Hopper GPUs, available on others from compute capability 8.0 on. Without "
            "them near-ties of two tokens may fall otherwise, and decoding is some per cent faster",
        ),
    ]
    prefill_chunk: Annotated[
        int | None,
        Option(
            Maybe(Whole()),
            None,
            "tokens of one prefill step; 2048 on a GPU if absent, 256 on a CPU",
        ),
    ]
    max_num_seqs: Annotated[
        int | None,
        Option(
            Maybe(Whole()),
            None,
            "rows that are decoded at once; those of a larger batch wait for a slot. All rows if "
            "absent",
        ),
    ]
    offload: Annotated[
        bool,
        Option(
            Truth(),
            False,
            "keep the target's cache in the host's memory, for contexts that do not fit on the "
            "device; every forward moves the cache, so let it verify much (docs/guides/memory.md)",
        ),
    ]


OPTIONS: Mapping[str, Option] = options(LoadOptions)
