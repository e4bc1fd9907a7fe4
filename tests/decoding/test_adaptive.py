"""Adaptive decoding: switching changes no token, and the clock decides what runs."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.config import PLAIN, TreeConfig
from longspec_jax.decoding import adaptive
from longspec_jax.decoding.adaptive import candidates, decode_bursts, rehearse, smaller_tree
from longspec_jax.decoding.engine import slack_slots
from longspec_jax.decoding.policy import Choice, FastestWithinBudget, Measurement
from longspec_jax.decoding.prefill import prefill
from longspec_jax.decoding.record import SpecState
from longspec_jax.decoding.target import CachedTarget
from longspec_jax.drafters.base import NoDraft, Params
from longspec_jax.drafters.draft import OneOf
from longspec_jax.drafters.longspec.config import DraftConfig
from longspec_jax.drafters.longspec.drafter import LongSpecDrafter
from tests.decoding.lossless import (
    LENGTHS,
    MAX_EMITTED,
    NEW,
    assert_same,
    generate,
    prompts,
    request,
)
from tests.kit import draft_params, random_draft, random_target, tiny_target_config
from tests.lookup import ConstantDrafter, LookupDrafter, LookupTarget, random_table

VOCABULARY = 13
TREE = TreeConfig((4, 5, 3))
TABLE = random_table(0, 97, VOCABULARY)
NEAR = TABLE + 0.5 * random_table(1, 97, VOCABULARY)
TIGHT = int((LENGTHS + NEW).max()) + slack_slots(TREE.num_levels)


@dataclass(frozen=True)
class Forced:
    """Runs a fixed cycle of choices, whatever happens."""

    cycle: tuple[Choice, ...]
    turn: int = 0

    def choose(self) -> Choice:
        return self.cycle[self.turn % len(self.cycle)]

    def observe(self, candidate: int, seen: Measurement) -> "Forced":
        assert candidate == self.choose().candidate and seen.rounds <= self.choose().rounds
        return replace(self, turn=self.turn + 1)


def start(target: Any, drafters: Any, params: Params, req: Any, vocabulary: int) -> SpecState:
    """The prefilled state, in a cache with no slot to spare."""
    return prefill(
        *(target, adaptive.tallest(drafters), params),
        *(jnp.asarray(prompts(vocabulary)), jnp.asarray(LENGTHS), req),
        capacity=TIGHT,
        max_emitted=MAX_EMITTED,
        chunk=8,
    )


def last(results: Iterator[adaptive.BurstResult]) -> adaptive.BurstResult:
    return deque(results, maxlen=1).pop()


def rows_of(state: SpecState) -> list[np.ndarray]:
    return [
        np.asarray(state.record.output)[b, : int(state.record.emitted[b])]
        for b in range(len(LENGTHS))
    ]


EVERY_ROUND = tuple(Choice(index, 1) for index in (0, 1, 2, 0, 2, 1))
"""Every switch there is, one round each."""
CYCLES = [EVERY_ROUND, (Choice(2, 3), Choice(0, 4), Choice(1, 2)), (Choice(0, 100),)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forced_switching_changes_no_token(temperature: float, seed: int) -> None:
    target, drafters = LookupTarget(VOCABULARY), candidates([LookupDrafter(TREE)])
    req, params = request(temperature, seeds=(5 + seed, 6, 7 * seed)), Params(TABLE, NEAR)
    tokens = prompts(VOCABULARY)
    plain, _ = generate(target, NoDraft(), Params(TABLE, ()), tokens, LENGTHS, req)
    for cycle in CYCLES:
        state = start(target, drafters, params, req, VOCABULARY)
        result = last(decode_bursts(target, drafters, params, state, Forced(cycle)))
        assert_same(rows_of(result.state), plain)
        total = sum(result.totals, Measurement())
        assert total.tokens == sum(NEW) - 3 and total.row_rounds == int(
            result.state.record.rounds.sum()
        )
        histogram = np.asarray(result.state.record.histogram).sum(axis=0)
        assert len(histogram) == 4 and histogram.sum() == total.row_rounds
        # A row's last round may have emitted no bonus.
        assert 0 <= histogram @ np.arange(1, 5) - total.tokens <= 3
        used = [measured.rounds > 0 for measured in result.totals]
        assert used == [index in {choice.candidate for choice in cycle} for index in range(3)]


CONFIG = tiny_target_config()
DRAFT = DraftConfig.for_target(CONFIG, window=11)  # Shorter than the prompts: the ring wraps.


@pytest.fixture(scope="module")
def models() -> Params:
    target = random_target(CONFIG)
    return Params(target, draft_params(random_draft(DRAFT), target))


def test_transformers_switch_losslessly_and_the_draft_misses_nothing(models: Params) -> None:
    """After any switching the ring is what an uninterrupted run of the tree leaves behind."""
    target, drafters = CachedTarget(CONFIG), candidates([LongSpecDrafter(DRAFT, TREE)])
    req, tokens = request((0.0, 0.8, 1.0)), prompts(CONFIG.vocab_size)
    plain, _ = generate(target, NoDraft(), models, tokens, LENGTHS, req)
    rings = []
    for cycle in ((Choice(2, 100),), EVERY_ROUND, (Choice(0, 100),)):
        state = start(target, drafters, models, req, CONFIG.vocab_size)
        result = last(decode_bursts(target, drafters, models, state, Forced(cycle)))
        assert_same(rows_of(result.state), plain)
        rings.append(jax.device_get(result.state.rows.draft))
    for ring in rings[1:]:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), ring, rings[0])


def test_a_plain_round_that_keeps_the_draft_up_to_date_is_no_dearer(models: Params) -> None:
    """A token's draft K/V, beside a target of merely two layers."""
    target, req, flops = CachedTarget(CONFIG), request(), []
    for drafter in (NoDraft(), candidates([LongSpecDrafter(DRAFT, TREE)])[0]):
        state = start(target, [drafter], models, req, CONFIG.vocab_size)
        program = adaptive.burst.lower(target, drafter, models, state, np.int32(1))
        flops.append(program.compile().cost_analysis()["flops"])
    assert flops[0] < flops[1] <= 1.10 * flops[0]


