"""Result files: written row by row, merged, drawn."""

import json
import sys
from pathlib import Path

import pytest

from infer import bench, bench_report


def test_the_file_is_whole_after_every_row(tmp_path: Path, capsys) -> None:
    file = tmp_path / "rows.json"
    report = bench_report.Report({"device": "a"}, file)
    for number in range(3):
        report.add({"number": number}, f"line {number}")
        written = json.loads(file.read_text())
        assert written == {"header": {"device": "a"}, "rows": report.rows}
    assert len(report.rows) == 3 and "line 2" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [file]


def test_rows_of_merged_files_keep_their_header() -> None:
    one, two, three = (
        {"header": {"date": day}, "rows": [{"day": day}, {"day": day}]} for day in "abc"
    )
    merged = bench_report.merge([bench_report.merge([one, two]), three])
    assert [header["date"] for header in merged["headers"]] == ["a", "b", "c"]
    for row in merged["rows"]:
        assert merged["headers"][row["run"]]["date"] == row["day"]
    assert len(merged["rows"]) == 6


def test_other_files_are_not_merged() -> None:
    with pytest.raises(ValueError, match="holds rows and header or headers"):
        bench_report.merge([{"rows": []}])


def test_the_commit_can_be_given(monkeypatch) -> None:
    monkeypatch.setenv("LONGSPEC_COMMIT", "abc")
    found = bench_report.header("cpu", "one\n  two", roof=1)
    assert (found["commit"], found["method"], found["roof"]) == ("abc", "one two", 1)
    assert found["versions"]["jax"]


def test_the_command_merges_and_draws(tmp_path: Path) -> None:
    row = {
        **{"implementation": "ours", "tokens": 69, "heads": 32, "kv_heads": 8, "context": 4096},
        **{"batch": 1, "microseconds": 32.0, "percent_of_roof": 50.0},
    }
    for name, more in {"a": {}, "b": {"implementation": "cudnn", "context": 32768}}.items():
        bench_report.write(tmp_path / name, {"header": {}, "rows": [{**row, **more}]})
    files = [str(tmp_path / name) for name in "ab"]
    merged, chart = tmp_path / "merged.json", tmp_path / "chart.png"
    bench.main(["report", *files, f"--json={merged}", f"--chart={chart}"])
    assert [row["run"] for row in json.loads(merged.read_text())["rows"]] == [0, 1]
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_a_missing_matplotlib_is_a_message(monkeypatch, tmp_path: Path, capsys) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    row = {"batch": 1, "context": 1, "implementation": "ours", "microseconds": 1.0}
    bench_report.draw([{**row, "heads": 1, "kv_heads": 1, "tokens": 1}], tmp_path / "x.png")
    assert "no chart: " in capsys.readouterr().out


def test_rows_without_a_chart(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no chart to draw"):
        bench_report.draw([{"accuracy": 1}], tmp_path / "x.png")


def test_decode_rows_are_drawn_beside_other_implementations(tmp_path: Path) -> None:
    ours = {
        **{"shape": "a", "batch": 1, "context": 64, "tree": [2], "attention": "automatic"},
        **{"tokens_per_second": 9.0, "plain_tokens_per_second": 5.0, "acceptance_wanted": 2.0},
        **{"round_ms": 6.0, "draft_ms": 1.0, "verify_ms": 4.0, "rest_ms": 1.0},
        **{"plain_ms_per_token": 3.0, "round_over_plain": 2.0},
    }
    other = {"implementation": "b", "shape": "a", "batch": 1, "context": 64, "ms_per_token": 4.0}
    refused = {**other, "implementation": "c", "ms_per_token": None}
    rows = [
        ours,
        {**ours, "context": 128, "budget": 9},
        {**other, "tokens_per_second": 4.0},
        refused,
    ]
    bench_report.draw(rows, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
