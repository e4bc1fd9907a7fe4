"""The page in a real browser: keyboard, pointer, narrow screens, light and dark, accessibility."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from infer.report.__main__ import main
from tests.browser import (
    DESKTOP,
    PHONE,
    brightness,
    is_as_wide_as_the_screen,
    needs_browser,
    open_browser,
    run_script,
    show,
    violations,
)

from .made import HOSTILE, record, run, write

pytestmark = needs_browser


def written(folder: Path, tasks: Sequence[str]) -> Path:
    """A report with every section, from runs of two batches."""
    rows = [
        record(
            method,
            str(sample),
            (1,) * 4 if method == "plain" else (3, 1, 2),
            task=task,
            prompt_tokens=900 + 3000 * sample,
            references=("word",),
        )
        for method in ("plain", "longspec-tree", "ngram")
        for sample in range(4)
        for task in tasks
    ]
    runs = [
        write(run(rows), folder / "one"),
        write(run(rows, batch=2), folder / "two"),
    ]
    assert main([*map(str, runs), f"--out={folder / 'report.html'}"]) == 0
    return folder / "report.html"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of names that are hostile, and too long for a phone."""
    names = ("needle", "gov_report", "a_task_of_a_long_name_" * 3, HOSTILE)
    return written(tmp_path_factory.mktemp("runs"), names)


@pytest.fixture(scope="module")
def small_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With one of everything: what looks at every element takes its time."""
    return written(tmp_path_factory.mktemp("small"), ("needle",))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as driver:
        yield driver


def test_nothing_of_a_model_is_run(browser: Any, page: Path) -> None:
    show(browser, page.as_uri(), DESKTOP)
    assert browser.title == "Evaluation of demo"
    assert browser.get_log("browser") == []  # Nothing was refused or failed to load, either.
    foreign = "return document.querySelectorAll('b, i, script, [onmouseover]').length"
    assert run_script(browser, foreign) == 0


@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_the_page_is_no_wider_than_the_screen(
    browser: Any, page: Path, size: tuple[int, int]
) -> None:
    """Wide tables scroll within their box; at least one has to on a phone."""
    show(browser, page.as_uri(), size)
    run_script(browser, "document.querySelectorAll('details').forEach((each) => each.open = true)")
    assert is_as_wide_as_the_screen(browser, size)
    boxes = "return [...document.querySelectorAll('.scroll')]"
    assert run_script(browser, f"{boxes}.some((box) => box.scrollWidth > box.clientWidth)")
    assert run_script(browser, f"{boxes}.every((box) => box.tabIndex === 0)")


def test_light_and_dark(browser: Any, page: Path) -> None:
    show(browser, page.as_uri(), DESKTOP, "light")
    ground, ink = brightness(browser)
    assert ground > 600 > ink
    show(browser, page.as_uri(), DESKTOP, "dark")
    ground, ink = brightness(browser)
    assert ground < 150 < ink


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_rules_of_accessibility(browser: Any, small_page: Path, scheme: str) -> None:
    """Those that axe has: contrast, names, roles, order, headings and so on."""
    show(browser, small_page.as_uri(), DESKTOP, scheme)
    run_script(browser, "document.querySelectorAll('details').forEach((each) => each.open = true)")
    assert violations(browser) == []
