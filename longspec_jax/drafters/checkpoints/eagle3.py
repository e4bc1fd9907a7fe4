"""EAGLE-3 drafts as the four families of trainers publish them, in and out.

Every stored tensor is read, or dropped for a reason that is listed, or refused.

The same key means different things in them. ``eagle_aux_hidden_state_layer_ids`` counts the layers
that a hidden state *enters* where speculators writes it, and those that it *leaves* where SpecForge
does. ``norm_output`` of speculators feeds the normed output to the next level; SpecForge's only
says whether a norm precedes the LM head. So a file is read by its family, and a file that bears
marks of two is refused with both readings.
"""

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from longspec_jax.checks import is_whole, shown
from longspec_jax.config.layers import RopeScaling, YarnRopeScaling, yarn_magnitude
from longspec_jax.config.target import TargetConfig
from longspec_jax.drafters.checkpoints.features import (
    DROPPED,
    LAYER_CONFIG,
    QKV,
    Described,
    FeatureDialect,
    FeatureFiles,
    counting,
    features_of,
    llama_rules,
    own_tables,
    without_prefix,
)
from longspec_jax.drafters.eagle3 import Eagle3Config, Eagle3Draft, Eagle3Options, Eagle3Params
from longspec_jax.weights.checkpoint import Tensors
from longspec_jax.weights.hf_config import (
    LAYER,
    REFUSED,
    check_refused,
    layer_fields,
    raw_layer,
)
from longspec_jax.weights.json_files import JsonObject
from longspec_jax.weights.rope import (
    inner_layers,
    raw_rope,
    rope_entry,
    rope_scaling,
    rope_theta,
    scaling_entry,
)
from longspec_jax.weights.tables import ROTARY, Rule, Table, bind, layer_sizes

MIDLAYER, FIRST_LAYER = "midlayer.", "layers.0."
"""What the names of the layer's tensors begin with."""
IDS = "eagle_aux_hidden_state_layer_ids"
_FED_BACK = "return_hidden_post_norm"
"""Of ``eagle_config``, as TensorRT-LLM calls it: whether the normed output is fed back."""
AUTHORS_BASE = 10000.0
"""Rotary base of the authors' code where positions are scaled, whatever ``rope_theta`` says."""
USUAL_POSITIONS = 2048
"""Positions of a draft whose file does not say: what the authors train on."""


AUTHORS = FeatureDialect("the authors' code", False, "no architecture of its own", MIDLAYER)
SPECFORGE = FeatureDialect("SpecForge", False, "an architecture named Eagle3", MIDLAYER)
SPECULATORS = FeatureDialect("speculators", True, "speculators_model_type", FIRST_LAYER)
DEEPSPEC = FeatureDialect("DeepSpec", False, "target_layer_ids", FIRST_LAYER)
DIALECTS = (AUTHORS, SPECFORGE, SPECULATORS, DEEPSPEC)


def dialect_of(raw: JsonObject, tensors: Iterable[str]) -> FeatureDialect:
    """The dialect of a draft.

    Args:
      raw: its ``config.json``.
      tensors: names of its tensors.

    Raises:
      ValueError: for a draft of another kind, or if file and tensors are of two dialects.
    """
    kind = raw.text("speculators_model_type", "eagle3")
    if kind != "eagle3":
        raise raw.error(
            "speculators_model_type", "is not supported, only 'eagle3'", "load another draft"
        )
    names = raw.texts("architectures")
    dialect = AUTHORS
    if raw.has("speculators_model_type"):
        dialect = SPECULATORS
    elif raw.has("target_layer_ids"):
        dialect = DEEPSPEC
    elif any("eagle3" in name.lower() for name in names):
        dialect = SPECFORGE
    prefixes = {prefix for prefix in (MIDLAYER, FIRST_LAYER) if _begins(tensors, prefix)}
    if prefixes != {dialect.layer}:
        found = " and ".join(f"{prefix}*" for prefix in sorted(prefixes)) or "neither"
        others = ", ".join(each.name for each in DIALECTS if each.layer in prefixes) or "none"
        raise ValueError(
            f"{raw.origin}: by this file ({dialect.mark}) the draft is written as {dialect.name} "
            f"writes it, with tensors {dialect.layer}*; its weights have {found}, as of {others}. "
            "Use the config.json that was saved with the weights"
        )
    return dialect


