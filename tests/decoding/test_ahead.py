"""Launching ahead changes no token, reads one array a round and never lets the device wait."""

import re
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.config import TreeConfig
from longspec_jax.decoding import ahead
from longspec_jax.decoding.adaptive import candidates
from longspec_jax.decoding.ahead import Report, Rounds, one_round
from longspec_jax.decoding.engine import decode
from longspec_jax.decoding.policy import Always, Choice, FastestWithinBudget, Measurement, Policy
from longspec_jax.decoding.record import Record, SpecState
from longspec_jax.decoding.rows import Rows
from longspec_jax.decoding.target import CachedTarget
from longspec_jax.drafters.base import Params
from longspec_jax.drafters.longspec.config import DraftConfig
from longspec_jax.drafters.longspec.drafter import LongSpecDrafter
from tests.decoding.lossless import LENGTHS, MAX_EMITTED, assert_same
from tests.decoding.lossless import request as requested
from tests.decoding.test_adaptive import rows_of, start
from tests.kit import draft_params, random_draft, random_target, tiny_target_config
from tests.lookup import LookupDrafter, LookupTarget, random_table

VOCABULARY = 13
TREE = TreeConfig((4, 5, 3))
TABLE = random_table(0, 97, VOCABULARY)
NEAR = TABLE + 0.5 * random_table(1, 97, VOCABULARY)
CONFIG = tiny_target_config()
DRAFT = DraftConfig.for_target(CONFIG, window=11)


@dataclass(frozen=True)
class Models:
    """A target, what may draft for it, and their parameters."""

    target: Any
    drafters: tuple[Any, ...]
    params: Params

    @property
    def vocabulary(self) -> int:
        return self.target.vocab_size

    def start(self, req: Any) -> SpecState:
        return start(self.target, self.drafters, self.params, req, self.vocabulary)

    def looped(self, req: Any) -> SpecState:
        """The same call in one executable."""
        return decode(self.target, self.drafters[-1], self.params, self.start(req))

    def rounds(self, req: Any, policy: Policy | None = None, **options: Any) -> Rounds:
        def launch(index: int, rows: Rows) -> tuple[Rows, jax.Array]:
            return one_round(self.target, self.drafters[index], self.params, rows)

        last = len(self.drafters) - 1
        policy = policy or Always(last)
        return Rounds(launch, self.start(req).rows, policy, last + 1, **options)


LOOKUP = Models(LookupTarget(VOCABULARY), candidates([LookupDrafter(TREE)]), Params(TABLE, NEAR))


@pytest.fixture(scope="module")
def transformers() -> Models:
    target = random_target(CONFIG)
    params = Params(target, draft_params(random_draft(DRAFT), target))
    return Models(CachedTarget(CONFIG), candidates([LongSpecDrafter(DRAFT, TREE)]), params)


def read(models: Models, req: Any, reports: list[Report]) -> list[np.ndarray]:
    """What a stream has shown: the prefill's token, then every round's."""
    rows = models.start(req).record.output[:, :1].tolist()
    for report in reports:
        for row, tokens, count in zip(rows, report.tokens, report.count, strict=True):
            row += tokens[:count].tolist()
    return [np.asarray(row) for row in rows]


def assert_same_rows(ahead: Rows, looped: Rows) -> None:
    """Equal in all that counts; slots that hold nothing yet may hold anything."""
    for name in ("length", "pending", "remaining", "done", "draft"):
        jax.tree.map(np.testing.assert_array_equal, getattr(ahead, name), getattr(looped, name))
    for row, length in enumerate(looped.length):
        jax.tree.map(
            lambda a, b: np.testing.assert_array_equal(a[row, :, :length], b[row, :, :length]),  # noqa: B023
            ahead.cache,
            looped.cache,
        )


MIXED = (0.0, 0.8, 1.0)
"""Temperatures of the rows."""


