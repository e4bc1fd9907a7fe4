"""``python -m infer.report``: what it writes, and what it refuses."""

import csv
import html.parser
import io
import json
import re
import sys
from pathlib import Path

import pytest

from infer.report.__main__ import main

from .made import HOSTILE, record, run, studied, write


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run with hostile names and texts, and a case to study."""
    rows = [
        record(method, sample, (1,) * 4 if method == "plain" else (2, 3), task=task)
        for method in ("plain", "longspec-tree")
        for sample in "abcd"
        for task in ("copying", HOSTILE)
    ]
    named = run([*rows, studied()], provenance={"device": HOSTILE, "commit": "1", "date": "now"})
    return write(named, tmp_path / "run")


class Reader(html.parser.HTMLParser):
    """What a browser would make of a page: elements with their attributes, and all text."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in {"meta", "link"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []  # Every element is closed, none is closed that was not opened.
    return reader


def test_three_files_lie_in_the_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(folder)]) == 0
    names = ["report.html", "report.md", "report.csv"]
    assert capsys.readouterr().out.split() == [str(folder / name) for name in names]
    assert all((folder / name).stat().st_size > 1000 for name in names)


def test_the_page_needs_nothing_else(folder: Path) -> None:
    assert main([str(folder), f"--out={folder / 'page.html'}"]) == 0
    assert not (folder / "report.html").exists()
    page = (folder / "page.html").read_text()
    reader = read(page)
    for _, attributes in reader.elements:
        for name in ("src", "href", "action", "data"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:")), value
    assert "url(" not in page and "@import" not in page


def test_texts_of_models_are_text(folder: Path) -> None:
    main([str(folder)])
    reader = read((folder / "report.html").read_text())
    kinds = [tag for tag, _ in reader.elements]
    assert kinds.count("script") == 2  # The page's own, and the trees of one case.
    assert not any("onmouseover" in attributes for _, attributes in reader.elements)
    told = "".join(reader.texts)
    assert told.count(HOSTILE) > 5  # As the name of a task and a device, and in the text.
    [trees] = [text for text in reader.texts if text.startswith("[{")]
    assert json.loads(trees)[0]["texts"][2] == f" {HOSTILE}"
    names = [attributes["id"] for _, attributes in reader.elements if "id" in attributes]
    assert len(names) == len(set(names))
    links = {
        (attributes.get("href") or "")[1:] for tag, attributes in reader.elements if tag == "a"
    }
    assert links <= set(names)


def test_tables_can_be_read_by_screen_readers(folder: Path) -> None:
    main([str(folder)])
    elements = read((folder / "report.html").read_text()).elements
    kinds = [tag for tag, _ in elements]
    assert kinds.count("caption") == kinds.count("table") > 5
    assert all("scope" in attributes for tag, attributes in elements if tag == "th")
    images = [attributes for tag, attributes in elements if tag == "svg"]
    assert images and all(image["role"] == "img" for image in images)
    assert all("aria-labelledby" in image for image in images)
    assert kinds.count("h1") == 1 and ("html", {"lang": "en"}) in elements


def test_markdown_has_every_table(folder: Path) -> None:
    main([str(folder)])
    text = (folder / "report.md").read_text()
    captions = read((folder / "report.html").read_text()).elements
    assert text.count("\n| ---") == [tag for tag, _ in captions].count("table")
    assert "<script>" not in text.replace("\\<script\\>", "")
    widths = {
        len(re.findall(r"(?<!\\)\|", line)) for line in text.split("\n\n")[4].splitlines() if line
    }
    assert len(widths) == 1 and widths != {0}


def test_what_figures_mean_is_said_once(folder: Path) -> None:
    """And not under every table."""
    main([str(folder)])
    for name in ("report.html", "report.md"):
        text = (folder / name).read_text()
        assert text.count("95% bootstrap") == text.count("bootstrap") == 1
        assert text.count("bonus included, prefill excluded") == 1
        assert text.count("without prefill, the token drawn") == 1


def test_csv_has_the_figures(folder: Path) -> None:
    main([str(folder), f"--out={folder / 'x.csv'}"])
    rows = [*csv.DictReader(io.StringIO((folder / "x.csv").read_text()))]
    [speed] = [
        row
        for row in rows
        if (row["table"], row["row"], row["group"], row["column"])
        == ("main-0-0", "longspec-tree", "copying", "τ")
    ]
    # Four texts of 5 tokens in 2 passes, one of 7 in 3.
    assert float(speed["value"]) == pytest.approx((4 * 5 + 7) / (4 * 2 + 3))
    assert float(speed["low"]) <= float(speed["value"]) <= float(speed["high"])
    assert speed["samples"] == "5"


def test_a_spreadsheet_computes_nothing(tmp_path: Path) -> None:
    folder = write(run([record(task="=1+1")]), tmp_path / "run")
    main([str(folder)])
    rows = [*csv.reader(io.StringIO((folder / "report.csv").read_text()))]
    assert any("'=1+1" in row for row in rows) and not any("=1+1" in row for row in rows)


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    folders = []
    for day in ("monday", "tuesday"):
        (tmp_path / day).mkdir()
        folders.append(str(write(run([record()]), tmp_path / day / "demo")))
    assert main([*folders, f"--out={tmp_path / 'report.md'}"]) == 0
    text = (tmp_path / "report.md").read_text()
    assert "monday/demo" in text and "tuesday/demo" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "nowhere holds no header.json"),
        (["run", "run"], "run is given twice, so that its samples would count twice"),
        (["run", "--out=x.json"], "--out=x.json ends in .json; name a folder, or a file that ends"),
        (["run", "--out=no/such/folder"], "--out=no/such/folder: its folder does not exist"),
        (["run", "--out=taken"], "--out=taken cannot be written"),
        (["run", "--out="], "--out: the value is empty; leave the option out"),
        (["run", "--lengths=0"], "--lengths: 0 must be"),
        (["run", "--lengths=x"], "--lengths: 'x' must be a whole number"),
        (["mine.md"], "mine.md holds no header.json; name the folder of an evaluation run"),
        (["empty"], "empty holds no finished sample yet"),
        (["run", "--out=mine.md"], "mine.md exists and is no report; move it, or name another"),
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


