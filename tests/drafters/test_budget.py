"""A budget keeps the best nodes, and what it keeps is a tree."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.config import TreeConfig
from longspec_jax.drafters.tree import (
    Tree,
    best_nodes,
    grow,
    node_depths,
    plant,
    subtree,
    within_budget,
)

WIDTHS = (3, 5, 4)
VOCABULARY = 7
budgeted = jax.jit(within_budget, static_argnums=2)


@partial(jax.jit, static_argnums=1)
def grown(
    noise: jax.Array, widths: tuple[int, ...] = WIDTHS
) -> tuple[Tree, list[jax.Array], jax.Array]:
    """A tree by beam search over ``noise[level, B, w, V]``: itself, its totals, its scores."""
    batch = noise.shape[1]
    tree = plant(jnp.full((batch,), 6), TreeConfig(widths))
    total, totals = jnp.zeros((batch, 1)), []
    first, width = 0, 1
    for level, children in enumerate(widths):
        scores = total[:, :, None] + noise[level, :, :width]
        total, best = jax.lax.top_k(scores.reshape(batch, -1), children)
        parents, tokens = best // VOCABULARY, best % VOCABULARY
        tree = grow(tree, first + width, tokens, first + parents)
        totals.append(total)
        first, width = first + width, children
    return tree, totals, jnp.concatenate([jnp.zeros((batch, 1)), *totals], axis=1)


def random_beliefs(seed: int) -> jax.Array:
    """Log-probabilities of four rows, sharp enough that deep nodes beat shallow ones."""
    logits = 3.0 * jax.random.normal(jax.random.key(seed), (3, 4, 5, VOCABULARY))
    return jax.nn.log_softmax(logits)


def oracle(tree: Tree, scores: np.ndarray, count: int) -> list[dict[int, tuple[int, ...]]]:
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


def paths_by_parents(tree: Tree, row: int) -> list[tuple[int, ...]]:
    """Tokens on the path to every node, following its parents."""
    paths: list[tuple[int, ...]] = []
    for node, parent in enumerate(np.asarray(tree.parents[row]).tolist()):
        assert parent == -1 if node == 0 else 0 <= parent < node
        above = paths[parent] if parent >= 0 else ()
        paths.append((*above, int(tree.tokens[row, node])))
    return paths


def test_by_hand() -> None:
    tree = plant(jnp.array([9]), TreeConfig((2, 3)))
    tree = grow(tree, 1, jnp.array([[1, 2]]), jnp.array([[0, 0]]))
    tree = grow(tree, 3, jnp.array([[5, 6, 7]]), jnp.array([[1, 2, 1]]))
    totals = [jnp.array([[-1.0, -3.0]]), jnp.array([[-2.0, -3.5, -2.5]])]
    kept = within_budget(tree, totals, TreeConfig((2, 3), budget=4))
    # Node 2 and its child 4 are the worst; 3 and 5 move up behind node 1.
    np.testing.assert_array_equal(kept.tokens, [[9, 1, 5, 7]])
    np.testing.assert_array_equal(kept.parents, [[-1, 0, 1, 1]])
    mask = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]
    np.testing.assert_array_equal(kept.mask.astype(int), [mask])
    np.testing.assert_array_equal(node_depths(kept, TreeConfig((2, 3), budget=4)), [[0, 1, 2, 2]])


@pytest.mark.parametrize("count", [1, 2, 6, 11, 12])
@pytest.mark.parametrize("seed", range(3))
def test_the_best_nodes_with_their_paths(seed: int, count: int) -> None:
    """Tokens, parents, masks and depths of the kept nodes, each row its own; order is kept."""
    tree, totals, scores = grown(random_beliefs(seed))
    config = TreeConfig(WIDTHS, budget=count)
    kept, expected = budgeted(tree, totals, config), oracle(tree, np.asarray(scores), count)
    assert kept.tokens.shape == (4, count) and kept.mask.shape == (4, count, count)
    depths = np.broadcast_to(node_depths(kept, config), kept.tokens.shape)
    for b in range(4):
        paths = paths_by_parents(kept, b)
        assert paths == list(expected[b].values())
        assert depths[b].tolist() == [len(path) - 1 for path in paths]
        seen = [
            tuple(np.asarray(kept.tokens[b])[mask].tolist()) for mask in np.asarray(kept.mask[b])
        ]
        assert seen == paths
    if count == 6:
        assert len({tuple(nodes) for nodes in expected}) > 1, "rows should differ"


@pytest.mark.parametrize(
    "belief", [0.0, -1e-9, -jnp.inf], ids=["certain", "lost in rounding", "out of reach"]
)
def test_ties_keep_ancestors(belief: float) -> None:
    """Where children score as their parents do, the lower index wins, which is the parent's."""
    tree, totals, _ = grown(jnp.full((3, 2, 5, VOCABULARY), belief).at[0, :, :, 3].set(-2.0))
    for count in range(1, 13):
        kept = budgeted(tree, totals, TreeConfig(WIDTHS, budget=count))
        for b in range(2):
            paths_by_parents(kept, b)


def test_the_root_is_kept_whatever_the_scores() -> None:
    nodes = best_nodes(jnp.array([[-5.0, -1.0, -2.0, -0.5], [0.0, 1.0, 2.0, 3.0]]), 2)
    np.testing.assert_array_equal(nodes, [[0, 3], [0, 3]])


def test_a_node_without_its_parent_is_out_of_reach() -> None:
    """Scores that break the rule cost speed only: no walk reaches parent -1."""
    tree, _, _ = grown(random_beliefs(0))
    kept = subtree(tree, jnp.broadcast_to(jnp.array([0, 5, 9]), (4, 3)))
    assert (np.asarray(kept.parents)[:, :2] == -1).all()


@pytest.mark.parametrize("budget", [None, 13, 64])
def test_a_budget_for_all_nodes_changes_nothing(budget: int | None) -> None:
    tree, totals, _ = grown(random_beliefs(0))
    config = TreeConfig(WIDTHS, budget)
    assert within_budget(tree, totals, config) is tree and not config.selective
    np.testing.assert_array_equal(node_depths(tree, config), [config.depths])


def test_sizes_and_refusals() -> None:
    config = TreeConfig(budget=64)
    assert (config.num_grown, config.num_nodes, config.num_levels) == (69, 64, 5)
    assert TreeConfig((2, 3), budget=64).num_nodes == 6
    for budget in (0, -3):
        with pytest.raises(ValueError, match=f"at least 1 node, got {budget}; leave it out"):
            TreeConfig(budget=budget)
