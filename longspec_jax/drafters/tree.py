"""The draft tree: how it is grown, cut to a budget, and accepted.

Node 0 is the root, the pending token. Tokens, parents and masks are device arrays in a static
shape: they differ from row to row and round to round. A level's nodes follow the previous level's,
so the depth of a grown node is known at trace time from its
:class:`~longspec_jax.config.tree.TreeConfig` (LongSpec, appendix E). Depths differ by row where a
budget chose among the nodes, or where the tree hangs at the end of a chain (:func:`hang_at_end`).

**Growing.** :func:`beam_search` serves every drafter with a model: the model scores the nodes of a
level, and the best continuations of all paths become the next level. With a threshold the depth
follows the text (OPT-Tree, arXiv:2406.17276): the exponential of a node's cumulative
log-probability estimates how likely the node is to be accepted, and the sum over the verified nodes
estimates the accepted tokens of a round. A row stops growing when a level adds at most the
threshold to this sum. A level that no row grows is not scored. A node that is not grown has no
parent, so no path reaches it.

**Budget.** The target verifies only the best nodes of every row (EAGLE-2 reranks its tree in this
way): a verification takes its time by whole tiles of query rows, so 64 nodes may be cheaper than
69. A cumulative log-probability is never above its parent's, so the best nodes form a tree. The
output does not depend on it: a node that is kept without its parent is never reached.

**Accepting.** The target draws the next token at every node. From the root, the accepted path
follows the child that carries the drawn token, and stops at the first node without such a child,
whose draw is the bonus token. There is no accept ratio and no residual distribution: every emitted
token is the target's own draw at its position, so the output is that of plain decoding.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Bool, Float, Int

from longspec_jax.axes import Array, Leaf
from longspec_jax.config.tree import TreeConfig
from longspec_jax.ops.selection.continuations import best_continuations, top_by_rank
from longspec_jax.ops.slicing import along


@struct.dataclass
class Tree:
    """Candidate continuations of the pending token."""

    tokens: Leaf[Int[Array, "B T"]]
    """Token of every node; column 0 is the pending token."""
    parents: Leaf[Int[Array, "B T"]]
    """Index of every node's parent; -1 for the root and for nodes not grown."""
    mask: Leaf[Bool[Array, "B T T"]]
    """``mask[b, i, j]`` where node ``j`` is node ``i`` or its ancestor."""
    totals: Leaf[Float[Array, "B T"]] | None = None
    """Logarithm of how likely the accepted path is to come to each node, 0 for the root and never
    more than its parent's; -inf for a node that no path reaches. None where nothing has estimated
    it."""
    sources: Leaf[Int[Array, "B T"]] | None = None
    """Who proposed each node: bit ``i`` for member ``i`` of joined drafters. None of a single
    drafter, which proposed them all."""
    paths: Leaf[Int[Array, "B T levels"]] | None = None
    """What :func:`tree_paths` finds in a tree, where it was made of paths."""


def root_tree(pending: Int[Array, " B"], config: TreeConfig) -> Tree:
    """A tree that holds its root only, with space for all nodes that will be grown."""
    batch, nodes = pending.shape[0], config.num_grown
    root = jnp.arange(nodes) == 0
    tokens = jnp.where(root, pending[:, None], 0).astype(jnp.int32)
    parents = jnp.full((batch, nodes), -1, jnp.int32)
    mask = jnp.broadcast_to(root[:, None] & root, (batch, nodes, nodes))
    return Tree(tokens, parents, mask)


def add_level(
    tree: Tree, first: int, tokens: Int[Array, "B w"], parents: Int[Array, "B w"]
) -> Tree:
    """Append one level as nodes ``first ... first + w - 1`` under the given parent nodes."""
    # As slices: an indexed update is a scatter, which checks every index on the device.
    write = partial(jax.lax.dynamic_update_slice_in_dim, start_index=first, axis=1)
    ancestors = jnp.take_along_axis(tree.mask, parents[:, :, None], axis=1)
    itself = jnp.eye(tokens.shape[1], tree.tokens.shape[1], first, dtype=bool)
    return Tree(
        tokens=write(tree.tokens, tokens.astype(jnp.int32)),
        parents=write(tree.parents, parents.astype(jnp.int32)),
        mask=write(tree.mask, ancestors | itself),
    )


