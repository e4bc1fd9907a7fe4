"""Growing a tree level by level, the best continuations of all paths of a level becoming the next.

What every drafter with a model does: the model scores a level's nodes, and a beam search over the
cumulative log-probability chooses their children.

With a threshold, depth follows the text (OPT-Tree, arXiv:2406.17276). The exponential of a node's
cumulative log-probability is how likely it is to be accepted, and the sum over the nodes that are
verified is how many tokens a round is expected to accept. A row goes on only while a level raises
this sum by more than the threshold; a level that no row wants is not scored at all. Shapes stay
static: what is not grown is a node without a parent, to which no walk comes.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from longspec_jax.axes import Array
from longspec_jax.config import TreeConfig
from longspec_jax.drafters.budget import expected_acceptance, within_budget
from longspec_jax.drafters.tree import Tree, grow, plant
from longspec_jax.ops.selection.continuations import best_continuations

Memory = TypeVar("Memory")
Score: TypeAlias = Callable[[Memory, Tree, slice, int], tuple[Memory, Array]]
"""``(memory, tree so far, nodes of the level, depth) -> memory, scores [B, w, V]``: of what follows
the nodes, and what later levels need to know of them. Scores are logarithms of probabilities up to
a constant of each node, so logits will do."""
Choose: TypeAlias = Callable[[Array, Array, int], tuple[Array, Array, Array]]
"""The op :func:`longspec_jax.ops.selection.continuations.best_continuations`, an implementation of
it."""
Level: TypeAlias = tuple[Memory, Tree, Float[Array, "B _"]]
"""Memory, the tree so far, and cumulative log-probabilities of its last level."""


def nodes_run(config: TreeConfig) -> int:
    """Nodes that are scored, the root among them: all but those of the last level."""
    return config.num_grown - (config.widths or (0,))[-1]


def beam_search(
    pending: Int[Array, " B"],
    config: TreeConfig,
    score: Score[Memory],
    memory: Memory,
    vocabulary: Int[Array, " v"] | None = None,
    implementation: str | None = None,
) -> Tree:
    """The tree of the best paths below the pending tokens, of which the budget's nodes remain.

    Args:
      pending: the root of every row.
      config: widths, budget and threshold.
      score: called level by level, from the root on; not for the last level.
      memory: a pytree that goes from call to call, such as the keys and values of scored nodes.
      vocabulary: the tokens that scores are about; token ``i`` is the i-th if absent.
      implementation: of the choice among a level's continuations, as of the attention ops.
    """
    choose = partial(best_continuations, implementation=implementation)
    batch, first, totals = pending.shape[0], 0, []
    at = memory, plant(pending, config), jnp.zeros((batch, 1), jnp.float32)
    going, expected = jnp.ones((batch,), bool), jnp.zeros((batch,), jnp.float32)
    for depth, children in enumerate(config.widths):
        deepen = partial(_deepen, score, choose, depth, first, children, vocabulary)
        if config.threshold is None or depth == 0:
            at = deepen(at)
        else:
            deepen, skip = partial(_deepen_some, deepen, going), partial(_skip, children)
            at = jax.lax.cond(going.any(), deepen, skip, at)
        totals.append(at[2])
        if config.threshold is not None and depth + 1 < config.num_levels:
            before, expected = expected, expected_acceptance(totals, config)
            going &= expected - before > config.threshold
        first += 1 if depth == 0 else config.widths[depth - 1]
    return within_budget(_with_seen_selves(at[1], config), totals, config)


def _deepen(
    score: Score[Memory],
    choose: Choose,
    depth: int,
    first: int,
    children: int,
    vocabulary: Int[Array, " v"] | None,
    at: Level[Memory],
) -> Level[Memory]:
    """Grow the level below the nodes from ``first`` on."""
    memory, tree, total = at
    width = total.shape[1]
    with jax.named_scope(f"draft_level_{depth + 1}"):
        memory, scores = score(memory, tree, slice(first, first + width), depth)
        total, parents, tokens = choose(scores, total, children)
        if vocabulary is not None:
            tokens = jnp.take(vocabulary, tokens)
        return memory, grow(tree, first + width, tokens, first + parents), total


def _deepen_some(
    deepen: Callable[[Level[Memory]], Level[Memory]], rows: Bool[Array, " B"], at: Level[Memory]
) -> Level[Memory]:
    """Grow a level in some rows; the others stay as they would be had no row grown it."""
    memory, tree, total = deepen(at)

    def in_rows(new: Array, old: Array) -> Array:
        return jnp.where(rows.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    total = jnp.where(rows[:, None], total, -jnp.inf)
    return memory, jax.tree.map(in_rows, tree, at[1]), total


def _skip(children: int, at: Level[Memory]) -> Level[Memory]:
    """Leave a level out in all rows."""
    memory, tree, total = at
    return memory, tree, jnp.full((total.shape[0], children), -jnp.inf)


def _with_seen_selves(tree: Tree, config: TreeConfig) -> Tree:
    """Let nodes that may not have been grown see themselves: no query sees nothing."""
    if config.threshold is None:
        return tree
    return replace(tree, mask=tree.mask | jnp.eye(config.num_grown, dtype=bool))
