"""The loop over steps of a toy: what it saves, what it refuses, how it stops and goes on."""

import dataclasses
import json
import math
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from configs import demo
from longspec_jax.sharding import make_mesh
from tests.train.tiny import SyntheticRows
from train.arguments import from_config
from train.checkpoint import Checkpoints
from train.config import RunConfig, StageConfig
from train.data.batches import Batches
from train.data.rows import Row
from train.loop import Interrupted, Stage, run_stage, stop_signals
from train.metrics import Metrics, read_records
from train.step import Batch, TrainState, learning_rate

CONFIG = StageConfig(
    name="short", seq_len=4, batch=3, accumulation=1, learning_rate=0.1, steps=10, epochs=0,
    max_seconds=0.0, max_offset=0,
)  # fmt: skip
START = TrainState(jnp.int32(0), {"w": jnp.float32(0)}, {"m": jnp.float32(0)})


@dataclass(frozen=True)
class Toy:
    """Sums up the tokens it is shown; what happens at a step is given."""

    losses: dict[int, float] = field(default_factory=dict)
    states: dict[int, float] = field(default_factory=dict)
    measured: dict[str, float] = field(default_factory=dict)
    slow: dict[int, float] = field(default_factory=dict)
    """Seconds that the second step takes to compile, by the length of its rows."""

    def step(self, state: TrainState, frozen: Any, batch: Batch, rate: Any) -> Any:
        at = int(state.step)
        time.sleep(self.slow.get(batch.tokens.shape[-1], 0.0) if at == 1 else 0.0)
        w = state.params["w"] + float(np.asarray(batch.tokens).sum()) * 1e-3
        w = jnp.float32(self.states.get(at, w))
        values = {"loss": jnp.float32(self.losses.get(at, w)), "grad_norm": jnp.float32(1)}
        return TrainState(jnp.int32(at + 1), {"w": w}, {"m": w}), values

    def measure(self, params: Any, frozen: Any, batch: Batch) -> dict[str, float]:
        return {"heldout_loss": float(params["w"]), **self.measured}


@dataclass(frozen=True)
class PaddedRows:
    """Rows of which a number of tokens are padding."""

    padding: int
    seq_len: int

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> Row:
        return SyntheticRows(30, self.seq_len, 50)[index]._replace(
            length=self.seq_len - self.padding
        )


@dataclass
class Run:
    """A run of the toy in a folder."""

    folder: Path
    padding: int = 0
    config: StageConfig = CONFIG
    fingerprint: dict[str, Any] = field(default_factory=lambda: {"--config.seed": 1})
    rows: Any = None
    buckets: int = 1

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True)

    def diverge(self, at: int) -> None:
        """Go as far as a step whose loss is no number."""
        with pytest.raises(FloatingPointError):
            self.go(Toy(losses={at: math.nan}))

    def go(self, toy: Toy, **settings: int) -> float:
        values = demo.get_config("tiny").to_dict()
        whole = dict(log_every=1, save_every=4, accept_every=4, max_to_keep=2)
        run: RunConfig = dataclasses.replace(from_config(values), **{**whole, **settings})
        rows: Any = self.rows or PaddedRows(self.padding, self.config.seq_len)
        batches = Batches(rows, self.config.batch, self.config.accumulation, 0, self.buckets)
        toy_: Any = toy
        stage = Stage(self.config, toy_, toy.step, (), batches, batches(0), self.fingerprint)
        checkpoints = Checkpoints(self.folder / "checkpoints", run.max_to_keep)
        metrics = Metrics(self.folder / "metrics.jsonl")
        mesh = make_mesh(1, 1, 1)
        try:
            state = run_stage(stage, START, run, mesh, checkpoints, metrics)
        finally:
            metrics.close()
            checkpoints.close()
        return float(state.params["w"])

    @property
    def records(self) -> list[dict[str, Any]]:
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [
            {name: value for name, value in json.loads(line).items() if name in SHOWN}
            for line in lines
        ]

    @property
    def saved(self) -> list[int]:
        return sorted(int(path.name) for path in (self.folder / "checkpoints").iterdir())


SHOWN = {"step", "loss", "heldout_loss"}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


@pytest.mark.parametrize("by_clock", [False, True])
def test_the_first_step_learns_and_the_last_one_has_the_floor(run: Run, by_clock: bool) -> None:
    """A step's rate is that of the stage with it."""
    toy = Toy(slow={4: 0.2} if by_clock else {})
    limits = dict(steps=0, max_seconds=0.6) if by_clock else {}
    dataclasses.replace(run, config=dataclasses.replace(CONFIG, **limits)).go(toy, accept_every=0)
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    rates = [values["lr"] for values in map(json.loads, lines) if "lr" in values]
    peak, optimizer = CONFIG.learning_rate, from_config(demo.get_config("tiny").to_dict()).optimizer
    assert 0 < rates[0] <= peak and len(rates) > 2
    assert rates[-1] == pytest.approx(peak * optimizer.floor, rel=1e-3) or by_clock
    if not by_clock:
        done = [(step + 1) / CONFIG.steps for step in range(CONFIG.steps)]
        shape = dict(warmup=optimizer.warmup, floor=optimizer.floor)
        expected = [learning_rate(each, peak, **shape) for each in done]
        assert rates == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("at", [0, 6, 7, 9])
def test_what_is_no_number_stops_the_run_and_is_never_saved(
    run: Run, at: int, value: float
) -> None:
    """At step 7 the save of step 8 is due; the metrics of a step come one step late."""
    with pytest.raises(FloatingPointError) as raised:
        run.go(Toy(losses={at: value}))
    message = str(raised.value)
    assert f"stage short has diverged: loss={value} at step {at}; " in (message)
    assert "learning_rate" in message
    assert run.saved == [step for step in (4, 8) if step <= at]
    if at > 4:
        assert f"the last finite checkpoint is {run.folder / 'checkpoints' / str(at // 4 * 4)}" in (
            message
        )
    else:
        assert "no checkpoint was saved yet" in message
    assert run.records[-1] == {"step": at, "loss": None}


