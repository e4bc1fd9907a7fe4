"""DFlash and DSpark drafts as their trainers publish them, in and out.

Every stored tensor is read, or dropped for a reason that is listed, or refused.

They count the target's layers differently, as with EAGLE-3 drafts
(:mod:`longspec_jax.drafters.checkpoints.eagle3`): speculators by the hidden states that *enter* a
layer, the others by those that *leave* it. A block of DFlash proposes after the pending token's
slot; a block of DSpark proposes from it on, one token more. JetSpec's heads (arXiv 2606.18394) are
z-lab's files with one key more, :data:`CAUSAL`.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from jax.typing import ArrayLike
from jaxtyping import PyTree

from longspec_jax.config.target import TargetConfig
from longspec_jax.drafters.checkpoints.features import (
    BLOCK_HEADS,
    DROPPED,
    LAYER_CONFIG,
    Described,
    FeatureDialect,
    FeatureFiles,
    features_of,
    own_tables,
    without_prefix,
)
from longspec_jax.drafters.dflash import (
    Confidence,
    DFlashConfig,
    DFlashDraft,
    DFlashOptions,
    DFlashParams,
    Markov,
)
from longspec_jax.drafters.dflash2 import Convolution, Selector
from longspec_jax.weights.checkpoint import Tensors
from longspec_jax.weights.hf_config import REFUSED, check_refused, hf_config, target_config
from longspec_jax.weights.json_files import JsonObject, Keys, as_raw, keys_of
from longspec_jax.weights.rope import FULL, SLIDING, inner_layers, layer_types
from longspec_jax.weights.tables import MARKOV, ROTARY, Rule, Table, bind, layer_rules, layer_sizes

LAYERS = "Qwen3ForCausalLM"
"""The family whose layers all of these drafts have, whatever the target's."""
HEADS = {"vanilla": (False, False), "gated": (True, False), "rnn": (False, True)}
"""Kinds of Markov heads: whether they have a gate, and whether a state runs along them."""
CAUSAL = "causal_head"
"""In ``dflash_config``: slots of every layer see none of the later ones (JetSpec)."""
_REFUSED = {
    "use_swa": "windows of another kind",
    "swa_window_size": "windows of another kind",
    "final_logit_softcapping": "a soft cap on logits",
    "output_multiplier": "a factor on logits",
    "input_embedding_scale": "a factor on embeddings",
}
"""Keys that change the arithmetic, and what they ask for. A 1 is a factor that changes nothing."""
_FACTORS = "output_multiplier", "input_embedding_scale"
_OF_CONVOLUTION: Keys = {"taps": "conv_kernel_size", "group": "conv_group_size"}
_OF_SELECTOR: Keys = {"rank": "selector_rank", "candidates": "selector_top_k"}
_DFLASH2 = keys_of(_OF_CONVOLUTION) + keys_of(_OF_SELECTOR)
"""Keys of DFlash 2, whose files have all of them."""
_OF_DFLASH2 = "candidate_selector.", "attention_conv.", "mlp_conv."
"""Parts of the names of its tensors, by which a file is one whatever it says."""
_OF_OTHERS = {
    "refiner_head.": "XPress",
    "hidden_dim_adapter": "JetSpec with an adapter of widths",
}
"""Parts of tensors' names, and the only drafts that have them, whatever their file says."""


ZLAB = FeatureDialect("z-lab and SpecForge")
DEEPSPEC = FeatureDialect("DeepSpec")
SPECULATORS = FeatureDialect("speculators", entering=True)
DIALECTS = (ZLAB, DEEPSPEC, SPECULATORS)


def dialect_of(raw: JsonObject, tensors: Iterable[str]) -> FeatureDialect:
    """The dialect of a draft, by its ``config.json``.

    Args:
      raw: the file.
      tensors: names of the tensors next to it.

    Raises:
      ValueError: for a draft of another kind, by its file or by its tensors.
    """
    for name in tensors:
        for part, kind in _OF_OTHERS.items():
            if part in name:
                raise ValueError(
                    f"{raw.origin}: the weights next to it hold {name}, which drafts of {kind} "
                    "have; they compute more than DFlash and DSpark drafts and are not supported "
                    "yet; load another draft"
                )
    names = raw.texts("architectures")
    if other := [name for name in names if name.startswith("Gemma4")]:
        raise raw.error(
            "architectures",
            f"is not supported: {other[0]} computes more than the layers of DFlash and DSpark "
            "drafts for Qwen3 and Llama",
            "load another draft",
        )
    if raw.has("speculators_model_type"):
        if raw.text("speculators_model_type", "") not in ("dflash", "dspark", "dflash2"):
            raise raw.error(
                "speculators_model_type",
                "must be 'dflash', 'dspark' or 'dflash2'",
                "load another draft",
            )
        return SPECULATORS
    return ZLAB if raw.has("dflash_config") else DEEPSPEC


