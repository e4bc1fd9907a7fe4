"""The engine: requests pass through slots with the tokens that they would get alone."""

import re
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.config.tree import PLAIN, TreeConfig
from longspec_jax.decoding import engine as engine_lib
from longspec_jax.decoding import prompts as prompts_lib
from longspec_jax.decoding.candidates import candidates, smaller_tree, tallest
from longspec_jax.decoding.choices import LAUNCH_SECONDS, launch_sizes
from longspec_jax.decoding.chunks import chunk_of, chunk_sizes
from longspec_jax.decoding.engine import Engine
from longspec_jax.decoding.policy import Always, Choice, FastestWithinBudget, Measurement, Policy
from longspec_jax.decoding.prefixes import PrefixCache
from longspec_jax.decoding.report import Contents, Report
from longspec_jax.decoding.round import many_rounds, one_round, slack_slots
from longspec_jax.decoding.rows import Request, RowShardings, insert
from longspec_jax.decoding.sampling import Sampling, SamplingKind
from longspec_jax.decoding.schedule import Plan, Prompt, Queued, Snapshot, plan
from longspec_jax.decoding.slots import Slots, StepOutput
from longspec_jax.decoding.target import TargetModel
from longspec_jax.decoding.trials import branch as branch_of
from longspec_jax.decoding.trials import rehearse, rejoin
from longspec_jax.drafters.base import NOTHING, Drafter, NoDraft, Params
from longspec_jax.drafters.draft import OneOf
from longspec_jax.drafters.longspec.config import DraftConfig
from longspec_jax.drafters.longspec.drafter import LongSpecDrafter
from longspec_jax.drafters.ngram import NgramDrafter
from longspec_jax.drafters.retrieval.hierarchy import Hierarchy
from longspec_jax.drafters.retrieval.selection import SinksAndRecent
from longspec_jax.drafters.small_lm.drafter import SmallLMDrafter
from longspec_jax.drafters.streaming import StreamingDrafter
from tests.decoding.lossless import LENGTHS, NEW, assert_same, engine_of, generate, prompts, run
from tests.decoding.lossless import request as requested
from tests.kit import (
    compilations,
    draft_params,
    prefill,
    random_draft,
    random_target,
    tiny_target_config,
)
from tests.lookup import ConstantDrafter, LookupDrafter, LookupTarget, random_table

VOCABULARY = 13
TREE = TreeConfig((4, 5, 3))
SMALL_TREE = TreeConfig((3, 2))
TABLE = random_table(0, 97, VOCABULARY)
NEAR = TABLE + 0.5 * random_table(1, 97, VOCABULARY)
TARGET, DRAFTER, PARAMS = LookupTarget(VOCABULARY), LookupDrafter(TREE), Params(TABLE, NEAR)
CONFIG = tiny_target_config(num_layers=1)
DRAFT = DraftConfig.for_target(CONFIG, window=11)
SMALL = tiny_target_config(num_layers=1)
MIXED = (0.0, 0.8, 1.0)
"""Temperatures of the rows."""
TIGHT = int((LENGTHS + NEW).max()) + slack_slots(TREE.num_levels)
"""Cache slots of the longest row, with no slot to spare."""


@dataclass(frozen=True)
class Cycle:
    """Runs a fixed cycle of choices, whatever happens."""

    cycle: tuple[Choice, ...]
    turn: int = 0

    def choose(self) -> Choice:
        return self.cycle[self.turn % len(self.cycle)]

    def observe(self, candidate: int, seen: Measurement) -> "Cycle":
        assert candidate == self.choose().candidate and seen.rounds > 0
        return replace(self, turn=self.turn + 1)


EVERY_SWITCH = Cycle(tuple(Choice(index, 1) for index in (0, 1, 2, 0, 2, 1)))


def lookup_engine(req: Request, policy: Policy | None = None, **options: Any) -> Engine:
    """An engine over the lookup model; its candidates are none, a chain and the tree."""
    drafters = candidates([DRAFTER]) if policy else [DRAFTER]
    tokens = prompts(VOCABULARY)
    return engine_of(
        *(TARGET, drafters, PARAMS, tokens, LENGTHS, req, TIGHT), policy=policy, **options
    )


def plainly(req: Request) -> list[np.ndarray]:
    """The rows of the lookup model, decoded plainly."""
    tokens = prompts(VOCABULARY)
    return generate(TARGET, NoDraft(), Params(TABLE, ()), tokens, LENGTHS, req)[0]


