"""Growing a tree level by level, the best continuations of all paths of a level becoming the next.

What every drafter with a model does: the model scores a level's nodes, and a beam search over the
cumulative log-probability chooses their children.
"""

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Int

from longspec_jax.axes import Array
from longspec_jax.config import TreeConfig
from longspec_jax.drafters.budget import within_budget
from longspec_jax.drafters.tree import Tree, best_continuations, grow, plant

Score: TypeAlias = Callable[[Tree, slice, int], Array]
"""``(tree so far, nodes of the level, depth) -> log-probabilities [B, w, V]`` of what follows."""


def nodes_run(config: TreeConfig) -> int:
    """Nodes that are scored, the root among them: all but those of the last level."""
    return config.num_grown - (config.widths or (0,))[-1]


def beam_search(
    pending: Int[Array, " B"],
    config: TreeConfig,
    score: Score,
    vocabulary: Int[Array, " v"] | None = None,
) -> Tree:
    """The tree of the best paths below the pending tokens, of which the budget's nodes remain.

    Args:
      pending: the root of every row.
      config: widths and budget.
      score: called level by level, from the root on; not for the last level.
      vocabulary: the tokens that scores are about; token ``i`` is the i-th if absent.
    """
    tree = plant(pending, config)
    total, totals = jnp.zeros((pending.shape[0], 1), jnp.float32), []
    first, width = 0, 1
    for depth, children in enumerate(config.widths):
        with jax.named_scope(f"draft_level_{depth + 1}"):
            belief = score(tree, slice(first, first + width), depth)
            total, parents, tokens = best_continuations(total[:, :, None] + belief, children)
            if vocabulary is not None:
                tokens = jnp.take(vocabulary, tokens)
            tree = grow(tree, first + width, tokens, first + parents)
        totals.append(total)
        first, width = first + width, children
    return within_budget(tree, totals, config)