def _begins(tensors: Iterable[str], prefix: str) -> bool:
    return any(name.startswith(prefix) for name in tensors)


def draft_config(
    raw: JsonObject,
    dialect: FeatureDialect,
    tensors: Iterable[str],
    target: TargetConfig,
    options: Eagle3Options,
) -> Eagle3Config:
    """The draft that a ``config.json`` describes.

    Args:
      raw: the parsed file.
      dialect: whose it is.
      tensors: names of the tensors next to it, which show whether there are biases and head norms.
      target: the target that it will draft for.
      options: of the draft, which may name layers and the rotary base instead of the file.

    Raises:
      ValueError: if the file describes what is not computed here, or can be read in two ways.
    """
    part = layers_of(raw, dialect)
    # Some files have their target's number. The tensors tell how many layers there are.
    others = {name.split(".")[1] for name in tensors if name.startswith("layers.")} - {"0"}
    if others or part.whole("num_hidden_layers", 1) not in (1, target.num_layers):
        found = f"layers.{min(others)}.*" if others else "one layer"
        rule = f"is not supported: one layer is, and the weights have {found}"
        raise part.error("num_hidden_layers", rule, "load another draft")
    fields = draft_fields(raw, part, dialect, tensors, target, options)
    return part.build(Eagle3Config, fields, LAYER)


def layers_of(raw: JsonObject, dialect: FeatureDialect) -> JsonObject:
    """Where a file of this dialect describes the draft's layers; refuses what is not computed."""
    part = inner_layers(raw, LAYER_CONFIG) if dialect is SPECULATORS else raw
    who = "an EAGLE-3 draft"
    part.require(("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"), who)
    check_refused(part, REFUSED)
    return part


def draft_fields(
    raw: JsonObject,
    part: JsonObject,
    dialect: FeatureDialect,
    tensors: Iterable[str],
    target: TargetConfig,
    options: Eagle3Options,
) -> dict[str, Any]:
    """Fields of the configuration that a ``config.json`` describes.

    Args:
      part: of :func:`layers_of`; other arguments and errors as in :func:`draft_config`.
    """
    if part.flag("mlp_bias", False):
        raise part.error(
            "mlp_bias", "is not supported: no biases are added in the MLP", "load another"
        )
    found = layer_fields(part)
    vocab_size = part.whole("vocab_size")
    scaling = _scaling(part, dialect)
    theta = options.rope_theta
    if theta is None:
        theta = authors_base(part, scaling) if dialect is AUTHORS else rope_theta(part)
    positions = part.whole("max_position_embeddings", USUAL_POSITIONS)
    if isinstance(scaling, YarnRopeScaling):
        positions = max(positions, int(scaling.factor * scaling.original_max_positions))
    normed = raw.flag("norm_output", dialect is SPECFORGE)
    feeds = dialect is not SPECFORGE
    eagle = raw.part("eagle_config")
    fed_back = eagle.flag(_FED_BACK, normed and feeds)
    kind = part.text("model_type", "")
    head_norm = f"{dialect.layer}self_attn.q_norm.weight" in tensors
    return found | dict(
        target_width=raw.whole("target_hidden_size", found["model_width"]),
        vocab_size=vocab_size,
        proposable=raw.whole("draft_vocab_size", vocab_size),
        features=options.features or _features(raw, dialect, target.num_layers),
        max_positions=positions,
        rope_theta=theta,
        rope_scaling=scaling,
        dtype=target.dtype,
        window=_window(part),
        qkv_bias=f"{dialect.layer}self_attn.q_proj.bias" in tensors,
        # SpecForge's drafts for Qwen3 may say qwen3 and are Llama layers all the same.
        qk_norm=head_norm or (kind == "qwen3" and dialect.layer == FIRST_LAYER),
        norm_before_residual=raw.flag("norm_before_residual", False),
        # vLLM looks here first.
        norm_before_fuse=eagle.flag("norm_before_fc", raw.flag("norm_before_fc", False)),
        feature_norms=raw.flag("fc_norm", False),
        normed_feedback=fed_back,
        normed_head=normed or feeds,
    )


