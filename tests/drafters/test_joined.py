"""Drafters joined in one tree: the union against sets of paths, and what lookup counts."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longspec_jax import LongSpec
from longspec_jax.config.tree import PLAIN, TreeConfig
from longspec_jax.decoding.round_noise import RoundNoise
from longspec_jax.decoding.sampling import Sampling, SamplingKind
from longspec_jax.drafters import ngram
from longspec_jax.drafters import tree as tree_lib
from longspec_jax.drafters import union as union_lib
from longspec_jax.drafters.base import Needs, NoDraft
from longspec_jax.drafters.calibration import COUNTED, SHARES, Counts, Kept, classified
from longspec_jax.drafters.joined import LEVELS as JOINED_LEVELS
from longspec_jax.drafters.joined import Joined, JoinedDraft
from longspec_jax.drafters.ngram import NgramDraft, NgramDrafter
from longspec_jax.drafters.streaming import StreamingDraft
from longspec_jax.drafters.suffix import SuffixDraft
from longspec_jax.drafters.tree import Tree, beam_search
from longspec_jax.generation.candidates import drafters_for
from longspec_jax.loading import with_lookup
from tests.drafters.kit import paths
from tests.kit import each_row

SHAPE = TreeConfig((3, 4, 2))
PLACES, LEVELS = 5, 4
# Outside a program every operation is one of its own.
union = partial(jax.jit, static_argnums=(1, 2))(union_lib.union)
node_depths = partial(jax.jit, static_argnums=1)(tree_lib.node_depths)
side_by_side = partial(jax.jit, static_argnums=3)(ngram.side_by_side)


@partial(jax.jit, static_argnums=(1, 2))
def model_tree(seed: int, batch: int = 3, vocabulary: int = 4) -> Tree:
    """A beam over few tokens, so that lookup meets its paths."""

    def score(memory: Any, tree: Tree, nodes: slice, depth: int) -> tuple[Any, jax.Array]:
        width = nodes.stop - nodes.start
        key = jax.random.fold_in(jax.random.key(seed), depth)
        return memory, 2 * jax.random.normal(key, (batch, width, vocabulary))

    return beam_search(jnp.full(batch, 9, jnp.int32), SHAPE, score, ())


def looked_up(seed: int, batch: int = 3, vocabulary: int = 4) -> Tree:
    """Continuations of places, some of which begin alike; some places have none."""
    random = np.random.default_rng(seed)
    tokens = jnp.asarray(random.integers(0, vocabulary, (batch, PLACES, LEVELS)), jnp.int32)
    totals = np.cumsum(np.log(random.uniform(0.2, 1, tokens.shape)), axis=2)
    totals[:, -1] = -np.inf
    config = TreeConfig((PLACES,) * LEVELS)
    return side_by_side(jnp.full(batch, 9, jnp.int32), tokens, jnp.asarray(totals), config)


def worth_by_path(tree: Tree, row: int) -> dict[tuple[int, ...], float]:
    """The paths of a tree with the most that a node of each is worth."""
    leaves: Any = tree.tokens, tree.mask, tree.totals
    tokens, mask, totals = (np.asarray(each[row]) for each in leaves)
    found: dict[tuple[int, ...], float] = {}
    for node in np.flatnonzero(np.isfinite(totals)):
        above = sorted(np.flatnonzero(mask[node]), key=lambda other: mask[other].sum())
        path = tuple(int(tokens[other]) for other in above[1:])
        found[path] = max(found.get(path, -np.inf), float(totals[node]))
    return found


@each_row("nodes", [2, 8, 14, 40])
def test_a_union_is_the_best_paths_of_all_trees(nodes: int) -> None:
    for seed in range(4):
        one, other = model_tree(seed), looked_up(seed)
        tree: Any = union({0: one, 2: other}, LEVELS, nodes)
        assert tree.tokens.shape == (3, nodes)
        config = TreeConfig(SHAPE.widths, nodes, lookup=LEVELS)
        depths = np.asarray(node_depths(tree, config))
        for row in range(3):
            first, second = worth_by_path(one, row), worth_by_path(other, row)
            worth = {p: max(first.get(p, -9e9), second.get(p, -9e9)) for p in {*first, *second}}
            nodes_of = paths(tree, row)
            kept = nodes_of.keys()
            assert len(kept) == min(nodes, len(worth))
            least = min(worth[path] for path in kept)
            assert all(value <= least for path, value in worth.items() if path not in kept)
            # What the merged tree says of itself.
            parents, mask = np.asarray(tree.parents[row]), np.asarray(tree.mask[row])
            tokens, bits = np.asarray(tree.tokens[row]), np.asarray(tree.sources)[row]
            there = np.isfinite(np.asarray(tree.totals[row]))
            edges = [
                (int(p), int(t)) for p, t, ok in zip(parents, tokens, there, strict=True) if ok
            ]
            assert len(set(edges)) == len(edges), "two children of one parent carry one token"
            for node in range(nodes):
                assert mask[node, node] and (
                    there[node] or (parents[node] == -1 and not bits[node])
                )
                if there[node] and node:
                    expected = mask[parents[node]] | (np.arange(nodes) == node)
                    np.testing.assert_array_equal(mask[node], expected)
                    assert depths[row, node] == depths[row, parents[node]] + 1
                    assert parents[node] < node
            for path in kept - {()}:
                assert bits[nodes_of[path]] == (path in first) + 4 * (path in second)


def test_counts_say_what_was_right_of_a_row_s_own_text() -> None:
    """Each class of a path whose tokens before were right, once for equal paths."""
    tokens = jnp.asarray([[[1, 2, 3], [1, 2, 4], [5, 6, 7]]] * 2)
    matched = jnp.asarray([[4, 2, 1]] * 2)
    found = classified(tokens, jnp.ones((2, 3, 3), bool), matched).kept(jnp.asarray([2, 2]))
    assert found.tokens.shape == (2, *COUNTED)
    text = jnp.asarray([[8, 9, 1, 2, 4, 0], [8, 9, 5, 0, 0, 0]])
    counts = Counts.begin(2).after(found, text, jnp.asarray([4, 2]))
    tried, right = np.asarray(counts.tried), np.asarray(counts.right)
    kinds = SHARES.shape[1]
    assert tried[0].sum() == 5 and right[0].sum() == 3
    assert tried[0, 2 * kinds + 3] == 1 == right[0, 2 * kinds + 3]  # 1 after four tokens.
    assert right[0, 3 * kinds + 3] == 1 and right[0, 2 * kinds + 4] == 0  # 4, and not 3.
    assert tried[1].sum() == 2 and right[1].sum() == 1  # One token is known.
    trusted = counts.likely(found.classes)
    assert trusted[0, 0, 0] > SHARES[2, 3] > trusted[1, 0, 0]
    # Nothing is counted twice, and nothing before the first lookup.
    again = counts.after(found._replace(start=jnp.asarray([5, 3])), text, jnp.asarray([4, 2]))
    np.testing.assert_array_equal(again.tried, tried)
    none = Counts.begin(2).after(Kept.nothing(2), text, jnp.asarray([4, 2]))
    assert not np.asarray(none.tried).any()


def test_chances_under_known_noise_have_the_chance_as_their_mean() -> None:
    batch, vocabulary = 400, 50
    sampling = Sampling(
        jnp.ones(batch),
        jnp.zeros(batch, jnp.int32),
        jnp.ones(batch),
        jnp.arange(batch, dtype=jnp.uint32),
        jnp.full(batch, -jnp.inf),
        SamplingKind.SAMPLED,
    )
    noise = RoundNoise.of_round(sampling, jnp.zeros(batch, jnp.int32), 2, vocabulary)
    tokens = jnp.broadcast_to(jnp.arange(40)[:, None], (batch, 40, 2)).astype(jnp.int32)
    for likely in (0.0, 0.05, 0.5, 0.9, 1.0):
        found = noise.chances(jnp.full(tokens.shape, likely), tokens)
        np.testing.assert_allclose(found.mean(), likely, atol=0.01)
    greedy = RoundNoise.of_round(
        sampling.of_kind(SamplingKind.GREEDY), jnp.zeros(batch, jnp.int32), 2, vocabulary
    )
    assert (greedy.chances(jnp.full(tokens.shape, 0.3), tokens) == 0.3).all()


def test_who_proposes_to_which_tree() -> None:
    draft = JoinedDraft((StreamingDraft(), NgramDraft(), SuffixDraft()))
    tree = TreeConfig.parse("3,2@9~4")
    both = draft.drafter(tree)
    assert both.name == "streaming+ngram+suffix" and both.sources == (
        "streaming",
        "ngram",
        "suffix",
    )
    shapes = [member.tree for _, member in both.active]
    assert shapes == [TreeConfig((3, 2)), *[TreeConfig((8,) * 4)] * 2]
    assert draft.drafter(TreeConfig((3, 2))).name == "streaming"
    assert draft.drafter(TreeConfig.parse("none@9~4")).name == "ngram+suffix"
    assert draft.drafter(PLAIN).active == [] and not draft.drafter(PLAIN).proposes_freely
    assert draft.drafter(TreeConfig.parse("none@9~4")).proposes_freely
    assert not both.proposes_freely
    lookups = JoinedDraft((NgramDraft(), SuffixDraft())).drafter(TreeConfig((2, 2)))
    assert [member.tree for _, member in lookups.active] == [TreeConfig((2, 2))] * 2


@each_row("drafts", [["ngram"], ["suffix"], ["ngram", "suffix"]])
def test_lookup_alone_takes_the_tree_that_names_its_levels(drafts: list[str]) -> None:
    """``none@9~4`` is lookup's part of a joined tree, and the whole of one that nothing joins."""
    spec = LongSpec.demo(draft=drafts)
    [drafter], _ = drafters_for(spec, TreeConfig.parse("none@9~4"), 1, adaptive=False)
    assert drafter.tree == TreeConfig((8,) * 4, budget=9)