def is_dflash2(raw: JsonObject, tensors: Iterable[str]) -> bool:
    """Whether a draft is one of DFlash 2: by its tensors, its keys or its name.

    Raises:
      ValueError: if it has the name or some of the tensors or keys, and not all of the keys.
    """
    holders = [raw.part("dflash_config"), raw] if raw.has("dflash_config") else [raw]
    keys = [key for key in _DFLASH2 if any(holder.has(key) for holder in holders)]
    marked = [name for name in tensors if any(part in name for part in _OF_DFLASH2)]
    marked += [name for name in raw.texts("architectures") if name.startswith("DFlash2")]
    marked += [name for name in [raw.text("speculators_model_type", "")] if name == "dflash2"]
    if not marked and not keys:
        return False
    if missing := [key for key in _DFLASH2 if key not in keys]:
        raise ValueError(
            f"{raw.origin}: the file has {(marked + keys)[0]}, which drafts of DFlash 2 have, and "
            f"lacks {', '.join(missing)}; use the config.json that was saved with the weights"
        )
    return True


def draft_config(
    raw: JsonObject,
    dialect: FeatureDialect,
    target: TargetConfig,
    *,
    dflash2: bool = False,
    layers: tuple[int, ...] | None = None,
) -> DFlashConfig:
    """The draft that a ``config.json`` describes.

    Args:
      raw: the parsed file.
      dialect: whose it is.
      target: the target that it will draft for.
      dflash2: as in :func:`is_dflash2`.
      layers: as ``features`` of the configuration; as the file says if absent.

    Raises:
      ValueError: if the file describes what is not computed here.
    """
    part = inner_layers(raw, LAYER_CONFIG) if dialect is SPECULATORS else raw
    own = raw.part("dflash_config") if dialect is ZLAB else raw
    for holder in (own, raw, part):
        for key, what in _REFUSED.items():
            value = holder.values.get(key)
            if value and not (value == 1 and value is not True and key in _FACTORS):
                raise holder.error(key, f"is not supported: {what}", "load another draft")
    for holder in (raw, part):
        if holder.values.get(CAUSAL):
            raise holder.error(
                CAUSAL,
                "is not supported outside of dflash_config, where JetSpec's files have it",
                "load another draft",
            )
    trunk = _trunk(part, target.dtype)
    dspark = raw.text("speculators_model_type", "dspark") == "dspark" and dialect is not ZLAB
    if dialect is ZLAB:
        projector = own.text("projector_type", "dflash")
        if projector not in ("dflash", "dspark"):
            raise own.error("projector_type", "must be dflash or dspark", "load another draft")
        dspark = projector == "dspark"
    windows = _windows(part, trunk.num_layers)
    both = own.assuming({key: raw.values[key] for key in _DFLASH2 if raw.has(key)})
    markov = _markov(own, dspark)
    confident = own.flag("enable_confidence_head", dspark and dialect is SPECULATORS)
    found = dict(
        trunk=trunk,
        target_width=part.whole(
            "target_hidden_size", raw.whole("target_hidden_size", trunk.model_width)
        ),
        target_layers=raw.whole("num_target_layers", target.num_layers),
        proposable=raw.whole("draft_vocab_size", trunk.vocab_size),
        features=layers or hidden_layers(own, dialect, target.num_layers, trunk.num_layers),
        block=(own if own.has("block_size") else raw).whole("block_size"),
        mask_token=own.whole("mask_token_id", least=0),
        from_pending=raw.flag("sample_from_anchor", dspark),
        windows=windows,
        causal=_causal(raw, own, dialect, windows),
        markov=markov,
        confidence=Confidence(own.flag("confidence_head_with_markov", markov is not None))
        if confident
        else None,
        convolution=both.made(Convolution, _OF_CONVOLUTION) if dflash2 else None,
        selector=both.made(Selector, _OF_SELECTOR) if dflash2 else None,
    )
    return raw.build(DFlashConfig, found, {})


def _trunk(part: JsonObject, dtype: str) -> TargetConfig:
    """The layers. The file may name the target's family and code of its own, which is never run."""
    check_refused(part, REFUSED)
    layers = {**part.values, "architectures": [LAYERS], "model_type": "qwen3"}
    layers |= {"use_sliding_window": False, "auto_map": None}
    return target_config(JsonObject(layers, part.origin), dtype)


