"""The target as its own drafter, over the first and the last tokens of its cache.

A forward of the target over a short part of a long cache takes little more than reading the
weights, and often draws what the whole cache would. This is the self-speculation of MagicDec
(arXiv:2408.11049) with the cache of StreamingLLM (arXiv:2309.17453). It has no weights and no
state, and copies nothing: the spans are read where they lie.
"""

from dataclasses import dataclass, field

import jax.numpy as jnp

from longspec_jax.axes import Array
from longspec_jax.config.tree import TreeConfig
from longspec_jax.drafters.base import Drafter, Params, SamplingNoise, Uncommitted, View
from longspec_jax.drafters.draft import DefaultTrees, Draft
from longspec_jax.drafters.retrieval.selection import SinksAndRecent
from longspec_jax.drafters.tree import Tree, beam_search, nodes_run


@dataclass(frozen=True)
class StreamingDrafter(Drafter):
    """Proposes trees by beam search over the log-probability of the target's partial forwards.

    A level costs a forward of the target, however narrow it is: chains and narrow trees pay.
    """

    tree: TreeConfig
    selection: SinksAndRecent = SinksAndRecent()
    """Which committed tokens a level sees, besides its own ancestors."""
    name: str = field(default="streaming", init=False)

    def propose(self, params: Params, state: tuple[()], view: View, noise: SamplingNoise) -> Tree:
        """Grow the tree level by level; the last level's nodes are never run themselves."""
        selected, run = self.selection(view.length), nodes_run(self.tree)

        def score(
            fresh: Uncommitted, tree: Tree, nodes: slice, depth: int
        ) -> tuple[Uncommitted, Array]:
            tokens, path = tree.tokens[:, nodes], tree.mask[:, nodes, :run]
            positions = jnp.broadcast_to(view.position[:, None] + depth, tokens.shape)
            forward = view.partial_forward(tokens, positions, selected, fresh, path, nodes.start)
            return forward.fresh, noise.scores(forward.logits, depth)

        return beam_search(view.pending, self.tree, score, view.uncommitted(run))


@dataclass(frozen=True)
class StreamingDraft(Draft):
    """The target itself as a draft; it has no parameters of its own and fits every target."""

    sinks: int = SinksAndRecent.sinks
    """First tokens of the row that a partial forward sees."""
    recent: int = SinksAndRecent.recent
    """Last tokens of the row that it sees."""
    name: str = field(default="streaming", init=False)

    def __post_init__(self) -> None:
        SinksAndRecent(self.sinks, self.recent)  # Raises for what it cannot be.

    @property
    def default_trees(self) -> DefaultTrees:
        """Chains: a level costs a forward of the target, however few its nodes are."""
        chains = tuple(TreeConfig((1,) * levels) for levels in (2, 3, 4))
        return DefaultTrees(chains, chains, chains)

    def drafter(self, tree: TreeConfig, attention: str | None = None) -> StreamingDrafter:
        """The drafter that grows this tree."""
        return StreamingDrafter(tree, SinksAndRecent(self.sinks, self.recent))
