"""The options of ``LongSpec.engine``: how many requests it holds, and what they may ask for.

Each is declared here, and nowhere else: keyword arguments, flags of ``infer.serve``, their checks
and their documentation derive from it.
"""

from collections.abc import Mapping
from typing import Annotated, TypedDict

from longspec_jax.checks import Maybe, Real, Truth, Whole
from longspec_jax.config.sampling import MOST_ALTERNATIVES
from longspec_jax.schema import REQUIRED, Option, options


class EngineSizes(TypedDict):
    """What every engine has to be told."""

    max_num_seqs: Annotated[
        int, Option(Whole(), REQUIRED, "requests that are decoded at once; others wait")
    ]
    max_model_len: Annotated[
        int, Option(Whole(2), REQUIRED, "most tokens of a request, prompt and new ones")
    ]


class EngineOptions(EngineSizes, total=False):
    """Keyword arguments of ``LongSpec.engine``."""

    adaptive: Annotated[
        bool,
        Option(
            Truth(),
            False,
            "choose among the tree, one of 16 nodes if it has more, and plain decoding, by the "
            "tokens per second of each, for every number of live rows",
        ),
    ]
    max_concurrent_prefills: Annotated[
        int,
        Option(
            Whole(),
            1,
            "prompts that may be under way at once, the shortest first; each takes a row of "
            "memory alongside the slots",
        ),
    ]
    prefixes: Annotated[
        bool,
        Option(
            Truth(),
            False,
            "whether a prompt begins with a copy of the whole chunks that it shares with an "
            "earlier one of the same cache_salt in a slot. A draft that needs the target's "
            "queries or keys of all tokens leaves nothing to reuse",
        ),
    ]
    cpu_prefix_cache_bytes: Annotated[
        int,
        Option(
            Whole(0, 2**50, " (bytes)"),
            0,
            "bytes of the host's memory for prompts that no slot holds any more; 0 for none",
        ),
    ]
    max_itl_ms: Annotated[
        float | None,
        Option(
            Maybe(Real(0.0, 1e6, "a number of milliseconds above 0", includes_least=False)),
            None,
            "the longest pause of a running stream while a prompt is read, in milliseconds; "
            "smaller chunks of prompts are timed, and the largest that keeps this is taken",
        ),
    ]
    logprobs: Annotated[
        int | None,
        Option(
            Maybe(Whole(0, MOST_ALTERNATIVES)),
            None,
            "most alternatives that a request may ask for with logprobs= and prompt_logprobs=; "
            "no request may ask if absent",
        ),
    ]
    enable_penalties: Annotated[
        bool,
        Option(
            Truth(),
            False,
            "whether requests may have logit_bias and penalties, for which every slot holds "
            "tables of the vocabulary",
        ),
    ]
    return_trees: Annotated[
        bool, Option(Truth(), False, "whether outputs hold the trees of their rounds")
    ]
    grammars: Annotated[bool, Option(Truth(), False, "whether requests may have a grammar")]


OPTIONS: Mapping[str, Option] = options(EngineOptions)
