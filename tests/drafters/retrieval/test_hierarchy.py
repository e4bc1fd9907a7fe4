"""Rounds inside a proposal: how long the chains are, and what the inner drafter is told."""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.config.tree import TreeConfig
from longspec_jax.decoding.round import propose_tree, sampling_noise
from longspec_jax.decoding.round_noise import RoundNoise
from longspec_jax.decoding.rows import Rows
from longspec_jax.decoding.sampling import NO_TOKEN
from longspec_jax.decoding.target import TargetModel
from longspec_jax.drafters.base import Drafter, Needs, NoDraft, Params, SamplingNoise, View
from longspec_jax.drafters.retrieval.hierarchy import PartialVerifier
from longspec_jax.drafters.retrieval.selection import SinksAndRecent, Spans
from longspec_jax.drafters.streaming import StreamingDrafter
from longspec_jax.drafters.tree import Tree
from longspec_jax.models.target import Target
from longspec_jax.ops.attention.reference import causal_attention
from tests.decoding.lossless import CONFIG, DRAFT_TABLES, LENGTHS, LOOKUP, TABLE, prompts
from tests.decoding.lossless import request as requested
from tests.drafters.kit import histogram, is_perfect
from tests.kit import each_row, prefill, random_target
from tests.lookup import LookupDrafter

ALL = SinksAndRecent(3, 1000)
CHAIN, LONG = TreeConfig((1,) * 4), TreeConfig((1,) * 9)
GREEDY, MIXED = requested(), requested((0.0, 0.7, 1.0))


def over_all(inner: Drafter, tree: str) -> PartialVerifier:
    """Rounds checked over all of the context."""
    return PartialVerifier(inner, ALL, TreeConfig.parse(tree))


OWN, PLAIN = LookupDrafter(TreeConfig((1, 1))), LookupDrafter(TreeConfig(()))
TREES, THREE = LookupDrafter(TreeConfig((2, 3))), LookupDrafter(TreeConfig((1, 1, 1)))
TARGETS = StreamingDrafter(TreeConfig(()), ALL)
TWICE = over_all(PLAIN, "chain:2")
PERFECT: dict[str, tuple[PartialVerifier, Any]] = {
    # The last draw of the last round counts, too: three rounds of two levels are nine tokens.
    "own": (over_all(OWN, "chain:9"), MIXED),
    "streaming": (over_all(StreamingDrafter(TreeConfig((1, 1)), ALL), "chain:9"), MIXED),
    "hierarchy": (over_all(over_all(TARGETS, "chain:3"), "chain:12"), MIXED),
    # Two rounds of two levels, and two levels that the target verifies.
    "a tree at the end": (over_all(OWN, "chain:6/chain:2"), GREEDY),
    "a tree at the end of hierarchies": (over_all(TWICE, "chain:6/chain:2"), MIXED),
    "a chain shorter than a round": (over_all(THREE, "chain:2"), MIXED),
}


@pytest.mark.parametrize("name", PERFECT)
def test_all_is_accepted_of_a_perfect_drafter(name: str) -> None:
    assert is_perfect(histogram(*PERFECT[name]))


@pytest.mark.parametrize(
    ("drafter", "request_"),
    [
        (over_all(OWN, "chain:7/chain:2"), GREEDY),
        (over_all(TWICE, "chain:7/chain:2"), MIXED),
        # A round yields more than the chain holds: what follows does not follow its last node.
        (over_all(THREE, "chain:2/2"), GREEDY),
    ],
    ids=["one", "two", "cut"],
)
def test_a_chain_that_is_no_whole_number_of_rounds_ends_before(drafter: Drafter, request_) -> None:
    """Its last node."""
    found = histogram(drafter, request_)
    assert is_perfect(found[:-1]) and found[-1] == 0


def test_a_bad_draft_s_tree_at_the_end_gains_nothing() -> None:
    """Negative control: the chain is confirmed, the tree after it is not."""
    found = histogram(PERFECT["a tree at the end"][0], GREEDY, DRAFT_TABLES["adversarial"])
    # Its rounds yield one token each, and after four there is no room for three more.
    assert is_perfect(found[:5]) and found[5:].sum() == 0


