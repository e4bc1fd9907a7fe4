"""Any draft, checked by the target over retrieved context before the target checks it whole.

What is chosen here is chosen beside the draft's own options: ``retrieve=4096`` makes a
:class:`~longspec_jax.drafters.hierarchy.Hierarchy` of it.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import jax

from longspec_jax.checks import shown
from longspec_jax.config import DEFAULT_TREE, PLAIN, TargetConfig, TreeConfig
from longspec_jax.drafters.attended import Attended
from longspec_jax.drafters.base import Lossy
from longspec_jax.drafters.draft import DefaultTrees, Draft
from longspec_jax.drafters.hierarchy import Hierarchy, on_one_level
from longspec_jax.drafters.lossy import LossyHierarchy
from longspec_jax.drafters.quest import Quest
from longspec_jax.drafters.refreshed import every
from longspec_jax.drafters.selectors import Selector
from longspec_jax.ops.selection.blocks import BlockBudget

SELECTORS = {"quest": Quest, "attention": Attended}
"""What ``retrieve_by`` may name: bounds of every layer and head, or the last token's attention."""

HIERARCHIES = {"full": Hierarchy, "partial": LossyHierarchy}
"""What ``retrieve_verify`` may name: what a token must have passed to be emitted."""


@dataclass(frozen=True)
class RetrievalOptions:
    """How much of the cache partial verification sees, and what it verifies."""

    retrieve: int
    """Tokens that a partial pass sees of every row, sinks and recent ones included; a multiple of
    the block."""
    retrieve_by: str = "quest"
    """How blocks are chosen: ``quest`` or ``attention``."""
    retrieve_block: int = BlockBudget.block
    """Tokens that are chosen together."""
    retrieve_sinks: int = BlockBudget.sinks
    """First tokens of a row, always seen."""
    retrieve_recent: int = BlockBudget.recent
    """Last tokens of a row, always seen."""
    retrieve_refresh: int = 1
    """Full passes from one choice of blocks to the next; what is committed between is seen."""
    retrieve_tree: str | None = None
    """Tree of the draft that partial passes verify; its usual one on this machine if absent. The
    call's tree is the chain that a full pass verifies."""
    retrieve_verify: str = "full"
    """``full``, or ``partial`` as SpecPV was published, which changes the text: *not lossless*."""
    retrieve_lead: float = 0.0
    """See :attr:`longspec_jax.drafters.hierarchy.Hierarchy.lead`."""

    def __post_init__(self) -> None:
        if self.retrieve_by not in SELECTORS:
            raise ValueError(
                f"retrieve_by={shown(self.retrieve_by)} must be one of {', '.join(SELECTORS)}"
            )
        if self.retrieve_verify not in HIERARCHIES:
            raise ValueError(
                f"retrieve_verify={shown(self.retrieve_verify)} must be one of "
                f"{', '.join(HIERARCHIES)}; with partial the text is not the target's own"
            )
        if self.retrieve_refresh < 1:
            raise ValueError(
                f"retrieve_refresh={self.retrieve_refresh} must be at least 1: blocks are chosen "
                "every so many full passes"
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
    """A tree at the end of a chain, both in no more nodes than the usual tree of a large target."""
    whole = TreeConfig((1,) * levels + tree.widths, threshold=tree.threshold, chain=levels)
    nodes = min(levels + tree.num_nodes, DEFAULT_TREE.num_nodes)
    return replace(whole, budget=nodes) if nodes < whole.num_nodes else whole


OPTION = "retrieve"
"""What the names of these options begin with; the one that all others are about."""


@dataclass(frozen=True, eq=False)
class RetrievalDraft:
    """A draft of any kind with partial verification over retrieved context."""

    inner: Draft
    """What partial passes verify."""
    target: TargetConfig
    options: RetrievalOptions
    name: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.drafter(PLAIN).name)

    @property
    def lossy(self) -> bool:
        """Whether the text is not the target's own."""
        return isinstance(self.drafter(PLAIN), Lossy)

    @property
    def params(self) -> Any:
        """The inner draft's."""
        return self.inner.params

    @property
    def own(self) -> Any:
        """The inner draft's."""
        return self.inner.own

    @property
    def default_trees(self) -> DefaultTrees:
        """Chains of two to four rounds between full passes, with the inner draft's tree behind.

        And that tree alone: at contexts that are not long partial verification does not pay. As
        that depends on the context, all are timed on large targets, too.
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
        """Raise ValueError if the inner draft does not fit, or this was made for another target."""
        self.inner.check_fits(target)
        if target != self.target:
            raise ValueError(
                "this retrieval was made for a target of another shape; load the draft with this "
                "target"
            )

    def drafter(self, tree: TreeConfig, attention: str | None = None) -> Hierarchy:
        """The drafter that hands up this chain, and what is at its end.

        Raises:
          ValueError: if it does not begin with a chain.
        """
        inner = self.inner.drafter(self._inner_tree, attention)
        kind = HIERARCHIES[self.options.retrieve_verify]
        return kind(inner, self._selector, tree, self.options.retrieve_lead)

    @property
    def _selector(self) -> Selector:
        chosen = SELECTORS[self.options.retrieve_by](self.target, self.options.budget)
        return every(self.options.retrieve_refresh, chosen)

    @property
    def _inner_tree(self) -> TreeConfig:
        if self.options.retrieve_tree is not None:
            return TreeConfig.parse(self.options.retrieve_tree)
        usual = self.inner.default_trees
        return (usual.cpu if jax.default_backend() == "cpu" else usual.large)[0]
