"""Trees: their masks, the nodes that a budget keeps, and where a threshold ends them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.config.tree import TreeConfig
from longspec_jax.drafters.ngram import NgramDrafter
from longspec_jax.drafters.tree import (
    Tree,
    add_level,
    beam_search,
    best_nodes,
    hang_at_end,
    node_depths,
    root_tree,
    single_branch,
    subtree,
    within_budget,
)
from tests.drafters.kit import paths
from tests.kit import each_row


def test_a_tree_hangs_where_its_row_s_chain_ends() -> None:
    """After all of it, after its first link, and, where there is no such node, after nothing."""

    @jax.jit
    def by_hand() -> Tree:
        chain = single_branch(jnp.full(3, 7), jnp.array([[1, 2]] * 3))
        end = root_tree(jnp.full(3, 9), TreeConfig((2, 1)))
        end = add_level(end, 1, jnp.array([[3, 4]] * 3), jnp.zeros((3, 2), int))
        end = add_level(end, 3, jnp.full((3, 1), 5), jnp.full((3, 1), 2))
        return hang_at_end(chain, jnp.array([2, 1, 3]), end)

    tree = by_hand()
    np.testing.assert_array_equal(tree.tokens, [[7, 1, 2, 3, 4, 5]] * 3)
    parents = [[-1, 0, 1, 2, 2, 4], [-1, 0, 1, 1, 1, 4], [-1, 0, 1, -1, -1, 4]]
    np.testing.assert_array_equal(tree.parents, parents)
    links = [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0]]
    behind_all = [[1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 1, 0], [1, 1, 1, 0, 1, 1]]
    behind_one = [[1, 1, 0, 1, 0, 0], [1, 1, 0, 0, 1, 0], [1, 1, 0, 0, 1, 1]]
    masks = [[*links, *behind_all], [*links, *behind_one], [*links, *behind_all]]
    np.testing.assert_array_equal(tree.mask, np.array(masks, bool))
    depths = np.asarray(node_depths(tree, TreeConfig((1, 1, 2, 1), chain=2)))
    np.testing.assert_array_equal(depths[:2], [[0, 1, 2, 3, 3, 4], [0, 1, 2, 2, 2, 3]])


GROWN = (3, 5, 4)
VOCABULARY = 7
budgeted = jax.jit(within_budget, static_argnums=2)


@partial(jax.jit, static_argnums=1)
def grown(
    noise: jax.Array, widths: tuple[int, ...] = GROWN
) -> tuple[Tree, list[jax.Array], jax.Array]:
    """A tree by beam search over ``noise[level, B, w, V]``: itself, its totals, its scores."""
    batch = noise.shape[1]
    tree = root_tree(jnp.full((batch,), 6), TreeConfig(widths))
    total, totals = jnp.zeros((batch, 1)), []
    first, width = 0, 1
    for level, children in enumerate(widths):
        scores = total[:, :, None] + noise[level, :, :width]
        total, best = jax.lax.top_k(scores.reshape(batch, -1), children)
        parents, tokens = best // VOCABULARY, best % VOCABULARY
        tree = add_level(tree, first + width, tokens, first + parents)
        totals.append(total)
        first, width = first + width, children
    return tree, totals, jnp.concatenate([jnp.zeros((batch, 1)), *totals], axis=1)


def random_noise(seed: int) -> jax.Array:
    """Log-probabilities of four rows, sharp enough that deep nodes beat shallow ones."""
    logits = 3.0 * jax.random.normal(jax.random.key(seed), (3, 4, 5, VOCABULARY))
    return jax.nn.log_softmax(logits)


def best_nodes_of(tree: Tree, scores: np.ndarray, count: int) -> list[dict[int, tuple[int, ...]]]:
    """Every row's kept nodes and the tokens on the path to each, by sorting in Python."""
    rows = []
    for b, row in enumerate(scores):
        order = sorted(range(len(row)), key=lambda node: (-row[node], node))
        paths = {}
        for node in sorted(order[:count]):
            path, at = [], node
            while at >= 0:
                path.append(int(tree.tokens[b, at]))
                at = int(tree.parents[b, at])
            paths[node] = tuple(reversed(path))
        rows.append(paths)
    return rows


