"""The engine's launches of one round or of many, and what is chosen for each."""

import re
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np
import pytest

from longspec_jax.config.tree import PLAIN, TreeConfig
from longspec_jax.decoding import engine as engine_lib
from longspec_jax.decoding.chooser import Choice, Measurement, Policy
from longspec_jax.decoding.engine import Engine
from longspec_jax.decoding.inflight import LAUNCH_SECONDS
from longspec_jax.decoding.jit_cache import PROGRAMS
from longspec_jax.decoding.policy import FastestWithinBudget
from longspec_jax.decoding.report import Contents, Report
from longspec_jax.decoding.round import many_rounds, one_round
from longspec_jax.decoding.runner import slack_slots
from longspec_jax.decoding.sampling import SamplingKind
from longspec_jax.decoding.slots import StepOutput
from longspec_jax.decoding.target import TargetModel
from longspec_jax.decoding.warmup import rehearse
from longspec_jax.drafters.base import Drafter, NoDraft, Params
from longspec_jax.drafters.draft import tallest
from longspec_jax.drafters.longspec import DraftConfig, LongSpecDrafter
from longspec_jax.generation.candidates import candidates, smaller_tree
from tests.decoding.engines import (
    CONFIG,
    DRAFT,
    DRAFTER,
    EVERY_SWITCH,
    KINDS,
    MIXED,
    PARAMS,
    SMALL_TREE,
    TABLE,
    TABLES,
    TARGET,
    TIGHT,
    TREE,
    VOCABULARY,
    Cycle,
    launch_by,
    launched,
    lookup_engine,
    open_engine,
    plainly,
)
from tests.decoding.lossless import LENGTHS, assert_same, engine_of, prompts, run
from tests.decoding.lossless import request as requested
from tests.kit import draft_params, each_row, random_draft, random_target, tiny_target_config
from tests.lookup import LookupDrafter


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_round_asks_the_host_nothing(temperature: float) -> None:
    """On a GPU a loop of unknown length, or a branch, would hold up its launch until it is done.

    Lowered for one, with attention that has no such loop of its own: the kernels have none either.
    """
    target = TargetModel(CONFIG, "reference")
    params = Params(TABLES, KINDS["longspec"][1])
    kind = SamplingKind.SAMPLED if temperature > 0 else SamplingKind.GREEDY
    for tree in (TREE, TreeConfig(TREE.widths, budget=7)):
        drafter = LongSpecDrafter(DRAFT, tree, "reference")
        rows = open_engine(target, [drafter], params).rows
        traced = one_round.trace(target, drafter, kind, params, rows)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert "stablehlo." in text
        assert not re.findall(r"stablehlo\.(?:while|case|if)\b", text)
    looped = many_rounds.trace(target, drafter, kind, params, rows, np.int32(2))
    assert "stablehlo.while" in looped.lower(lowering_platforms=("cuda",)).as_text()


def test_a_stream_is_one_launch_ahead_of_what_was_read() -> None:
    engine = lookup_engine(requested(), streams=True)
    launches, shown = launched(engine), 0
    while engine.busy:
        outputs = engine.step()
        shown += any(out.rounds for out in outputs)
        if engine.live and shown:
            assert len(launches) == shown + 1
    # When the last round was read, one more was under way. Nobody waits for it.
    assert len(launches) - shown <= 1 and all(choice.rounds == 1 for choice, *_ in launches)


def test_no_round_is_launched_behind_the_budget() -> None:
    """Every round emits a token at least, so that the end of plain decoding is known."""
    models = TARGET, [NoDraft()], Params(TABLE, ())
    asked = prompts(VOCABULARY), LENGTHS, requested(new=(9, 5, 1)), TIGHT
    engine = engine_of(*models, *asked, streams=True)
    launches = launched(engine)
    run(engine)
    assert len(launches) == 8


@pytest.mark.parametrize("streams", [True, False], ids=["one round", "many rounds"])
@pytest.mark.parametrize(
    "policy",
    [
        None,
        EVERY_SWITCH,
        Cycle((Choice(2, 3), Choice(0, 2), Choice(1, 4))),
        FastestWithinBudget.over(3),
    ],
    ids=["one tree", "every switch", "several rounds", "by the clock"],
)
def test_a_call_has_the_tokens_of_plain_decoding(policy: Policy | None, streams: bool) -> None:
    """Whatever is chosen for its launches, which are counted."""
    req = requested(MIXED)
    engine = lookup_engine(req, policy, streams=streams, ahead=streams)
    rows, end = run(engine)
    assert_same(rows, plainly(req))
    record, total = end.record, sum(engine.totals, Measurement())
    assert sum(each.rounds > 0 for each in engine.totals) == (1 if policy is None else 3)
    assert total.tokens == record.emitted.sum() - 3
    assert total.row_rounds == record.rounds.sum()
    assert len(set(record.rounds.tolist())) > 1, "rows end at different rounds"
    if policy is None:
        assert total.rounds == record.rounds.max()
        # A row's last round may have emitted no bonus.
        drafted = int(record.drafted.sum())
        assert 0 <= drafted + record.rounds.sum() - (record.emitted.sum() - 3) <= 3


