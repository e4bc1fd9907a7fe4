"""Rounds inside a proposal: how long the chains are, and what the inner drafter is told."""

from dataclasses import dataclass, field
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
from longspec_jax.drafters.retrieval.hierarchy import Hierarchy
from longspec_jax.drafters.retrieval.selection import SinksAndRecent, Spans
from longspec_jax.drafters.streaming import StreamingDrafter
from longspec_jax.drafters.tree import Tree
from longspec_jax.models.target import Target
from longspec_jax.ops.attention.reference import causal_attention
from tests.decoding.lossless import (
    CONFIG,
    DRAFT_TABLES,
    LENGTHS,
    TABLE,
    VOCABULARY,
    assert_same,
    generate,
    prompts,
)
from tests.decoding.lossless import request as requested
from tests.drafters.test_streaming import is_perfect
from tests.kit import each_row, prefill, random_target
from tests.lookup import LookupDrafter, LookupTarget

ALL = SinksAndRecent(3, 1000)
CHAIN, LONG = TreeConfig((1,) * 4), TreeConfig((1,) * 9)
GREEDY, MIXED = requested(), requested((0.0, 0.7, 1.0))


def histogram(drafter: Drafter, request=GREEDY, draft: Any = TABLE) -> np.ndarray:
    """Rounds by accepted tokens, on the lookup model."""
    tokens, params = prompts(VOCABULARY), Params(TABLE, draft)
    _, state = generate(LookupTarget(VOCABULARY), drafter, params, tokens, LENGTHS, request)
    return np.asarray(state.record.histogram).sum(axis=0)


@pytest.mark.parametrize(
    ("inner", "request_"),
    [
        (LookupDrafter(TreeConfig((1, 1))), MIXED),
        (StreamingDrafter(TreeConfig((1, 1)), ALL), MIXED),
        (Hierarchy(StreamingDrafter(TreeConfig(()), ALL), ALL, TreeConfig((1, 1, 1))), MIXED),
    ],
    ids=["own", "streaming", "hierarchy"],
)
def test_whole_chains_are_accepted_of_a_perfect_drafter(inner: Drafter, request_) -> None:
    """The last draw of the last round too: three rounds of two levels are nine tokens."""
    levels = 3 * (inner.tree.num_levels + 1)
    drafter = Hierarchy(inner, ALL, TreeConfig((1,) * levels))
    assert is_perfect(histogram(drafter, request_))


END = TreeConfig.parse("chain:6/chain:2")
"""Two rounds of two levels, and two levels that the target verifies."""


@pytest.mark.parametrize(("levels", "request_"), [(1, GREEDY), (2, MIXED)], ids=["one", "two"])
def test_a_tree_at_the_end_is_walked_into(levels: int, request_) -> None:
    """Where the drafter inside is perfect, to its end; also that of hierarchies inside."""
    inner: Drafter = LookupDrafter(TreeConfig((1, 1)))
    if levels == 2:
        inner = Hierarchy(LookupDrafter(TreeConfig(())), ALL, TreeConfig((1, 1)))
    assert is_perfect(histogram(Hierarchy(inner, ALL, END), request_))
    # A chain that is no whole number of rounds ends before its last node.
    odd = histogram(Hierarchy(inner, ALL, TreeConfig.parse("chain:7/chain:2")), request_)
    assert is_perfect(odd[:-1]) and odd[-1] == 0


def test_a_bad_draft_s_tree_at_the_end_gains_nothing() -> None:
    """Negative control: the chain is confirmed, the tree behind it is not."""
    inner, bad = LookupDrafter(TreeConfig((1, 1))), DRAFT_TABLES["adversarial"]
    found = histogram(Hierarchy(inner, ALL, END), GREEDY, bad)
    # Its rounds yield one token each, and after four there is no room for three more.
    assert is_perfect(found[:5]) and found[5:].sum() == 0


def test_a_chain_of_none_is_one_level() -> None:
    """The inner drafter's trees, as it would propose them alone."""
    inner, near = LookupDrafter(TreeConfig((2, 3))), DRAFT_TABLES["near"]
    hierarchy = Hierarchy(inner, SinksAndRecent(2, 5), TreeConfig((2, 3), chain=0))
    wanted = histogram(inner, MIXED, near)
    np.testing.assert_array_equal(histogram(hierarchy, MIXED, near), wanted)


