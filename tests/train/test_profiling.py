"""The profiler's window: which steps are traced, and what they say of themselves."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import pytest

from configs import demo, vicuna7b
from tests.train.test_loop import Run, Toy
from train.config import RunConfig, from_config
from train.profiling import check_window, traced_steps
from train.records import read_records

WINDOW = dict(profile_at=3, profile_steps=2)


def config(**window: int) -> RunConfig:
    return dataclasses.replace(from_config(demo.get_config("tiny").to_dict()), **window)


def traced(folder: Path) -> list[int]:
    """The steps that a trace shows."""
    [path] = folder.rglob("*.xplane.pb")
    found = set()
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        for line in plane.lines:
            for event in line.events:
                if event.name == "train":
                    found.add(int(dict(event.stats)["step_num"]))
    return sorted(found)


def test_a_trace_is_of_its_steps_which_have_no_speed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, run = Run(tmp_path / "plain"), Run(tmp_path / "run")
    for each in (plain, run):
        each.folder.mkdir()
    assert run.go(Toy(), **WINDOW) == plain.go(Toy()) and run.records == plain.records
    assert not (plain.folder / "profile").exists()
    assert traced(run.folder / "profile" / "short") == [3, 4]
    assert f"a trace is in {run.folder / 'profile' / 'short'}" in capsys.readouterr().err
    steps = [record for record in read_records(run.folder / "metrics.jsonl") if "loss" in record]
    timed = [record["step"] for record in steps if "tokens_per_second" in record]
    assert timed == [1, 2, 5, 6, 7, 8, 9]  # Step 0 compiles.


def test_a_stage_that_ends_within_its_window_has_a_trace(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.go(Toy(), profile_at=8, profile_steps=50)
    assert traced(tmp_path / "profile" / "short") == [8, 9]


def test_a_profiler_that_fails_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(*_: Any) -> None:
        raise RuntimeError("only one profile at a time")

    monkeypatch.setattr(jax.profiler, "start_trace", failing)
    run = Run(tmp_path)
    run.go(Toy(), **WINDOW)
    assert len([record for record in run.records if "loss" in record]) == 10
    assert capsys.readouterr().err.count("no trace is written (only one profile at a time)") == 1


def test_the_step_that_compiles_is_not_traced() -> None:
    at_four = config(profile_at=4, profile_steps=2)
    assert traced_steps(at_four, 0) == traced_steps(at_four, 2) == range(4, 6)
    assert traced_steps(at_four, 4) == range(5, 7)
    assert not traced_steps(config(), 0)


@pytest.mark.parametrize("window", [(0, 3), (3, 0), (-1, 2), (2, -1)])
def test_a_window_of_nothing_is_refused(window: tuple[int, int]) -> None:
    at, steps = window
    with pytest.raises(ValueError, match=f"profile_at={at} with --config.profile_steps={steps} tr"):
        config(profile_at=at, profile_steps=steps)


def test_a_window_that_no_stage_gets_to_is_refused() -> None:
    values = {**vicuna7b.get_config().to_dict(), **dict(profile_at=40, profile_steps=2)}
    run = from_config(values)
    check_window(run, [41, 3, 3])
    with pytest.raises(ValueError, match="profile_at=40, .*: short ends after 40, long ends after"):
        check_window(run, [40, 3, 3])
    clock = dataclasses.replace(run.stages[0], epochs=0, max_seconds=9.0)
    check_window(dataclasses.replace(run, stages=(clock, *run.stages[1:])), [40, 3, 3])
    check_window(dataclasses.replace(run, profile_at=0, profile_steps=0), [1, 1, 1])