# Requests that come and go.

LENGTHS_OF = (1, 30, 8, 3, 17, 9, 25)
NEW_OF = (9, 1, 12, 4, 2, 7, 5)
SIZES: dict[str, Any] = {"capacity": 48, "chunk": 8, "stop_width": 2}


def asked(row: int) -> Request:
    """The options of a row: no two alike."""
    sampling = Sampling(
        np.asarray([MIXED[row % 3]], np.float32),
        np.asarray([(0, 5)[row % 2]], np.int32),
        np.asarray([1.0 - 0.05 * row], np.float32),
        np.asarray([11 * row], np.uint32),
        np.asarray([-np.inf], np.float32),
    )
    stops = np.asarray([[row, -1]], np.int32)
    return Request(sampling, stops, np.asarray([NEW_OF[row % len(NEW_OF)]], np.int32))


def endless(new: int) -> Request:
    return replace(
        asked(0),
        stop_tokens=np.full((1, 2), -1, np.int32),
        max_new_tokens=np.asarray([new], np.int32),
    )


def prompt(row: int, vocabulary: int = VOCABULARY) -> np.ndarray:
    length = LENGTHS_OF[row % len(LENGTHS_OF)]
    return np.random.default_rng(row).integers(0, vocabulary, length).astype(np.int32)


def open_engine(
    target: Any = TARGET,
    drafters: Sequence[Drafter] = (LookupDrafter(SMALL_TREE),),
    params: Params = PARAMS,
    slots: int = 2,
    **options: Any,
) -> Engine:
    return Engine(target, drafters, params, slots=slots, **{**SIZES, **options})


def serve(
    engine: Engine, rows: Sequence[int], vocabulary: int = VOCABULARY
) -> tuple[list[np.ndarray], list[StepOutput]]:
    """Submit the rows in this order; their tokens by number, and all outputs."""
    ids = {engine.submit(prompt(row, vocabulary), asked(row)): row for row in rows}
    outputs: list[StepOutput] = []
    while engine.busy:
        outputs += engine.step()
    parts = [[out.tokens for out in outputs if ids[out.id] == row] for row in sorted(rows)]
    return [np.concatenate(part) for part in parts], outputs


def alone(target: Any, params: Any, rows: Sequence[int], vocabulary: int) -> list[np.ndarray]:
    """The rows decoded plainly, each by itself."""
    found = []
    for row in rows:
        text = prompt(row, vocabulary)
        models = target, NoDraft(), Params(params, ())
        [own], _ = generate(*models, text[None], [len(text)], asked(row), 48, 8)
        found.append(own)
    return found


@pytest.mark.parametrize("slots", [1, 8])
def test_requests_over_slots_are_those_of_single_runs(slots: int) -> None:
    """Also where a launch is of the live rows and few others, as rows come and go."""
    rows, taken = range(14), set()
    engine = open_engine(slots=slots)
    engine.launch_sizes = tuple(size for size in (1, 2, 4, 8) if size <= slots)
    launch = engine._launch
    engine._launch = lambda *given: (taken.add(len(given[2])), launch(*given))[1]  # type: ignore[method-assign]
    shown, outputs = serve(engine, rows)
    assert taken == {*engine.launch_sizes} - {8}, "at most four rows are live together"
    assert_same(shown, alone(TARGET, TABLE, rows, VOCABULARY))
    assert [out.rounds for out in outputs].count(()) == len(rows)
    ends = [out.finish for out in outputs if out.finish is not None]
    assert len(ends) == len(rows) and set(ends) == {"stop", "length"}
    assert any(out.drafted.any() for out in outputs), "nothing was speculated"
    assert sum(total.tokens for total in engine.totals) == sum(map(len, shown)) - len(rows)


def test_chunks_of_prompts_that_are_prefilled_alone_follow_from_their_own_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: dict[int, int] = {}
    chunks = prompts_lib.prefill_chunks

    def noted(*models_and_tokens: Any, chunk: int, **options: Any) -> Any:
        length = int(models_and_tokens[4][0])
        assert taken.setdefault(length, chunk) == chunk
        return chunks(*models_and_tokens, chunk=chunk, **options)

    monkeypatch.setattr(prompts_lib, "prefill_chunks", noted)
    rows = range(7)
    shown, _ = serve(open_engine(short_chunks=(2, 4)), rows)
    assert taken == {1: 2, 3: 4, 8: 8, 9: 8, 17: 8, 25: 8, 30: 8}
    monkeypatch.undo()
    assert_same(shown, alone(TARGET, TABLE, rows, VOCABULARY))