def hidden_layers(
    own: JsonObject, dialect: FeatureDialect, target_layers: int, draft_layers: int
) -> tuple[int, ...]:
    """The layers after which hidden states are taken, by the counting of the dialect."""
    key = "aux_hidden_state_layer_ids" if dialect is SPECULATORS else "target_layer_ids"
    if not own.has(key):
        return evenly(target_layers, draft_layers)
    return features_of(own, key, target_layers, dialect)


def evenly(target_layers: int, draft_layers: int) -> tuple[int, ...]:
    """The layers of z-lab's code where the file names none: one for each of the draft's."""
    if draft_layers == 1:
        return (target_layers // 2,)
    span = target_layers - 4
    return tuple(round(1 + layer * span / (draft_layers - 1)) for layer in range(draft_layers))


def _windows(part: JsonObject, layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer, if it has one."""
    kinds = layer_types(part, [FULL] * layers, SLIDING)
    return tuple(part.whole("sliding_window") if kind == SLIDING else None for kind in kinds)


def _causal(
    raw: JsonObject, own: JsonObject, dialect: FeatureDialect, windows: Iterable[int | None]
) -> tuple[bool, ...]:
    """Whether slots see none of the later ones: where the window slides, unless the file says.

    Raises:
      ValueError: if a file says both of all layers.
    """
    every_slot = raw.text("speculators_model_type", "") == "dflash2"
    slides, everywhere = not raw.flag("sliding_window_non_causal", every_slot), False
    if dialect is ZLAB:
        everywhere = own.flag(CAUSAL, False)
        for holder, key in ((raw, "is_causal"), (own, "causal")):
            slides = holder.flag(key, slides)
            if everywhere and not holder.flag(key, True):
                raise holder.error(
                    key,
                    f"contradicts {CAUSAL}=True of the same file: slots either see the later ones "
                    "or do not",
                )
    return tuple(everywhere or (window is not None and slides) for window in windows)


def _markov(own: JsonObject, dspark: bool) -> Markov | None:
    rank = own.whole("markov_rank", 0, least=0) if dspark else 0
    kind = own.text("markov_head_type", "vanilla")
    if kind not in HEADS:
        raise own.error("markov_head_type", f"must be one of {', '.join(HEADS)}")
    gated, recurrent = HEADS[kind]
    return Markov(rank, gated, recurrent) if rank else None


def hf_draft_config(config: DFlashConfig) -> dict[str, Any]:
    """A ``config.json`` as z-lab writes it, which :func:`draft_config` reads as ``config``."""
    heads = _raw_heads(config)
    architecture = "DFlashDraftModel" if config.selector is None else "DFlash2DraftModel"
    own = {"target_layer_ids": [*config.features], "mask_token_id": config.mask_token} | heads
    dspark = bool(heads) or config.from_pending
    if all(config.causal) and None in config.windows:
        own[CAUSAL] = True
    elif any(config.windows):
        own["causal"] = any(config.causal)
    if dspark:
        own["projector_type"] = "dspark"
    raw = hf_config(config.trunk) | _raw_windows(config)
    if config.convolution is not None and config.selector is not None:
        own |= as_raw(config.convolution, _OF_CONVOLUTION) | as_raw(config.selector, _OF_SELECTOR)
    raw |= {"architectures": [architecture], "block_size": config.block}
    raw["num_target_layers"] = config.target_layers  # Without it z-lab's class does not load.
    if config.from_pending != dspark:
        raw["sample_from_anchor"] = config.from_pending
    if config.proposable != config.vocab_size:
        raw["draft_vocab_size"] = config.proposable
    if config.target_width != config.model_width:
        raw["target_hidden_size"] = config.target_width
    return raw | {"dflash_config": own}


def _raw_windows(config: DFlashConfig) -> dict[str, Any]:
    kinds = [FULL if each is None else SLIDING for each in config.windows]
    windows = [each for each in config.windows if each is not None]
    slides = {"sliding_window": windows[0], "use_sliding_window": True} if windows else {}
    return {"layer_types": kinds, **slides}


def _raw_heads(config: DFlashConfig) -> dict[str, Any]:
    """Keys about the heads of DSpark; none for DFlash."""
    if config.markov is None and config.confidence is None:
        return {}
    found: dict[str, Any] = {"markov_rank": 0, "enable_confidence_head": bool(config.confidence)}
    if config.markov is not None:
        switches = config.markov.gated, config.markov.recurrent
        kind = next(kind for kind, each in HEADS.items() if each == switches)
        found |= {"markov_rank": config.markov.rank, "markov_head_type": kind}
    if config.confidence is not None:
        found["confidence_head_with_markov"] = config.confidence.with_markov
    return found


_TRUNK = (
    Rule("fuse/kernel", "C D", (("fc.weight", "D C"),)),
    Rule("hidden_norm/scale", "D", (("hidden_norm.weight", "D"),)),
    Rule("final_norm/scale", "D", (("norm.weight", "D"),)),
)
_CONFIDENCE = (
    Rule("confidence/kernel", "O I", (("confidence_head.proj.weight", "O I"),)),
    Rule("confidence/bias", "O", (("confidence_head.proj.bias", "O"),)),
)
_SELECTOR = (
    Rule("selector/embedding", "V R", (("candidate_selector.predecessor_codebook", "V R"),)),
    Rule("selector/head", "V R", (("candidate_selector.successor_codebook", "V R"),)),
    Rule("selector/fuse/kernel", "D R", (("candidate_selector.hidden_projection.weight", "R D"),)),
)


def _convolutions() -> tuple[Rule, ...]:
    """Rules of a layer's convolutions: two sides ``S`` of ``T`` taps, ``L`` outputs."""
    rules = ()
    for name in ("attention_conv", "mlp_conv"):
        projection = f"{name}.kernel_projection.weight"
        rules += (
            Rule(f"{name}/base", "S T D", ((f"{name}.base_kernel", "S T D"),)),
            Rule(f"{name}/fuse/kernel", "D L", ((projection, "L D"),)),
        )
    return rules


def draft_table(config: DFlashConfig, *, embedding: bool, head: bool) -> Table:
    """The tensors of a draft, and of the tables that are stored with it."""
    sizes = layer_sizes(config.trunk) | {
        "C": len(config.features) * config.target_width,
        "V": config.vocab_size,
        "v": config.proposable,
        "O": 1,
        "I": config.confidence_width,
    }
    rules = _TRUNK + own_tables(embedding=embedding, head=head)
    if config.markov is not None:
        rules += MARKOV
        inputs, outputs = config.markov.joint_shape(config.model_width)
        sizes |= {"R": config.markov.rank, "J": inputs, "P": outputs}
        if config.markov.gated or config.markov.recurrent:
            name = f"markov_head.{'gate' if config.markov.gated else 'joint'}_proj"
            rules += (
                Rule("markov/fuse/kernel", "J P", ((f"{name}.weight", "P J"),)),
                Rule("markov/fuse/bias", "P", ((f"{name}.bias", "P"),)),
            )
    if config.confidence is not None:
        rules += _CONFIDENCE
    of_layer = layer_rules(config.trunk)
    if (selector := config.selector) is not None and (conv := config.convolution) is not None:
        rules, of_layer = rules + _SELECTOR, of_layer + _convolutions()
        groups = config.model_width // conv.group
        sizes |= {"R": selector.rank, "S": 2, "T": conv.taps, "L": 2 * conv.taps * groups}
    leaves = [bind(rule, sizes) for rule in rules]
    for index in range(config.trunk.num_layers):
        ours, theirs = f"layers_{index}/", f"layers.{index}."
        leaves += [bind(rule, sizes, ours, theirs) for rule in of_layer]
    return Table(tuple(leaves), ROTARY | DROPPED)


def _described(
    raw: JsonObject, tensors: Tensors, target: TargetConfig, options: DFlashOptions
) -> Described[DFlashConfig]:
    tensors = without_prefix(tensors)
    dialect, dflash2 = dialect_of(raw, tensors), is_dflash2(raw, tensors)
    config = draft_config(raw, dialect, target, dflash2=dflash2, layers=options.features)
    embedding, head = "embed_tokens.weight" in tensors, "lm_head.weight" in tensors
    return Described(config, draft_table(config, embedding=embedding, head=head), tensors)


def _bound(
    layer: dict[str, Any],
    config: DFlashConfig,
    target: TargetConfig,
    target_params: PyTree,
    vocabulary: ArrayLike | None,
    tied: bool,
) -> DFlashParams:
    markov, confidence, selector = (layer.pop(name, None) for name in BLOCK_HEADS)
    params = DFlashParams.bound(layer, config, target, target_params, vocabulary)
    return replace(params, markov=markov, confidence=confidence, selector=selector)


FILES = FeatureFiles(
    _described,
    _bound,
    DFlashDraft.bind,
    DFlashOptions,
    lambda config: config.trunk.max_positions if None in config.windows else None,
    hf_draft_config,
    lambda config, embedding, head: draft_table(config, embedding=embedding, head=head),
)
"""z-lab's dialect is written, which SGLang and vLLM read."""
load, load_draft, save_draft = FILES.load, FILES.load_draft, FILES.save_draft
