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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.sharding import Mesh
from jaxtyping import PyTree

from longspec_jax.checks import is_whole, shown
from longspec_jax.config.layers import (
    LARGEST_FACTOR,
    RopeScaling,
    Rotary,
    YarnRopeScaling,
    yarn_magnitude,
)
from longspec_jax.config.target import TargetConfig
from longspec_jax.drafters.checkpoints.features import (
    DROPPED,
    LAYER_CONFIG,
    QKV,
    counting,
    features_of,
    llama_rules,
    own_tables,
    stored_params,
    vocabulary_of,
    vocabulary_tensors,
    warn_of_window,
    without_prefix,
)
from longspec_jax.drafters.draft import Target, pays_in_int8
from longspec_jax.drafters.eagle3 import (
    D,
    Eagle3Config,
    Eagle3Draft,
    Eagle3Options,
    Eagle3Params,
)
from longspec_jax.weights.folder import open_folder
from longspec_jax.weights.hf_config import (
    LAYER,
    REFUSED,
    check_refused,
    layer_fields,
    raw_layer,
)
from longspec_jax.weights.json_files import JsonObject
from longspec_jax.weights.params import write_model
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


@dataclass(frozen=True)
class Dialect:
    """How a family of trainers writes EAGLE-3 drafts."""

    name: str
    mark: str
    """What its ``config.json`` is identified by, for messages."""
    layer: str
    """What the names of the layer's tensors begin with."""
    entering: bool = False
    """Whether layers are counted by the hidden states that enter them, not by those that leave."""


AUTHORS = Dialect("the authors' code", "no architecture of its own", MIDLAYER)
SPECFORGE = Dialect("SpecForge", "an architecture named Eagle3", MIDLAYER)
SPECULATORS = Dialect("speculators", "speculators_model_type", FIRST_LAYER, entering=True)
DEEPSPEC = Dialect("DeepSpec", "target_layer_ids", FIRST_LAYER)
DIALECTS = (AUTHORS, SPECFORGE, SPECULATORS, DEEPSPEC)


def dialect_of(raw: JsonObject, tensors: Iterable[str]) -> Dialect:
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
    dialect: Dialect,
    tensors: Iterable[str],
    target: TargetConfig,
    *,
    layers: tuple[int, ...] | None = None,
    theta: float | None = None,
) -> Eagle3Config:
    """The draft that a ``config.json`` describes.

    Args:
      raw: the parsed file.
      dialect: whose it is.
      tensors: names of the tensors beside it, which show whether there are biases and head norms.
      target: the target that it will draft for.
      layers: as ``features`` of the configuration; as the file says if absent.
      theta: the rotary base; as the file says if absent.

    Raises:
      ValueError: if the file describes what is not computed here, or can be read in two ways.
    """
    part = inner_layers(raw, LAYER_CONFIG) if dialect is SPECULATORS else raw
    who = "an EAGLE-3 draft"
    part.require(("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"), who)
    check_refused(part, REFUSED)
    # Some files have their target's number. The tensors tell how many layers there are.
    others = {name.split(".")[1] for name in tensors if name.startswith("layers.")} - {"0"}
    if others or part.whole("num_hidden_layers", 1) not in (1, target.num_layers):
        found = f"layers.{min(others)}.*" if others else "one layer"
        rule = f"is not supported: one layer is, and the weights have {found}"
        raise part.error("num_hidden_layers", rule, "load another draft")
    if part.flag("mlp_bias", False):
        raise part.error(
            "mlp_bias", "is not supported: no biases are added in the MLP", "load another"
        )
    found = layer_fields(part)
    vocab_size = part.whole("vocab_size")
    scaling = _scaling(part, dialect)
    if theta is None:
        theta = authors_base(part, scaling) if dialect is AUTHORS else rope_theta(part)
    positions = part.whole("max_position_embeddings", USUAL_POSITIONS)
    if isinstance(scaling, YarnRopeScaling):
        positions = max(positions, int(scaling.factor * scaling.original_max_positions))
    normed = raw.flag("norm_output", dialect is SPECFORGE)
    feeds = dialect is not SPECFORGE
    fed_back = raw.part("eagle_config").flag(_FED_BACK, normed and feeds)
    kind = part.text("model_type", "")
    head_norm = f"{dialect.layer}self_attn.q_norm.weight" in tensors
    found |= dict(
        target_width=raw.whole("target_hidden_size", found["model_width"]),
        vocab_size=vocab_size,
        proposable=raw.whole("draft_vocab_size", vocab_size),
        features=layers or _features(raw, dialect, target.num_layers),
        max_positions=positions,
        rope_theta=theta,
        rope_scaling=scaling,
        dtype=target.dtype,
        window=_window(part),
        qkv_bias=f"{dialect.layer}self_attn.q_proj.bias" in tensors,
        # SpecForge's drafts for Qwen3 may say qwen3 and are Llama layers all the same.
        qk_norm=head_norm or (kind == "qwen3" and dialect.layer == FIRST_LAYER),
        norm_before_residual=raw.flag("norm_before_residual", False),
        norm_before_fuse=raw.flag("norm_before_fc", False),
        feature_norms=raw.flag("fc_norm", False),
        normed_feedback=fed_back,
        normed_head=normed or feeds,
    )
    return part.build(Eagle3Config, found, LAYER)


