"""Trees whose depth follows the text: where they end, and that neighbours change nothing of it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.config import TreeConfig
from longspec_jax.decoding.target import CachedTarget
from longspec_jax.drafters.base import Drafter, NoDraft, Params
from longspec_jax.drafters.longspec.drafter import LongSpecDrafter
from longspec_jax.drafters.ngram import NgramDrafter
from longspec_jax.drafters.small_lm.drafter import SmallLMDrafter
from longspec_jax.drafters.streaming import StreamingDrafter
from longspec_jax.drafters.tree import Tree, beam_search, node_depths
from tests.decoding import lossless
from tests.kit import draft_params, random_draft, random_target

VOCABULARY = 7
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


def paths(tree: Tree, row: int) -> dict[tuple[int, ...], int]:
    """Tokens below the root on the path to every node that has one, and the node."""
    found = {(): 0}
    tokens, parents = np.asarray(tree.tokens[row]), np.asarray(tree.parents[row])
    names = {0: ()}
    for node in range(1, len(tokens)):
        if parents[node] >= 0:
            names[node] = (*names[parents[node]], int(tokens[node]))
            found[names[node]] = node
    return found


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


@pytest.mark.parametrize("seed", range(3))
def test_a_row_ends_with_the_level_that_adds_too_little(seed: int) -> None:
    """Each for itself; what is not grown is an orphan that sees itself alone."""
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


def test_a_threshold_that_all_levels_exceed_changes_nothing() -> None:
    certain = jnp.log(jnp.eye(VOCABULARY)[jnp.asarray([[2, 3, 5, 1]])] + 1e-9)
    with_it, without = (searched(certain, TreeConfig(WIDTHS, 6, each)) for each in (0.9, None))
    for ours, theirs in zip(jax.tree.leaves(with_it), jax.tree.leaves(without), strict=True):
        np.testing.assert_array_equal(ours, theirs)


DYNAMIC = TreeConfig((3, 4, 2), budget=6, threshold=0.4)
SMALL = lossless.SMALL_LM.config


@pytest.mark.parametrize(
    "drafter",
    [
        LongSpecDrafter(lossless.DRAFT, DYNAMIC),
        SmallLMDrafter(SMALL, DYNAMIC, narrower=True),
        StreamingDrafter(DYNAMIC, lossless.SHORT),
    ],
    ids=["longspec", "small_lm", "streaming"],
)
def test_trees_of_any_depth_change_no_token(drafter: Drafter) -> None:
    """Rows at temperatures 0, 0.7 and 1."""
    target_params = random_target(lossless.CONFIG)
    draft = {
        "longspec": lambda: draft_params(random_draft(lossless.DRAFT), target_params),
        "small_lm": lambda: random_target(SMALL, seed=5),
        "streaming": lambda: None,
    }[drafter.name]()
    target, tokens = CachedTarget(lossless.CONFIG), lossless.prompts(101)
    params = Params(target_params, draft)
    rest = tokens, lossless.LENGTHS, lossless.request(**lossless.MIXED)
    plain, _ = lossless.generate(target, NoDraft(), params, *rest)
    rows, state = lossless.generate(target, drafter, params, *rest)
    lossless.assert_same(rows, plain)
    assert int((state.record.emitted - 1 - state.record.rounds).sum()) > 0


def test_what_has_no_probabilities_takes_no_threshold() -> None:
    with pytest.raises(ValueError, match="ngram has no probabilities.*write 3,4,2@6$"):
        NgramDrafter(DYNAMIC)