def authors_base(raw: JsonObject, scaling: RopeScaling) -> float:
    """The rotary base of a draft that the authors' code trained.

    That code ignores ``rope_theta`` where it scales positions, without a warning. It never writes
    the base into the entry, so a base that stands there is used.
    """
    base = rope_theta(raw)
    if scaling is None or rope_entry(raw).has("rope_theta"):
        return base
    if base != AUTHORS_BASE and raw.has("rope_theta"):
        warnings.warn(
            f"{raw.origin}: rope_theta={base:g} is not used, since the authors' code rotates by "
            f"{AUTHORS_BASE:g} where positions are scaled; the draft option rope_theta={base:g} "
            "uses it",
            stacklevel=2,
        )
    return AUTHORS_BASE


def _features(raw: JsonObject, dialect: FeatureDialect, layers: int) -> tuple[int, ...]:
    """The layers after which hidden states are taken, by the counting of the dialect."""
    nested = raw.part("eagle_config")
    places = {"": raw.has(IDS), "eagle_config, ": nested.has(IDS)}
    foreign = raw.has(IDS) if dialect is not SPECULATORS else nested.has(IDS)
    if foreign:
        ids = _ids(raw if raw.has(IDS) else nested, IDS)
        where = "".join(place for place, found in places.items() if found)
        enter, leave = counting(entering=True), counting(entering=False)
        raise ValueError(
            f"{raw.origin}, {where}{IDS}={shown(list(ids))}: {dialect.name} does not write the key "
            f"there. Written by speculators it means {enter} {_listed(ids)}, which "
            f"is layers={_listed(each - 1 for each in ids)}; written by SpecForge it means "
            f"{leave} {_listed(ids)}, layers={_listed(ids)}. Name one of them with "
            "the draft option layers"
        )
    holder, key = (raw if dialect is SPECULATORS else nested), IDS
    if dialect is DEEPSPEC:
        holder, key = raw, "target_layer_ids"
    if not holder.has(key):
        return 1, layers // 2 - 1, layers - 4
    return features_of(holder, key, layers, dialect)


def _ids(raw: JsonObject, key: str) -> tuple[int, ...]:
    found = raw.values[key]
    if not isinstance(found, list) or not all(map(is_whole, found)):
        raise raw.error(key, "must be a list of layers")
    return tuple(found)


def _listed(ids: Iterable[int]) -> str:
    return ",".join(map(str, ids))


def _window(part: JsonObject) -> int | None:
    """The sliding window of the draft's layer, if it has one."""
    kinds = part.texts("layer_types")
    on = "sliding_attention" in kinds if kinds else part.flag("use_sliding_window", False)
    return part.whole("sliding_window") if on else None


def _scaling(part: JsonObject, dialect: FeatureDialect) -> RopeScaling:
    """The rotary scaling; that of YaRN is read as transformers does where speculators wrote it.

    Others give the factor and the range, and take no single scale; SpecForge divides the two in any
    case, where transformers does if neither is zero.
    """
    kind, entry = scaling_entry(part)
    if kind != "yarn" or dialect is SPECULATORS:
        return rope_scaling(part)
    factor, original = entry.number("factor", least=1), "original_max_position_embeddings"
    said = {**entry.values, original: (entry if entry.has(original) else part).whole(original)}
    scales = [entry.number(key, 0.0) for key in ("mscale", "mscale_all_dim")]
    if not entry.has("attention_factor"):
        divides = all(scales) or (dialect is SPECFORGE and any(scales))
        over, under = (yarn_magnitude(factor, each) for each in scales)
        said["attention_factor"] = over / under if divides else yarn_magnitude(factor)
    return rope_scaling(JsonObject({"rope_scaling": said | {"mscale": None}}, part.origin))


def hf_draft_config(config: Eagle3Config) -> dict[str, Any]:
    """A ``config.json`` as SpecForge writes it, which :func:`draft_config` reads as ``config``."""
    outputs: dict[str, Any] = {IDS: [*config.features]}
    if config.normed_feedback:
        outputs[_FED_BACK] = True
    wider = config.target_width != config.model_width
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_config": outputs,
        "model_type": "qwen3" if config.qk_norm else "llama",
        "vocab_size": config.vocab_size,
        "num_hidden_layers": 1,
        **raw_layer(config),
        "max_position_embeddings": config.max_positions,
        "attention_bias": config.qkv_bias,
        **_raw_rope(config),
        **_raw_window(config),
        "draft_vocab_size": config.proposable,
        "torch_dtype": config.dtype,
        **({"target_hidden_size": config.target_width} if wider else {}),
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fuse,
        "fc_norm": config.feature_norms,
        "norm_output": config.normed_head,
    }


