"""Result files: written row by row."""

import json
import os
from pathlib import Path

import pytest

from infer.bench import report as bench_report


def test_the_file_is_whole_after_every_row(tmp_path: Path, capsys) -> None:
    file = tmp_path / "rows.json"
    report = bench_report.Report({"device": "a"}, file)
    for number in range(3):
        report.add({"number": number}, f"line {number}")
        written = json.loads(file.read_text())
        assert written == {"header": {"device": "a"}, "rows": report.rows}
    assert len(report.rows) == 3 and "line 2" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [file]


def test_the_commit_can_be_given(monkeypatch) -> None:
    monkeypatch.setenv("LONGSPEC_COMMIT", "abc")
    found = bench_report.run_header("cpu", "one\n  two", roof=1)
    assert (found["commit"], found["method"], found["roof"]) == ("abc", "one two", 1)
    assert found["versions"]["jax"]


def fail_to_write(*_) -> None:
    raise OSError(28, "No space left on device")


def test_rows_that_cannot_be_written_are_printed_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    file = tmp_path / "rows.json"
    monkeypatch.setattr(os, "fsync", fail_to_write)
    with pytest.raises(OSError, match="No space left on device.*; its content is the last line"):
        with bench_report.Report({"device": "a"}, file) as report:
            report.add({"number": 1}, "line 1")
            report.add({"number": 2}, "line 2")
    printed = capsys.readouterr()
    assert json.loads(printed.out.splitlines()[-1]) == {
        "header": {"device": "a"},
        "rows": report.rows,
    }
    assert printed.err.count("No space left on device; going on") == 1
    assert not list(tmp_path.iterdir())


def test_an_earlier_file_survives_a_failure_to_write(tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "rows.json"
    bench_report.write(file, {"kept": True})
    monkeypatch.setattr(os, "fsync", fail_to_write)
    with pytest.raises(OSError, match="No space"):
        bench_report.write(file, {"kept": False})
    assert json.loads(file.read_text()) == {"kept": True}


def test_a_file_that_could_be_written_after_all_is_whole(tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "rows.json"
    with bench_report.Report({"device": "a"}, file) as report:
        with monkeypatch.context() as full:
            full.setattr(os, "fsync", fail_to_write)
            report.add({"number": 1}, "line 1")
    assert json.loads(file.read_text())["rows"] == [{"number": 1}]


def test_the_header_is_a_line_for_people(capsys) -> None:
    versions = {"jax": "1.2", "torch": None}
    bench_report.Report({"device": "a GPU", "versions": versions, "roof_tb_per_s": 4.4321})
    assert capsys.readouterr().out == "a GPU; jax 1.2; measured roofs 4.43 TB/s\n"
