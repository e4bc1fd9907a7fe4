"""What other candidates would have emitted, read from the path that one of them found."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.config.tree import PLAIN, TreeConfig
from longspec_jax.decoding.chooser import Measurement, Watch
from longspec_jax.decoding.policy import FastestWithinBudget
from longspec_jax.decoding.report import foregone, shows
from longspec_jax.drafters.base import Drafter, NoDraft, Params
from longspec_jax.drafters.joined import Joined
from longspec_jax.drafters.ngram import NgramDrafter
from longspec_jax.drafters.tree import AcceptedPath, Tree
from tests.lookup import LookupDrafter

MODEL, LOOKUP = 1, 2
BOTH = MODEL | LOOKUP
NOTHING = Params((), ())
after = jax.jit(Watch.after, static_argnums=1)


def candidates(*trees: str) -> list[Joined]:
    members = LookupDrafter(PLAIN), NgramDrafter(PLAIN)
    return [Joined(members, TreeConfig.parse(tree)) for tree in trees]


def counted(ran: Drafter, drafters: list[Joined], *rounds: tuple[int, list[int]]) -> list[int]:
    """Tokens by every candidate in rows of which each accepted a chain: emitted, and by whom."""
    nodes, height = ran.tree.num_nodes, 1 + ran.tree.num_levels
    links, order = np.arange(height), np.arange(nodes)
    mask = np.tri(nodes, dtype=bool) & (order < height)[:, None] | np.eye(nodes, dtype=bool)
    sources = np.zeros((len(rounds), nodes), np.int32)
    for row, (_, each) in enumerate(rounds):
        sources[row, 1 : 1 + len(each)] = each
    parents = np.where(order < height, order - 1, -1)
    totals = np.where(order < height, -0.1 * order, -np.inf).astype(np.float32)
    of_rows = partial(jnp.repeat, repeats=len(rounds), axis=0)
    tree = Tree(
        jnp.zeros_like(sources),
        of_rows(parents[None]),
        of_rows(mask[None]),
        of_rows(totals[None]),
        jnp.asarray(sources),
    )
    path = np.broadcast_to(links, (len(rounds), height))
    accepted = jnp.asarray([1 + sum(bits > 0 for bits in each) for _, each in rounds])
    found = AcceptedPath(path=jnp.asarray(path), count=accepted, tokens=jnp.zeros_like(path))
    emitted = jnp.asarray([count for count, _ in rounds])
    count = jax.jit(lambda *operands: foregone(ran, NOTHING, *operands, drafters=drafters))
    # A loop of a few steps takes a GPU longer than a layer: every step asks the host.
    assert "while" not in count.lower(tree, found, emitted).as_text()
    return count(tree, found, emitted).sum(axis=0).tolist()


def test_a_joined_tree_shows_what_its_parts_are_worth() -> None:
    trees = candidates("none", "none@9~4", "none@9~2", "2,3@5", "2,3@12~4", "3,3@12~4", "2,3@12~6")
    rounds = (
        (4, [BOTH, LOOKUP, LOOKUP]),
        (3, [MODEL, BOTH]),
        (1, []),
        (0, []),
        (4, [LOOKUP] * 4),  # Cut by the row's budget before the target's own token.
    )
    # Lookup to four levels: 4, 1, 1, 0, 4; to two: 3, 1, 1, 0, 3; the model alone: 2, 3, 1, 0, 1.
    assert counted(trees[4], trees, *rounds) == [4, 10, 8, 7, 12, -5, -5]
    assert counted(trees[1], trees, *rounds)[2:5] == [8, -5, -5], "lookup shows nothing of a model"
    assert counted(trees[0], trees, (1, []), (1, [])) == [2, -2, -2, -2, -2, -2, -2]
    model = candidates("2,3@12~4", "2,3@12", "2@12")
    assert counted(model[0], model, *rounds)[1:] == [2 + 3 + 1 + 0 + 1, 2 + 2 + 1 + 0 + 1]


def test_a_smaller_budget_or_beam_keeps_the_likeliest_nodes() -> None:
    """Of a root with three children, the last of which is the likeliest, and one below each."""
    trees = candidates("3,3@7", "3,3@3", "2,2@5", "1,1@3")
    parents = jnp.asarray([[-1, 0, 0, 0, 1, 2, 3]])
    mask = jnp.asarray(
        [[[int(seen) for seen in row] for row in
          ("1000000", "1100000", "1010000", "1001000", "1100100", "1010010", "1001001")]], bool
    )  # fmt: skip
    totals = jnp.log(jnp.asarray([[1.0, 0.2, 0.3, 0.5, 0.1, 0.05, 0.4]]))
    tree = Tree(jnp.zeros((1, 7), jnp.int32), parents, mask, totals, jnp.full((1, 7), MODEL))

    def emitted(*nodes: int) -> list[int]:
        path = jnp.asarray([[0, *nodes]])
        count = jnp.asarray([1 + len(nodes)])
        found = AcceptedPath(path=path, count=count, tokens=path)
        return foregone(trees[0], NOTHING, tree, found, count, trees)[0].tolist()

    assert emitted(3, 6) == [3, 3, 3, 3]
    assert emitted(2, 5) == [3, 1, 2, 1], "its child is only the third of its level"
    assert emitted(1, 4) == [3, 1, 1, 1]


def test_what_weighs_its_trees_is_not_shown() -> None:
    """Its rounds are plain ones where a tree does not pay."""
    joined, alone = candidates("2,3@12~4", "none@9~4")
    weighs = Params((), (), costs=jnp.asarray([1.0, 1.5]))
    assert shows(joined, alone, NOTHING) and not shows(joined, alone, weighs)
    assert shows(joined, NoDraft(), weighs)


def test_a_launch_ends_where_another_candidate_leads() -> None:
    """A tree that accepts nothing is left for plain decoding, and not in the first round."""
    shown = (True, False), (True, True)
    policy = FastestWithinBudget.timed((1.0, 1.5), (1.0, 2.5), wait=0.1, shows=shown)
    choice = policy.choose()
    assert choice.candidate == 1
    watch, rounds = policy.watch(choice), 0
    while jax.jit(Watch.leads, static_argnums=1)(watch, 1):
        watch, rounds = after(watch, 1, jnp.asarray([[1, 1], [0, 0]])), rounds + 1
    assert 1 < rounds < 12
    shown = np.ones((rounds, 2))
    policy = policy.observe(1, Measurement(rounds, rounds, rounds, 1.5 * rounds + 0.1, shown))
    assert policy.leader == 0 == policy.choose().candidate, "as the launch has found"
    np.testing.assert_allclose(watch.known[0, 1], policy.estimates[1].tokens, rtol=1e-5)
    looks = policy.watch(policy.choose()._replace(candidate=1))
    assert looks.leads(1), "a look goes on"


def test_a_larger_tree_moves_along_with_the_one_that_runs() -> None:
    """On the device and on the host, by as many tokens; what would not show that one stays."""
    shown = (
        (True, False, False, False),
        (True, True, False, False),
        (True, True, True, False),
        (True, False, False, True),
    )
    seconds, tokens = (1.0, 1.1, 2.2, 2.0), (1.0, 7.0, 8.5, 2.5)
    policy = FastestWithinBudget.timed(seconds, tokens, shows=shown)
    choice = policy.choose()
    assert choice.candidate == 1
    watch = policy.watch(choice)
    for _ in range(6):
        watch = after(watch, 1, jnp.asarray([[1, 2, -1, -1]]))
    assert watch.leads(1)
    each = np.tile([1.0, 2.0, np.nan, np.nan], (6, 1))
    policy = policy.observe(1, Measurement(6, 6, 12, 6.6, each))
    _, lookup, joined, other = policy.estimates
    assert joined.mean - lookup.mean == pytest.approx(1.5) and other.mean == pytest.approx(2.5)
    np.testing.assert_allclose(watch.known[0], [one.tokens for one in policy.estimates], rtol=1e-5)
    assert policy.leader == 1


@pytest.mark.parametrize(("alone", "leader"), [(3.6, 1), (1.5, 2)])
def test_a_candidate_is_chosen_by_what_other_rounds_show_of_it(alone: float, leader: int) -> None:
    """Plain decoding, lookup alone and a joined tree; the last one runs."""
    shown = (True, False, False), (True, True, False), (True, True, True)
    policy = FastestWithinBudget.timed((1.0, 1.3, 2.2), (1.0, 1.3, 3.2), shows=shown)
    for _ in range(3):
        choice = policy.choose()
        if choice.candidate != 2:
            break
        rounds = min(choice.rounds, 8)
        each = np.tile([1.0, alone, 4.0], (rounds, 1))
        seen = Measurement(rounds, rounds, 4 * rounds, 2.2 * rounds, each)
        policy = policy.observe(2, seen)
    assert policy.leader == leader == policy.choose().candidate


def test_what_rounds_show_is_added_up() -> None:
    """Of each candidate with the rounds that show it: others say nothing of it."""
    first, second = np.asarray([[3.0, np.nan]]), np.asarray([[2.0, 4.0], [3.0, 1.0]])
    both = Measurement(1, 1, 3, 1.0, first) + Measurement(2, 2, 5, 1.0, second)
    assert both.shown is not None
    np.testing.assert_array_equal(both.shown, [[3, np.nan], [2, 4], [3, 1]])
    policy = FastestWithinBudget.timed((1.0, 1.0)).observe(0, both)
    one, other = policy.estimates
    assert one.mean == pytest.approx(8 / 3, rel=0.02) and other.mean == pytest.approx(2.5, rel=0.02)
    assert one.weight > other.weight


def test_a_candidate_that_cannot_pay_is_not_looked_at() -> None:
    shown = (True, False), (True, True)
    slow, choices = FastestWithinBudget.timed((1.0, 9.0), (1.0, 2.0), shows=shown), []
    for _ in range(20):
        choice = slow.choose()
        choices.append(choice.candidate)
        slow = slow.observe(choice.candidate, Measurement(1, 1, 1, 1.0))
    assert not any(choices)
