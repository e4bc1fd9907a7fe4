"""What the documentation names exists: files, decisions, commands and their options."""

import argparse
import importlib.util
import re
from pathlib import Path

import pytest

from infer import arguments
from infer.bench import arguments as bench_arguments
from infer.bench.__main__ import BENCHMARKS
from train import regenerate

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
CODE = sorted(
    path
    for folder in ("longspec_jax", "train", "infer", "configs", "tests")
    for path in (ROOT / folder).rglob("*.py")
)
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
DECISION = re.compile(r"decisions? (4\.\d+)")


def headings(page: Path) -> list[str]:
    return HEADING.findall(page.read_text())


def anchors(page: Path) -> set[str]:
    """The names under which GitHub links to a page's headings."""
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings(page))
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.name} links to {link}"
        assert not anchor or anchor in anchors(target), f"{page.name} links to {link}"


def test_cited_decisions_exist() -> None:
    decisions = {heading.split()[0] for heading in headings(ROOT / "docs" / "design.md")}
    cited = {
        (path.name, number)
        for path in (*CODE, *PAGES)
        if path != Path(__file__)
        for number in DECISION.findall(path.read_text())
    }
    assert ("sampling.py", "4.1") in cited
    assert {number for _, number in cited} <= decisions


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_exist(page: Path) -> None:
    for module in re.findall(r"python -m ((?:train|infer)[\w.]*)", page.read_text()):
        found = importlib.util.find_spec(module)
        assert found is not None, f"{page.name}: python -m {module}"
        if found.submodule_search_locations:
            assert importlib.util.find_spec(f"{module}.__main__"), f"python -m {module}"


def options_of_commands() -> dict[str, set[str]]:
    """The options that each command of ``infer`` has, and those of ``train`` without a config."""
    summaries = {name: summary for name, (_, summary) in BENCHMARKS.items()}
    [benchmarks] = (
        action.choices
        for action in bench_arguments.parser(summaries)._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    parsers = {"infer.decode": arguments.parser()}
    parsers |= {f"infer.bench {name}": parser for name, parser in benchmarks.items()}
    parsers["train.regenerate"] = regenerate.parser()
    return {
        name: {option for action in parser._actions for option in action.option_strings}
        for name, parser in parsers.items()
    }


COMMAND = re.compile(
    r"python -m (infer\.decode|infer\.bench [a-z]+|train\.regenerate)(.*)", re.DOTALL
)
OPTION = re.compile(r"--\w[\w.-]*")
OTHERS_OPTIONS = ("--config", "--xla_")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_options_exist(page: Path) -> None:
    """In commands, and where they stand alone; the changelog may name some that are gone."""
    known = options_of_commands()
    every = set().union(*known.values())
    text = page.read_text()
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    words = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    for piece in (line.split("#")[0] for line in (*lines, *words)):
        if command := COMMAND.search(piece):
            missing = set(OPTION.findall(command[2])) - known[command[1]]
        elif piece.startswith("--") and page.name != "CHANGELOG.md":
            named = OPTION.findall(piece)
            missing = {name for name in named if not name.startswith(OTHERS_OPTIONS)} - every
        else:
            continue
        assert not missing, f"{page.name}: {piece}"


def test_every_benchmark_is_described() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert [name for name in BENCHMARKS if f"| `{name}` |" not in page] == []


def test_every_raw_file_is_listed() -> None:
    folder = ROOT / "docs" / "results"
    page = (folder / "README.md").read_text()
    assert [path.name for path in folder.glob("*.json*") if path.name not in page] == []


def test_the_pages_are_read() -> None:
    """Guards against a moved folder turning the checks above into nothing."""
    names = {str(page.relative_to(ROOT)) for page in PAGES}
    assert {"README.md", "CONTRIBUTING.md", "docs/data.md", "docs/results/README.md"} <= names
    assert len(CODE) > 100