def single_branch(pending: Int[Array, " B"], tokens: Int[Array, "B n"]) -> Tree:
    """A single branch: below the pending token each of these follows the one before."""
    rows, nodes = tokens.shape[0], tokens.shape[1] + 1
    return Tree(
        tokens=jnp.concatenate([pending[:, None], tokens], axis=1).astype(jnp.int32),
        parents=jnp.broadcast_to(jnp.arange(nodes, dtype=jnp.int32) - 1, (rows, nodes)),
        mask=jnp.broadcast_to(jnp.tri(nodes, dtype=bool), (rows, nodes, nodes)),
    )


def hang_at_end(chain: Tree, count: Int[Array, " B"], end: Tree) -> Tree:
    """A chain with a tree at its end, whose root is the chain's node ``count[b]``.

    Args:
      chain: of :func:`single_branch`; in each row ``count[b]`` links of it count.
      count: may be more than the chain has nodes for: no path reaches such a row's tree.
      end: its nodes but the root follow the chain's.
    """
    nodes = chain.tokens.shape[1]
    below, ended = end.parents[:, 1:], count[:, None]
    root = jnp.where(ended < nodes, ended, -1)
    parents = jnp.where(below == 0, root, jnp.where(below > 0, below + nodes - 1, -1))
    batch, added = below.shape
    links = jnp.broadcast_to((jnp.arange(nodes) <= ended)[:, None], (batch, added, nodes))
    mask = jnp.pad(chain.mask, ((0, 0), (0, 0), (0, added)))
    return Tree(
        tokens=jnp.concatenate([chain.tokens, end.tokens[:, 1:]], axis=1),
        parents=jnp.concatenate([chain.parents, parents.astype(jnp.int32)], axis=1),
        mask=jnp.concatenate([mask, jnp.concatenate([links, end.mask[:, 1:, 1:]], axis=2)], axis=1),
    )


def node_depths(tree: Tree, config: TreeConfig) -> Int[Array, "#B T"]:
    """Depth of every node; one row for all where no depth varies.

    Args:
      tree: a grown tree, or the part of it within the budget.
      config: the shape it was grown in.
    """
    if config.varies:
        return tree.mask.sum(axis=2, dtype=jnp.int32) - 1  # A node sees itself and its ancestors.
    return jnp.asarray(config.depths, jnp.int32)[None]


def tree_paths(tree: Tree, levels: int) -> Int[Array, "B T levels"]:
    """The draft tokens on the path to every node, itself included; -1 where a path is shorter.

    Args:
      tree: candidates below each row's pending token, which is not a draft token.
      levels: of the tree below its root, or more.
    """
    if tree.paths is not None:
        longer = (0, 0), (0, 0), (0, levels - tree.paths.shape[2])
        return jnp.pad(tree.paths, longer, constant_values=-1)
    depth = tree.mask.sum(axis=2, dtype=jnp.int32) - 1  # A node sees itself and its ancestors.
    here = depth[:, None] == 1 + jnp.arange(levels)[:, None]
    found = tree.mask[:, :, None] & here[:, None]
    return jnp.where(found, tree.tokens[:, None, None], -1).max(axis=3, initial=-1)


def within_budget(tree: Tree, totals: Sequence[Float[Array, "B _"]], config: TreeConfig) -> Tree:
    """The nodes of a grown tree that are verified: ``config.num_nodes``, the root among them.

    Args:
      tree: all ``config.num_grown`` nodes.
      totals: cumulative log-probabilities of the levels below the root, first level first.
      config: widths and budget; without one the tree is returned as it is.
    """
    if not config.selective:
        return tree
    return subtree(tree, best_nodes(of_all_nodes(totals), config.num_nodes))


def of_all_nodes(totals: Sequence[Float[Array, "B _"]]) -> Float[Array, "B T"]:
    """Cumulative log-probabilities of the levels below the root, with the root's 0 before them."""
    return jnp.concatenate([jnp.zeros((totals[0].shape[0], 1), jnp.float32), *totals], axis=1)