@pytest.mark.parametrize(
    ("kind", "temperature"),
    [("lookup", 0.0), ("lookup", MIXED), ("transformers", MIXED)],
    ids=["lookup-greedy", "lookup", "transformers"],
)
def test_tokens_are_those_of_the_loop_and_the_round_too_many_does_nothing(
    kind: str, temperature: Any, request: pytest.FixtureRequest
) -> None:
    models = LOOKUP if kind == "lookup" else request.getfixturevalue("transformers")
    req = requested(temperature)
    looped = models.looped(req)
    with models.rounds(req) as rounds:
        reports = list(rounds)
    assert_same(read(models, req, reports), rows_of(looped))
    assert len(reports) == int(looped.record.rounds.max()) == rounds.totals[-1].rounds
    assert [bool(report.done.all()) for report in reports] == [False] * (len(reports) - 1) + [True]
    assert len(set(np.asarray(looped.record.rounds).tolist())) > 1, "rows end at different rounds"
    total = rounds.totals[-1]
    assert total.tokens == int(looped.record.emitted.sum()) - 3
    assert total.row_rounds == int(looped.record.rounds.sum())
    drafted = np.concatenate([r.drafted[b, : r.count[b]] for b in range(3) for r in reports])
    whole = np.concatenate(
        [looped.record.drafted[b, 1 : int(looped.record.emitted[b])] for b in range(3)]
    )
    np.testing.assert_array_equal(drafted, whole)
    assert_same_rows(rounds.rows, looped.rows)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_round_asks_the_host_nothing(transformers: Models, temperature: float) -> None:
    """On a GPU a loop of unknown length, or a branch, would hold up its launch until it is done.

    Lowered for one, with attention that has no such loop of its own: the kernels have none either.
    """
    target, req = CachedTarget(CONFIG, "reference"), requested(temperature)
    state = transformers.start(req)
    for tree in (TREE, TreeConfig(TREE.widths, budget=7)):
        models = target, LongSpecDrafter(DRAFT, tree, "reference"), transformers.params
        traced = one_round.trace(*models, state.rows)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert "stablehlo." in text
        assert not re.findall(r"stablehlo\.(?:while|case|if)\b", text)
    looped = decode.trace(*models, state).lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.while" in looped


def test_every_row_ends_at_its_own_stop_token() -> None:
    whole = rows_of(LOOKUP.looped(requested(1.0)))
    # A token in the middle of each row, and none for the last.
    stop = [[int(whole[0][5]), -1], [int(whole[1][2]), int(whole[1][-1])], [-1, -1]]
    req = requested(1.0, stop=stop)
    looped = LOOKUP.looped(req)
    with LOOKUP.rounds(req) as rounds:
        reports = list(rounds)
    assert_same(read(LOOKUP, req, reports), rows_of(looped))
    assert int(looped.record.emitted[0]) <= 6 < len(whole[0])
    assert_same_rows(rounds.rows, looped.rows)