@pytest.mark.parametrize("stride", [None, 1, 3])
def test_legs_are_bursts_or_strides_and_time_is_the_clocks(stride: int | None) -> None:
    """A clock that ticks once a reading: every burst takes a second, the consumer nothing."""
    target, drafters = LookupTarget(VOCABULARY), candidates([LookupDrafter(TREE)])
    req, params = request(), Params(TABLE, NEAR)
    now = iter(range(10_000))
    state = start(target, drafters, params, req, VOCABULARY)
    policy = Forced((Choice(2, 4), Choice(0, 5)))
    results = decode_bursts(
        *(target, drafters, params, state, policy),
        stride=stride,
        clock=lambda: float(next(now)),
    )
    rounds, seconds = [], []
    for result in results:
        total = sum(result.totals, Measurement())
        rounds.append(total.rounds)
        seconds.append(total.seconds)
        [next(now) for _ in range(50)]  # The consumer takes its time.
    assert seconds == [float(n) for n in range(1, len(seconds) + 1)]
    begins = {None: [4, 5], 1: [1] * 9, 3: [3, 1, 3, 2]}[stride]
    assert np.diff([0, *rounds]).tolist()[: len(begins)] == begins


def test_the_clock_decides_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same models and rounds; plain decoding runs where the tree is dear, else the tree."""
    target, drafters = LookupTarget(VOCABULARY), candidates([LookupDrafter(TREE)])
    req, params = request(new=(31, 31, 31)), Params(TABLE, TABLE)
    real, now = adaptive.burst, [0.0]

    def run(costs: dict[TreeConfig, float]) -> list[int]:
        def timed(target, drafter, *args):
            state, report = real(target, drafter, *args)
            now[0] += costs[drafter.tree] * int(report[0])
            return state, report

        monkeypatch.setattr(adaptive, "burst", SimpleNamespace(of_shape=lambda *_: timed))
        state = start(target, drafters, params, req, VOCABULARY)
        policy = replace(FastestWithinBudget.over(3), burst_rounds=4)
        results = decode_bursts(*(target, drafters, params, state, policy), clock=lambda: now[0])
        return [measured.rounds for measured in last(results).totals]

    shapes = [drafter.tree for drafter in drafters]
    plain, narrow, tree = run(dict(zip(shapes, (1.0, 7.0, 9.0), strict=True)))
    assert narrow == tree == 3 and plain > 4, "first looks alone, and then plain decoding"
    plain, _, tree = run(dict(zip(shapes, (1.0, 3.0, 1.1), strict=True)))
    assert plain == 4 and tree > plain


def test_the_promise_holds_across_drafters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two drafters with a common state, useless ones cost a tenth and a good one is found."""
    target, members = LookupTarget(VOCABULARY), (LookupDrafter(PLAIN), ConstantDrafter(PLAIN))
    trees = TREE, TreeConfig((2, 2))
    drafters = candidates([OneOf(members, index, tree) for index, tree in enumerate(trees)])
    real, now, new = adaptive.burst, [0.0], 240
    req = request(new=(new,) * 3)

    def run(table: Any, costs: dict[TreeConfig, float]) -> adaptive.BurstResult:
        def timed(target, drafter, *args):
            state, report = real(target, drafter, *args)
            now[0] += costs[drafter.tree] * int(report[0])
            return state, report

        params = Params(TABLE, (table, ()))
        with monkeypatch.context() as inside:
            inside.setattr(adaptive, "burst", SimpleNamespace(of_shape=lambda *_: timed))
            state = prefill(
                *(target, adaptive.tallest(drafters), params),
                *(jnp.asarray(prompts(VOCABULARY)), jnp.asarray(LENGTHS), req),
                capacity=280,
                max_emitted=new,
                chunk=8,
            )
            policy = FastestWithinBudget.over(len(drafters))
            results = decode_bursts(
                *(target, drafters, params, state, policy), clock=lambda: now[0]
            )
            return last(results)

    dear = run(-TABLE, {PLAIN: 1.0, trees[0]: 4.0, trees[1]: 6.0})
    assert all(total.rounds for total in dear.totals), "every drafter was looked at"
    assert now[0] <= 1.1 * (new - 1)
    found = run(TABLE, {PLAIN: 1.0, trees[0]: 1.2, trees[1]: 1.1})
    assert found.totals[drafters.index(OneOf(members, 0, TREE))].tokens > 0.8 * 3 * new
    assert_same(rows_of(found.state), rows_of(dear.state))


