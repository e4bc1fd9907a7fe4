"""What the documentation names exists: files, decisions and commands."""

import importlib.util
import re
from pathlib import Path

import pytest

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


def test_the_pages_are_read() -> None:
    """Guards against a moved folder turning the checks above into nothing."""
    names = {str(page.relative_to(ROOT)) for page in PAGES}
    assert {"README.md", "CONTRIBUTING.md", "docs/design.md", "docs/results/README.md"} <= names
    assert len(CODE) > 100