def test_lookup_joins_every_draft_with_a_model() -> None:
    assert [each.name for each in with_lookup((StreamingDraft(),))] == ["streaming", "ngram"]
    for drafts in ((), (NgramDraft(),), (StreamingDraft(), SuffixDraft())):
        assert with_lookup(drafts) == drafts
    usual = JoinedDraft(with_lookup((StreamingDraft(),))).default_trees
    own = StreamingDraft().default_trees
    for joined, alone in ((usual.cpu, own.cpu), (usual.gpu, own.gpu), (usual.large, own.large)):
        assert [tree.widths for tree in joined][: len(alone)] == [tree.widths for tree in alone]
        # No deeper than a chain of all nodes.
        levels = [min(JOINED_LEVELS, tree.num_nodes - 1) for tree in joined]
        assert [tree.lookup for tree in joined] == levels
        assert all(tree.num_nodes >= 6 for tree in joined)
        assert [tree for tree in joined if not tree.widths], "lookup alone is a candidate"
    assert not usual.settled


def test_lookup_gets_all_tokens_and_takes_no_features_from_others() -> None:
    joined = Joined((NgramDrafter(PLAIN), NoDraft()), PLAIN)
    assert joined.needs == Needs(recent=0, text=True)
    windowed = Needs(hidden=(2,), recent=16)
    assert windowed | joined.needs == Needs(hidden=(2,), recent=16, text=True)
    assert joined.needs.of_a_pass == Needs()
