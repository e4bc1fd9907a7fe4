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

    options: str
    """Module and dataclass of its options, a colon between them. A draft without weights is made of
    its options alone: there it is the draft itself."""
    loader: str = ""
    """Module and function that loads one with weights, as
    :func:`longspec_jax.drafters.longspec.load.load`."""

    @property
    def options_type(self) -> type[Any]:
        """The dataclass of its options."""
        return _named(self.options)

    @property
    def load(self) -> Any:
        """The function that loads a draft."""
        return _named(self.loader)


def _named(place: str) -> Any:
    module, name = place.split(":")
    return getattr(importlib.import_module(f"longspec_jax.drafters.{module}"), name)


LONGSPEC = Kind("longspec.options:LongSpecOptions", "longspec.load:load")
NAMED = {
    "ngram": Kind("ngram:NgramDraft"),
    "streaming": Kind("streaming:StreamingDraft"),
}
"""Kinds without weights."""
SMALL_LM = Kind("small_lm.options:SmallLMOptions", "small_lm.load:load")
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
