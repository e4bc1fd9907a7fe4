"""MTP layers as they are published, and the draft bound to its target.

Two families of files have a layer that is computed here. MiMo's lie among the target's own tensors,
so target and draft are one folder. speculators' are a folder of their own, trained for a target
that may have been published without (FastMTP). Others are refused with the reason: their layers
have experts, or a gate beside their attention, as their targets do.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from longspec_jax.config.layers import LayerConfig
from longspec_jax.config.target import TargetConfig
from longspec_jax.drafters.checkpoints.eagle3 import bound
from longspec_jax.drafters.checkpoints.features import DROPPED, LAYER_CONFIG, QKV, llama_rules
from longspec_jax.drafters.draft import Target
from longspec_jax.drafters.eagle import EagleOptions, MtpConfig, MtpParams
from longspec_jax.drafters.eagle3 import Eagle3Draft
from longspec_jax.weights.checkpoint import Tensors
from longspec_jax.weights.folder import open_folder
from longspec_jax.weights.hf_config import target_config
from longspec_jax.weights.json_files import JsonObject
from longspec_jax.weights.rope import inner_layers
from longspec_jax.weights.tables import Rule, Table, bind, layer_sizes

LAYERS = "num_nextn_predict_layers"
"""How many layers a file says that it has."""
_SPECULATORS_LAYER = "Qwen3ForCausalLM"
_FUSE = (Rule("fuse/kernel", "C D", (("input_proj.weight", "D C"),)),)
_NORMS = tuple(
    Rule(f"{ours}/scale", "D", ((f"{theirs}.weight", "D"),))
    for ours, theirs in {
        "embedding_norm": "token_layernorm",
        "hidden_norm": "hidden_layernorm",
        "attention_norm": "input_layernorm",
        "output_norm": "final_layernorm",
    }.items()
)


@dataclass(frozen=True)
class Dialect:
    """Where a family of trainers writes an MTP layer."""

    prefix: str
    """What the names of its tensors begin with."""
    beside_target: bool
    """Whether it lies among the target's own tensors."""
    hidden_first: bool
    """Whether the projection reads the hidden state before the embedding."""

    def table(self, config: MtpConfig) -> Table:
        """The tensors of the layer."""
        sizes = layer_sizes(config) | {"C": 2 * config.model_width}
        rules = *_FUSE, QKV, *_NORMS, *llama_rules(config)
        return Table(tuple(bind(rule, sizes, theirs=self.prefix) for rule in rules), DROPPED)


MIMO = Dialect("model.mtp_layers.0.", beside_target=True, hidden_first=True)
SPECULATORS = Dialect("mtp_layers.0.", beside_target=False, hidden_first=False)


def load(
    source: str | Path,
    target: Target,
    options: EagleOptions = EagleOptions(),  # noqa: B008 - frozen.
    *,
    mesh: Mesh | None = None,
    revision: str | None = None,
) -> Eagle3Draft:
    """Load an MTP layer, from the folder of its target or from one of its own.

    Raises:
      FileNotFoundError: if the folder or one of its files is missing.
      ValueError: if it does not belong to the target, its layer is not computed here, or a file is
        damaged.
    """
    with open_folder(source, mesh, revision) as folder:
        tensors = folder.tensors
        dialect = _dialect_of(folder.raw, tensors)
        config = _config(folder.raw, dialect, target.config, options.rope_theta)
        with folder.named():
            config.check_fits(target.config)
        if dialect.beside_target:
            tensors = {name: each for name, each in tensors.items() if ".mtp_layers." in name}
        layer = folder.params(dialect.table(config), tensors, config.dtype)
    params = MtpParams.bound(layer, config, target.config, target.params)
    return bound(source, config, params, target, options, mesh, "mtp")


_COMMON = (
    *("vocab_size", "model_width", "mlp_width", "num_heads", "num_kv_heads", "head_width"),
    *("max_positions", "rope_theta", "rope_scaling", "norm_eps", "qkv_bias"),
)
"""Fields that an MTP layer has as a target has them."""


def _dialect_of(raw: JsonObject, tensors: Tensors) -> Dialect:
    """Whose file it is; raises ValueError for a layer that is not computed here."""
    if raw.whole(LAYERS, 1) != 1:
        raise raw.error(LAYERS, "is not supported: one layer for all levels is", "load another")
    for dialect in (MIMO, SPECULATORS):
        if f"{dialect.prefix}input_proj.weight" in tensors:
            return dialect
    named = " ".join(raw.texts("architectures")) or "this model"
    if any(name.startswith("mtp.") or name.endswith("eh_proj.weight") for name in tensors):
        raise ValueError(
            f"{raw.origin}: the MTP layer of {named} has experts or a gate beside its attention, "
            "which are not computed; MTP layers of MiMo and of speculators "
            "for Qwen3 are. Use another draft, such as ngram"
        )
    raise ValueError(
        f"{raw.origin}: {named} has no MTP layer among its tensors "
        f"({MIMO.prefix}* or {SPECULATORS.prefix}*); many files are published without it. Download "
        "one with it, or use another draft, such as ngram"
    )


def _config(
    raw: JsonObject, dialect: Dialect, target: TargetConfig, theta: float | None
) -> MtpConfig:
    """The layer that a ``config.json`` describes."""
    if dialect is SPECULATORS:
        part = inner_layers(raw, LAYER_CONFIG)
        if part.text("model_type", "") != "qwen3":
            raise part.error("model_type", "is not supported, only 'qwen3'", "load another draft")
        raw = JsonObject({**part.values, "architectures": [_SPECULATORS_LAYER]}, part.origin)
    layer = target_config(raw, target.dtype)
    if layer.layer(layer.num_layers - 1) != LayerConfig(layer.rotary) or layer.rotary_width:
        raise ValueError(f"{raw.origin}: an MTP layer with a window is not computed; load another")
    fields: dict[str, Any] = {name: getattr(layer, name) for name in _COMMON}
    if theta is not None:
        fields["rope_theta"] = theta
    return MtpConfig(
        **fields,
        target_width=layer.model_width,
        proposable=layer.vocab_size,
        features=(target.num_layers,),
        dtype=target.dtype,
        qk_norm=layer.qk_norm,
        normed_head=False,
        fuse_bias=False,
        hidden_first=dialect.hidden_first,
    )
