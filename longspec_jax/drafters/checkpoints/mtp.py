"""MTP layers as they are published, and the draft bound to its target.

Three families of files have one. Qwen's and MiMo's lie among the target's own tensors, so target
and draft are one folder. speculators' are a folder of their own, trained for a target that may have
been published without (FastMTP). The layer is one of its family's targets, and its tensors are
named as that family names a layer's; what stands around it each family of files names in its own
way.
"""

from dataclasses import dataclass, replace

from jax.sharding import Mesh

from longspec_jax.config.target import TargetConfig
from longspec_jax.drafters.checkpoints.eagle3 import made_for
from longspec_jax.drafters.checkpoints.features import (
    DROPPED,
    LAYER_CONFIG,
    Described,
    FeatureFiles,
)
from longspec_jax.drafters.eagle import EagleOptions, MtpConfig, MtpDraft, MtpParams
from longspec_jax.ops.matmul.packed_shares import packed_params
from longspec_jax.weights.checkpoint import Tensors, each_expert
from longspec_jax.weights.families import FAMILIES
from longspec_jax.weights.hf_config import target_config, text_part
from longspec_jax.weights.json_files import JsonObject
from longspec_jax.weights.quantised.formats import quantisation
from longspec_jax.weights.quantised.table import as_stored
from longspec_jax.weights.rope import inner_layers
from longspec_jax.weights.tables import Rule, Table, bind, head_order, layer_rules, layer_sizes

LAYERS = "num_nextn_predict_layers", "mtp_num_hidden_layers"
"""How many layers a file says that it has."""
_DEDICATED = "mtp_use_dedicated_embeddings"
_AROUND = ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")


@dataclass(frozen=True)
class MtpDialect:
    """How a family of files names an MTP layer."""

    among: str
    """What the names of its tensors begin with among the target's own; empty in a folder of its
    own."""
    around: str
    """What the names of the projection and the norms around the layer begin with."""
    layer: str
    """What the names of the layer's tensors begin with."""
    families: tuple[str, ...]
    """Whose layer it may be."""
    names: tuple[str, str, str, str] = _AROUND
    """The projection, and the norms of embedding, hidden state and output."""
    hidden_first: bool = False
    """Whether the projection reads the hidden state before the embedding."""

    def table(self, config: MtpConfig) -> Table:
        """The tensors of the layer and of what is around it."""
        sizes = layer_sizes(config.layer, config.kind) | {"C": 2 * config.model_width}
        shuffle = head_order(config.head_width, config.rotary_width, interleaved=False)
        fuse, *norms = (f"{name}.weight" for name in self.names)
        ours = "embedding_norm", "hidden_norm", "output_norm"
        around = [Rule("fuse/kernel", "C D", ((fuse, "D C"),))]
        for each, name in zip(ours, norms, strict=True):
            around.append(Rule(f"{each}/scale", "D", ((name, "D"),)))
        leaves = [bind(rule, sizes, theirs=self.around) for rule in around]
        for rule in layer_rules(config.layer, kind=config.kind):
            leaves.append(bind(rule, sizes, "layer/", self.layer, shuffle))
        return Table(tuple(leaves), {} if self.among else DROPPED)


QWEN = MtpDialect(
    "mtp.",
    "mtp.",
    "mtp.layers.0.",
    ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM"),
    ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"),
)
_MIMO = "model.mtp_layers.0."
MIMO = MtpDialect("model.mtp_layers.", _MIMO, _MIMO, ("MiMoForCausalLM",), hidden_first=True)
_OWN = "mtp_layers.0."
SPECULATORS = MtpDialect("", _OWN, _OWN, ("Qwen3ForCausalLM", "Qwen3_5ForCausalLM"))


def _described(
    raw: JsonObject, tensors: Tensors, target: TargetConfig, options: EagleOptions
) -> Described[MtpConfig]:
    """Where the target's linears are quantised, so are those of its layer, and stay so."""
    raw = text_part(raw)
    dialect = _dialect_of(raw, tensors)
    config = _config(raw, dialect, target, options.rope_theta)
    if dialect.among:
        tensors = {name: tensors[name] for name in tensors if name.startswith(dialect.among)}
    tensors = each_expert(tensors, [dialect.layer])
    table, quantised = dialect.table(config), quantisation(raw)
    if quantised is None:
        return Described(config, table, tensors)
    table, tensors, groups = as_stored(table, tensors, quantised)
    return Described(config, table, tensors, groups=groups)


def _bind(
    config: MtpConfig,
    params: MtpParams,
    target: TargetConfig,
    options: EagleOptions,
    *,
    int8: bool,
    mesh: Mesh | None,
) -> MtpDraft:
    draft = MtpDraft.bind(config, params, target, options, int8=int8, mesh=mesh)
    layer = packed_params(draft.params.layer, config.dtype)
    return replace(draft, params=replace(draft.params, layer=layer))


def _dialect_of(raw: JsonObject, tensors: Tensors) -> MtpDialect:
    """Whose file it is; raises ValueError for a layer that is not computed here."""
    for key in LAYERS:
        if raw.whole(key, 1) != 1:
            raise raw.error(key, "is not supported: one layer for all levels is", "load another")
    if raw.flag(_DEDICATED, False):
        rule = "is not supported: an MTP layer reads its target's embedding"
        raise raw.error(_DEDICATED, rule, "load another draft, such as ngram")
    for dialect in (MIMO, SPECULATORS):
        if f"{dialect.around}{_AROUND[0]}.weight" in tensors:
            return dialect
    named = " ".join(raw.texts("architectures")) or raw.text("model_type", "this model")
    if other := next((name for name in tensors if name.endswith("eh_proj.weight")), None):
        raise ValueError(
            f"{raw.origin}: the MTP layer of {named} has {other}, and none with this tensor is "
            "computed; MTP layers of Qwen3.5, Qwen3-Next, MiMo and speculators are. Use another "
            "draft, such as ngram"
        )
    if any(name.startswith(QWEN.among) for name in tensors):
        return QWEN
    raise ValueError(
        f"{raw.origin}: {named} has no MTP layer among its tensors ({QWEN.among}*, "
        f"{MIMO.around}* or {SPECULATORS.around}*); many files are published without it. Download "
        "one with it, or use another draft, such as ngram"
    )


def _config(
    raw: JsonObject, dialect: MtpDialect, target: TargetConfig, theta: float | None
) -> MtpConfig:
    """The layer that a ``config.json`` describes."""
    if dialect is SPECULATORS:
        part = inner_layers(raw, LAYER_CONFIG)
        raw = JsonObject({**part.values, "architectures": None}, part.origin)
        kinds = [FAMILIES[name].model_type for name in dialect.families]
        if raw.text("model_type", "") not in kinds:
            rule = f"is not supported, only {' and '.join(map(repr, kinds))}"
            raise raw.error("model_type", rule, "load another draft")
    layer = target_config(raw, target.dtype)
    if layer.architecture not in dialect.families:
        raise ValueError(
            f"{raw.origin}: an MTP layer {dialect.layer}* of {layer.architecture} is not computed, "
            f"only of {', '.join(dialect.families)}; load another draft, such as ngram"
        )
    kind = next(each for each in reversed(layer.layers) if each.recurrence is None)
    if kind.window is not None:
        raise ValueError(f"{raw.origin}: an MTP layer with a window is not computed; load another")
    config = MtpConfig.of(layer, kind, target.num_layers)
    return replace(
        config,
        rope_theta=config.rope_theta if theta is None else theta,
        hidden_first=dialect.hidden_first,
    )


load = FeatureFiles(_described, MtpParams.bound, _bind, EagleOptions, made_for).load
