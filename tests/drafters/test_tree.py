"""The tree grows level by level; masks are written out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.config import TreeConfig
from longspec_jax.drafters.tree import (
    SMALL_VOCABULARY,
    at_end,
    best_continuations,
    branch,
    grow,
    node_depths,
    plant,
)


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


def test_best_continuations_are_the_flat_top_k() -> None:
    scores = jax.random.normal(jax.random.key(0), (2, 5, 13))
    best, nodes, tokens = best_continuations(scores, 7)
    flat, index = jax.lax.top_k(scores.reshape(2, -1), 7)
    np.testing.assert_array_equal(best, flat)
    np.testing.assert_array_equal(nodes * 13 + tokens, index)


@pytest.mark.parametrize(
    "shape, count",
    [((2, 5, 4099), 7), ((1, 16, 4224), 16), ((3, 1, 5000), 4), ((1, 2, 4097), 200)],
    ids=str,
)
def test_a_large_vocabulary_is_searched_in_blocks(shape: tuple[int, ...], count: int) -> None:
    """Same values and pairs as the flat top-k, also where the last block is ragged."""
    batch, nodes, vocabulary = shape
    assert vocabulary > SMALL_VOCABULARY
    scores = jax.random.normal(jax.random.key(1), shape)
    scores = scores.at[0, 0, 256:384].add(3.0)  # Most of the best in one block.
    scores = scores.at[-1, -1, -2:].add(9.0)  # Some of the best in the ragged one.
    best, node, token = jax.jit(best_continuations, static_argnums=1)(scores, count)
    flat, index = jax.lax.top_k(scores.reshape(batch, -1), count)
    np.testing.assert_array_equal(best, flat)
    np.testing.assert_array_equal(node * vocabulary + token, index)


def test_tokens_out_of_reach_may_be_minus_infinity() -> None:
    """Filters leave few tokens: then some nodes carry impossible tokens, all of them real ids."""
    scores = jnp.full((1, 2, 5000), -jnp.inf).at[0, 1, 4995].set(-1.0)
    best, node, token = best_continuations(scores, 4)
    assert (node[0, 0], token[0, 0], best[0, 0]) == (1, 4995, -1.0)
    assert int(token.max()) < 5000 and bool(jnp.isneginf(best[0, 1:]).all())


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
