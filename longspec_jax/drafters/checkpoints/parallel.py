"""Parallel LongSpec drafts in and out: ``config.json`` and the tensors of one folder.

Layers have the names of the LongSpec release after ``layers.0.``, and the keys of ``config.json``
are those of a LongSpec draft, with the block and the Markov head's rank next to them.
"""

from pathlib import Path
from typing import Any

from jax.sharding import Mesh
from jaxtyping import PyTree

from longspec_jax.config.target import TargetConfig
from longspec_jax.drafters.checkpoints.longspec import LAYER_RULES, hf_draft_config, layer_config
from longspec_jax.drafters.draft import Target, pays_in_int8
from longspec_jax.drafters.parallel import ParallelConfig, ParallelDraft, ParallelOptions
from longspec_jax.weights.folder import open_folder
from longspec_jax.weights.json_files import JsonObject, Keys, as_raw
from longspec_jax.weights.params import write_model
from longspec_jax.weights.tables import MARKOV, ROTARY, Rule, Table, bind, layer_sizes

ARCHITECTURE = "LongSpecParallelDraft"

_KEYS: Keys = {
    "vocab_size": "vocab_size",
    "num_layers": "num_hidden_layers",
    "block": "longspec_block",
    "markov_rank": "longspec_markov_rank",
}
_BLOCK = (
    Rule("slots", "S D", (("slot_embeddings.weight", "S D"),)),
    Rule("final_norm/scale", "D", (("norm.weight", "D"),)),
)


def load_draft(
    source: str | Path,
    target: TargetConfig,
    *,
    dtype: str | None = None,
    mesh: Mesh | None = None,
    revision: str | None = None,
) -> tuple[ParallelConfig, Any]:
    """Load a parallel LongSpec draft: its configuration and a tree of its parameters.

    Arguments and errors as in :func:`longspec_jax.drafters.checkpoints.longspec.load_draft`.
    """
    with open_folder(source, mesh, revision) as folder:
        config = draft_config(folder.raw, target, dtype)
        return config, folder.params(draft_table(config), folder.tensors, config.layer.dtype)


def save_draft(
    folder: str | Path, config: ParallelConfig, params: PyTree, *, target: TargetConfig
) -> None:
    """Save a draft; raises ValueError for parameters that are not its own, or not finite.

    Args:
      folder: made if absent; weights in it are replaced, other files stay.
      config: the draft's configuration.
      params: its parameters, as :func:`load_draft` returns them, of any sharding.
      target: its target; recorded, so that loading it with another vocabulary is refused.
    """
    raw = hf_draft_config(config.layer, target) | {"architectures": [ARCHITECTURE]}
    raw |= as_raw(config, _KEYS)
    write_model(Path(folder).expanduser(), draft_table(config), params, config.layer.dtype, raw)


def draft_config(raw: JsonObject, target: TargetConfig, dtype: str | None = None) -> ParallelConfig:
    """The draft that a ``config.json`` describes; raises ValueError if it fits another target."""
    config = raw.made(ParallelConfig, _KEYS, {"layer": layer_config(raw, target, dtype)})
    with raw.named():
        config.check_fits(target)
    return config


def draft_table(config: ParallelConfig) -> Table:
    """The tensors of a draft."""
    sizes = layer_sizes(config.layer) | {
        "S": config.block - 1,
        "V": config.vocab_size,
        "v": config.vocab_size,
        "R": config.markov_rank,
    }
    leaves = [bind(rule, sizes) for rule in _BLOCK + MARKOV * bool(config.markov_rank)]
    for index in range(config.num_layers):
        ours, theirs = f"layers_{index}/", f"layers.{index}."
        leaves += [bind(rule, sizes, ours, theirs) for rule in LAYER_RULES]
    return Table(tuple(leaves), ROTARY)


def load(
    source: str | Path,
    target: Target,
    options: ParallelOptions,
    *,
    mesh: Mesh | None = None,
    revision: str | None = None,
) -> ParallelDraft:
    """The same bound to its target, with its options applied."""
    config, params = load_draft(
        source, target.config, dtype=target.config.dtype, mesh=mesh, revision=revision
    )
    int8 = pays_in_int8(target) if options.int8 is None else options.int8
    return ParallelDraft.bind(config, params, target.params, int8=int8, mesh=mesh)