def test_one_transfer_a_round_and_one_launch_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of events: no report is waited for before the round behind it is launched."""
    events: list[str] = []
    real = ahead.fetch
    monkeypatch.setattr(ahead, "fetch", lambda report: (real(report), events.append("fetch"))[0])
    req = requested()
    looped = LOOKUP.looped(req)
    flight = LOOKUP.rounds(req)
    launch = flight._launch
    flight._launch = lambda *args: (events.append("launch"), launch(*args))[1]
    with flight as rounds:
        assert events.count("launch") == 1, "the first round runs before anything is asked for"
        for shown, _ in enumerate(rounds, 1):
            assert events.count("launch") == shown + 1
    rounds._reader.shutdown(wait=True)
    assert events.count("fetch") == int(looped.record.rounds.max()) == shown
    assert events.count("launch") == shown + 1


def test_the_round_too_many_is_not_waited_for() -> None:
    """Its report would never be ready."""

    class Never:
        def block_until_ready(self) -> None:
            raise AssertionError("nobody asked for it")

    def launch(index: int, rows: Rows) -> Any:
        if bool(rows.done.all()):
            return rows, Never()
        return one_round(LOOKUP.target, LOOKUP.drafters[index], LOOKUP.params, rows)

    req = requested()
    with Rounds(launch, LOOKUP.start(req).rows, Always(2), 3) as rounds:
        assert list(rounds)[-1].done.all()


def test_a_consumer_that_stops_early_leaves_whole_rows() -> None:
    """From where it left off, one round ahead, the loop goes on to the same end."""
    req = requested(1.0)
    whole = LOOKUP.looped(req)
    with LOOKUP.rounds(req) as rounds:
        for shown, _ in enumerate(rounds, 1):
            if shown == 2:
                break
    gone = 1 + np.asarray(rounds.rows.length) - LENGTHS
    record = Record.begin(jnp.copy(rounds.rows.pending), MAX_EMITTED, TREE.num_levels + 1)
    state = SpecState(rounds.rows, record)
    state = decode(LOOKUP.target, LOOKUP.drafters[-1], LOOKUP.params, state)
    np.testing.assert_array_equal(1 + state.record.rounds.max(), whole.record.rounds.max() - 2)
    assert_same(rows_of(state), [row[n - 1 :] for row, n in zip(rows_of(whole), gone, strict=True)])


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


@pytest.mark.parametrize(
    "policy",
    [
        Cycle(tuple(Choice(index, 1) for index in (0, 1, 2, 0, 2, 1))),
        Cycle((Choice(2, 3), Choice(0, 2), Choice(1, 4))),
        FastestWithinBudget.over(3),
    ],
    ids=["every switch", "bursts", "by the clock"],
)
def test_switching_changes_no_token(policy: Policy, transformers: Models) -> None:
    for models, temperature in ((LOOKUP, 0.0), (LOOKUP, MIXED), (transformers, MIXED)):
        req = requested(temperature)
        with models.rounds(req, policy) as rounds:
            reports = list(rounds)
        looped = models.looped(req)
        assert_same(read(models, req, reports), rows_of(looped))
        assert sum(total.rounds > 0 for total in rounds.totals) == 3
        total = sum(rounds.totals, Measurement())
        assert (total.rounds, total.tokens) == (len(reports), int(looped.record.emitted.sum()) - 3)
        np.testing.assert_array_equal(rounds.rows.length, looped.rows.length)
        assert sum(total.row_rounds for total in rounds.totals) == sum(
            np.count_nonzero(report.count) for report in reports
        )


def test_a_choice_is_one_round_late() -> None:
    """It is asked when all rounds but the last were seen; a single one that was not runs twice."""
    launched: list[int] = []

    def order(cycle: tuple[Choice, ...]) -> list[int]:
        launched.clear()
        flight = LOOKUP.rounds(requested(new=(31, 31, 31)), Cycle(cycle))
        launch = flight._launch
        flight._launch = lambda index, state: (launched.append(index), launch(index, state))[1]
        with flight as rounds:
            list(rounds)
        return launched[:7]

    assert order((Choice(2, 3), Choice(0, 2))) == [2, 2, 2, 0, 0, 2, 2]
    # At the second look the round too many of the first one has been seen.
    assert order((Choice(0, 1), Choice(1, 1))) == [0, 0, 1, 1, 0, 1, 0]
    assert order((Choice(0, 1),)) == [0] * 7


def simulated(seconds: dict[int, float], hold: float, policy: Policy) -> tuple[Rounds, list[float]]:
    """A run whose device is a clock: rounds take what they take, one after the other.

    Args:
      seconds: of a round of every candidate.
      hold: how long the consumer keeps every report.
      policy: chooses.
    """
    now, free = [0.0], [0.0]
    ends: dict[int, float] = {}
    read_at: list[float] = []
    req = requested(new=(31, 31, 31))

    def launch(index: int, rows: Rows) -> tuple[Rows, jax.Array]:
        free[0] = max(free[0], now[0]) + seconds[index]
        rows, report = one_round(LOOKUP.target, LOOKUP.drafters[index], LOOKUP.params, rows)
        ends[id(report)] = free[0]
        return rows, report

    flight = Rounds(launch, LOOKUP.start(req).rows, policy, 3, clock=lambda: now[0])

    # Reading in the caller's thread, in order: the clock shows when each report came.
    def land(report: jax.Array) -> tuple[Report, float]:
        landed = Report.of(np.asarray(report))
        return landed, ends[id(report)]

    flight._land = land
    with flight as rounds:
        for _ in rounds:
            read_at.append(rounds._last_arrival)
            now[0] = max(now[0], rounds._last_arrival) + hold
    return rounds, read_at


@pytest.mark.parametrize("hold", [0.0, 0.3, 50.0])
def test_seconds_are_the_devices_whatever_the_consumer_takes(hold: float) -> None:
    rounds, arrivals = simulated(
        {0: 1.0, 1: 2.0, 2: 3.0}, hold, Cycle((Choice(2, 3), Choice(0, 2)))
    )
    for total, each in zip(rounds.totals, (1.0, 2.0, 3.0), strict=True):
        assert total.seconds == pytest.approx(each * total.rounds)
    if hold < 1:
        # The device never waited: rounds end one right after the other.
        assert arrivals[-1] == pytest.approx(sum(total.seconds for total in rounds.totals))


def test_the_clock_decides_what_runs() -> None:
    policy = replace(FastestWithinBudget.over(3), burst_rounds=4)
    rounds, _ = simulated({0: 1.0, 1: 7.0, 2: 9.0}, 0.1, policy)
    plain, _, tree = (total.rounds for total in rounds.totals)
    assert plain > 2 * tree
    rounds, _ = simulated({0: 1.0, 1: 3.0, 2: 1.1}, 0.1, policy)
    plain, _, tree = (total.rounds for total in rounds.totals)
    assert plain <= 3 and tree >= plain


def test_an_error_in_a_round_reaches_the_consumer(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(report: jax.Array) -> Any:
        raise FloatingPointError("the device is on fire")

    monkeypatch.setattr(ahead, "fetch", broken)
    with pytest.raises(FloatingPointError, match="on fire"), LOOKUP.rounds(requested()) as rounds:
        next(iter(rounds))


def test_several_processes_may_not_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(NotImplementedError, match="2 processes would each choose by their own"):
        LOOKUP.rounds(requested())