def authors_base(raw: JsonObject, scaling: RopeScaling) -> float:
    """The rotary base of a draft that the authors' code trained.

    That code forgets ``rope_theta`` where it scales positions, and says nothing. Of an entry that
    holds the base itself it knows nothing: whoever wrote one means it.
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


def _features(raw: JsonObject, dialect: Dialect, layers: int) -> tuple[int, ...]:
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
    return features_of(holder, key, layers, dialect.name, entering=dialect.entering)


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


def _scaling(part: JsonObject, dialect: Dialect) -> RopeScaling:
    """The rotary scaling."""
    kind, entry = scaling_entry(part)
    if kind != "yarn":
        return rope_scaling(part)
    original = "original_max_position_embeddings"
    holder = entry if entry.has(original) else part
    if dialect is SPECULATORS and not holder.has(original):
        holder, original = part, "max_position_embeddings"  # As transformers reads the file.
    factor = entry.number("factor", least=1, most=LARGEST_FACTOR)
    scales = tuple(entry.number(key, 0.0) for key in ("mscale", "mscale_all_dim"))
    magnitude = entry.number("attention_factor") if entry.has("attention_factor") else None
    # SpecForge divides the two scales in any case, transformers where neither is zero.
    if magnitude is None and (all(scales) or dialect is SPECFORGE and any(scales)):
        over, under = (yarn_magnitude(factor, each) for each in scales)
        magnitude = over / under
    return YarnRopeScaling(
        factor,
        holder.whole(original),
        yarn_magnitude(factor) if magnitude is None else magnitude,
        entry.number("beta_fast", 32.0),
        entry.number("beta_slow", 1.0),
        entry.flag("truncate", True),
    )


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
    scaling = config.rope_scaling
    if not isinstance(scaling, YarnRopeScaling):
        return raw_rope(Rotary(config.rope_theta, scaling), config.head_width)
    entry = {
        "rope_type": "yarn",
        "type": "yarn",
        "factor": float(scaling.factor),
        "original_max_position_embeddings": scaling.original_max_positions,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
        "truncate": scaling.truncate,
    }
    usual = yarn_magnitude(scaling.factor)
    if scaling.attention_factor != usual:
        entry["attention_factor"] = scaling.attention_factor
    # SpecForge's code reads these two, and asks for both.
    scale = (scaling.attention_factor - 1) / (usual - 1 or 1)
    entry |= {"mscale": scale, "mscale_all_dim": 0.0}
    return {"rope_theta": config.rope_theta, "rope_scaling": entry}


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


def load_draft(
    source: str | Path,
    target: TargetConfig,
    target_params: PyTree,
    *,
    layers: tuple[int, ...] | None = None,
    theta: float | None = None,
    mesh: Mesh | None = None,
    revision: str | None = None,
) -> tuple[Eagle3Config, Eagle3Params]:
    """Load a draft in any of the published dialects.

    Args:
      source: a folder with ``config.json`` and weights, or a hub id.
      target: the configuration of its target.
      target_params: the target's parameters, of which the draft may share tables.
      layers: layers of the target after which it takes the hidden states, -1 for the embedding; as
        its file says if absent.
      theta: its rotary base; as its file says if absent.
      mesh: devices to shard over by the project's rules; the first device if absent.
      revision: branch, tag or commit of a hub id.

    Raises:
      FileNotFoundError: if the draft or one of its files is missing.
      ValueError: if the draft does not belong to the target, or its files are damaged, do not fit
        together or can be read in two ways.
    """
    with open_folder(source, mesh, revision) as folder:
        raw, tensors = folder.raw, without_prefix(folder.tensors)
        dialect = dialect_of(raw, tensors)
        config = draft_config(raw, dialect, tensors, target, layers=layers, theta=theta)
        with folder.named():
            config.check_fits(target)
            vocabulary = vocabulary_of(tensors, config)
        table = draft_table(
            config,
            embedding="embed_tokens.weight" in tensors,
            head="lm_head.weight" in tensors,
            layer=dialect.layer,
        )
        layer = folder.params(table, tensors, config.dtype)
    tied = raw.flag("tie_word_embeddings", False)
    return config, Eagle3Params.bound(layer, config, target, target_params, vocabulary, tied)


def save_draft(folder: str | Path, config: Eagle3Config, params: Eagle3Params) -> None:
    """Save a draft in SpecForge's format, which SGLang and vLLM read, wherever it came from.

    Args:
      folder: made if absent; weights in it are replaced, other files stay.
      config: the draft's configuration.
      params: its parameters, of any sharding; not in 8 bits. Tables of the target's are not stored.

    Raises:
      ValueError: for parameters in 8 bits.
    """
    stored = stored_params(params)
    table = draft_table(config, embedding="embedding" in stored, head="head" in stored)
    more = vocabulary_tensors(params.vocabulary, config.vocab_size)
    where = Path(folder).expanduser()
    write_model(where, table, stored, config.dtype, hf_draft_config(config), more)


def load(
    source: str | Path,
    target: Target,
    options: Eagle3Options = Eagle3Options(),  # noqa: B008 - frozen.
    *,
    mesh: Mesh | None = None,
    revision: str | None = None,
) -> Eagle3Draft:
    """Load an EAGLE-3 draft as its trainer stored it, from a folder or a hub id.

    Raises:
      FileNotFoundError: if the draft or one of its files is missing.
      ValueError: if it does not belong to the target, or a file is damaged or can be read in two
        ways.
    """
    config, params = load_draft(
        source,
        target.config,
        target.params,
        layers=options.features,
        theta=options.rope_theta,
        mesh=mesh,
        revision=revision,
    )
    return bound(source, config, params, target, options, mesh, Eagle3Draft)


def bound(
    source: str | Path,
    config: Eagle3Config,
    params: Eagle3Params,
    target: Target,
    options: Eagle3Options,
    mesh: Mesh | None,
    make: type[D],
) -> D:
    """A loaded draft of this kind or one of its relatives; says what it sees if nobody named it."""
    int8 = pays_in_int8(target) if options.int8 is None else options.int8
    draft = make.bind(config, params, target.config, options, int8=int8, mesh=mesh)
    if draft.seen.window is not None and options.window is None and config.window is None:
        warn_of_window(source, draft.seen, draft.config.max_positions, target.config)
    return draft
