"""``python -m infer.report``: what it writes, what it says is missing, and what it refuses."""

import base64
import csv
import dataclasses
import html.parser
import io
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from infer.eval.records import Run, SampleRecord, SkippedSample
from infer.report.__main__ import main
from infer.report.frame import blocks_of, frame_of
from infer.report.page import draw
from infer.report.tables import missing_or_doubtful
from tests.kit import each_row

from .made import HOSTILE, record, run, write


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with hostile names, and its report."""
    rows = [
        record(method, sample, (1,) * 4 if method == "plain" else (2, 3), task=task)
        for method in ("plain", "longspec-tree")
        for sample in "abcd"
        for task in ("copying", HOSTILE)
    ]
    named = run(rows, provenance={"device": HOSTILE, "commit": "1", "date": "now"})
    made = write(named, tmp_path_factory.mktemp("hostile") / "run")
    assert main([str(made)]) == 0
    return made


class Reader(html.parser.HTMLParser):
    """What a browser would make of a page: elements with their attributes, and all text."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in {"meta", "link", "img"}:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def read_page(folder: Path) -> Reader:
    """The page of a report in a folder."""
    reader = Reader()
    reader.feed((folder / "report.html").read_text())
    reader.close()
    assert reader.open == []  # Every element is closed, none is closed that was not opened.
    return reader


@pytest.fixture(scope="module")
def page(folder: Path) -> Reader:
    return read_page(folder)


def test_the_page_needs_nothing_else_and_runs_nothing(page: Reader) -> None:
    assert "script" not in [tag for tag, _ in page.elements]
    names = [given["id"] for _, given in page.elements if "id" in given]
    assert len(names) == len(set(names))
    for _, given in page.elements:
        assert not any(name.startswith("on") for name in given)
        for name in ("src", "href", "xlink:href", "action", "data"):
            value = given.get(name) or "data:"
            assert value.startswith("data:") or value[1:] in names, value


def test_texts_of_models_are_text(page: Reader) -> None:
    assert "".join(page.texts).count(HOSTILE) > 5  # As a task and a device.


def test_the_page_can_be_read_by_screen_readers(page: Reader) -> None:
    elements = page.elements
    kinds = [tag for tag, _ in elements]
    tables = [given for tag, given in elements if tag == "table"]
    names = {given.get("id") for tag, given in elements if tag == "h2"}
    assert len(tables) == 5 and {given["aria-labelledby"] for given in tables} <= names
    assert all("scope" in given for tag, given in elements if tag == "th")
    charts = [given for tag, given in elements if tag == "img"]
    assert charts and all("longspec-tree: " in (given["alt"] or "") for given in charts)
    assert kinds.count("h1") == 1 and ("html", {"lang": "en"}) in elements