@pytest.mark.parametrize(
    ("hierarchy", "alone"),
    [
        # An empty chain is one level: the inner drafter's trees, as it would propose them alone.
        (PartialVerifier(TREES, SinksAndRecent(2, 5), TreeConfig((2, 3), chain=0)), TREES),
        # Without a drafter inside each round draws one token, by partial passes of the target.
        (PartialVerifier(NoDraft(), ALL, CHAIN), StreamingDrafter(CHAIN, ALL)),
        (
            PartialVerifier(NoDraft(), SinksAndRecent(2, 5), CHAIN),
            StreamingDrafter(CHAIN, SinksAndRecent(2, 5)),
        ),
    ],
    ids=["no chain", "no drafter", "no drafter, short"],
)
def test_what_is_left_of_a_hierarchy_is_its_part(hierarchy: Drafter, alone: Drafter) -> None:
    near = DRAFT_TABLES["near"]
    wanted = histogram(alone, MIXED, near)
    np.testing.assert_array_equal(histogram(hierarchy, MIXED, near), wanted)


def test_every_round_advances_however_bad_the_drafter() -> None:
    """A check over everything yields at least its own draw, which the full one confirms."""
    drafter = over_all(TREES, "chain:6")
    bad = histogram(drafter, MIXED, DRAFT_TABLES["adversarial"])
    near = histogram(drafter, MIXED, DRAFT_TABLES["near"])
    # Rows may be cut in their last rounds.
    assert bad[:2].sum() <= 3 and near[:2].sum() <= 3
    levels = np.arange(7)
    assert near @ levels / near.sum() > bad @ levels / bad.sum()


class Blind(SinksAndRecent):
    """Nothing of the cache is seen."""

    def __call__(self, length: jax.Array) -> Spans:
        nothing = jnp.zeros((length.shape[0], 1), jnp.int32)
        return Spans(nothing, nothing)


class Stuck(RoundNoise):
    """Its noise does not move on with the rounds."""

    def after(self, steps: jax.Array, levels: int) -> RoundNoise:
        return super().after(jnp.zeros_like(steps), levels)


class Stale(PartialVerifier):
    """Its rounds all use the noise of the first."""

    def propose(self, params: Params, state: Any, view: View, noise: SamplingNoise) -> Tree:
        assert isinstance(noise, RoundNoise)
        stuck = Stuck(noise.noise, noise.sampling)
        return super().propose(params, state, view, stuck)


@pytest.mark.parametrize("broken", ["selection", "noise"])
def test_a_mistake_lowers_what_is_accepted(broken: str) -> None:
    """Negative control: the perfection above tells a right check from a wrong one."""
    request = requested((1.0, 0.7, 1.0))
    drafter = {
        "selection": PartialVerifier(OWN, Blind(3, 1000), LONG),
        "noise": Stale(OWN, ALL, LONG),
    }[broken]
    found = histogram(drafter, request)
    assert found[-1] < found.sum() / 2


@dataclass(frozen=True)
class Diarist(Drafter):
    """Draws chains of its own, and keeps what it is told: by position, in ``state``."""

    tree: TreeConfig = TreeConfig((1, 1))
    needs: Needs = Needs(hidden=(1,), queries=(0,))
    name: str = "lookup"
    seen: list[Any] = field(default_factory=list, compare=False)

    def begin(self, params: Params, batch: int, capacity: int) -> Any:
        hidden = jnp.zeros((batch, capacity + 9, CONFIG.model_width))
        queries = jnp.zeros((batch, capacity + 9, CONFIG.num_heads, CONFIG.head_width))
        return jnp.full((batch, capacity + 9), -1), hidden, queries

    def extend(self, params: Params, state: Any, committed) -> Any:
        at = committed.start[:, None] + jnp.arange(committed.tokens.shape[1])
        inside = at < (committed.start + committed.count)[:, None]
        at = jnp.where(inside, at, state[0].shape[1])
        told = committed.tokens, committed.features.hidden[1], committed.features.queries[0]
        write = jax.vmap(lambda page, at, new: page.at[at].set(new, mode="drop"))
        return tuple(write(page, at, new) for page, new in zip(state, told, strict=True))

    def propose(self, params: Params, state: Any, view, noise) -> Tree:
        told = state, view.pending, view.position
        jax.debug.callback(lambda *told: self.seen.append(told), *told, ordered=True)
        return StreamingDrafter(self.tree, SinksAndRecent(0, 4)).propose(params, (), view, noise)


@jax.jit
def propose(params: Params, rows: Rows) -> Tree:
    """The chain that the hierarchy proposes; the diarist notes what it is told."""
    target = TargetModel(CONFIG)
    noise = sampling_noise(target, TOLD, rows)
    return propose_tree(target, TOLD, params, rows, noise)