def test_a_line_cut_short_is_told(folder: Path) -> None:
    with (folder / "samples.jsonl").open("a") as file:
        file.write('{"task": "cop')
    assert main([str(folder)]) == 0
    assert "cut short in writing (13 bytes)" in (folder / "report.md").read_text()


def test_ranges_of_lengths_can_be_chosen(folder: Path) -> None:
    assert main([str(folder), "--lengths=900", "--lengths=1100"]) == 0
    assert "900–1100" in (folder / "report.md").read_text()


def test_a_page_needs_no_package_for_scores(tmp_path: Path, monkeypatch) -> None:
    """What is left out is told, with what to install."""
    monkeypatch.setitem(sys.modules, "rapidfuzz", None)
    rows = [record(task=task, references=("word",)) for task in ("lcc", "needle")]
    folder = write(run(rows), tmp_path / "run")
    assert main([str(folder)]) == 0
    text = (folder / "report.md").read_text()
    assert "lcc has no score: scores of texts need packages that are not" in text
    assert "needle: found" in text and "lcc: edit similarity" not in text


def test_an_earlier_report_is_replaced(folder: Path) -> None:
    assert main([str(folder)]) == 0
    files = [folder / f"report.{end}" for end in ("html", "md", "csv")]
    before = [file.read_text() for file in files]
    for file in files:
        file.write_text(file.read_text()[: len(file.read_text()) // 2])
    assert main([str(folder)]) == 0
    assert [file.read_text() for file in files] == before