def expected_acceptance(
    totals: Sequence[Float[Array, "B _"]], config: TreeConfig
) -> Float[Array, " B"]:
    """Expected accepted tokens of the best nodes of the levels so far.

    A node is accepted with all its ancestors or not at all, so the expectation is the sum of the
    nodes' own probabilities (OPT-Tree, arXiv:2406.17276, theorem 3.1).

    Args:
      totals: cumulative log-probabilities of the levels grown so far, first level first.
      config: whose budget says how many nodes are verified.
    """
    grown = jnp.concatenate(totals, axis=1)
    best, _ = top_by_rank(grown, min(config.num_nodes - 1, grown.shape[1]))
    return jnp.exp(best).sum(axis=1)


def best_nodes(scores: Float[Array, "B T"], count: int) -> Int[Array, "B n"]:
    """The root and the ``count - 1`` best other nodes, in ascending order.

    Ties go to the lower index. Parents come before their children, so a kept node's ancestors are
    kept wherever no score is above its parent's, minus infinity included.
    """
    root = jnp.arange(scores.shape[1]) == 0
    _, nodes = top_by_rank(jnp.where(root, jnp.inf, scores), count)
    return jnp.sort(nodes, axis=1)


def subtree(tree: Tree, nodes: Int[Array, "B n"]) -> Tree:
    """The tree of the given nodes, node ``nodes[b, i]`` of row ``b`` becoming node ``i``.

    Args:
      nodes: in ascending order, the root first; a node whose parent is missing gets parent -1.
    """
    parents = jnp.take_along_axis(tree.parents, nodes, axis=1)
    found = parents[:, :, None] == nodes[:, None, :]
    rows = jnp.take_along_axis(tree.mask, nodes[:, :, None], axis=1)
    of_nodes = partial(jnp.take_along_axis, indices=nodes, axis=1)
    return Tree(
        tokens=of_nodes(tree.tokens),
        parents=jnp.where(found.any(axis=2), jnp.argmax(found, axis=2), -1).astype(jnp.int32),
        mask=jnp.take_along_axis(rows, nodes[:, None, :], axis=2),
        totals=None if tree.totals is None else of_nodes(tree.totals),
        sources=None if tree.sources is None else of_nodes(tree.sources),
    )


Memory = TypeVar("Memory")
Score: TypeAlias = Callable[[Memory, Tree, slice, int], tuple[Memory, Array]]
"""``(memory, tree so far, nodes of the level, depth) -> memory, scores [B, w, V]``: scores of the
tokens after each node, and what later levels need to know of the nodes. Scores are
log-probabilities up to a constant of each node, so logits will do."""
Trust: TypeAlias = Callable[[Memory, Tree, slice, int], Array]
"""``(memory, tree so far, nodes of the level, depth) -> [B, w]``: the logarithm of a probability
that every path through the node is worth less by."""
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
    vocabulary: Int[Array, "*B v"] | None = None,
    implementation: str | None = None,
    trust: Trust[Memory] | None = None,
) -> Tree:
    """The tree of the best paths below the pending tokens, cut to the budget's nodes.

    Args:
      score: called level by level, from the root on; not for the last level.
      memory: a pytree passed from call to call, such as the keys and values of scored nodes.
      vocabulary: the tokens that scores are about, the same in all rows or each row's own; token
        ``i`` is the i-th if absent.
      implementation: of the choice among a level's continuations, as in the attention ops.
      trust: how far the scores after a node are trusted; fully if absent.
    """
    choose = partial(best_continuations, implementation=implementation)
    batch, first, totals = pending.shape[0], 0, []
    at = memory, root_tree(pending, config), jnp.zeros((batch, 1), jnp.float32)
    going, expected = jnp.ones((batch,), bool), jnp.zeros((batch,), jnp.float32)
    for depth, children in enumerate(config.widths):
        deepen = partial(_deepen, score, choose, trust, depth, first, children, vocabulary)
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
    tree = replace(at[1], totals=of_all_nodes(totals) if totals else at[2])
    return within_budget(_with_seen_selves(tree, config), totals, config)