def test_the_draft_misses_nothing_while_candidates_switch() -> None:
    """After any switching its state is what an uninterrupted run of the tree leaves behind."""
    drafter, draft = KINDS["longspec"]
    tokens, req, states = prompts(CONFIG.vocab_size), requested(MIXED), []
    for cycle in ((Choice(2, 100),), EVERY_SWITCH.cycle, (Choice(0, 100),)):
        models = TargetModel(CONFIG), candidates([drafter]), Params(TABLES, draft)
        engine = engine_of(*models, tokens, LENGTHS, req, TIGHT, policy=Cycle(cycle), ahead=False)
        run(engine)
        states.append(jax.device_get(engine.rows.draft))
    for state in states[1:]:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), state, states[0])


def test_a_plain_round_that_keeps_the_draft_up_to_date_is_no_dearer() -> None:
    """A token's draft K/V, next to a target of merely two layers."""
    config = tiny_target_config()
    draft = DraftConfig.for_target(config, window=11)
    table = random_target(config)
    target, params = TargetModel(config), Params(table, draft_params(random_draft(draft), table))
    flops = []
    for drafter in (NoDraft(), candidates([LongSpecDrafter(draft, TREE)])[0]):
        rows = open_engine(target, [drafter], params).rows
        lowered = one_round.lower(target, drafter, SamplingKind.GREEDY, params, rows)
        flops.append(lowered.compile().cost_analysis()["flops"])
    assert flops[0] < flops[1] <= 1.10 * flops[0]


def test_a_choice_is_one_launch_late_in_a_stream() -> None:
    """It is made when all rounds but the last were read; a single one that was not runs twice."""

    def order(cycle: tuple[Choice, ...]) -> list[int]:
        engine = lookup_engine(requested(new=(31, 31, 31)), Cycle(cycle), streams=True)
        launches = launched(engine)
        run(engine)
        return [choice.candidate for choice, *_ in launches[:7]]

    assert order((Choice(2, 3), Choice(0, 2))) == [2, 2, 2, 0, 0, 2, 2]
    # At the second choice the extra round of the first one has been read.
    assert order((Choice(0, 1), Choice(1, 1))) == [0, 0, 1, 1, 0, 1, 0]
    assert order((Choice(0, 1),)) == [0] * 7


def clocked(
    seconds: Sequence[float],
    policy: Policy | None,
    hold: float = 0.0,
    *,
    streams: bool = False,
    drafters: Sequence[Drafter] | None = None,
    params: Params = PARAMS,
    rounds: list[int] | None = None,
) -> tuple[Engine, float]:
    """A run whose device is a clock: rounds take what they take, one after the other.

    Args:
      seconds: of a round of every candidate.
      policy: chooses.
      hold: how long the consumer keeps every output.
      streams: whether a launch is one round.
      drafters: the candidates.
      params: of both models.
      rounds: takes those of every launch.

    Returns:
      The engine, and the clock at its end.
    """
    now, free = [0.0], [0.0]
    engine = engine_of(
        *(TARGET, drafters or candidates([DRAFTER]), params, prompts(VOCABULARY), LENGTHS),
        *(requested(new=(31,) * 3), 50 + slack_slots(TREE.num_levels)),
        policy=policy,
        streams=streams,
        ahead=streams,
        clock=lambda: now[0],
    )
    launch, ends = engine.runner.launch, []

    def timed(rows: Any, choice: Choice, *more: Any) -> Any:
        rows, packed = launch(rows, choice, *more)
        ran = len(Report.of(np.asarray(packed), DRAFTER.tree).count)
        free[0] = max(free[0], now[0]) + seconds[choice.candidate] * ran
        if rounds is not None:
            rounds.append(ran)
        ends.append(free[0])
        return rows, packed

    launch_by(engine, timed)
    launches = engine._launches
    wait = launches.wait

    def landed() -> list[StepOutput]:
        oldest = launches.unread[0]
        arrived = ends.pop(0) if oldest.choice is not None else now[0]
        now[0] = max(now[0], arrived)
        output, _ = oldest.landing.result()
        done = Future()
        done.set_result((output, arrived))
        launches.unread[0] = oldest._replace(landing=done)
        return wait()

    launches.wait = landed  # type: ignore[method-assign]
    while engine.busy:
        engine.step()
        now[0] += hold
    engine.finish()
    return engine, now[0]