def paths_by_node(tree: Tree, row: int) -> list[tuple[int, ...]]:
    """Tokens on the path to every node, the root's own first."""
    root = int(tree.tokens[row, 0])
    nodes = {node: path for path, node in paths(tree, row).items()}
    return [(root, *nodes[node]) for node in sorted(nodes)]


@each_row(("seed", "count"), [(0, 2), (1, 6), (2, 11)])
def test_the_best_nodes_with_their_paths(seed: int, count: int) -> None:
    """Tokens, parents, masks and depths of the kept nodes, each row its own; order is kept."""
    tree, totals, scores = grown(random_noise(seed))
    config = TreeConfig(GROWN, budget=count)
    kept, expected = (
        budgeted(tree, totals, config),
        best_nodes_of(tree, np.asarray(scores), count),
    )
    assert kept.tokens.shape == (4, count) and kept.mask.shape == (4, count, count)
    depths = np.broadcast_to(node_depths(kept, config), kept.tokens.shape)
    for b in range(4):
        found = paths_by_node(kept, b)
        assert found == list(expected[b].values())
        assert depths[b].tolist() == [len(path) - 1 for path in found]
        seen = [
            tuple(np.asarray(kept.tokens[b])[mask].tolist()) for mask in np.asarray(kept.mask[b])
        ]
        assert seen == found
    if count == 6:
        assert len({tuple(nodes) for nodes in expected}) > 1, "rows should differ"


@each_row("belief", [0.0, -1e-9, -jnp.inf])
def test_ties_keep_ancestors(belief: float) -> None:
    """Where children score as their parents do, the lower index wins, which is the parent's."""
    tree, totals, _ = grown(jnp.full((3, 2, 5, VOCABULARY), belief).at[0, :, :, 3].set(-2.0))
    for count in (2, 4, 12):
        kept = budgeted(tree, totals, TreeConfig(GROWN, budget=count))
        for b in range(2):
            assert len(paths_by_node(kept, b)) == count, "no node is without its parent"


def test_the_root_is_kept_whatever_the_scores() -> None:
    nodes = best_nodes(jnp.array([[-5.0, -1.0, -2.0, -0.5], [0.0, 1.0, 2.0, 3.0]]), 2)
    np.testing.assert_array_equal(nodes, [[0, 3], [0, 3]])


def test_a_node_without_its_parent_is_out_of_reach() -> None:
    """Scores that break the rule cost speed only: no walk reaches parent -1."""
    tree, _, _ = grown(random_noise(0))
    kept = subtree(tree, jnp.broadcast_to(jnp.array([0, 5, 9]), (4, 3)))
    assert (np.asarray(kept.parents)[:, :2] == -1).all()


@each_row("budget", [None, 13, 64])
def test_a_budget_for_all_nodes_changes_nothing(budget: int | None) -> None:
    tree, totals, _ = grown(random_noise(0))
    config = TreeConfig(GROWN, budget)
    assert within_budget(tree, totals, config) is tree and not config.selective
    np.testing.assert_array_equal(node_depths(tree, config), [config.depths])


WIDTHS, BUDGET, THRESHOLD = (3, 4, 4, 2), 8, 0.5
SHARPNESS = (0.0, 1.2, 2.5, 9.0)
scored: list[int] = []
"""Depths of the levels that a search has scored, in order."""


def noise(seed: int = 0) -> jax.Array:
    """Log-probabilities ``[B, levels, V]``: rows more and more certain, a level's nodes alike."""
    logits = jax.random.normal(jax.random.key(seed), (len(SHARPNESS), len(WIDTHS), VOCABULARY))
    return jax.nn.log_softmax(jnp.asarray(SHARPNESS)[:, None, None] * logits)


