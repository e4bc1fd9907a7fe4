"""Result files: written row by row, merged, drawn."""

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from infer.bench import __main__ as bench
from infer.bench import charts
from infer.bench import report as bench_report

ATTENTION = {
    **{"implementation": "ours", "tokens": 69, "heads": 32, "kv_heads": 8, "context": 4096},
    **{"batch": 1, "head_dim": 128, "dtype": "bfloat16"},
    **{"microseconds": 32.0, "percent_of_roof": 50.0},
}
DECODE = {
    **{"shape": "a", "batch": 1, "context": 4096, "tree": [2, 4], "attention": "automatic"},
    **{"draft_vocabulary": 512, "new_tokens": 9, "dtype": "bfloat16", "acceptance_wanted": 2.0},
    **{"tokens_per_second": 9.0, "plain_tokens_per_second": 5.0},
    **{"round_ms": 6.0, "draft_ms": 1.0, "verify_ms": 5.5, "rest_ms": -0.5},
    **{"plain_ms_per_token": 3.0, "round_over_plain": 2.0},
}


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
    found = bench_report.run_header("cpu", "one\n  two", roof=1)
    assert (found["commit"], found["method"], found["roof"]) == ("abc", "one two", 1)
    assert found["versions"]["jax"]


def test_the_command_merges_and_draws(tmp_path: Path) -> None:
    for name, more in {"a": {}, "b": {"implementation": "cudnn", "context": 32768}}.items():
        bench_report.write(tmp_path / name, {"header": {}, "rows": [{**ATTENTION, **more}]})
    files = [str(tmp_path / name) for name in "ab"]
    merged, chart = tmp_path / "merged.json", tmp_path / "chart.png"
    bench.main(["report", *files, f"--json={merged}", f"--chart={chart}"])
    assert [row["run"] for row in json.loads(merged.read_text())["rows"]] == [0, 1]
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_a_missing_matplotlib_is_a_message(monkeypatch, tmp_path: Path, capsys) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    bench_report.draw([ATTENTION], tmp_path / "x.png")
    assert "no chart: " in capsys.readouterr().out


MALFORMED = {
    "is no JSON: Expecting value": "rows",
    "is no JSON: Extra data": '{"header": {}, "rows": []} {}',
    "a result file holds one object, this one a list": "[]",
    "a result file holds rows and header or headers, this one ['rows']": '{"rows": []}',
    "its rows must be a list of objects": '{"header": {}, "rows": 3}',
    "its headers must be a list of objects": '{"headers": [1], "rows": []}',
    "must be the index of one of its 1 headers": '{"header": {}, "rows": [{"run": 1}]}',
    "is no UTF-8 text": b"\xff",
}


@pytest.mark.parametrize("words", MALFORMED)
def test_malformed_files_are_refused_by_name(words: str, tmp_path: Path, capsys) -> None:
    good, bad, merged = (tmp_path / name for name in ("good", "bad", "merged"))
    content = MALFORMED[words]
    bad.write_bytes(content if isinstance(content, bytes) else content.encode())
    bench_report.write(good, {"header": {}, "rows": []})
    assert bench.main(["report", str(good), str(bad), f"--json={merged}"]) == 2
    printed = capsys.readouterr()
    [line] = printed.err.splitlines()
    assert f"result file {bad}" in line and words in line
    assert not printed.out and not merged.exists()


def test_rows_that_lack_a_field_have_no_chart(tmp_path: Path, capsys) -> None:
    file, chart = tmp_path / "a", tmp_path / "a.png"
    bench_report.write(file, {"header": {}, "rows": [{"round_ms": 1.0}]})
    assert bench.main(["report", str(file), f"--chart={chart}"]) == 2
    assert "no chart to draw: a row lacks the field 'shape'" in capsys.readouterr().err


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


