"""DFlash and DSpark drafts as they are published, in and out (:mod:`.dialects` has their files).

Every stored tensor is read, or dropped for a reason that is listed, or refused.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from longspec_jax.config.target import TargetConfig
from longspec_jax.drafters.checkpoints.features import (
    DROPPED,
    TableFormat,
    vocabulary_of,
    vocabulary_tensors,
    without_prefix,
)
from longspec_jax.drafters.dflash.config import DFlashConfig
from longspec_jax.drafters.dflash.dialects import Dialect, dialect_of, draft_config, hf_draft_config
from longspec_jax.drafters.dflash.model import DFlashParams
from longspec_jax.weights.folder import open_folder
from longspec_jax.weights.params import write_model
from longspec_jax.weights.tables import MARKOV, ROTARY, Rule, Table, bind, layer_rules, layer_sizes

_TRUNK = (
    Rule("fuse/kernel", "C D", (("fc.weight", "D C"),)),
    Rule("hidden_norm/scale", "D", (("hidden_norm.weight", "D"),)),
    Rule("final_norm/scale", "D", (("norm.weight", "D"),)),
)
_CONFIDENCE = (
    Rule("confidence/kernel", "O I", (("confidence_head.proj.weight", "O I"),)),
    Rule("confidence/bias", "O", (("confidence_head.proj.bias", "O"),)),
)


@dataclass(frozen=True)
class Format(TableFormat):
    """How a draft is stored."""

    dialect: Dialect

    def table(self, config: DFlashConfig) -> Table:
        """The tensors of a draft."""
        sizes = layer_sizes(config.trunk) | {
            "C": len(config.features) * config.target_width,
            "V": config.vocab_size,
            "v": config.proposable,
            "O": 1,
            "I": config.confidence_width,
        }
        rules = _TRUNK + self.tables
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
        leaves = [bind(rule, sizes) for rule in rules]
        for index in range(config.trunk.num_layers):
            ours, theirs = f"layers_{index}/", f"layers.{index}."
            leaves += [bind(rule, sizes, ours, theirs) for rule in layer_rules(config.trunk)]
        return Table(tuple(leaves), ROTARY | DROPPED)


def load_draft(
    source: str | Path,
    target: TargetConfig,
    target_params: Any,
    *,
    layers: tuple[int, ...] | None = None,
    mesh: Mesh | None = None,
    revision: str | None = None,
) -> tuple[Format, DFlashConfig, DFlashParams]:
    """Load a draft in any of the published dialects.

    Arguments and errors as of :func:`longspec_jax.drafters.checkpoints.eagle3.load_draft`.
    """
    with open_folder(source, mesh, revision) as folder:
        tensors = without_prefix(folder.tensors)
        dialect = dialect_of(folder.raw, tensors)
        config = draft_config(folder.raw, dialect, target, layers=layers)
        with folder.named():
            config.check_fits(target)
            vocabulary = vocabulary_of(tensors, config)
        stored = Format(dialect, "embed_tokens.weight" in tensors, "lm_head.weight" in tensors)
        layer = folder.params(stored.table(config), tensors, config.trunk.dtype)
    heads = {name: layer.pop(name, None) for name in ("markov", "confidence")}
    params = DFlashParams.bound(layer, config, target, target_params, vocabulary)
    return stored, config, replace(params, **heads)


def save_draft(
    folder: str | Path, stored: Format, config: DFlashConfig, params: DFlashParams
) -> None:
    """Save a draft in the dialect that it was loaded from.

    Args:
      folder: made if absent; weights in it are replaced, other files stay.
      stored: how; tables that the draft shares with its target are written where it says so.
      config: the draft's configuration.
      params: its parameters, of any sharding; not in 8 bits.

    Raises:
      ValueError: for parameters in 8 bits.
    """
    raw = hf_draft_config(config, stored.dialect)
    heads = {"markov": params.markov, "confidence": params.confidence}
    own = {name: head for name, head in heads.items() if head is not None}
    more = vocabulary_tensors(params.vocabulary, config.vocab_size)
    table, dtype = stored.table(config), config.trunk.dtype
    everything = stored.stored(params) | own
    write_model(Path(folder).expanduser(), table, everything, dtype, raw, more)
