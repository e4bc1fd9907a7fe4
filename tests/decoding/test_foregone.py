"""What other candidates would have emitted, read from the path that one of them found."""

import numpy as np
import pytest

from longspec_jax.config.tree import PLAIN, TreeConfig
from longspec_jax.decoding.policy import FastestWithinBudget, Measurement
from longspec_jax.decoding.report import Report, foregone
from longspec_jax.drafters.base import NoDraft
from longspec_jax.drafters.joined import Joined
from longspec_jax.drafters.ngram import NgramDrafter
from tests.lookup import LookupDrafter

MODEL, LOOKUP = 1, 2
BOTH = MODEL | LOOKUP


def candidates(*trees: str) -> list[Joined]:
    members = LookupDrafter(PLAIN), NgramDrafter(PLAIN)
    return [Joined(members, TreeConfig.parse(tree)) for tree in trees]


def report(*rounds: tuple[int, list[int]]) -> Report:
    """Rounds of one row: the tokens emitted, and who proposed each."""
    height = max(len(sources) for _, sources in rounds)
    sources = np.zeros((len(rounds), 1, height), int)
    for index, (_, each) in enumerate(rounds):
        sources[index, 0, : len(each)] = each
    count = np.asarray([[count] for count, _ in rounds])
    accepted = (sources > 0).sum(axis=2)
    return Report(count, count < 0, accepted, np.zeros_like(sources), sources)


def test_a_joined_tree_shows_what_its_parts_are_worth() -> None:
    trees = candidates("none", "none@9~4", "none@9~2", "2,3@5", "2,3@12~4", "3,3@12~4", "2,3@12~6")
    seen = report(
        (4, [BOTH, LOOKUP, LOOKUP, 0, 0]),
        (3, [MODEL, BOTH, 0, 0, 0]),
        (1, [0, 0, 0, 0, 0]),
        (0, [0, 0, 0, 0, 0]),
        (4, [LOOKUP] * 4 + [0]),  # Cut by the row's budget before the target's own token.
    )
    # Lookup to four levels: 4, 1, 1, 0, 4; to two: 3, 1, 1, 0, 3. The model alone has fewer nodes.
    assert foregone(4, trees, seen) == {1: 10, 2: 8}
    assert foregone(1, trees, seen) == {2: 8}, "lookup shows nothing of the model"
    assert foregone(0, trees, seen) == {}
    model = candidates("2,3@12~4", "2,3@12", "2@12")
    assert foregone(0, model, seen) == {1: 2 + 3 + 1 + 1, 2: 2 + 2 + 1 + 1}
    others = [NoDraft(), LookupDrafter(TreeConfig((2, 3))), LookupDrafter(TreeConfig((2,)))]
    assert foregone(1, others, report((3, [1, 1, 0]), (1, [0, 0, 0]))) == {2: 2 + 1}


@pytest.mark.parametrize(("alone", "leader"), [(3.6, 1), (1.5, 2)])
def test_a_candidate_is_chosen_by_what_other_rounds_show_of_it(alone: float, leader: int) -> None:
    """Plain decoding, lookup alone and a joined tree, of which the last one runs."""
    policy = FastestWithinBudget.timed((1.0, 1.3, 2.2), (1.0, None, None), 2, (1.0, 1.3, 2.9))
    for _ in range(3):
        choice = policy.choose()
        if choice.candidate != 2:
            break
        seen = Measurement(
            *(choice.rounds, choice.rounds, 4 * choice.rounds, 2.2 * choice.rounds),
            {1: Measurement(choice.rounds, choice.rounds, round(alone * choice.rounds))},
        )
        policy = policy.observe(2, seen)
    assert policy.leader == leader == policy.choose().candidate


def test_what_rounds_show_is_added_up() -> None:
    """Of each candidate with the rounds that show it: others say nothing of it."""
    both = Measurement(1, 1, 3, 1.0, {1: Measurement(1, 1, 2)}) + Measurement(
        2, 2, 5, 1.0, {1: Measurement(2, 2, 4), 2: Measurement(2, 2, 1)}
    )
    assert both.foregone == {1: Measurement(3, 3, 6), 2: Measurement(2, 2, 1)}


def test_a_guess_is_replaced_by_the_first_rounds() -> None:
    policy = FastestWithinBudget.timed((1.0, 2.0), (1.0, None), 1, (1.0, 5.0))
    assert policy.choose() == (1, 2), "as short as a first look"
    policy = policy.observe(1, Measurement(2, 2, 2, 4.0))
    assert policy.estimates[1].tokens == 1.0 and policy.leader == 0
    slow = FastestWithinBudget.timed((1.0, 9.0), (1.0, None), 0, (1.0, 2.0))
    choices = []
    for _ in range(20):
        choice = slow.choose()
        choices.append(choice.candidate)
        rounds = choice.rounds
        slow = slow.observe(choice.candidate, Measurement(rounds, rounds, rounds, float(rounds)))
    assert not any(choices), "one that cannot pay is not looked at"
