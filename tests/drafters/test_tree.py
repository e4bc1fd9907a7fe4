"""The tree grows level by level; masks are written out."""

import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.config import TreeConfig
from longspec_jax.drafters.tree import at_end, branch, grow, node_depths, plant


def test_ancestor_masks_by_hand() -> None:
    tree = plant(jnp.array([7, 8]), TreeConfig((2, 3)))
    tree = grow(tree, 1, jnp.array([[1, 2], [3, 4]]), jnp.array([[0, 0], [0, 0]]))
    tree = grow(tree, 3, jnp.array([[5, 6, 7], [8, 9, 1]]), jnp.array([[1, 2, 1], [2, 2, 2]]))
    np.testing.assert_array_equal(tree.tokens, [[7, 1, 2, 5, 6, 7], [8, 3, 4, 8, 9, 1]])
    np.testing.assert_array_equal(tree.parents, [[-1, 0, 0, 1, 2, 1], [-1, 0, 0, 2, 2, 2]])
    first = [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 0, 1, 0, 1, 0],
        [1, 1, 0, 0, 0, 1],
    ]
    second = [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 0, 1, 1, 0, 0],
        [1, 0, 1, 0, 1, 0],
        [1, 0, 1, 0, 0, 1],
    ]
    np.testing.assert_array_equal(tree.mask.astype(int), [first, second])


def test_a_tree_hangs_where_its_row_s_chain_ends() -> None:
    """Behind all of it, behind its first link, and, where there is no such node, behind nothing."""
    chain = branch(jnp.full(3, 7), jnp.array([[1, 2]] * 3))
    end = grow(
        plant(jnp.full(3, 9), TreeConfig((2, 1))),
        1,
        jnp.array([[3, 4]] * 3),
        jnp.zeros((3, 2), int),
    )
    end = grow(end, 3, jnp.full((3, 1), 5), jnp.full((3, 1), 2))
    tree = at_end(chain, jnp.array([2, 1, 3]), end)
    np.testing.assert_array_equal(tree.tokens, [[7, 1, 2, 3, 4, 5]] * 3)
    parents = [[-1, 0, 1, 2, 2, 4], [-1, 0, 1, 1, 1, 4], [-1, 0, 1, -1, -1, 4]]
    np.testing.assert_array_equal(tree.parents, parents)
    links = [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0]]
    behind_all = [[1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 1, 0], [1, 1, 1, 0, 1, 1]]
    behind_one = [[1, 1, 0, 1, 0, 0], [1, 1, 0, 0, 1, 0], [1, 1, 0, 0, 1, 1]]
    masks = [[*links, *behind_all], [*links, *behind_one], [*links, *behind_all]]
    np.testing.assert_array_equal(tree.mask.astype(int), masks)
    depths = node_depths(tree, TreeConfig((1, 1, 2, 1), chain=2))
    np.testing.assert_array_equal(depths[:2], [[0, 1, 2, 3, 3, 4], [0, 1, 2, 2, 2, 3]])


def test_tree_shapes() -> None:
    paper = TreeConfig()
    assert paper.num_nodes == 69 and paper.num_levels == 5
    assert paper.depths[:6] == (0, 1, 1, 1, 1, 2)
    assert TreeConfig(()).num_nodes == 1
    for widths in ((4, 0), (-1,), (200, 100)):
        with pytest.raises(ValueError):
            TreeConfig(widths)