def _deepen(
    score: Score[Memory],
    choose: Choose,
    trust: Trust[Memory] | None,
    depth: int,
    first: int,
    children: int,
    vocabulary: Int[Array, "*B v"] | None,
    at: Level[Memory],
) -> Level[Memory]:
    """Grow the level below the nodes from ``first`` on."""
    memory, tree, total = at
    nodes = slice(first, first + total.shape[1])
    with jax.named_scope(f"draft_level_{depth + 1}"):
        if trust is not None:
            total = total + trust(memory, tree, nodes, depth)
        memory, scores = score(memory, tree, nodes, depth)
        total, parents, tokens = choose(scores, total, children)
        if vocabulary is not None:
            own = vocabulary.ndim == 2
            tokens = along(tokens, vocabulary) if own else jnp.take(vocabulary, tokens)
        return memory, add_level(tree, nodes.stop, tokens, first + parents), total


def _deepen_some(
    deepen: Callable[[Level[Memory]], Level[Memory]], rows: Bool[Array, " B"], at: Level[Memory]
) -> Level[Memory]:
    """Grow a level in some rows; the other rows stay as they were."""
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
    """Let nodes that may not have been grown see themselves: every query must see something."""
    if config.threshold is None:
        return tree
    return replace(tree, mask=tree.mask | jnp.eye(config.num_grown, dtype=bool))


class AcceptedPath(NamedTuple):
    """The accepted path of every row, in a static height of levels + 1."""

    path: Int[Array, "B h"]
    """Tree nodes on the path, root first; entries beyond the count repeat the last node."""
    tokens: Int[Array, "B h"]
    """The target's draw at each node of the path: accepted tokens, then the bonus."""
    # Shadows tuple.count on purpose.
    count: Int[Array, " B"]  # pyright: ignore[reportIncompatibleMethodOverride]
    """Tokens emitted, bonus included: 1 to levels + 1."""


AcceptRule: TypeAlias = Callable[[Tree, Array, int], AcceptedPath]
"""``(tree, draws[B, T], levels) -> path``: the type of :func:`accept`."""


def accept(tree: Tree, draws: Int[Array, "B T"], levels: int) -> AcceptedPath:
    """Follow the target's draws down the tree.

    Args:
      tree: candidates below each row's pending token.
      draws: the target's draw at every node.
      levels: levels of the tree below its root.
    """
    node = jnp.arange(draws.shape[1], dtype=jnp.int32)
    drawn = jnp.take_along_axis(draws, jnp.maximum(tree.parents, 0), axis=1)
    child = (tree.parents >= 0) & (tree.tokens == drawn)
    # Of equal siblings, which only a drafter that repeats itself has, the first one counts.
    sibling = (tree.parents[:, :, None] == tree.parents[:, None]) & (node < node[:, None])
    child &= ~(sibling & (tree.tokens[:, :, None] == tree.tokens[:, None])).any(axis=2)
    # The path's nodes are those all of whose ancestors were drawn: no loop over the levels.
    reached = (~tree.mask | (child | (node == 0))[:, None]).all(axis=2)
    depth = tree.mask.sum(axis=2, dtype=jnp.int32) - 1
    # A parent comes before its children: the last node down to a depth is the deepest.
    above = reached[:, None] & (depth[:, None] <= jnp.arange(levels + 1)[:, None])
    path = jnp.where(above, node, 0).max(axis=2)
    count = along(path[:, -1:], depth)[:, 0] + 1
    return AcceptedPath(path, jnp.take_along_axis(draws, path, axis=1), count)


def accept_unverified(
    tree: Tree, draws: Int[Array, "B T"], levels: int, *, unverified_levels: int
) -> AcceptedPath:
    """Accept a whole chain whatever the target drew, then follow its draws: *not* lossless.

    The rule of SpecPV (arXiv:2512.02337, section 3.3): tokens that a partial forward verified are
    emitted, and the full verification only repairs their keys and values.

    Args:
      tree: a chain, maybe with a tree at its end.
      draws: the target's draw at every node.
      levels: levels of the tree below its root.
      unverified_levels: how many first levels are accepted so.
    """
    offered = tree.parents[:, 1 : unverified_levels + 1] >= 0
    taken = jnp.where(
        offered, tree.tokens[:, 1 : unverified_levels + 1], draws[:, :unverified_levels]
    )
    return accept(tree, jnp.concatenate([taken, draws[:, unverified_levels:]], axis=1), levels)