def test_a_tree_behind_a_chain_that_is_cut_is_not_walked_to() -> None:
    """A round yields more than the chain holds: what follows does not follow its last node."""
    drafter = Hierarchy(LookupDrafter(TreeConfig((1, 1, 1))), ALL, TreeConfig((1, 1, 2), chain=2))
    assert is_perfect(histogram(drafter)[:-1])


@pytest.mark.parametrize("selection", [ALL, SinksAndRecent(2, 5)], ids=["all", "short"])
def test_without_a_drafter_inside_it_is_streaming(selection: SinksAndRecent) -> None:
    """Each round draws one token: a chain of the target's partial passes."""
    found = histogram(Hierarchy(NoDraft(), selection, CHAIN), MIXED)
    chain = StreamingDrafter(CHAIN, selection)
    np.testing.assert_array_equal(found, histogram(chain, MIXED))


def test_every_round_advances_however_bad_the_drafter() -> None:
    """A check over everything yields at least its own draw, which the full one confirms."""
    drafter = Hierarchy(LookupDrafter(TreeConfig((2, 3))), ALL, TreeConfig((1,) * 6))
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


class Stale(Hierarchy):
    """Its rounds all use the noise of the first."""

    def propose(self, params: Params, state: Any, view: View, noise: SamplingNoise) -> Tree:
        assert isinstance(noise, RoundNoise)
        stuck = Stuck(noise.noise, noise.sampling)
        return super().propose(params, state, view, stuck)


@pytest.mark.parametrize("broken", ["selection", "noise"])
def test_a_mistake_lowers_what_is_accepted(broken: str) -> None:
    """Negative control: the perfection above tells a right check from a wrong one."""
    inner, request = LookupDrafter(TreeConfig((1, 1))), requested((1.0, 0.7, 1.0))
    drafter = {
        "selection": Hierarchy(inner, Blind(3, 1000), LONG),
        "noise": Stale(inner, ALL, LONG),
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
TOLD = Hierarchy(DIARIST, ALL, LONG)
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
        Hierarchy(NoDraft(), ALL, TreeConfig.parse(text))


def test_it_is_a_drafter_with_the_needs_and_the_state_of_the_inner_one() -> None:
    inner = Diarist()
    drafter = Hierarchy(inner)
    assert isinstance(drafter, Drafter) and drafter.needs == inner.needs
    found = drafter.begin(Params(None, None), 2, 7), inner.begin(Params(None, None), 2, 7)
    assert jax.tree.map(jnp.shape, found[0].inner) == jax.tree.map(jnp.shape, found[1])


def test_without_levels_it_is_plain_decoding() -> None:
    """And goes on to learn, as adaptive decoding wants it."""
    drafter = Hierarchy(LookupDrafter(TreeConfig((1,))), ALL, TreeConfig(()))
    assert histogram(drafter).shape == (1,)


def test_a_chain_shorter_than_a_round_is_one_round() -> None:
    """Of which it takes what it has room for."""
    drafter = Hierarchy(LookupDrafter(TreeConfig((1, 1, 1))), ALL, TreeConfig((1, 1)))
    assert is_perfect(histogram(drafter, MIXED))


def test_rows_that_are_done_keep_nobody_waiting() -> None:
    """They do not get on, and a proposal for nobody but them takes no pass."""
    rows, _, seen = proposed(requested((0.0, 0.7, 1.0), new=(1, 9, 1)))
    assert np.asarray(rows.done).tolist() == [True, False, True] and seen
    positions = np.array([position for _, _, position in seen])
    assert (positions[:, [0, 2]] == LENGTHS[[0, 2]]).all() and positions[-1, 1] > LENGTHS[1]
    assert proposed(requested((0.0, 0.7, 1.0), new=(1, 1, 1)))[2] == []


def test_logits_that_are_not_finite_end_a_row_as_they_end_plain_decoding() -> None:
    """They draw a token that is none, which must not become a candidate."""
    target, tokens = LookupTarget(VOCABULARY), prompts(VOCABULARY)
    params = Params(TABLE.at[::9].set(jnp.nan), None)
    plain, _ = generate(target, NoDraft(), params, tokens, LENGTHS, GREEDY)
    rows, state = generate(
        target, Hierarchy(NoDraft(), ALL, CHAIN), params, tokens, LENGTHS, GREEDY
    )
    assert any(row[-1] == NO_TOKEN for row in plain)
    assert_same(rows, plain)
    for b, row in enumerate(rows):
        assert not np.asarray(state.record.drafted)[b, : len(row)][row == NO_TOKEN].any()