def test_chunk_sizes_are_few() -> None:
    sizes = chunk_sizes
    assert [sizes(largest) for largest in (2048, 8192, 256, 512, 100)] == [
        (128, 512, 2048),
        (128, 512, 2048, 8192),
        (256,),
        (128, 512),
        (100,),
    ]
    chunk = [chunk_of(length, sizes(2048)) for length in (1, 128, 129, 513, 5000)]
    assert chunk == [128, 128, 512, 2048, 2048]


def test_requests_take_the_slots_in_turn() -> None:
    """Also where the first one has ended before the second has a slot."""
    engine = open_engine(slots=3)
    for row, new in enumerate((1, 4, 4)):
        engine.submit(prompt(row), endless(new))
    while engine.prefilling:
        engine.step(decode=False)
    assert engine.live == (1, 2)
    np.testing.assert_array_equal(engine.rows.length, [len(prompt(row)) for row in range(3)])


TABLES = random_target(CONFIG)
STREAMING = StreamingDrafter(TreeConfig((1,)), SinksAndRecent(1, 4))
KINDS = {
    "longspec": (LongSpecDrafter(DRAFT, SMALL_TREE), draft_params(random_draft(DRAFT), TABLES)),
    "ngram": (NgramDrafter(TreeConfig((2, 2))), ()),
    "small_lm": (SmallLMDrafter(SMALL, SMALL_TREE), random_target(SMALL, seed=3)),
    "hierarchy": (Hierarchy(STREAMING, SinksAndRecent(2, 6), TreeConfig((1, 1, 1, 1))), ()),
}


@pytest.fixture(scope="module")
def single() -> list[np.ndarray]:
    return alone(TargetModel(CONFIG), TABLES, range(7), CONFIG.vocab_size)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_drafter_serves(kind: str, single: list[np.ndarray]) -> None:
    """A slot's last row leaves nothing behind in the drafter's state."""
    drafter, draft = KINDS[kind]
    engine = open_engine(TargetModel(CONFIG), [drafter], Params(TABLES, draft))
    engine.launch_sizes = 1, 2
    shown, _ = serve(engine, range(7), CONFIG.vocab_size)
    assert_same(shown, single)


def test_sizes_of_launches_are_few_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert [launch_sizes(slots) for slots in (1, 4, 5, 8)] == [(1,), (4,), (1, 5), (1, 2, 8)]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert [launch_sizes(slots) for slots in (1, 2, 6, 8)] == [
        (1,),
        (1, 2),
        (1, 2, 4, 6),
        (1, 2, 4, 8),
    ]


def test_a_launch_is_of_the_live_rows_and_the_first_others() -> None:
    slots = Slots(8, PrefixCache(PARAMS, NOTHING, 8))
    slots.held = [None, 3, None, None, 5, None, 4, None]
    assert slots.of_launch((1, 2, 4, 8)) == [0, 1, 4, 6]
    assert slots.of_launch((3, 8)) == [1, 4, 6]
    assert slots.of_launch((2, 8)) == [*range(8)]


def test_neither_order_policy_nor_prefills_at_once_change_a_token(single: list[np.ndarray]) -> None:
    drafter, draft = KINDS["longspec"]
    models = TargetModel(CONFIG), candidates([drafter]), Params(TABLES, draft)
    engine = open_engine(*models, policy=EVERY_SWITCH, prefills=3)
    shown, _ = serve(engine, (6, 0, 4, 2, 5, 1, 3), CONFIG.vocab_size)
    assert_same(shown, single)
    assert all(total.rounds for total in engine.totals)


def test_a_long_prompt_comes_in_between_the_rounds_of_the_others() -> None:
    """Five chunks: the other row advances behind every one of them."""
    engine = open_engine(TARGET, [NoDraft()], Params(TABLE, ()))
    long = np.arange(36, dtype=np.int32) % VOCABULARY
    first = engine.submit(long[:3], endless(40))
    while not engine.step():
        pass
    second = engine.submit(long, asked(1))
    ids: list[int] = []
    while second not in ids:
        ids += [out.id for out in engine.step()]
    assert ids.count(first) >= 5


