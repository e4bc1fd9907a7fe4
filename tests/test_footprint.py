"""The test suite's own health: programs are really dropped, and a crash ends the run."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from longspec_jax.decoding.jit_cache import PROGRAMS, program
from tests.footprint import Footprint, drop_programs
from tests.kit import each_row

OPTIONS = Path(__file__).resolve().parents[1] / "pyproject.toml"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mappings are read from /proc")
def test_programs_are_unmapped_though_their_functions_live_on() -> None:
    jax.jit(lambda x: x - 1)(1.0)  # What the first program brings along stays.
    drop_programs()
    before = Footprint.now().mappings
    kept = [jax.jit(lambda x, size=size: x + size) for size in range(8)]
    for function in kept:
        function(1.0)
    held = Footprint.now().mappings
    drop_programs()
    assert held - before > 4 * (Footprint.now().mappings - before)


def test_programs_that_an_engine_has_prepared_stay_as_long_as_it_is_open() -> None:
    with PROGRAMS.noted() as prepared:
        program()(lambda x: 2 * x)(np.ones(1))
    PROGRAMS.pin(prepared)
    drop_programs()
    assert PROGRAMS.keeps(prepared)
    PROGRAMS.unpin(prepared)
    drop_programs()
    assert not PROGRAMS.keeps(prepared)


@pytest.mark.multiproc
def test_a_crash_ends_the_run(tmp_path: Path) -> None:
    """With this project's options; with pytest-xdist's own it may wait for ever."""
    for name in "abcd":
        (tmp_path / f"test_{name}.py").write_text("def test_passes(): pass\n")
    (tmp_path / "test_z.py").write_text(
        "import os, time\n\ndef test_dies():\n    time.sleep(0.5)\n    os.kill(os.getpid(), 11)\n"
    )
    command = [sys.executable, "-m", "pytest", "-c", OPTIONS, "--rootdir", tmp_path, tmp_path]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == pytest.ExitCode.TESTS_FAILED, run.stdout
    assert "1 failed, 4 passed" in run.stdout
    assert "crashed while running 'test_z.py::test_dies'" in run.stdout


def test_a_table_runs_all_rows_and_names_those_that_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = []

    @each_row("a, b", [(1, 1), (2, 3), (4, 5)])
    @each_row("c", [0, 10])
    def equal(a: int, b: int, c: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert "ROW" not in os.environ, "of the row before"
        monkeypatch.setenv("ROW", str(a))
        folders.append(tmp_path)
        if c:
            pytest.skip("of half of the rows")
        with pytest.raises(ZeroDivisionError):
            1 / (a - b)

    given = {"tmp_path": tmp_path, "monkeypatch": monkeypatch}
    assert [*inspect.signature(equal).parameters] == [*given]
    with pytest.raises(BaseExceptionGroup, match="rows that fail") as caught:
        equal(**given)
    assert [error.__notes__[-1] for error in caught.value.exceptions] == [
        "in the row {'a': 2, 'b': 3}",
        "in the row {'a': 4, 'b': 5}",
    ]
    assert len({*folders}) == 6 and all(folder.is_dir() for folder in folders)
    with pytest.raises(AssertionError, match="marks is a test of its own"):
        each_row("a", [pytest.param(1, marks=pytest.mark.gpu)])(equal)