def test_a_state_that_is_no_number_is_never_saved(run: Run) -> None:
    """A loss is that of the parameters before its step."""
    with pytest.raises(FloatingPointError, match="parameters or optimiser state that are not fini"):
        run.go(Toy(losses={7: 1.0}, states={7: math.inf}), accept_every=0)
    assert run.saved == [4]


def test_a_measurement_that_is_no_number_stops_the_run(run: Run) -> None:
    with pytest.raises(FloatingPointError, match="diverged: tau=nan at step 4; no checkpoint"):
        run.go(Toy(measured={"tau": math.nan}))
    assert run.saved == []


def test_a_resumed_run_repeats_the_log_and_no_step_of_it(run: Run, tmp_path: Path) -> None:
    straight = Run(tmp_path / "straight")
    final = straight.go(Toy())
    assert [record["step"] for record in straight.records if "loss" in record] == [*range(10)]
    assert [r["step"] for r in straight.records if "heldout_loss" in r] == [4, 8, 10]

    run.diverge(7)
    log = run.folder / "metrics.jsonl"
    other = '{"stage": "other", "step": 3}\n'
    # As kill -9 and a full disk leave it.
    log.write_text(other + log.read_text() + '{"stage": "short", "st')
    assert run.go(Toy()) == final
    assert run.records == [{"step": 3}, *straight.records]
    assert run.go(Toy()) == final and run.records == [{"step": 3}, *straight.records]


def test_a_stage_killed_before_its_first_save_begins_its_log_anew(run: Run) -> None:
    run.diverge(2)
    run.go(Toy())
    assert [record["step"] for record in run.records if "loss" in record] == [*range(10)]


def test_the_end_is_measured_and_saved_once(run: Run) -> None:
    run.go(Toy(), save_every=5, accept_every=5)
    assert [r["step"] for r in run.records if "heldout_loss" in r] == [5, 10]
    assert run.saved == [5, 10]


def test_another_run_is_refused_by_name(run: Run) -> None:
    run.diverge(7)
    before = run.records
    run.fingerprint = {"--config.seed": 2, "data": "a"}
    with pytest.raises(ValueError) as raised:
        run.go(Toy())
    sentence = "another run: --config.seed=2 (was 1), data=a (was absent); restore what changed"
    assert sentence in str(raised.value) and "--workdir" in str(raised.value)
    assert run.records == before


def test_the_one_before_is_used_where_the_newest_is_damaged(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.diverge(9)
    (run.folder / "checkpoints" / "8" / "meta.json").write_text("{")
    final = run.go(Toy())
    assert "8 is skipped: meta.json does not fit the checksums" in capsys.readouterr().err
    assert [record["step"] for record in run.records if "loss" in record] == [*range(10)]
    straight = Run(tmp_path / "straight")
    assert final == straight.go(Toy())


class Uneven(PaddedRows):
    """Every third row is whole, of the others half is padding."""

    def lengths(self) -> np.ndarray:
        return np.asarray([4 if index % 3 == 0 else 2 for index in range(len(self))])

    def __getitem__(self, index: int) -> Row:
        return super().__getitem__(index)._replace(length=int(self.lengths()[index]))


def test_a_run_of_several_lengths_resumes_exactly(run: Run, tmp_path: Path) -> None:
    """The first step of every length compiles, and has no speed."""
    run.rows, run.buckets = Uneven(0, 4), 2
    run.diverge(5)
    final = run.go(Toy())
    straight = Run(tmp_path / "straight", rows=run.rows, buckets=2)
    assert final == straight.go(Toy(slow={2: 0.5}))
    steps = [r for r in read_records(straight.folder / "metrics.jsonl") if "loss" in r]
    lengths = [step["row_tokens"] for step in steps]
    assert set(lengths) == {2, 4} and all(step["padding"] < 0.5 for step in steps)
    assert steps[1]["row_tokens"] == 2 and steps[0]["elapsed"] < 0.5  # As the second compiled.
    timed = ["tokens_per_second" in step for step in steps]
    assert timed == [length in lengths[:at] for at, length in enumerate(lengths)]


def test_steps_say_how_fast_they_were(run: Run) -> None:
    run.padding = 3
    run.go(Toy())
    steps = [record for record in read_records(run.folder / "metrics.jsonl") if "loss" in record]
    assert all(step["data_wait"] >= 0 and step["padding"] == 0.75 for step in steps)
    # The first one compiles. Three rows have one token each that is no padding.
    assert ["tokens_per_second" in step for step in steps] == [False] + 9 * [True]
    for step in steps[1:]:
        assert step["tokens_per_second"] * step["step_time"] == pytest.approx(3, rel=1e-4)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_stops_before_the_next_step(number: signal.Signals, status: int) -> None:
    before = signal.getsignal(number)
    with stop_signals() as stop:
        assert stop(0) == 0
        os.kill(os.getpid(), number)
        assert stop(1) == status
    assert signal.getsignal(number) is before


def test_a_signal_in_the_last_step_stops_before_the_next_stage(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Metrics.write

    def writing(self: Metrics, stage: str, step: int, values: dict[str, float]) -> None:
        write(self, stage, step, values)
        if step == CONFIG.steps - 1:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Metrics, "write", writing)
        with pytest.raises(Interrupted, match="stopped at step 10 of stage short"):
            run.go(Toy())
    straight = Run(tmp_path / "straight")
    assert run.go(Toy()) == straight.go(Toy()) and run.records == straight.records