def test_a_short_prompt_overtakes_a_long_one_where_several_are_prefilled() -> None:
    for prefills, first in ((1, 0), (2, 1)):
        engine = open_engine(TARGET, [NoDraft()], Params(TABLE, ()), prefills=prefills)
        engine.submit(np.ones(40, np.int32), endless(3))
        engine.submit(np.ones(5, np.int32), endless(3))
        outputs: list[StepOutput] = []
        while not outputs:
            outputs = engine.step()
        assert outputs[0].id == first


def test_later_requests_compile_nothing() -> None:
    """Whatever their lengths, options and slots are."""
    drafter, draft = KINDS["longspec"]
    engine = open_engine(TargetModel(CONFIG), [drafter], Params(TABLES, draft), slots=3)
    serve(engine, (0,), CONFIG.vocab_size)
    with compilations() as found:
        serve(engine, range(1, 7), CONFIG.vocab_size)
    assert not found


def test_greedy_requests_run_programs_without_noise_or_sort() -> None:
    """The kind of a launch is that of the live rows alone."""
    engine, kinds = open_engine(), []
    launch = engine._launch
    engine._launch = lambda *given: (kinds.append(given[1]), launch(*given))[1]  # type: ignore[method-assign]
    greedy = SamplingKind.GREEDY
    plain = replace(endless(6), sampling=asked(0).sampling.of_kind(greedy))
    engine.submit(prompt(1), plain)
    while engine.busy:
        engine.step()
    assert set(kinds) == {greedy}
    engine.submit(prompt(1), plain)
    engine.submit(prompt(3), endless(20))
    while engine.busy:
        engine.step()
    assert kinds[-1] == SamplingKind.ANY


def test_a_cancelled_request_makes_room_and_disturbs_nobody() -> None:
    engine = open_engine()
    cancelled = engine.submit(prompt(4), endless(20))
    while not engine.step():
        pass
    waiting = engine.submit(prompt(4), endless(20))
    assert not engine.rows.done.all()
    engine.cancel(cancelled)
    engine.cancel(waiting)
    # The device neither decodes what nobody reads, nor reads its cache.
    assert engine.rows.done.all()
    shown, outputs = serve(engine, range(6))
    assert_same(shown, alone(TARGET, TABLE, range(6), VOCABULARY))
    assert not {cancelled, waiting} & {out.id for out in outputs}


def test_one_of_several_prompts_prefilled_together_can_be_cancelled() -> None:
    req = requested(new=(31, 31, 31))
    expected = plainly(req)
    engine = lookup_engine(req)
    engine.step()
    engine.cancel(1)
    outputs: list[StepOutput] = []
    while engine.busy:
        outputs += engine.step()
    assert {out.id for out in outputs} == {0, 2}
    for row in (0, 2):
        np.testing.assert_array_equal(
            np.concatenate([out.tokens for out in outputs if out.id == row]), expected[row]
        )


def test_requests_that_do_not_fit_are_refused() -> None:
    engine = open_engine()
    engine.submit(np.zeros(40, np.int32), endless(48 - 40 - 3))
    for length, new in ((40, 6), (49, 1)):
        with pytest.raises(ValueError, match="cache slots and a row has 48; make the engine with"):
            engine.submit(np.zeros(length, np.int32), endless(new))
    many = replace(endless(1), stop_tokens=np.arange(3, dtype=np.int32)[None])
    with pytest.raises(ValueError, match="3 stop tokens does not fit an engine made for 2"):
        engine.submit(prompt(0), many)


def test_a_slot_is_written_whole() -> None:
    """NaN of the last row must not reach the next one through a masked product."""
    engine = open_engine()
    poisoned = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), engine.rows.cache)
    rows = prefill(
        *(TARGET, LookupDrafter(SMALL_TREE), PARAMS, np.zeros((1, 3), np.int32), np.asarray([3])),
        asked(0),
        capacity=48,
        chunk=8,
    )
    clean = replace(rows, cache=jax.tree.map(jnp.zeros_like, rows.cache))
    shardings = RowShardings.beside(TABLE, 2)
    after = insert(shardings, replace(engine.rows, cache=poisoned), np.int32(1), clean)
    for leaf in jax.tree.leaves(after.cache):
        assert np.isnan(leaf[0]).all() and not np.isnan(leaf[1]).any()