@partial(jax.jit, static_argnums=1)
def searched(belief: jax.Array, config: TreeConfig) -> Tree:
    """The tree of a search over these noise; notes which levels were scored."""

    def score(memory: jax.Array, tree: Tree, nodes: slice, depth: int):
        jax.debug.callback(lambda: scored.append(depth), ordered=True)
        width = nodes.stop - nodes.start
        level = jnp.repeat(belief[:, depth, None], width, axis=1)
        # The memory of a level that was left out would be missed.
        return memory + 1, level + jnp.where(memory == depth, 0.0, -jnp.inf)

    return beam_search(jnp.zeros(len(belief), jnp.int32), config, score, jnp.int32(0))


def oracle(belief: jax.Array, row: int) -> tuple[set[tuple[int, ...]], int]:
    """The paths of a row's tree and how many levels it has, from searches that grow every level."""
    before, kept = 0.0, set()
    for levels in range(1, len(WIDTHS) + 1):
        whole = searched(belief[row : row + 1], TreeConfig(WIDTHS[:levels], BUDGET))
        kept = set(paths(whole, 0))
        logs = np.asarray(belief[row])
        expected = sum(
            np.exp(sum(logs[depth, token] for depth, token in enumerate(path)))
            for path in kept - {()}
        )
        if expected - before <= THRESHOLD:
            return kept, levels
        before = expected
    return kept, len(WIDTHS)


@each_row("seed", range(2))
def test_a_row_ends_with_the_level_that_adds_too_little(seed: int) -> None:
    """Each by itself; a node that is not grown is an orphan that sees only itself."""
    belief = noise(seed)
    config = TreeConfig(WIDTHS, BUDGET, THRESHOLD)
    tree = searched(belief, config)
    assert tree.tokens.shape == (len(SHARPNESS), BUDGET)
    depths = np.asarray(node_depths(tree, config))
    levels = []
    for row in range(len(SHARPNESS)):
        expected, ended = oracle(belief, row)
        found = paths(tree, row)
        assert set(found) == expected
        assert all(depths[row, node] == len(path) for path, node in found.items())
        for node in set(range(BUDGET)) - set(found.values()):
            assert int(tree.parents[row, node]) == -1
            np.testing.assert_array_equal(tree.mask[row, node], np.arange(BUDGET) == node)
        levels.append(ended)
    assert levels[0] == 1 and len(set(levels)) > 1, "rows should differ"


def test_levels_that_no_row_wants_are_not_scored() -> None:
    belief, config = noise(), TreeConfig(WIDTHS, BUDGET, THRESHOLD)
    wanted = [oracle(belief, row)[1] for row in range(len(SHARPNESS))]
    for rows in ([0, 1], [0, 3], [0]):
        scored.clear()
        jax.block_until_ready(searched(belief[jnp.asarray(rows)], config))
        jax.effects_barrier()
        assert scored == list(range(max(wanted[row] for row in rows)))


def test_a_tree_does_not_depend_on_its_neighbours() -> None:
    """Nor do the nodes that are not grown, whether a neighbour grows their level or not."""
    belief = noise()
    for config in (TreeConfig(WIDTHS, BUDGET, THRESHOLD), TreeConfig(WIDTHS, None, THRESHOLD)):
        together = searched(belief, config)
        for row in range(len(SHARPNESS)):
            alone = searched(belief[row : row + 1], config)
            for ours, theirs in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
                np.testing.assert_array_equal(ours[row], theirs[0])


def test_what_has_no_probabilities_takes_no_threshold() -> None:
    with pytest.raises(ValueError, match="ngram has no probabilities.*write 3,4,2@6$"):
        NgramDrafter(TreeConfig((3, 4, 2), budget=6, threshold=0.4))