def test_page_and_figures_lie_in_the_folder_and_are_replaced(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [folder / f"report.{end}" for end in ("html", "csv")]
    before = [file.read_text() for file in files]
    page = before[0]  # It explains each figure once, not under every table.
    assert page.count("95% bootstrap") == page.count("bootstrap") == 1
    assert page.count("bonus included, prefill excluded") == 1
    for file in files:
        file.write_text(file.read_text()[: len(file.read_text()) // 2])
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out.split() == [str(file) for file in files]
    assert [file.read_text() for file in files] == before


def test_a_spreadsheet_computes_nothing(tmp_path: Path) -> None:
    folder, out = write(run([record(task="=1+1")]), tmp_path / "run"), tmp_path / "report.csv"
    main([str(folder), f"--out={out}"])
    rows = [*csv.reader(io.StringIO(out.read_text()))]
    assert any("'=1+1" in row for row in rows) and not any("=1+1" in row for row in rows)


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    folders = []
    for day in ("monday", "tuesday"):
        (tmp_path / day).mkdir()
        folders.append(str(write(run([record()]), tmp_path / day / "demo")))
    assert main([*folders, f"--out={tmp_path / 'report.html'}"]) == 0
    text = (tmp_path / "report.html").read_text()
    assert "monday/demo" in text and "tuesday/demo" in text


def test_what_is_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line cut short, and scores whose package is missing."""
    monkeypatch.setitem(sys.modules, "rapidfuzz", None)
    rows = [record(task=task, references=("word",)) for task in ("lcc", "needle")]
    scored = write(run(rows), tmp_path / "scored")
    with (scored / "samples.jsonl").open("a") as file:
        file.write('{"task": "cop')
    assert main([str(scored)]) == 0
    text = " | ".join(filter(str.strip, read_page(scored).texts))
    assert "cut short in writing (13 bytes)" in text
    assert "lcc has no score: scores need packages that are not" in text
    assert "lcc | plain | 1.00 | 4.0 | 1.00 | 1000 | 5 | 2.000 | 1.000 | 1 | –" in text


@each_row(
    ("arguments", "said"),
    [
        (["nowhere"], "nowhere holds no header.json"),
        (["run", "run"], "run is given twice, so that its samples would count twice"),
        (["run", "--out=x.json"], "--out=x.json ends in .json; name a folder, or a file that ends"),
        (["run", "--out=taken"], "--out=taken cannot be the folder of a run (File exists)"),
        (["run", "--out="], "--out: the value is empty; leave the option out"),
        (["mine.md"], "mine.md holds no header.json; name the folder of an evaluation run"),
        (["empty"], "empty holds no finished sample yet"),
        ([], "required: RUN"),
    ],
)
def test_bad_input_is_refused(
    tmp_path: Path,
    arguments: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write(run([record()]), tmp_path / "run")
    write(run([]), tmp_path / "empty")
    (tmp_path / "taken").write_text("a file")
    (tmp_path / "mine.md").write_text("# Notes")
    before = sorted(tmp_path.rglob("*"))
    assert main(arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert said in line
    assert sorted(tmp_path.rglob("*")) == before


GIVEN = {"task": "needle", "references": ("word",)}


def complete() -> list[SampleRecord]:
    """A run that lacks nothing."""
    methods = ("plain", "longspec-tree")
    return [record(method, name, **GIVEN) for method in methods for name in "abcde"]


def told(*runs: Run) -> list[str]:
    blocks = blocks_of(runs)
    return missing_or_doubtful(blocks, frame_of(blocks))


def test_a_complete_run_lacks_nothing() -> None:
    assert told(run(complete())) == []
    header = run(complete(), tasks=("needle", "lcc"))
    assert told(header) == ["demo: task lcc has no sample at all."]


Change = Callable[[SampleRecord], SampleRecord | None]


def all_but(leaves: Callable[[SampleRecord], bool]) -> Change:
    return lambda row: None if leaves(row) else row


def changed(**fields: Any) -> Change:
    return lambda row: dataclasses.replace(row, **fields)


def resumed(row: SampleRecord) -> SampleRecord:
    """Stopped after plain decoding, whose load may have been another."""
    is_first = row.method == "plain" or row.sample == "a"
    return dataclasses.replace(row, start=0 if is_first else 1)


@each_row(
    ("change", "said"),
    [
        (
            all_but(lambda row: row.method == "plain" and row.sample in "ab"),
            "demo: plain lacks 2 of the 5 texts of needle at T = 0",
        ),
        (all_but(lambda row: row.method == "plain"), "plain decoding did not run, so that there"),
        (all_but(lambda row: row.sample in "ab"), "fewer than 4 independent samples of needle"),
        (resumed, "plain decoding was timed in another session than longspec-tree (4 texts)"),
    ],
)
def test_what_is_left_out_or_doubtful_is_told(change: Change, said: str) -> None:
    rows = [row for row in map(change, complete()) if row is not None]
    [sentence] = [each for each in told(run(rows)) if said in each]
    assert sentence.endswith(".")


def test_skipped_samples_are_counted() -> None:
    skipped = [SkippedSample("needle", name, 900, "900 tokens are too few") for name in "xyz"]
    assert "a: 3 samples of needle skipped: 900 tokens are too few." in told(
        run(complete(), skipped=skipped)
    )


def test_speeds_of_several_commits_are_told() -> None:
    mine, other = ({"device": "made up", "commit": commit * 40} for commit in "ab")
    rows = complete()
    one = run([row for row in rows if row.method == "plain"], "a", provenance=mine)
    two = run([row for row in rows if row.method != "plain"], "b", provenance=other)
    commits, session = told(one, two)
    assert "measured at several commits (aaaaaaaaaaaa, bbbbbbbbbbbb)" in commits
    assert "timed in another session than longspec-tree (5 texts)" in session
    assert told(run(rows, continued=(mine,), provenance=mine)) == []


@each_row(("seconds", "doubtful"), [(14.45, True), (1.41, False)])
def test_a_speed_up_that_speculation_cannot_give_is_told(seconds: float, doubtful: bool) -> None:
    """Plain decoding at 1 / 14.45 of the speed, and 41 tokens in 29 passes."""
    rows = [
        record("plain", emitted=(1,) * 41, seconds=seconds),
        record("ngram", emitted=(2,) * 12 + (1,) * 17, seconds=1.0),
    ]
    words = f"ngram has a speed-up of {seconds:.2f} at τ 1.41 on copying, T = 0"
    assert any(words in each for each in told(run(rows))) is doubtful


@each_row("joined", [True, False])
def test_a_chart_says_what_it_draws(joined: bool) -> None:
    """It would not parse if a name were not escaped; lines join points."""
    cells = pd.DataFrame(
        {
            "task": [HOSTILE] * 3,
            "method": [HOSTILE, HOSTILE, "$b"],
            "column": ["x", "z", "$y$"],
            "value": [2.0, 0.5, 3.0],
            "low": [1.75, float("nan"), 3.5],  # The last interval is above its figure.
            "high": [2.25, float("nan"), 9.0],
        }
    )
    styles = {HOSTILE: ("#2f81d8", "s"), "$b": ("#d9622b", "o")}
    address, words = draw("Speed", cells, styles, joined)
    assert words == f"Speed. {HOSTILE}, $b: $y$ 3; {HOSTILE}, {HOSTILE}: x 2, z 0.5."
    drawn = base64.b64decode(address.removeprefix("data:image/svg+xml;base64,")).decode()
    root = ElementTree.fromstring(drawn)
    paths = [each.get("style") or "" for each in root.iter() if each.tag.endswith("}path")]
    joining = [style for style in paths if "#2f81d8" in style and "stroke-linecap: square" in style]
    assert bool(joining) is joined