@each_row("hold", [0.0, 0.3, 50.0])
def test_seconds_are_the_devices_whatever_the_consumer_takes(hold: float) -> None:
    policy = Cycle((Choice(2, 3), Choice(0, 2)))
    engine, end = clocked((1.0, 2.0, 3.0), policy, hold, streams=True)
    for total, each in zip(engine.totals, (1.0, 2.0, 3.0), strict=True):
        assert total.seconds == pytest.approx(each * total.rounds)
    if hold < 1:
        # The device never waited: rounds end one right after the other.
        spent = sum(total.seconds for total in engine.totals)
        assert end == pytest.approx(spent, abs=5 * hold + 1e-6)


@each_row("streams", [True, False])
def test_the_clock_decides_what_runs(streams: bool) -> None:
    policy = FastestWithinBudget.over(3)
    engine, _ = clocked((1.0, 7.0, 9.0), policy, 0.1, streams=streams)
    plain, _, tree = (total.rounds for total in engine.totals)
    assert plain > 2 * tree
    engine, _ = clocked((1.0, 3.0, 1.1), policy, 0.1, streams=streams)
    plain, _, tree = (total.rounds for total in engine.totals)
    assert plain <= 4 and tree >= plain


def test_launches_of_many_rounds_fill_their_time() -> None:
    rounds: list[int] = []
    clocked((0.041,), None, drafters=[NoDraft()], params=Params(TABLE, ()), rounds=rounds)
    assert rounds == [4, 9, 9, 8]
    assert 9 * 0.041 <= LAUNCH_SECONDS < 10 * 0.041


def test_rehearsal_compiles_everything_and_emits_within_the_budget() -> None:
    drafters = candidates([LookupDrafter(SMALL_TREE)])
    given = TARGET, drafters, PARAMS, prompts(VOCABULARY), LENGTHS
    own = TIGHT + 3  # A capacity of no other test.
    engine = engine_of(*given, requested(new=(2, 2, 2)), own)
    while engine.prefilling:
        engine.step(decode=False)
    with PROGRAMS.limited(sys.maxsize):  # Else those of other tests make room.
        before = many_rounds._cache_size()
        rehearse(engine, requested().sampling.kind)
        assert many_rounds._cache_size() - before == 3
        np.testing.assert_array_equal(engine.rows.length, LENGTHS + 1)
        run(engine_of(*given, requested(), own, policy=EVERY_SWITCH, ahead=False))
        assert many_rounds._cache_size() - before == 3


def test_an_error_in_a_launch_reaches_the_scheduler_and_ends_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: Any) -> Report:
        raise FloatingPointError("the device is on fire")

    monkeypatch.setattr(engine_lib.Report, "of", broken)
    engine = lookup_engine(requested())
    with pytest.raises(FloatingPointError, match="on fire"):
        run(engine)
    with pytest.raises(RuntimeError, match="cannot go on: the device is on fire"):
        engine.step()


def test_a_closed_engine_says_so_and_its_thread_ends() -> None:
    before = set(threading.enumerate())
    with lookup_engine(requested()) as engine:
        engine.step()
    with pytest.raises(RuntimeError, match="was closed; make a new one"):
        engine.step()
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=30)
        assert not thread.is_alive()


def test_several_processes_may_not_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(NotImplementedError, match="2 processes would each choose by their own"):
        lookup_engine(requested(), EVERY_SWITCH)


@each_row(
    ("widths", "smaller"),
    [((4, 16, 16, 16, 16), (1, 1, 1)), ((1, 1, 1, 1), (1, 1)), ((1,), (1,)), ((3, 20), (1,))],
)
def test_candidates_are_none_a_smaller_and_the_tree_itself(widths, smaller) -> None:
    tree = TreeConfig(widths)
    assert smaller_tree(tree) == TreeConfig(smaller)
    assert smaller_tree(TreeConfig(tree.widths, budget=3)) == TreeConfig(smaller)
    found = [drafter.tree for drafter in candidates([LookupDrafter(tree)])]
    assert found == list(dict.fromkeys([PLAIN, TreeConfig(smaller), tree]))
    two = [LookupDrafter(TreeConfig((1,))), LookupDrafter(tree)]
    assert [d.tree for d in candidates(two)] == list(dict.fromkeys([PLAIN, two[0].tree, tree]))
    assert tallest(candidates([LookupDrafter(tree)])).tree.num_levels == len(widths)


def test_a_launch_in_which_no_row_emits_reports_no_round() -> None:
    """As after the last round of a stream, which is launched before that one is read."""
    packed = np.zeros((1, 2, 60), np.int32)
    report = Report.of(packed, TreeConfig((1, 1)), Contents(2, trees=True))
    assert report.count == [] and report.of_row(0) == ([], [], [], False)
    assert report.logprobs_of(0, 2) == report.trees_of(0) == ()
