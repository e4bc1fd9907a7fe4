"""What is chosen about a draft of random weights, as about one that is loaded."""

from collections.abc import Mapping
from typing import Any

from longspec_jax.config import TargetConfig
from longspec_jax.drafters.longspec.load import LongSpecOptions
from longspec_jax.drafters.registry import options_of, separated
from longspec_jax.drafters.small_lm.load import SmallLMOptions

from .arguments import KINDS
from .values import DTYPES


def draft_options(drafter: str, values: Mapping[str, Any], target: TargetConfig) -> Any:
    """The options of a kind of draft, checked; of a kind without weights that is the draft.

    Args:
      drafter: the kind.
      values: of its options, by name; what is about retrieval is checked alone.
      target: what it is to draft for.

    Raises:
      ValueError: for an option it does not have, or a value that it cannot have.
    """
    own, _ = separated(values, drafter)
    options = options_of(KINDS[drafter], own, drafter)
    if isinstance(options, LongSpecOptions) and options.vocabulary is not None:
        if not 1 <= options.vocabulary <= target.vocab_size:
            raise ValueError(
                f"draft_options: vocabulary={options.vocabulary} must be 1 to {target.vocab_size}, "
                "the tokens of the target; name fewer, or leave it out for all"
            )
    if isinstance(options, SmallLMOptions) and options.dtype not in (None, *DTYPES):
        raise ValueError(
            f"draft_options: dtype={options.dtype!r} must be one of {', '.join(DTYPES)}, or left "
            "out for the target's"
        )
    return options
