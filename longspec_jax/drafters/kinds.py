"""Which kinds of drafts there are: one table, that imports none of them.

A kind without weights has a name. One with weights is told by the ``architectures`` of its
``config.json``. What they stand for is made by :mod:`longspec_jax.drafters.registry`.
"""

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Kind:
    """Where a kind of draft lives."""

    maker: str
    """Module and function, a colon between them. Of a kind without weights ``options -> draft``;
    else as :func:`longspec_jax.drafters.longspec.load.load`."""
    options: str
    """Module and dataclass of its options."""

    @property
    def make(self) -> Any:
        """The function that makes a draft."""
        return _named(self.maker)

    @property
    def options_type(self) -> type[Any]:
        """The dataclass of its options."""
        return _named(self.options)


def _named(place: str) -> Any:
    module, name = place.split(":")
    return getattr(importlib.import_module(f"longspec_jax.drafters.{module}"), name)


LONGSPEC = Kind("longspec.load:load", "longspec.options:LongSpecOptions")
NAMED = {
    "ngram": Kind("ngram:NgramDraft", "ngram:NgramOptions"),
    "streaming": Kind("streaming:StreamingDraft", "streaming:StreamingOptions"),
}
"""Kinds without weights."""
SMALL_LM = Kind("small_lm.load:load", "small_lm.options:SmallLMOptions")
ARCHITECTURES = {
    "LongSpecDraft": LONGSPEC,
    "LlamaForCausalLM": SMALL_LM,
    "MistralForCausalLM": SMALL_LM,
    "Qwen2ForCausalLM": SMALL_LM,
    "Qwen3ForCausalLM": SMALL_LM,
}
"""Kinds with weights. The published LongSpec drafts name no architecture of their own, so that
whatever is not listed is taken for one of them."""


def is_name(source: Any) -> bool:
    """Whether a source is the name of a kind without weights: then no folder is meant."""
    return isinstance(source, str) and source in NAMED
