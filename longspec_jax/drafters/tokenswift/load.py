"""TokenSwift's heads as they are published, and the draft bound to its target.

They lie among the target's own tensors, as ``model.medusa_layers.{head}.*``, and ``medusa_heads``
of the target's ``config.json`` counts them. So target and draft may be one folder.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from longspec_jax.config.target import TargetConfig
from longspec_jax.config.tree import TreeConfig
from longspec_jax.drafters.draft import DefaultTrees, Draft, Target
from longspec_jax.drafters.retrieval.selection import Quest
from longspec_jax.drafters.tokenswift.drafter import (
    TokenSwiftConfig,
    TokenSwiftDrafter,
    TokenSwiftParams,
)
from longspec_jax.models.target import head_of
from longspec_jax.ops.selection.blocks import BlockBudget
from longspec_jax.weights.folder import open_folder
from longspec_jax.weights.tables import Rule, Table, bind

_PREFIX = "model.medusa_layers."
_HEAD = (
    Rule("input_norm/scale", "D", (("input_layernorm.weight", "D"),)),
    Rule("block_0/kernel", "E D", (("linear.weight", "D E"),)),
    Rule("output_norm/scale", "D", (("post_layernorm.weight", "D"),)),
)


@dataclass(frozen=True)
class TokenSwiftOptions:
    """How much of the cache a draft's forward sees; none changes a token."""

    context: int = BlockBudget.slots
    """Tokens of every row, in whole blocks of 32: the first and the last ones, and those that the
    last queries attend to most."""

    def __post_init__(self) -> None:
        try:
            BlockBudget(self.context)
        except ValueError as error:
            raise ValueError(f"context={self.context}: {error}") from error


@dataclass(frozen=True, eq=False)
class TokenSwiftDraft(Draft):
    """TokenSwift's heads beside their target."""

    config: TokenSwiftConfig
    params: TokenSwiftParams = field(repr=False)
    target: TargetConfig
    context: int = BlockBudget.slots
    """Tokens of every row that a draft's forward sees."""
    name: str = field(default="tokenswift", init=False)

    @property
    def own_params(self) -> Any:
        """The heads."""
        return self.params.heads

    @property
    def default_trees(self) -> DefaultTrees:
        """The published one, three children of every node but the root, and smaller ones."""
        levels = self.config.heads + 1
        tree, chain = TreeConfig((1, 3, 9, 27)[:levels]), TreeConfig((1,) * min(levels, 4))
        narrow = TreeConfig((1, 2, 4, 4)[:levels])
        return DefaultTrees((chain, narrow), (narrow, tree), (tree, narrow, chain), settled=False)

    def drafter(self, tree: TreeConfig, attention: str | None = None) -> TokenSwiftDrafter:
        """The drafter that grows this tree."""
        selector = Quest(self.target, BlockBudget(self.context))
        return TokenSwiftDrafter(self.config, tree, attention, selector)


def load(
    source: str | Path,
    target: Target,
    options: TokenSwiftOptions = TokenSwiftOptions(),
    *,
    mesh: Mesh | None = None,
    revision: str | None = None,
) -> TokenSwiftDraft:
    """Load TokenSwift's heads, from the folder of the model that they are stored with.

    Raises:
      FileNotFoundError: if the folder or one of its files is missing.
      ValueError: if they do not belong to the target, or a file is damaged.
    """
    theirs = target.config
    with open_folder(source, mesh, revision) as folder:
        raw, found = folder.raw, folder.tensors
        raw.require(
            ("medusa_heads", "hidden_size", "vocab_size"), "a model with TokenSwift's heads"
        )
        sizes = raw.whole("hidden_size"), raw.whole("vocab_size"), theirs.num_layers
        tensors = {name: found[name] for name in found if name.startswith(_PREFIX)}
        with folder.named():
            config = TokenSwiftConfig(
                *(raw.whole("medusa_heads"), *sizes, theirs.norm_eps, theirs.dtype),
                logits_divisor=theirs.logits_divisor,
                logit_cap=theirs.logit_cap,
            )
            config.check_fits(theirs)
        params = folder.params(heads_table(config), tensors, config.dtype)
    bound = TokenSwiftParams(params, head_of(target.params))
    return TokenSwiftDraft(config, bound, target.config, options.context)


def heads_table(config: TokenSwiftConfig) -> Table:
    """The tensors of the heads."""
    sizes = {"D": config.model_width, "E": config.model_width}
    leaves = [
        bind(rule, sizes, f"heads_{head}/", f"{_PREFIX}{head}.")
        for head in range(config.heads)
        for rule in _HEAD
    ]
    return Table(tuple(leaves), {})
