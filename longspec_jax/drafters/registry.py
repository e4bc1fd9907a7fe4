"""The kinds of drafts, and their options: one table, which imports none of them.

To add a kind, add its file here and its entry below. A kind without weights has a name.
One with weights is identified by the ``architectures`` of its ``config.json``. A kind of any other
module is named with it, ``MODULE:FOLDER``: see :func:`split_module`.
:mod:`longspec_jax.loading` loads drafts with this table.
"""

import importlib
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
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
    :func:`longspec_jax.drafters.checkpoints.longspec.load`."""
    package: str = "longspec_jax.drafters"
    """Of these modules; empty where they are named in full."""

    @property
    def options_type(self) -> type[Any]:
        """The dataclass of its options."""
        return self._imported(self.options)

    @property
    def load(self) -> Any:
        """The function that loads a draft."""
        return self._imported(self.loader)

    def _imported(self, place: str) -> Any:
        module, name = place.split(":")
        dotted = f"{self.package}.{module}" if self.package else module
        return getattr(importlib.import_module(dotted), name)


LONGSPEC = Kind("longspec:LongSpecOptions", "checkpoints.longspec:load")
SMALL_LM = Kind("small_lm:SmallLMOptions", "checkpoints.small_lm:load")
NAMED = {
    "ngram": Kind("ngram:NgramDraft"),
    "streaming": Kind("streaming:StreamingDraft"),
    "suffix": Kind("suffix:SuffixDraft"),
}
"""Kinds without weights."""
EAGLE3 = Kind("eagle3:Eagle3Options", "checkpoints.eagle3:load")
PEAGLE = Kind("peagle:PEagleOptions", "checkpoints.peagle:load")
EAGLE = Kind("eagle:EagleOptions", "checkpoints.eagle:load")
MTP = Kind("eagle:EagleOptions", "checkpoints.mtp:load")
OWN = "mtp"
"""Names the MTP layer among the target's own tensors."""
PARALLEL = Kind("parallel:ParallelOptions", "checkpoints.parallel:load")
DFLASH = Kind("dflash:DFlashOptions", "checkpoints.dflash:load")
ASSISTANT = Kind("assistant:AssistantOptions", "checkpoints.assistant:load")
ARCHITECTURES = {
    "LongSpecDraft": LONGSPEC,
    "LongSpecParallelDraft": PARALLEL,
    "LlamaForCausalLMEagle3": EAGLE3,
    "Eagle3DraftModel": EAGLE3,
    "Eagle3Speculator": EAGLE3,
    "Qwen3Eagle3Model": EAGLE3,
    "PEagleDraftModel": PEAGLE,
    "PEagleSpeculator": PEAGLE,
    "DFlashDraftModel": DFLASH,
    "DFlash2DraftModel": DFLASH,
    "DFlashSpeculator": DFLASH,
    "DSparkDraftModel": DFLASH,
    "DSparkSpeculator": DFLASH,
    "Qwen3DSparkModel": DFLASH,
    "Gemma4DSparkModel": DFLASH,
    "MTPDraftModel": MTP,
    "Gemma4AssistantForCausalLM": ASSISTANT,
    "Gemma4UnifiedAssistantForCausalLM": ASSISTANT,
}
"""Kinds with weights. A whole model of a family that targets may have is a small language model.
The published LongSpec drafts name no architecture of their own, so any other one means them."""
MARKS = {
    "dflash_config": DFLASH,
    "num_nextn_predict_layers": MTP,
    "ptd_token_id": PEAGLE,
    "speculators_model_type": EAGLE3,
    "draft_vocab_size": EAGLE3,
}
"""Keys of ``config.json`` that only this kind has, whatever the architecture."""
MASK_TOKENS = "mask_token_id", "pard_token", "ptd_token_id"
"""Keys of the token in mask slots, in the order in which they count."""
CONTRIBUTED = {
    "MedusaModel": "contrib.medusa",
    "medusa_num_heads": "contrib.medusa",
    "medusa_heads": "contrib.tokenswift",
}
"""Architectures and keys of the kinds in ``contrib/`` of a checkout, so that they are refused with
their modules' names."""

