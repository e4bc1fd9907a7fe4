"""EAGLE-3 drafts as they are published, in and out (:mod:`.dialects` has their ``config.json``).

Every stored tensor is read, or dropped for a reason that is listed, or refused.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from longspec_jax.config.target import TargetConfig
from longspec_jax.drafters.checkpoints.features import (
    DROPPED,
    QKV,
    TableFormat,
    llama_rules,
    vocabulary_of,
    vocabulary_tensors,
    without_prefix,
)
from longspec_jax.drafters.eagle3.config import Eagle3Config
from longspec_jax.drafters.eagle3.dialects import Dialect, dialect_of, draft_config, hf_draft_config
from longspec_jax.drafters.eagle3.model import Eagle3Params
from longspec_jax.weights.folder import open_folder
from longspec_jax.weights.params import write_model
from longspec_jax.weights.tables import ROTARY, Rule, Table, bind, layer_sizes

_NORMS = (
    Rule("embedding_norm/scale", "D", (("input_layernorm.weight", "D"),)),
    Rule("hidden_norm/scale", "D", (("hidden_norm.weight", "D"),)),
)
_FUSE = (Rule("fuse/kernel", "C D", (("fc.weight", "D C"),)),)
_FUSE_NORM = (Rule("fuse_norm/scale", "C", (("input_norm.weight", "C"),)),)
_FINAL_NORM = (Rule("final_norm/scale", "D", (("norm.weight", "D"),)),)
_DROPPED = ROTARY | DROPPED


@dataclass(frozen=True)
class Format(TableFormat):
    """How a draft is stored."""

    dialect: Dialect

    def table(self, config: Eagle3Config) -> Table:
        """The tensors of a draft."""
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
        prefix, wide = self.dialect.layer, sizes | {"D": 2 * config.model_width}
        leaves = [bind(QKV, wide, theirs=prefix)]
        layer = _NORMS + llama_rules(config)
        leaves += [bind(rule, sizes, theirs=prefix) for rule in layer]
        leaves += [bind(rule, sizes) for rule in (*_FUSE, *norms, *self.tables)]
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
    more = vocabulary_tensors(params.vocabulary, config.vocab_size)
    raw, where = hf_draft_config(config, stored.dialect), Path(folder).expanduser()
    write_model(where, stored.table(config), stored.stored(params), config.dtype, raw, more)
