"""A draft of any kind that the target verifies over retrieved context before it verifies in full.

The options here stand beside the draft's own: ``retrieve=4096`` makes a
:class:`~longspec_jax.drafters.retrieval.hierarchy.Hierarchy` of it.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import jax

from longspec_jax.checks import shown
from longspec_jax.config.target import TargetConfig
from longspec_jax.config.tree import DEFAULT_TREE, PLAIN, TreeConfig
from longspec_jax.drafters.draft import DefaultTrees, Draft
from longspec_jax.drafters.retrieval.blocks import AttentionRetriever, Quest
from longspec_jax.drafters.retrieval.hierarchy import Hierarchy, on_one_level
from longspec_jax.ops.selection.blocks import BlockBudget

RETRIEVERS = {"quest": Quest, "attention": AttentionRetriever}
"""Values of ``retrieve_by``: bounds of every layer and head, or the last token's attention."""

VERIFY = ("full", "partial")
"""Values of ``retrieve_verify``: the verification that a token must pass to be emitted."""


@dataclass(frozen=True)
class RetrievalOptions:
    """How much of the cache partial verification sees, and what it verifies."""

    retrieve: int
    """Tokens of every row that a partial forward sees, a multiple of the block; includes sinks and
    recent ones."""
    retrieve_by: str = "quest"
    """How blocks are chosen: ``quest`` or ``attention``."""
    retrieve_block: int = BlockBudget.block
    """Tokens that are chosen together."""
    retrieve_sinks: int = BlockBudget.sinks
    """First tokens of a row, always seen."""
    retrieve_recent: int = BlockBudget.recent
    """Last tokens of a row, always seen."""
    retrieve_tree: str | None = None
    """Tree of the draft that partial forwards verify; its default on this machine if absent. The
    call's tree is the chain that the full verification checks."""
    retrieve_verify: str = "full"
    """``full``, or ``partial`` as SpecPV was published, which changes the text: *not lossless*."""

    def __post_init__(self) -> None:
        if self.retrieve_by not in RETRIEVERS:
            raise ValueError(
                f"retrieve_by={shown(self.retrieve_by)} must be one of {', '.join(RETRIEVERS)}"
            )
        if self.retrieve_verify not in VERIFY:
            raise ValueError(
                f"retrieve_verify={shown(self.retrieve_verify)} must be one of "
                f"{', '.join(VERIFY)}; with partial the text is not the target's own"
            )
        try:
            _ = self.budget
        except ValueError as error:
            raise ValueError(f"retrieve={self.retrieve}: {error}") from error
        if self.retrieve_tree is not None:
            TreeConfig.parse(self.retrieve_tree)

    @property
    def budget(self) -> BlockBudget:
        """The blocks."""
        return BlockBudget(
            self.retrieve, self.retrieve_sinks, self.retrieve_recent, self.retrieve_block
        )


def behind_chain(levels: int, tree: TreeConfig) -> TreeConfig:
    """A tree at the end of a chain; together at most the nodes of a large target's default tree."""
    whole = TreeConfig((1,) * levels + tree.widths, threshold=tree.threshold, chain=levels)
    nodes = min(levels + tree.num_nodes, DEFAULT_TREE.num_nodes)
    return replace(whole, budget=nodes) if nodes < whole.num_nodes else whole


@dataclass(frozen=True, eq=False)
class RetrievalDraft(Draft):
    """A draft of any kind with partial verification over retrieved context."""

    inner: Draft
    """What partial forwards verify."""
    target: TargetConfig
    options: RetrievalOptions
    name: str = field(init=False)
    params: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.drafter(PLAIN).name)
        object.__setattr__(self, "params", self.inner.params)

    @property
    def own_params(self) -> Any:
        """The inner draft's."""
        return self.inner.own_params

    @property
    def apart(self) -> "RetrievalDraft":
        """Around the inner one apart."""
        return replace(self, inner=self.inner.apart)

    @property
    def shares_texts(self) -> bool:
        """Whether the inner one does."""
        return self.inner.shares_texts

    @property
    def default_trees(self) -> DefaultTrees:
        """The inner draft's tree alone, and behind chains of two to four partial rounds.

        Partial verification pays at long contexts only. So all of them are timed, on large targets
        too.
        """
        own = self.inner.default_trees

        def around(tree: TreeConfig, *chains: int) -> tuple[TreeConfig, ...]:
            return *(behind_chain(levels, tree) for levels in chains), on_one_level(tree)

        return DefaultTrees(
            around(own.cpu[0], 8, 16),
            around(own.gpu[0], 16, 8),
            around(own.large[0], 16, 24, 8),
            settled=False,
        )

    def check_fits(self, target: TargetConfig) -> None:
        """Raise ValueError if it does not belong to this target."""
        target.check_read("retrieval")
        self.inner.check_fits(target)
        if target != self.target:
            raise ValueError(
                "this retrieval was made for a target of another shape; load the draft with this "
                "target"
            )

    def drafter(self, tree: TreeConfig, attention: str | None = None) -> Hierarchy:
        """The drafter that proposes this chain, with the tree at its end.

        Raises:
          ValueError: if it does not begin with a chain.
        """
        inner = self.inner.drafter(self._inner_tree, attention)
        selector = RETRIEVERS[self.options.retrieve_by](self.target, self.options.budget)
        return Hierarchy(inner, selector, tree, self.options.retrieve_verify == "full")

    @property
    def _inner_tree(self) -> TreeConfig:
        if self.options.retrieve_tree is not None:
            return TreeConfig.parse(self.options.retrieve_tree)
        trees = self.inner.default_trees
        return (trees.cpu if jax.default_backend() == "cpu" else trees.large)[0]