def test_rows_that_are_done_read_nothing_of_their_cache() -> None:
    """A row that ended must not make the others' rounds as long as its own context was."""
    engine = lookup_engine(requested(new=(31, 3, 1)))
    while engine.live != (0,):
        engine.step()
    assert engine.rows.attended.tolist()[1:] == [0, 0] and engine.rows.attended[0] > 0


TWO = (Queued(), Queued())


def under_way(*left: int | None) -> tuple[Prompt, ...]:
    """Prefills with these numbers of chunks left."""
    return tuple(map(Prompt, left))


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (Snapshot(TWO, (), 1, 2, False, 1), Plan((0,), None, None)),
        (Snapshot(TWO, under_way(3), 0, 2, False, 1), Plan((), 0, None)),
        (Snapshot(TWO, under_way(3, 1), 0, 2, False, 3), Plan((0,), 1, None)),
        (Snapshot((), under_way(None, 2), 0, 2, False, 2), Plan((), 1, None)),
        (Snapshot((), under_way(2, None), 1, 2, False, 2), Plan((), 0, 1)),
        (Snapshot(TWO, (), 3, 3, True, 1), Plan((), None, None)),
        (Snapshot((Queued(),) * 3, (), 3, 3, True, 1), Plan((0, 1, 2), None, None)),
        (Snapshot((), under_way(None), 2, 3, True, 1), Plan((), None, None)),
    ],
)
def test_the_plan_of_a_step(now: Snapshot, expected: Plan) -> None:
    assert plan(now) == expected


# One call, in launches of one round or of many.


@pytest.mark.parametrize("temperature", [0.0, MIXED], ids=["greedy", "mixed"])
@pytest.mark.parametrize("streams", [True, False], ids=["one round", "many rounds"])
def test_a_call_has_the_tokens_of_plain_decoding(streams: bool, temperature: Any) -> None:
    req = requested(temperature)
    engine = lookup_engine(req, streams=streams)
    rows, end = run(engine)
    assert_same(rows, plainly(req))
    [total] = engine.totals
    record = end.record
    assert total.rounds == record.rounds.max() and total.row_rounds == record.rounds.sum()
    assert total.tokens == record.emitted.sum() - 3
    assert len(set(record.rounds.tolist())) > 1, "rows end at different rounds"
    # A row's last round may have emitted no bonus.
    drafted = int(record.drafted.sum())
    assert 0 <= drafted + record.rounds.sum() - (record.emitted.sum() - 3) <= 3


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


def launched(engine: Engine) -> list[Choice]:
    """The launches of an engine from now on."""
    found: list[Choice] = []
    launch = engine._launch
    engine._launch = lambda *given: (found.append(given[0]), launch(*given))[1]  # type: ignore[method-assign]
    return found


def test_a_stream_is_one_launch_ahead_of_what_was_read() -> None:
    engine = lookup_engine(requested(), streams=True)
    choices, shown = launched(engine), 0
    while engine.busy:
        outputs = engine.step()
        shown += any(out.rounds for out in outputs)
        if engine.live and shown:
            assert len(choices) == shown + 1
    # When the last round was read, one more was under way. Nobody waits for it.
    assert len(choices) - shown <= 1 and all(choice.rounds == 1 for choice in choices)


def test_no_round_is_launched_behind_the_budget() -> None:
    """Every round emits a token at least, so that the end of plain decoding is known."""
    engine = lookup_engine(requested(new=(9, 5, 1)), streams=True)
    engine.drafters = (NoDraft(),)
    choices = launched(engine)
    run(engine)
    assert len(choices) == 8


@pytest.mark.parametrize("streams", [True, False], ids=["one round", "many rounds"])
@pytest.mark.parametrize(
    "policy",
    [EVERY_SWITCH, Cycle((Choice(2, 3), Choice(0, 2), Choice(1, 4))), FastestWithinBudget.over(3)],
    ids=["every switch", "several rounds", "by the clock"],
)
def test_switching_changes_no_token(policy: Policy, streams: bool) -> None:
    req = requested(MIXED)
    engine = lookup_engine(req, policy, streams=streams, ahead=streams)
    rows, end = run(engine)
    assert_same(rows, plainly(req))
    assert sum(total.rounds > 0 for total in engine.totals) == 3
    total = sum(engine.totals, Measurement())
    assert total.tokens == end.record.emitted.sum() - 3
    assert total.row_rounds == end.record.rounds.sum()


