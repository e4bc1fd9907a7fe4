"""Medusa heads as they are published, in and out, and the draft bound to its target.

``medusa_lm_head.safetensors`` or ``.pt`` has the tensors of all heads, by the number of the head
and of the module in it: residual blocks, and behind them an LM head of its own where it has one.
``config.json`` has no sizes; they follow from the tensors.
"""

import re
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from longspec_jax.config import TargetConfig, TreeConfig
from longspec_jax.drafters.draft import DefaultTrees, Draft, Target
from longspec_jax.drafters.medusa.drafter import MedusaConfig, MedusaDrafter, MedusaParams
from longspec_jax.models.target import head_of
from longspec_jax.weights.checkpoint import MEDUSA_FILES, Tensors, open_tensors
from longspec_jax.weights.hub import local_folder
from longspec_jax.weights.json_files import JsonObject, read_json
from longspec_jax.weights.params import load_params, write_model
from longspec_jax.weights.tables import Rule, Table, bind, check_tensors

_PREFIX = "medusa_head."
"""Stands before all names where the heads were saved with their model."""


@dataclass(frozen=True)
class MedusaOptions:
    """Medusa heads have no options."""


@dataclass(frozen=True, eq=False)
class MedusaDraft(Draft):
    """Medusa heads beside their target."""

    config: MedusaConfig
    params: MedusaParams
    name: str = field(default="medusa", init=False)

    @property
    def own_params(self) -> Any:
        """The heads."""
        return self.params.heads

    @property
    def default_trees(self) -> DefaultTrees:
        """As deep as there are heads, up to four: a deeper one is seldom right."""
        levels = min(self.config.heads, 4)
        chain, small = TreeConfig((1,) * min(levels, 3)), TreeConfig((2, 2)[:levels])
        narrow, wide = (TreeConfig((8, 16, 16, 16)[:levels], budget) for budget in (16, 64))
        return DefaultTrees(
            (chain, small), (narrow, wide), (wide, narrow), settled=False, together=(wide, narrow)
        )

    def check_fits(self, target: TargetConfig) -> None:
        """Raise ValueError if these are no heads for this target."""
        self.config.check_fits(target)

    def drafter(self, tree: TreeConfig, attention: str | None = None) -> MedusaDrafter:
        """The drafter that grows this tree."""
        return MedusaDrafter(self.config, tree, attention)


def load(
    source: str | Path,
    target: Target,
    options: MedusaOptions = MedusaOptions(),
    *,
    mesh: Mesh | None = None,
    revision: str | None = None,
) -> MedusaDraft:
    """Load Medusa heads, of Medusa 1 or 2.

    Args:
      source: a folder or hub id.
      target: what they were trained for.
      options: none.
      mesh: devices to spread them over; the first device if absent.
      revision: branch, tag or commit of a hub id.

    Raises:
      FileNotFoundError: if the folder or one of its files is missing.
      ValueError: if they do not belong to the target, or a file is damaged.
    """
    folder = local_folder(source, revision)
    raw = read_json(folder / "config.json")
    with ExitStack() as stack:
        found = open_tensors(folder, stack, MEDUSA_FILES)
        tensors = {name.removeprefix(_PREFIX): tensor for name, tensor in found.items()}
        try:
            config = _config(raw, tensors, target.config)
            config.check_fits(target.config)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from error
        table = heads_table(config)
        check_tensors(table, tensors, str(source))
        heads = load_params(table, tensors, config.dtype, mesh)
    return MedusaDraft(config, MedusaParams(heads, head_of(target.params)))


def save(folder: str | Path, draft: MedusaDraft) -> None:
    """Save Medusa heads as published.

    Args:
      folder: made if absent; heads in it are replaced.
      draft: the heads, of any sharding.
    """
    config = draft.config
    raw = {"medusa_num_heads": config.heads, "medusa_num_layers": config.blocks}
    where = Path(folder).expanduser()
    table, heads = heads_table(config), draft.params.heads
    write_model(where, table, heads, config.dtype, raw, file=MEDUSA_FILES[0])


def heads_table(config: MedusaConfig) -> Table:
    """The tensors of the heads."""
    sizes = {"D": config.model_width, "E": config.model_width, "V": config.vocab_size}
    leaves = []
    for head in range(config.heads):
        for block in range(config.blocks):
            ours, theirs = f"heads_{head}/block_{block}/", f"{head}.{block}.linear."
            leaves.append(bind(Rule("kernel", "E D", (("weight", "D E"),)), sizes, ours, theirs))
            leaves.append(bind(Rule("bias", "D", (("bias", "D"),)), sizes, ours, theirs))
        if config.own_tables:
            rule = Rule("head", "V D", ((f"{config.blocks}.weight", "V D"),))
            leaves.append(bind(rule, sizes, f"heads_{head}/", f"{head}."))
    return Table(tuple(leaves), {})


def _config(raw: JsonObject, tensors: Tensors, target: TargetConfig) -> MedusaConfig:
    """The shape of the heads, by their tensors."""
    blocks = raw.whole("medusa_num_layers", 1)
    stored = {int(found[1]) for name in tensors if (found := re.match(r"(\d{1,4})\.", name))}
    first, own = tensors.get("0.0.linear.weight"), tensors.get(f"0.{blocks}.weight")
    if first is None or len(first.shape) != 2 or (own is not None and len(own.shape) != 2):
        raise ValueError(
            "0.0.linear.weight, the first block of the first head, is not among the tensors, or "
            "they are no matrices; these are no Medusa heads, or the file is damaged"
        )
    # The released files may hold more heads than their config.json names.
    heads = max(raw.whole("medusa_num_heads", len(stored)), len(stored))
    return MedusaConfig(
        heads,
        blocks,
        first.shape[0],
        target.vocab_size if own is None else own.shape[0],
        target.num_layers,
        own is not None,
        target.dtype,
        target.logits_divisor,
        target.logit_cap,
    )
