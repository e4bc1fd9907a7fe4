"""The target as its own drafter, over the first and the last tokens of its cache.

With a short span of a long cache to read, a pass of the target takes little more than reading its
weights, and it often draws what it would draw from all of the cache. This is the self-speculation
of MagicDec (arXiv:2408.11049) with the cache of StreamingLLM (arXiv:2309.17453): no weights and no
state, and nothing is copied, for the spans are read where they lie.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from longspec_jax.config import TreeConfig
from longspec_jax.drafters.base import NOTHING, Beliefs, Committed, Needs, Params, View
from longspec_jax.drafters.budget import within_budget
from longspec_jax.drafters.selection import SinksAndRecent
from longspec_jax.drafters.tree import Tree, best_continuations, grow, plant


@dataclass(frozen=True)
class StreamingDrafter:
    """Proposes trees by beam search over the log-probability of the target's partial passes.

    A level costs a pass of the target, however narrow it is: chains and narrow trees pay.
    """

    tree: TreeConfig
    selection: SinksAndRecent = SinksAndRecent()
    """Which committed tokens a level sees, beside its own ancestors."""
    needs: Needs = field(default=NOTHING, init=False)

    def begin(self, params: Params, batch: int, capacity: int) -> tuple[()]:
        """No state."""
        return ()

    def extend(self, params: Params, state: tuple[()], committed: Committed) -> tuple[()]:
        """No state."""
        return ()

    def propose(self, params: Params, state: tuple[()], view: View, beliefs: Beliefs) -> Tree:
        """Grow the tree level by level; the last level's nodes are never run themselves."""
        batch = view.pending.shape[0]
        tree = plant(view.pending, self.tree)
        selected = self.selection(view.length)
        run = self.tree.num_grown - (self.tree.widths or (1,))[-1]
        fresh = view.uncommitted(run)
        total, totals = jnp.zeros((batch, 1), jnp.float32), []
        first, width = 0, 1
        for depth, children in enumerate(self.tree.widths):
            nodes = slice(first, first + width)
            tokens, path = tree.tokens[:, nodes], tree.mask[:, nodes, :run]
            positions = jnp.broadcast_to(view.position[:, None] + depth, tokens.shape)
            with jax.named_scope(f"draft_level_{depth + 1}"):
                glance = view.glance(tokens, positions, selected, fresh, path, first)
                fresh = glance.fresh
                belief = beliefs.log_probabilities(glance.logits, depth)
                total, parents, tokens = best_continuations(total[:, :, None] + belief, children)
                tree = grow(tree, first + width, tokens, first + parents)
            totals.append(total)
            first, width = first + width, children
        return within_budget(tree, totals, self.tree)
