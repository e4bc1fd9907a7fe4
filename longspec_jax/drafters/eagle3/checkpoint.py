"""EAGLE-3 drafts as they are published, in and out (:mod:`.dialects` has their ``config.json``).

Every stored tensor is read, or dropped for a reason that is listed, or refused.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from longspec_jax.config.target import TargetConfig
from longspec_jax.drafters.eagle3.config import Eagle3Config
from longspec_jax.drafters.eagle3.dialects import Dialect, dialect_of, draft_config, hf_draft_config
from longspec_jax.drafters.eagle3.model import Eagle3Params
from longspec_jax.drafters.vocabulary import (
    DROPPED,
    vocabulary_of,
    vocabulary_tensors,
    without_prefix,
)
from longspec_jax.weights.folder import open_folder
from longspec_jax.weights.params import write_model
from longspec_jax.weights.tables import (
    MLP,
    QKV_BIAS_PARTS,
    QKV_KERNEL,
    ROTARY,
    Rule,
    Table,
    bind,
    layer_sizes,
)

_QKV = Rule("self_qkv/fused/kernel", "D K * H", QKV_KERNEL)
"""Of the embedding and the feature side by side: here ``D`` is twice the width."""
_LAYER = (
    Rule("embedding_norm/scale", "D", (("input_layernorm.weight", "D"),)),
    Rule("hidden_norm/scale", "D", (("hidden_norm.weight", "D"),)),
    Rule("self_out/kernel", "N H D", (("self_attn.o_proj.weight", "D (N H)"),)),
    Rule("mlp_norm/scale", "D", (("post_attention_layernorm.weight", "D"),)),
    *MLP,
)
_QKV_BIAS = (Rule("self_qkv/fused/bias", "K * H", QKV_BIAS_PARTS),)
_QK_NORM = tuple(
    Rule(f"{name}/scale", "H", ((f"self_attn.{name}.weight", "H"),))
    for name in ("q_norm", "k_norm")
)
_FUSE = (Rule("fuse/kernel", "C D", (("fc.weight", "D C"),)),)
_FUSE_NORM = (Rule("fuse_norm/scale", "C", (("input_norm.weight", "C"),)),)
_FINAL_NORM = (Rule("final_norm/scale", "D", (("norm.weight", "D"),)),)
_EMBEDDING = (Rule("embedding", "V D", (("embed_tokens.weight", "V D"),)),)
_HEAD = (Rule("head", "v D", (("lm_head.weight", "v D"),)),)
_DROPPED = ROTARY | DROPPED


@dataclass(frozen=True)
class Format:
    """How a draft is stored."""

    dialect: Dialect
    embedding: bool
    """Whether its own embedding is stored."""
    head: bool
    """Whether its own LM head is stored."""

    def table(self, config: Eagle3Config) -> Table:
        """The tensors of a draft."""
        sizes = layer_sizes(config) | {
            "C": len(config.features) * config.target_width,
            "E": config.target_width,
            "V": config.vocab_size,
            "v": config.proposable,
        }
        layer = _LAYER + _QKV_BIAS * config.qkv_bias + _QK_NORM * config.qk_norm
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
        tables = _EMBEDDING * self.embedding + _HEAD * self.head
        prefix, wide = self.dialect.layer, sizes | {"D": 2 * config.model_width}
        leaves = [bind(_QKV, wide, theirs=prefix)]
        leaves += [bind(rule, sizes, theirs=prefix) for rule in layer]
        leaves += [bind(rule, sizes) for rule in (*_FUSE, *norms, *tables)]
        return Table(tuple(leaves), _DROPPED, dead)


def load_draft(
    source: str | Path,
    target: TargetConfig,
    target_params: Any,
    *,
    layers: tuple[int, ...] | None = None,
    theta: float | None = None,
    mesh: Mesh | None = None,
    revision: str | None = None,
) -> tuple[Format, Eagle3Config, Eagle3Params]:
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
        stored = Format(dialect, "embed_tokens.weight" in tensors, "lm_head.weight" in tensors)
        layer = folder.params(stored.table(config), tensors, config.dtype)
    tied = raw.flag("tie_word_embeddings", False)
    tables = target, target_params, vocabulary, tied
    return stored, config, Eagle3Params.bound(layer, config, *tables)


def save_draft(
    folder: str | Path, stored: Format, config: Eagle3Config, params: Eagle3Params
) -> None:
    """Save a draft in the dialect that it was loaded from, or in another.

    Args:
      folder: made if absent; weights in it are replaced, other files stay.
      stored: how; tables that the draft shares with its target are written where it says so.
      config: the draft's configuration.
      params: its parameters, of any sharding; not in 8 bits.

    Raises:
      ValueError: for parameters in 8 bits.
    """
    if params.int8:
        raise ValueError("the draft is in 8 bits; load it with int8=False to save it")
    tables: dict[str, Any] = {"embedding": params.embedding} if stored.embedding else {}
    if stored.head:
        tables["head"] = params.head
    more = vocabulary_tensors(params.vocabulary, config.vocab_size)
    raw = hf_draft_config(config, stored.dialect)
    everything = {**params.layer, **tables}
    write_model(
        Path(folder).expanduser(), stored.table(config), everything, config.dtype, raw, more
    )