def test_the_draft_misses_nothing_while_candidates_switch() -> None:
    """After any switching its state is what an uninterrupted run of the tree leaves behind."""
    drafter, draft = KINDS["longspec"]
    tokens, req, states = prompts(CONFIG.vocab_size), requested(MIXED), []
    for cycle in ((Choice(2, 100),), EVERY_SWITCH.cycle, (Choice(0, 100),)):
        engine = engine_of(
            *(TargetModel(CONFIG), candidates([drafter]), Params(TABLES, draft), tokens, LENGTHS),
            *(req, TIGHT),
            policy=Cycle(cycle),
            ahead=False,
        )
        run(engine)
        states.append(jax.device_get(engine.rows.draft))
    for state in states[1:]:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), state, states[0])


def test_a_plain_round_that_keeps_the_draft_up_to_date_is_no_dearer() -> None:
    """A token's draft K/V, beside a target of merely two layers."""
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
        choices = launched(engine)
        run(engine)
        return [choice.candidate for choice in choices[:7]]

    assert order((Choice(2, 3), Choice(0, 2))) == [2, 2, 2, 0, 0, 2, 2]
    # At the second choice the extra round of the first one has been read.
    assert order((Choice(0, 1), Choice(1, 1))) == [0, 0, 1, 1, 0, 1, 0]
    assert order((Choice(0, 1),)) == [0] * 7


def clocked(
    seconds: Sequence[float],
    policy: Policy,
    hold: float = 0.0,
    *,
    streams: bool = False,
    drafters: Sequence[Drafter] | None = None,
    params: Params = PARAMS,
    new: int = 31,
    rounds: list[int] | None = None,
) -> tuple[Engine, float, list[np.ndarray]]:
    """A run whose device is a clock: rounds take what they take, one after the other.

    Args:
      seconds: of a round of every candidate.
      policy: chooses.
      hold: how long the consumer keeps every output.
      streams: whether a launch is one round.
      drafters: the candidates.
      params: of both models.
      new: tokens of each row.
      rounds: takes those of every launch.

    Returns:
      The engine, the clock at its end, and the tokens.
    """
    now, free = [0.0], [0.0]
    engine = engine_of(
        *(TARGET, drafters or candidates([DRAFTER]), params, prompts(VOCABULARY), LENGTHS),
        *(requested(new=(new,) * 3), 19 + new + slack_slots(TREE.num_levels)),
        policy=policy,
        streams=streams,
        ahead=streams,
        clock=lambda: now[0],
    )
    launch, ends = engine._launch, []

    def timed(choice: Choice, *more: Any) -> Any:
        rows, packed = launch(choice, *more)
        ran = len(Report.of(np.asarray(packed)).count)
        free[0] = max(free[0], now[0]) + seconds[choice.candidate] * ran
        if rounds is not None:
            rounds.append(ran)
        ends.append(free[0])
        return rows, packed

    engine._launch = timed  # type: ignore[method-assign]
    launches = engine._launches
    land = launches.land

    def landed() -> list[StepOutput]:
        oldest = launches._launches[0]
        arrived = ends.pop(0) if oldest.choice is not None else now[0]
        now[0] = max(now[0], arrived)
        output, _ = oldest.landing.result()
        done = Future()
        done.set_result((output, arrived))
        launches._launches[0] = oldest._replace(landing=done)
        return land()

    launches.land = landed  # type: ignore[method-assign]
    tokens: list[list[int]] = [[] for _ in LENGTHS]
    while engine.busy:
        for out in engine.step():
            tokens[out.id] += out.tokens.tolist()
        now[0] += hold
    engine.finish()
    return engine, now[0], [np.asarray(row) for row in tokens]


@pytest.mark.parametrize("hold", [0.0, 0.3, 50.0])
def test_seconds_are_the_devices_whatever_the_consumer_takes(hold: float) -> None:
    policy = Cycle((Choice(2, 3), Choice(0, 2)))
    engine, end, _ = clocked((1.0, 2.0, 3.0), policy, hold, streams=True)
    for total, each in zip(engine.totals, (1.0, 2.0, 3.0), strict=True):
        assert total.seconds == pytest.approx(each * total.rounds)
    if hold < 1:
        # The device never waited: rounds end one right after the other.
        spent = sum(total.seconds for total in engine.totals)
        assert end == pytest.approx(spent, abs=5 * hold + 1e-6)