def _raw_window(config: Eagle3Config) -> Mapping[str, Any]:
    if config.window is None:
        return {}
    return {
        "layer_types": ["sliding_attention"],
        "sliding_window": config.window,
        "use_sliding_window": True,
        "max_window_layers": 0,
    }


def _raw_rope(config: Eagle3Config) -> dict[str, Any]:
    """The rotary embedding, in the older dialect of transformers, which all read."""
    raw, scaling = raw_rope(config.rotary, config.head_width), config.rope_scaling
    if isinstance(scaling, YarnRopeScaling):
        # SpecForge's code reads these, and asks for the two scales.
        usual = yarn_magnitude(scaling.factor)
        scale = (scaling.attention_factor - 1) / (usual - 1 or 1)
        raw["rope_scaling"] |= {"type": "yarn", "mscale": scale, "mscale_all_dim": 0.0}
        if scaling.attention_factor == usual:
            del raw["rope_scaling"]["attention_factor"]
    return raw


_NORMS = (
    Rule("embedding_norm/scale", "D", (("input_layernorm.weight", "D"),)),
    Rule("hidden_norm/scale", "D", (("hidden_norm.weight", "D"),)),
)
_FUSE = (Rule("fuse/kernel", "C D", (("fc.weight", "D C"),)),)
_FUSE_NORM = (Rule("fuse_norm/scale", "C", (("input_norm.weight", "C"),)),)
_FINAL_NORM = (Rule("final_norm/scale", "D", (("norm.weight", "D"),)),)


def draft_table(
    config: Eagle3Config, *, embedding: bool, head: bool, layer: str = MIDLAYER
) -> Table:
    """The tensors of a draft.

    Args:
      config: of the draft.
      embedding: whether its own embedding is stored.
      head: whether its own LM head is stored.
      layer: what the names of the layer's tensors begin with.
    """
    sizes = layer_sizes(config) | {
        "C": len(config.features) * config.target_width,
        "E": config.target_width,
        "V": config.vocab_size,
        "v": config.proposable,
    }
    norms = _FUSE_NORM * config.norm_before_fuse
    if config.feature_norms:
        norms += tuple(
            Rule(f"feature_norms_{each}/scale", "E", ((f"fc_norm.{each}.weight", "E"),))
            for each in range(len(config.features))
        )
    dead: dict[str, tuple[int, ...]] = {}
    if config.normed_head or config.normed_feedback:
        norms += _FINAL_NORM
    else:
        dead["norm.weight"] = (config.model_width,)
    # q, k and v read the embedding and the feature side by side.
    leaves = [bind(QKV, sizes | {"D": 2 * config.model_width}, theirs=layer)]
    leaves += [bind(rule, sizes, theirs=layer) for rule in _NORMS + llama_rules(config)]
    tables = own_tables(embedding=embedding, head=head)
    leaves += [bind(rule, sizes) for rule in (*_FUSE, *norms, *tables)]
    return Table(tuple(leaves), ROTARY | DROPPED, dead)


def _described(
    raw: JsonObject, tensors: Tensors, target: TargetConfig, options: Eagle3Options
) -> Described[Eagle3Config]:
    tensors = without_prefix(tensors)
    dialect = dialect_of(raw, tensors)
    config = draft_config(raw, dialect, tensors, target, options)
    embedding, head = "embed_tokens.weight" in tensors, "lm_head.weight" in tensors
    table = draft_table(config, embedding=embedding, head=head, layer=dialect.layer)
    return Described(config, table, tensors, raw.flag("tie_word_embeddings", False))


def made_for(config: Eagle3Config) -> int | None:
    """See :class:`FeatureFiles`."""
    return None if config.window is not None else config.max_positions


FILES = FeatureFiles(
    _described,
    Eagle3Params.bound,
    Eagle3Draft.bind,
    Eagle3Options,
    made_for,
    hf_draft_config,
    lambda config, embedding, head: draft_table(config, embedding=embedding, head=head),
)
"""SpecForge's dialect is written, which SGLang and vLLM read."""
load, load_draft, save_draft = FILES.load, FILES.load_draft, FILES.save_draft
