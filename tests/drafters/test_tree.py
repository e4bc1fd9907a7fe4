"""The tree grows level by level; masks are written out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.config import TreeConfig
from longspec_jax.drafters.tree import best_continuations, grow, plant


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


def test_best_continuations_are_the_flat_top_k() -> None:
    scores = jax.random.normal(jax.random.key(0), (2, 5, 13))
    best, nodes, tokens = best_continuations(scores, 7)
    flat, index = jax.lax.top_k(scores.reshape(2, -1), 7)
    np.testing.assert_array_equal(best, flat)
    np.testing.assert_array_equal(nodes * 13 + tokens, index)


def test_a_tree_wider_than_its_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="only 6 continuations"):
        best_continuations(jnp.zeros((1, 2, 3)), 7)


def test_tree_shapes() -> None:
    paper = TreeConfig()
    assert paper.num_nodes == 69 and paper.num_levels == 5
    assert paper.depths[:6] == (0, 1, 1, 1, 1, 2)
    assert TreeConfig(()).num_nodes == 1
    for widths in ((4, 0), (-1,), (200, 100)):
        with pytest.raises(ValueError):
            TreeConfig(widths)
