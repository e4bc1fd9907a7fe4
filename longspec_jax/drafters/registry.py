"""The kinds of drafts, and their options: one table, which imports none of them.

To add a kind, add its folder (or file) here and its entry below. A kind without weights has a name.
One with weights is identified by the ``architectures`` of its ``config.json``.
:mod:`longspec_jax.loading` loads drafts with this table.
"""

import importlib
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

from longspec_jax.schema import build


@dataclass(frozen=True)
class Kind:
    """Where a kind of draft lives."""

    options: str
    """Module and dataclass of its options, with a colon between. For a kind without weights this is
    the draft itself."""
    loader: str = ""
    """Module and function that load a draft with weights, such as
    :func:`longspec_jax.drafters.longspec.load.load`."""

    @property
    def options_type(self) -> type[Any]:
        """The dataclass of its options."""
        return _imported(self.options)

    @property
    def load(self) -> Any:
        """The function that loads a draft."""
        return _imported(self.loader)


def _imported(place: str) -> Any:
    module, name = place.split(":")
    return getattr(importlib.import_module(f"longspec_jax.drafters.{module}"), name)


LONGSPEC = Kind("longspec.load:LongSpecOptions", "longspec.load:load")
SMALL_LM = Kind("small_lm.load:SmallLMOptions", "small_lm.load:load")
NAMED = {
    "ngram": Kind("ngram:NgramDraft"),
    "streaming": Kind("streaming:StreamingDraft"),
    "suffix": Kind("suffix:SuffixDraft"),
}
"""Kinds without weights."""
EAGLE3 = Kind("eagle3.load:Eagle3Options", "eagle3.load:load")
EAGLE = Kind("eagle.load:EagleOptions", "eagle.load:load")
MEDUSA = Kind("medusa.load:MedusaOptions", "medusa.load:load")
TOKENSWIFT = Kind("tokenswift.load:TokenSwiftOptions", "tokenswift.load:load")
MTP = Kind("eagle.load:EagleOptions", "mtp.load:load")
PARALLEL = Kind("parallel.load:ParallelOptions", "parallel.load:load")
DFLASH = Kind("dflash.load:DFlashOptions", "dflash.load:load")
ARCHITECTURES = {
    "LongSpecDraft": LONGSPEC,
    "LongSpecParallelDraft": PARALLEL,
    "LlamaForCausalLMEagle3": EAGLE3,
    "Eagle3DraftModel": EAGLE3,
    "Eagle3Speculator": EAGLE3,
    "Qwen3Eagle3Model": EAGLE3,
    "DFlashDraftModel": DFLASH,
    "DFlash2DraftModel": DFLASH,
    "DFlashSpeculator": DFLASH,
    "DSparkDraftModel": DFLASH,
    "DSparkSpeculator": DFLASH,
    "Qwen3DSparkModel": DFLASH,
    "Gemma4DSparkModel": DFLASH,
    "MTPDraftModel": MTP,
    "MedusaModel": MEDUSA,
}
"""Kinds with weights. A whole model of a family that targets may have is a small language model.
The published LongSpec drafts name no architecture of their own, so any other one means them."""
MARKS = {
    "dflash_config": DFLASH,
    "num_nextn_predict_layers": MTP,
    "speculators_model_type": EAGLE3,
    "draft_vocab_size": EAGLE3,
    "medusa_num_heads": MEDUSA,
    "medusa_heads": TOKENSWIFT,
}
"""Keys of ``config.json`` that only this kind has, whatever the architecture."""

RETRIEVE = "retrieve"
"""The option that turns on retrieval; names of the others about it begin with it."""
_RETRIEVAL = "retrieval.draft:RetrievalOptions"
_WHERE = "draft_options: "
"""What stands before the name of an option in a message."""


def is_eagle(tensors: Set[str]) -> bool:
    """Whether these are the tensors of an EAGLE-1 or 2 draft, whose ``config.json`` has no mark."""
    return {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= tensors and not (
        {"layers.0.input_layernorm.weight", "layers.0.hidden_norm.weight"} & tensors
    )


def is_mtp(tensors: Set[str]) -> bool:
    """Whether an MTP layer is among these tensors, of a file whose ``config.json`` has no mark."""
    return any(name.startswith("mtp.") for name in tensors)


def is_name(source: Any) -> bool:
    """Whether a source is the name of a kind without weights, and no folder."""
    return isinstance(source, str) and source in NAMED


def separated(options: Mapping[str, Any], draft: str) -> tuple[Mapping[str, Any], Any]:
    """A draft's own options, and those about retrieval.

    Args:
      draft: its name or folder, for the message.

    Returns:
      The draft's own options, by name; and the
      :class:`~longspec_jax.drafters.retrieval.draft.RetrievalOptions`, or None without retrieval.

    Raises:
      ValueError: for an unknown option about retrieval, or a wrong value.
    """
    about = {name: options[name] for name in options if str(name).startswith(RETRIEVE)}
    if not about:
        return options, None
    if RETRIEVE not in about:
        raise ValueError(
            f"draft_options: {next(iter(about))} needs retrieval, which {RETRIEVE}=4096 turns on; "
            f"name {RETRIEVE} as well"
        )
    own = {name: value for name, value in options.items() if name not in about}
    return own, build(_imported(_RETRIEVAL), about, _WHERE, f"{draft} with {RETRIEVE}")


def options_of(kind: Kind, values: Mapping[str, Any], draft: str) -> Any:
    """The options of a kind, checked; of a kind without weights that is the draft.

    Args:
      draft: its name or folder, for the message.

    Raises:
      ValueError: for an unknown option, or a wrong value.
    """
    return build(kind.options_type, values, _WHERE, draft, [RETRIEVE])