def test_rows_without_a_chart(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no chart to draw"):
        bench_report.draw([{"accuracy": 1}], tmp_path / "x.png")


def test_every_context_and_batch_has_a_panel_of_its_shapes() -> None:
    cudnn = {**ATTENTION, "implementation": "cudnn", "microseconds": 1234.0, "percent_of_roof": 1.3}
    rows = [
        ATTENTION,
        {**ATTENTION, "batch": 8, "tokens": 1},
        {**ATTENTION, "microseconds": 20.0},
        cudnn,
    ]
    figure = charts.attention(rows)
    first, second = figure.axes
    assert [bar.get_facecolor() for bar in first.patches] == [
        handle.get_facecolor() for handle in figure.legends[0].legend_handles[:2]
    ]
    assert _texts(first.texts) == ["20.0", "1234"]  # The later of two equal rows.
    assert _texts(first.get_xticklabels()) == ["32/8 heads\n69 tokens"]
    assert _texts(second.get_xticklabels()) == ["32/8 heads\n1 token"]
    assert first.collections[0].get_segments()[0][0][1] == 10  # The roof, from the fastest row.


def test_decode_rows_are_drawn_beside_other_implementations(tmp_path: Path) -> None:
    other = {"implementation": "b", "shape": "a", "batch": 1, "context": 64, "ms_per_token": 4.0}
    refused = {**other, "implementation": "c", "ms_per_token": None}
    rows = [DECODE, {**DECODE, "budget": 5}, {**other, "tokens_per_second": 4.0}, refused]
    bench_report.draw(rows, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    speeds, rounds = charts.decode(rows[:3]).axes
    assert _texts(speeds.get_legend().get_texts()) == [
        *("speculation, all 7 nodes", "speculation, best 5 nodes", "plain", "b")
    ]
    assert _texts(rounds.get_xticklabels()) == ["4k\nall 7 nodes", "4k\nbest 5 nodes"]
    assert min(bar.get_height() for bar in rounds.patches) == 0  # The rest.


def test_one_context_is_bars_of_the_latest_rows_named_by_what_differs() -> None:
    rows = [DECODE, {**DECODE, "draft_vocabulary": 64}, {**DECODE, "tokens_per_second": 7.0}]
    speeds, _ = charts.decode(rows).axes
    bars = {
        name: bar.get_height()
        for name, bar in zip(_texts(speeds.get_xticklabels()), speeds.patches, strict=True)
    }
    assert bars == {
        "speculation\ndraft vocabulary\n512": 7,
        "speculation\ndraft vocabulary\n64": 9,
        "plain": 5,
    }


def test_bars_tell_int8_drafts() -> None:
    """Rows from before there was one are of the model's dtype."""
    int8 = {**DECODE, "draft_int8": True}
    rows = [DECODE, int8, {**DECODE, "draft_int8": False}]
    speeds, _ = charts.decode(rows).axes
    drafts = (f"speculation\n{form} draft" for form in ("bfloat16", "int8"))
    assert _texts(speeds.get_xticklabels()) == [*drafts, "plain"]


def test_bars_tell_drafters_and_their_options() -> None:
    """Kinds other than LongSpec's have no vocabulary and no weights to tell of."""
    others = {name: DECODE[name] for name in DECODE if name != "draft_vocabulary"}
    rows = [
        DECODE,
        *({**others, "drafter": "streaming", "drafter_options": {"recent": n}} for n in (8, 16)),
    ]
    speeds, _ = charts.decode(rows).axes
    bars = [label.replace("\n", " ") for label in _texts(speeds.get_xticklabels())]
    assert sorted(bars) == [
        *("plain", "speculation longspec draft draft vocabulary 512 bfloat16 draft"),
        *(f"speculation streaming draft recent={n}" for n in (16, 8)),
    ]


def test_rows_of_different_lengths_do_not_replace_rows_of_one_length() -> None:
    rows = [DECODE, {**DECODE, "lengths": [2048, 4096], "plain_tokens_per_second": 6.0}]
    speeds, _ = charts.decode([*rows, {**DECODE, "lengths": [4096, 4096]}]).axes
    bars = [label.replace("\n", " ") for label in _texts(speeds.get_xticklabels())]
    assert bars == [
        *("speculation rows of different lengths", "speculation rows of one length"),
        *("plain rows of different lengths", "plain rows of one length"),
    ]


def test_rows_are_drawn_by_the_dates_of_their_runs(tmp_path: Path, monkeypatch) -> None:
    drawn = []
    monkeypatch.setattr(bench_report, "draw", lambda rows, path: drawn.extend(rows))
    for name, date in {"a": "2026-11-21", "b": "2026-11-20"}.items():
        bench_report.write(tmp_path / name, {"header": {"date": date}, "rows": [{"name": name}]})
    bench.main(["report", *(str(tmp_path / name) for name in "ab"), "--chart=x.png"])
    assert [row["name"] for row in drawn] == ["b", "a"]


def _texts(labels: Iterable[Any]) -> list[str]:
    return [label.get_text() for label in labels]
