"""Priorities, preemption, faults, and choices by load: what a server needs of the engine."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.config.tree import TreeConfig
from longspec_jax.decoding.chooser import Chooser, Measurement, load_of
from longspec_jax.decoding.engine import Engine
from longspec_jax.decoding.inflight import FAULTS_APART
from longspec_jax.decoding.policy import FastestWithinBudget
from longspec_jax.decoding.prompts import Prefill, StepPlan, Waiting
from longspec_jax.decoding.slots import StepOutput
from longspec_jax.decoding.warmup import largest_chunk, smaller_chunks
from longspec_jax.drafters.base import NoDraft, Params
from longspec_jax.drafters.ngram import NgramDrafter
from longspec_jax.drafters.retrieval.hierarchy import PartialVerifier
from longspec_jax.drafters.streaming import StreamingDrafter
from longspec_jax.generation.candidates import candidates_by_load
from tests.decoding.engines import (
    TABLE,
    TARGET,
    VOCABULARY,
    alone,
    asked,
    endless,
    launch_by,
    open_engine,
    prompt,
)
from tests.decoding.lossless import outputs_of, texts_of
from tests.kit import each_row
from tests.lookup import LookupDrafter

# The plan of a step.


def waiting(priority: int, id: int = 0) -> Waiting:
    return Waiting(priority, id, np.zeros(1, np.int32), asked(0))


def seen(
    queued: Any = (),
    prefilling: Any = (),
    live: Any = (),
    *,
    free: int = 0,
    held_back: int | None = None,
    slots: int = 2,
    together: bool = False,
    prefills: int = 2,
) -> StepPlan:
    """What is planned next to waiting, prefilled and live requests of these priorities.

    Args:
      prefilling: also the chunks that are left, 0 where a prefill waits for a slot.
      free: vacant slots.
      held_back: the place of a request that had better wait.
    """
    prompts = open_engine(slots=slots, together=together, prefills=prefills).prompts
    none = (_ for _ in ())
    prompts._is_held_back = lambda one: one.id == held_back  # type: ignore[method-assign]
    prompts.queue = [waiting(priority, id) for id, priority in enumerate(queued)]
    prompts.under_way = [Prefill([waiting(own)], none, 64, left) for left, own in prefilling]
    return prompts.plan(free, live)


TOGETHER = {"slots": 3, "together": True, "prefills": 1}


@each_row(
    ("queued", "prefilling", "now", "expected"),
    [
        ((0, 0), (), {"free": 1, "prefills": 1}, StepPlan((0,), None, None)),
        ((0, 0), ((3, 0),), {"prefills": 1}, StepPlan((), 0, None)),
        ((0, 0), ((3, 0), (1, 0)), {"prefills": 3}, StepPlan((0,), 1, None)),
        ((), ((0, 0), (2, 0)), {}, StepPlan((), 1, None)),
        ((), ((2, 0), (0, 0)), {"free": 1}, StepPlan((), 0, 1)),
        ((0, 0), (), {"free": 3, **TOGETHER}, StepPlan((), None, None)),
        ((0, 0, 0), (), {"free": 3, **TOGETHER}, StepPlan((0, 1, 2), None, None)),
        ((), ((0, 0),), {"free": 2, **TOGETHER}, StepPlan((), None, None)),
    ],
)
def test_the_plan_of_a_step(queued: Any, prefilling: Any, now: Any, expected: StepPlan) -> None:
    assert seen(queued, prefilling, **now) == expected


def test_a_lower_priority_goes_first_at_every_stage() -> None:
    long, short = (9, 0), (1, 1)
    assert seen((), (short, long)).chunk == 1, "a better prompt, however long"
    assert seen((), ((9, 1), short)).chunk == 1, "of equal ones the shorter"
    assert seen((), ((0, 1), (0, 0)), free=1).place == 1
    assert seen((), ((0, 1), (0, 1)), free=1).place == 0


def test_a_better_prompt_takes_the_slot_of_the_worst_that_came_last() -> None:
    ready = ((0, 1),)
    assert seen((), ready, (3, 2, 3, 1)).preempt == 2
    assert seen((), ready, (1, 0)).preempt is None, "never an equal one"
    assert seen((), ready, (3,), free=1).preempt is None
    assert seen((), ((2, 0),), (3,)).preempt is None, "not before it is ready"
    assert seen((), ready).preempt is None, "there may be none that can wait again"


def test_a_better_request_takes_the_place_of_a_prefill() -> None:
    begun = (0, 1), (3, 2), (0, 2)
    found = seen((1, 1), begun, prefills=3)
    assert found.postpone == 2 and not found.admit
    assert seen((2,), begun, prefills=3).postpone is None
    assert seen((1,), begun, prefills=3, held_back=0).postpone is None
    assert seen((1,), begun, prefills=4) == StepPlan((0,), 1)


def test_a_request_that_is_held_back_is_overtaken() -> None:
    assert seen((0, 1, 1), ((4, 0),), held_back=0).admit == (1,)
    assert seen((0,), ((4, 0),), held_back=0).admit == ()


# Requests that lose their slots.


def collected(engine: Engine, outputs: list[StepOutput]) -> dict[int, np.ndarray]:
    """The tokens of all requests, run to their end."""
    outputs += outputs_of(engine)
    texts = texts_of(outputs)
    for id in texts:
        ends = [out.finish for out in outputs if out.id == id]
        assert ends[-1] is not None and not any(ends[:-1]), "an end comes once, at the end"
    return texts


@pytest.mark.parametrize("prefixes", [False, True])
def test_a_preempted_request_goes_on_as_if_nothing_had_happened(prefixes: bool) -> None:
    rows = range(6)
    expected = alone(TARGET, TABLE, rows, VOCABULARY)
    engine = open_engine(slots=2, prefixes=prefixes, readmits=True)
    outputs: list[StepOutput] = []
    ids = [engine.submit(prompt(row), asked(row), priority=5) for row in (0, 2, 4)]
    while len(engine.live) < 2 or not outputs:
        outputs += engine.step()
    for row in (5, 3, 1):
        ids.append(engine.submit(prompt(row), asked(row), priority=row))
        outputs += engine.step() + engine.step()
    texts = collected(engine, outputs)
    assert engine.status.preemptions > 0
    for id, row in zip(ids, (0, 2, 4, 5, 3, 1), strict=True):
        np.testing.assert_array_equal(texts[id], expected[row], err_msg=f"row {row}")
    # The best one, which came last, was done before those that had waited for a slot.
    order = [out.id for out in outputs if out.finish]
    assert order.index(ids[-1]) < order.index(ids[2])


# Faults.


class Faults:
    """Raises in some launches of an engine, whose clock stands still."""

    def __init__(self, engine: Engine, at: Sequence[int]) -> None:
        self.now, self._at, self._count = 0.0, set(at), 0
        self._launch = engine.runner.launch
        launch_by(engine, self)
        engine._faults.clock = lambda: self.now

    def __call__(self, *args: Any) -> Any:
        self._count += 1
        after = self._launch(*args)
        if self._count in self._at:
            raise RuntimeError("the device is on fire")
        return after


def test_after_a_fault_every_request_goes_on_as_if_nothing_had_happened(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows = range(7)
    engine = open_engine(slots=2, prefills=2, prefixes=True, host_bytes=1 << 20, readmits=True)
    faults = Faults(engine, (2, 7))
    ids = [engine.submit(prompt(row), asked(row)) for row in rows]
    outputs: list[StepOutput] = []
    while not engine.status.recoveries:
        outputs += engine.step()
    assert not engine.live and engine._rows is None, "nothing of the old arrays is held"
    faults.now += FAULTS_APART
    texts = collected(engine, outputs)
    assert engine.status.recoveries == 2
    written = [record.exc_text or str(record.exc_info) for record in caplog.records]
    assert len(written) == 2 and all("the device is on fire" in each for each in written)
    for id, text in zip(ids, alone(TARGET, TABLE, rows, VOCABULARY), strict=True):
        np.testing.assert_array_equal(texts[id], text)


def test_a_second_fault_within_a_minute_ends_the_engine() -> None:
    engine = open_engine(readmits=True)
    faults = Faults(engine, (1, 2))
    engine.submit(prompt(1), endless(9))
    while not engine.status.recoveries:
        engine.step()
    faults.now += FAULTS_APART - 1
    with pytest.raises(RuntimeError, match="on fire"):
        outputs_of(engine)
    with pytest.raises(RuntimeError, match="cannot go on: the device is on fire"):
        engine.step()


@pytest.mark.parametrize("method", ["first", "rounds"])
def test_a_row_that_cannot_be_read_ends_alone_and_takes_no_token_of_the_others(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = range(7)
    engine = open_engine(slots=3, readmits=True)
    ids = [engine.submit(prompt(row), asked(row)) for row in rows]
    read = getattr(engine._slots, method)

    def broken(*given: Any) -> StepOutput:
        id = given[1].waiting[given[2]].id if method == "first" else given[2]
        if id == ids[2]:
            raise IndexError("no such entry")
        return read(*given)

    monkeypatch.setattr(engine._slots, method, broken)
    outputs: list[StepOutput] = []
    texts = collected(engine, outputs)
    assert engine.status.recoveries == 0
    [failed] = [out for out in outputs if out.finish == "error"]
    assert failed.id == ids[2] and failed.reason == "IndexError: no such entry"
    for id, text in zip(ids, alone(TARGET, TABLE, rows, VOCABULARY), strict=True):
        expected = text[: len(texts[id])] if id == failed.id else text
        np.testing.assert_array_equal(texts[id], expected)


def test_what_was_read_before_a_failure_is_reported_once() -> None:
    """An engine that cannot go on has told every token that it counts."""
    engine = open_engine(slots=2)
    ids = [engine.submit(prompt(row), endless(15)) for row in (1, 2)]
    shown = {id: 0 for id in ids}

    def step() -> None:
        for output in engine.step():
            shown[output.id] += len(output.tokens)

    while not all(shown.values()):
        step()
    report, failing = engine._report, ids[1]

    def broken(id: int, read: Any) -> None:
        if id == failing:
            raise RuntimeError("the device is on fire")
        report(id, read)

    engine._report = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="^the device is on fire"):
        while True:
            step()
    counted = {id: len(active.tokens) for id, active in engine._slots.active.items()}
    assert counted == shown
    with pytest.raises(RuntimeError, match="cannot go on: the device is on fire"):
        engine.step()


def test_an_interruption_is_no_fault() -> None:
    engine = open_engine(readmits=True)

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    launch_by(engine, interrupted)
    engine.submit(prompt(1), endless(9))
    with pytest.raises(KeyboardInterrupt):
        outputs_of(engine)


def test_a_row_without_finite_logits_ends_alone() -> None:
    rows = range(7)
    table = TABLE.at[::9].set(jnp.nan)
    expected = alone(TARGET, table, rows, VOCABULARY)
    engine = open_engine(params=Params(table, TABLE), slots=3)
    ids = [engine.submit(prompt(row), asked(row)) for row in rows]
    outputs: list[StepOutput] = []
    texts = collected(engine, outputs)
    failed = {out.id for out in outputs if out.finish == "error"}
    assert 0 < len(failed) < len(ids)
    for id, text in zip(ids, expected, strict=True):
        np.testing.assert_array_equal(texts[id], text)
        assert (text[-1] == -1) == (id in failed)


# Trees by load.


def test_loads_are_powers_of_two() -> None:
    assert [load_of(live) for live in (1, 2, 3, 4, 5, 8, 9)] == [0, 1, 2, 2, 3, 3, 4]


def test_candidates_by_load_are_none_a_small_tree_and_the_default_one() -> None:
    def trees(*drafters: Any) -> list[str]:
        return [f"{drafter.name} {drafter.tree}" for drafter in candidates_by_load(drafters)]

    wide = trees(LookupDrafter(TreeConfig(budget=64)), LookupDrafter(TreeConfig((2,))))
    assert wide == ["lookup none", "lookup 4,16,16,16,16@16", "lookup 4,16,16,16,16@64"]
    assert trees(LookupDrafter(TreeConfig((3, 2, 2)))) == ["lookup none", "lookup 3,2,2"]
    two = LookupDrafter(TreeConfig((8,) * 4)), NgramDrafter(TreeConfig((8,) * 4, 20))
    assert trees(*two) == [
        "lookup none",
        "lookup 8,8,8,8@16",
        "ngram 8,8,8,8@16",
        "ngram 8,8,8,8@20",
        "lookup 8,8,8,8",
    ]
    chain = PartialVerifier(StreamingDrafter(TreeConfig((1,))), tree=TreeConfig((1,) * 20))
    by_load = [str(each.tree) for each in candidates_by_load([chain])]
    assert by_load == ["none", "chain:10", "chain:20"]


def simulated(
    seconds: Sequence[Sequence[float]], tokens: Sequence[float], loads: Sequence[int]
) -> list[int]:
    """The candidates that run, one round at a time next to these numbers of live rows.

    Args:
      seconds: of a round of every candidate, by load.
      tokens: that a round of every candidate emits in a row.
      loads: live rows of every round.
    """
    policies = [FastestWithinBudget.timed(own) for own in seconds]
    choices, ran = Chooser(policies, len(tokens)), []
    for live in loads:
        choice, _ = choices.next([], 1, live)
        candidate, taken = choice.candidate, seconds[load_of(live)][choice.candidate]
        emitted = round(1000 * tokens[candidate]) * live
        choices.record(candidate, Measurement(1, 1000 * live, emitted, taken), live)
        ran.append(candidate)
    return ran


def test_the_tree_follows_the_number_of_live_rows() -> None:
    """64 nodes pay for one row, and 16 for eight: no load looks at what another has learnt."""
    seconds = [(1.0, 1.2, 1.3), (1.0, 1.2, 1.5), (1.0, 1.3, 2.2), (1.0, 1.4, 3.5)]
    loads = ([1] * 20 + [8] * 20) * 10
    ran = simulated(seconds, (1.0, 2.5, 3.2), loads)
    one = [candidate for candidate, live in zip(ran, loads, strict=True) if live == 1]
    eight = [candidate for candidate, live in zip(ran, loads, strict=True) if live == 8]
    assert one[:4] == [0, 0, 1, 1] and one.count(2) > 0.85 * len(one)
    assert eight.count(1) > 0.95 * len(eight)


def test_a_draft_that_proposes_nothing_right_is_given_up_at_every_load() -> None:
    seconds = [(1.0, 1.2, 1.3), (1.0, 1.5, 2.5)]
    loads = [1 + turn % 2 for turn in range(600)]
    ran = simulated(seconds, (1.0, 1.0, 1.0), loads)
    assert ran.count(0) > 0.93 * len(ran)


# Gaps.


def test_the_largest_chunk_that_keeps_the_gap_is_taken() -> None:
    sizes, timed = smaller_chunks(1024), []

    def seconds(size: int) -> float:
        timed.append(size)
        return size / 1000

    assert sizes == [1024, 512, 256, 128, 64]
    assert largest_chunk(sizes, seconds, 0.1, 0.65) == 512 and timed == [1024, 512]
    assert smaller_chunks(100) == [100]
    with pytest.warns(UserWarning, match="max_itl_ms=50 cannot be kept: a chunk of 64 tokens and"):
        assert largest_chunk(sizes, seconds, 0.1, 0.05) == 64


def test_between_two_chunks_of_a_prompt_the_others_have_a_round() -> None:
    engine = open_engine(drafters=[NoDraft()], params=Params(TABLE, ()), slots=2, prefills=2)
    engine.submit(prompt(3), endless(40))
    while not engine.live:
        engine.step()
    events: list[str] = []
    launch, chunk = engine.runner.launch, engine._launch_chunk
    launch_by(engine, lambda *args: (events.append("round"), launch(*args))[1])
    engine._launch_chunk = lambda *args: (events.append("chunk"), chunk(*args))[1]  # type: ignore[method-assign]
    for _ in range(2):
        engine.submit(np.arange(33, dtype=np.int32) % VOCABULARY, endless(3))
    collected(engine, [])
    assert events.count("chunk") == 10
    assert "chunk chunk" not in " ".join(events)