@pytest.mark.parametrize("streams", [True, False], ids=["one round", "many rounds"])
def test_the_clock_decides_what_runs(streams: bool) -> None:
    policy = replace(FastestWithinBudget.over(3), burst_rounds=4)
    engine, _, _ = clocked((1.0, 7.0, 9.0), policy, 0.1, streams=streams)
    plain, _, tree = (total.rounds for total in engine.totals)
    assert plain > 2 * tree
    engine, _, _ = clocked((1.0, 3.0, 1.1), policy, 0.1, streams=streams)
    plain, _, tree = (total.rounds for total in engine.totals)
    assert plain <= 4 and tree >= plain


def test_launches_of_many_rounds_fill_their_time() -> None:
    rounds: list[int] = []
    clocked((0.041,), Always(), drafters=[NoDraft()], params=Params(TABLE, ()), rounds=rounds)
    assert rounds == [4, 9, 9, 8]
    assert 9 * 0.041 <= LAUNCH_SECONDS < 10 * 0.041


def test_the_promise_holds_across_drafters() -> None:
    """Of two drafters with a common state, useless ones cost a tenth and a good one is found."""
    members, new = (LookupDrafter(PLAIN), ConstantDrafter(PLAIN)), 240
    trees = TREE, TreeConfig((2, 2))
    drafters = candidates([OneOf(members, index, tree) for index, tree in enumerate(trees)])
    costs = {PLAIN: 1.0, trees[0]: 4.0, trees[1]: 6.0}

    def ran(table: Any, costs: dict[TreeConfig, float]) -> tuple[Engine, float, list[np.ndarray]]:
        policy = FastestWithinBudget.over(len(drafters))
        seconds = [costs[drafter.tree] for drafter in drafters]
        return clocked(
            seconds, policy, drafters=drafters, params=Params(TABLE, (table, ())), new=new
        )

    engine, spent, dear = ran(-TABLE, costs)
    assert all(total.rounds for total in engine.totals), "every drafter was looked at"
    assert spent <= 1.1 * (new - 1)
    engine, _, found = ran(TABLE, {PLAIN: 1.0, trees[0]: 1.2, trees[1]: 1.1})
    assert engine.totals[drafters.index(OneOf(members, 0, TREE))].tokens > 0.8 * 3 * new
    assert_same(found, dear)


def test_rehearsal_compiles_everything_and_emits_within_the_budget() -> None:
    drafters = candidates([LookupDrafter(SMALL_TREE)])
    given = TARGET, drafters, PARAMS, prompts(VOCABULARY), LENGTHS
    own = TIGHT + 3  # A capacity of no other test.
    engine = engine_of(*given, requested(new=(2, 2, 2)), own)
    while engine.prefilling:
        engine.step(decode=False)
    before = many_rounds._cache_size()
    rehearse(engine, requested().sampling.kind)
    assert many_rounds._cache_size() - before == 3
    np.testing.assert_array_equal(engine.rows.length, LENGTHS + 1)
    run(engine_of(*given, requested(), own, policy=EVERY_SWITCH, ahead=False))
    assert many_rounds._cache_size() - before == 3


def test_branches_go_on_from_one_prefill() -> None:
    """One that shares the cache gives it back; one with its own decodes beside the first."""
    req = requested(MIXED)
    engine = lookup_engine(req)
    first: list[StepOutput] = []
    while engine.prefilling:
        first += engine.step(decode=False)
    plain = branch_of(engine, [NoDraft()], Params(TABLE, ()), (), own_cache=True)
    trial = branch_of(engine, [DRAFTER], PARAMS, engine.rows.draft, own_cache=False, tokens=20)
    while trial.totals[0].rounds < 3:
        trial.step()
    rejoin(engine, trial)
    expected = plainly(req)
    for branch in (plain, engine):
        rows, _ = run(branch)
        start = [out.tokens for out in sorted(first, key=lambda out: out.id)]
        assert_same([np.concatenate(pair) for pair in zip(start, rows, strict=True)], expected)


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


@pytest.mark.parametrize(
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
    """As behind the last round of a stream, which is launched before that one is read."""
    packed = np.zeros((1, 2, 60), np.int32)
    report = Report.of(packed, TreeConfig((1, 1)), Contents(2, trees=True))
    assert report.logprobs is not None and report.logprobs.shape == (0, 2, 3, 5)
    assert report.tokens.shape == (0, 2, 3)
    assert not report.logprobs_of(0, np.zeros(0, int), 2) and not len(report.count)