DIARIST = Diarist()
TOLD = PartialVerifier(DIARIST, ALL, LONG)
TARGET = random_target(CONFIG, 1)
"""Parameters with which rows accept chains of different lengths."""


def proposed(request: Any) -> tuple[Any, Tree, list[Any]]:
    """The rows after the prompts, what is proposed for them, and what the diarist is told."""
    drafter, target = TOLD, TargetModel(CONFIG)
    params, tokens = Params(TARGET, None), prompts(CONFIG.vocab_size)
    rows = prefill(
        *(target, drafter, params, jnp.asarray(tokens), jnp.asarray(LENGTHS), request),
        capacity=128,
        chunk=8,
    )
    DIARIST.seen.clear()
    tree = jax.block_until_ready(propose(params, rows))
    jax.effects_barrier()
    return rows, tree, [jax.tree.map(np.asarray, told) for told in DIARIST.seen]


def test_the_inner_drafter_is_told_of_the_chain_and_forgets_it() -> None:
    """Tokens, hidden states and queries of prompt and chain are those of one plain pass."""
    tokens, params = prompts(CONFIG.vocab_size), TARGET
    rows, tree, seen = proposed(requested((0.0, 0.7, 1.0)))
    last, steps = seen[-1], np.diff([position for _, _, position in seen], axis=0)
    assert (steps[:2] > 0).all() and (steps >= 0).all()
    # Rows advance differently, and those whose chain is full wait for the others.
    assert len({*(last[2] - LENGTHS)}) > 1 and (steps == 0).any()
    text = np.zeros((3, 32), np.int32)
    for row, (length, end) in enumerate(zip(LENGTHS, last[2], strict=True)):
        chain = np.asarray(tree.tokens)[row, : end - length + 1]
        assert chain[-1] == last[1][row]
        text[row, :end] = [*tokens[row, :length], *chain[:-1]]
    hidden, queries = plain_pass(params, text)
    for row, end in enumerate(last[2]):
        told = [np.asarray(page)[row, : end + 3] for page in last[0]]
        np.testing.assert_array_equal(told[0], [*text[row, :end], -1, -1, -1])
        np.testing.assert_allclose(told[1][:end], hidden[row, :end], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(told[2][:end], queries[row, :end], rtol=1e-4, atol=1e-4)
        # The drafter's own state still ends with the prompt.
        assert (np.asarray(rows.draft.inner[0])[row, LENGTHS[row] :] == -1).all()


@jax.jit
def plain_pass(params: Any, text: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Hidden states after layer 1 and queries of layer 0, of one causal pass."""
    queries = {}

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        queries[layer] = q
        return causal_attention(q, k, v)

    positions = jnp.broadcast_to(jnp.arange(text.shape[1]), text.shape)
    output: Any = Target(CONFIG).apply({"params": params}, text, positions, attend, keep=(1,))
    return output.kept[1], queries[0]


@each_row("text", ["2,3", "chain:4@3"])
def test_a_tree_that_is_no_chain_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"tree {text} must be a chain such as chain:16"):
        PartialVerifier(NoDraft(), ALL, TreeConfig.parse(text))


def test_without_levels_it_is_plain_decoding() -> None:
    """And goes on to learn, as adaptive decoding wants it."""
    assert histogram(over_all(OWN, "none"), GREEDY).shape == (1,)


def test_rows_that_are_done_keep_nobody_waiting() -> None:
    """They do not get on, and a proposal for nobody but them takes no pass."""
    rows, _, seen = proposed(requested((0.0, 0.7, 1.0), new=(1, 9, 1)))
    assert np.asarray(rows.done).tolist() == [True, False, True] and seen
    positions = np.array([position for _, _, position in seen])
    assert (positions[:, [0, 2]] == LENGTHS[[0, 2]]).all() and positions[-1, 1] > LENGTHS[1]
    assert proposed(requested((0.0, 0.7, 1.0), new=(1, 1, 1)))[2] == []


def test_logits_that_are_not_finite_end_a_row_as_they_end_plain_decoding() -> None:
    """They draw what is not a token, which must not become a candidate."""
    spoiled = replace(LOOKUP, params=TABLE.at[::9].set(jnp.nan), _known={})
    [state] = spoiled.same(PartialVerifier(NoDraft(), ALL, CHAIN), None, [GREEDY])
    rows = spoiled.plain(GREEDY)
    assert any(row[-1] == NO_TOKEN for row in rows)
    for b, row in enumerate(rows):
        assert not np.asarray(state.record.drafted)[b, : len(row)][row == NO_TOKEN].any()
