"""Result files: written row by row."""

import json
import os
from pathlib import Path

import pytest

from benchmarks import report as bench_report
from infer import output


def test_the_file_is_whole_after_every_row(tmp_path: Path, capsys) -> None:
    file = tmp_path / "rows.json"
    report = bench_report.Report({"device": "a"}, file, ("number", "absent"))
    for number in range(3):
        report.add({"number": number, "more": 1})
        written = json.loads(file.read_text())
        assert written == {"header": {"device": "a"}, "rows": report.rows}
    assert len(report.rows) == 3 and "number 2\n" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [file]


def test_the_commit_can_be_given(monkeypatch) -> None:
    monkeypatch.setenv("LONGSPEC_COMMIT", "abc")
    found = bench_report.run_header("cpu", "one\n  two", roof=1)
    assert (found["commit"], found["method"], found["roof"]) == ("abc", "one two", 1)
    assert found["versions"]["jax"]


def fail_to_write(*_) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("failure", [None, ValueError("a later row")])
def test_rows_that_cannot_be_written_are_kept_and_the_run_goes_on(
    failure: Exception | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    file = tmp_path / "rows.json"
    file.write_text("before")
    monkeypatch.setattr(os, "fsync", fail_to_write)
    monkeypatch.setattr(output.tempfile, "tempdir", str(tmp_path))
    with pytest.raises(type(failure) if failure else OSError):
        with bench_report.Report({"device": "a"}, file) as report:
            report.add({"number": 1})
            report.add({"number": 2})
            if failure:
                raise failure
    said = capsys.readouterr().err
    assert said.count("No space left on device; going on") == 1
    [kept] = tmp_path.glob("longspec_*.json")
    assert f"No space left on device; the numbers are in {kept}" in said
    assert json.loads(kept.read_text()) == {"header": {"device": "a"}, "rows": report.rows}
    assert file.read_text() == "before" and len(list(tmp_path.iterdir())) == 2


def test_a_file_that_could_be_written_after_all_is_whole(tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "rows.json"
    with bench_report.Report({"device": "a"}, file) as report:
        with monkeypatch.context() as full:
            full.setattr(os, "fsync", fail_to_write)
            report.add({"number": 1})
    assert json.loads(file.read_text())["rows"] == [{"number": 1}]


def test_the_header_is_a_line_for_people(capsys) -> None:
    versions = {"jax": "1.2", "torch": None}
    bench_report.Report({"device": "a GPU", "versions": versions, "roof_tb_per_s": 4.4321})
    assert capsys.readouterr().out == "a GPU; jax 1.2; measured roofline 4.43 TB/s\n"