_WITH_MODULE = re.compile(r"((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*):(?!//)(.+)")
RETRIEVE = "retrieve"
"""The option that turns on retrieval; names of the others about it begin with it."""
_RETRIEVAL = Kind("retrieval.hierarchy:RetrievalOptions")
_WHERE = "draft_options: "
"""What stands before the name of an option in a message."""


def kind_of_config(names: Sequence[str], raw: Mapping[str, Any]) -> Kind | None:
    """The kind that a ``config.json`` names, or is marked with; None if it does neither.

    Args:
      names: its architectures.
      raw: all of it.
    """
    kinds = [ARCHITECTURES[name] for name in names if name in ARCHITECTURES]
    kinds += [kind for key, kind in MARKS.items() if raw.get(key)]
    # P-EAGLE's trainers write the marks of EAGLE-3, and a mask token.
    parallel = any(raw.get(key) is not None for key in ("dflash_config", *MASK_TOKENS))
    return PEAGLE if kinds[:1] == [EAGLE3] and parallel else next(iter(kinds), None)


def kind_of_tensors(tensors: Set[str], *, whole: bool, own: bool) -> Kind:
    """The kind of a draft whose ``config.json`` does not tell.

    Args:
      tensors: their names.
      whole: whether they are a whole model of a known family.
      own: whether they are the target's own: an MTP layer among them drafts for it.
    """
    if any(name.startswith("mtp.") for name in tensors) and (own or not whole):
        return MTP
    if whole:
        return SMALL_LM
    norms = {"layers.0.input_layernorm.weight", "layers.0.hidden_norm.weight"}
    eagle = {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= tensors and not norms & tensors
    return EAGLE if eagle else LONGSPEC


def is_name(source: object) -> bool:
    """Whether a source is a name, and no folder: of a kind without weights, or :data:`OWN`."""
    return isinstance(source, str) and source in {*NAMED, OWN}


def split_module(source: str | Path) -> tuple[str, str | Path]:
    """The module of a source ``MODULE:FOLDER`` and the folder or hub id; no module for others."""
    if not isinstance(source, str) or Path(source).expanduser().exists():
        return "", source
    found = _WITH_MODULE.fullmatch(source)
    return (found[1], found[2]) if found else ("", source)


def kind_of_module(module: str) -> Kind:
    """The kind of drafts that a module brings, its ``KIND``; the module is imported.

    Raises:
      ValueError: if there is no such module or it has none.
    """
    try:
        kind = getattr(importlib.import_module(module), "KIND", None)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{module}:... names the module of a draft, and it cannot be imported ({error}); run "
            "from the folder that has it, or set PYTHONPATH"
        ) from error
    if not isinstance(kind, Kind):
        raise ValueError(
            f"{module}:... names the module of a draft, and {module} has no KIND; "
            "docs/guides/drafts.md says what such a module has"
        )
    return kind


def separated(options: Mapping[str, Any], draft: str) -> tuple[Mapping[str, Any], Any]:
    """A draft's own options, and those about retrieval.

    Args:
      draft: its name or folder, for the message.

    Returns:
      The draft's own options, by name; and those of retrieval
      (:class:`~longspec_jax.drafters.retrieval.hierarchy.RetrievalOptions`), or None without it.

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
    return own, build(_RETRIEVAL.options_type, about, _WHERE, f"{draft} with {RETRIEVE}")


def options_of(kind: Kind, values: Mapping[str, Any], draft: str) -> Any:
    """The options of a kind, checked; of a kind without weights that is the draft.

    Args:
      draft: its name or folder, for the message.

    Raises:
      ValueError: for an unknown option, or a wrong value.
    """
    return build(kind.options_type, values, _WHERE, draft, [RETRIEVE])