def test_rehearsal_compiles_everything_and_emits_within_the_budget() -> None:
    target, drafters = LookupTarget(VOCABULARY), candidates([LookupDrafter(TreeConfig((3, 2)))])
    params, req = Params(TABLE, NEAR), request(new=(2, 2, 2))
    state = start(target, drafters, params, req, VOCABULARY)
    before = adaptive.burst._cache_size()
    state = rehearse(target, drafters, params, state)
    assert adaptive.burst._cache_size() - before == 3
    assert state.record.emitted.tolist() == [2, 2, 2]
    state = start(target, drafters, params, request(), VOCABULARY)
    last(decode_bursts(target, drafters, params, state, Forced(EVERY_ROUND)))
    assert adaptive.burst._cache_size() - before == 3


def test_finished_rows_run_nothing() -> None:
    target, drafters = LookupTarget(VOCABULARY), candidates([LookupDrafter(TREE)])
    params, req = Params(TABLE, NEAR), request(new=(1, 1, 1))
    state = start(target, drafters, params, req, VOCABULARY)
    assert not list(decode_bursts(target, drafters, params, state, Forced(EVERY_ROUND)))


@pytest.mark.parametrize(
    ("widths", "smaller"),
    [
        ((4, 16, 16, 16, 16), (1, 1, 1)),
        ((1, 1, 1, 1), (1, 1)),
        ((1,), (1,)),
        ((3, 20), (1,)),
    ],
)
def test_candidates_are_none_a_smaller_and_the_tree_itself(widths, smaller) -> None:
    tree = TreeConfig(widths)
    assert smaller_tree(tree) == TreeConfig(smaller)
    assert smaller_tree(TreeConfig(tree.widths, budget=3)) == TreeConfig(smaller)
    found = [drafter.tree for drafter in candidates([LookupDrafter(tree)])]
    assert found == list(dict.fromkeys([PLAIN, TreeConfig(smaller), tree]))
    two = [LookupDrafter(TreeConfig((1,))), LookupDrafter(tree)]
    assert [d.tree for d in candidates(two)] == list(dict.fromkeys([PLAIN, two[0].tree, tree]))
    assert adaptive.tallest(candidates([LookupDrafter(tree)])).tree.num_levels == len(widths)


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    target, drafters = LookupTarget(VOCABULARY), candidates([LookupDrafter(TREE)])
    params, req = Params(TABLE, NEAR), request()
    state = start(target, drafters, params, req, VOCABULARY)
    with pytest.raises(NotImplementedError, match="2 processes would each choose by their own"):
        next(decode_bursts(target, drafters, params, state, Forced(EVERY_ROUND)))
