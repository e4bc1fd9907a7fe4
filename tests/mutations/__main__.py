"""Breaks the project in one place at a time, and checks that its tests notice.

Run from the root of the checkout::

    python -m tests.mutations                 # all of them: some ten minutes on two cores
    python -m tests.mutations window merged   # those whose names contain a word

Every mutation of ``mutations.toml`` is made in a temporary copy of the checkout. The tests that are
named next to it must fail there, and those that failed must pass in a copy that is not broken. The
exit status is 0 only if every mutation was caught.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tests.mutations import ROOT, Mutation, mutations

PASSED, FAILED = 0, 1
"""Exit statuses of pytest; others mean that the tests did not run."""
SECONDS = 120
"""Of one test: a broken loop may have no end."""


class Outcome(NamedTuple):
    """What the tests said about a copy of the checkout."""

    status: int
    """Pytest's exit status."""
    failed: tuple[str, ...]
    """The tests that failed."""
    output: str
    seconds: float


def main(argv: Sequence[str] | None = None) -> int:
    """Try mutations; returns 1 if one was not caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("words", nargs="*", help="try those whose names contain one of these words")
    parser.add_argument("--jobs", type=int, default=2, help="mutations at a time (%(default)s)")
    args = parser.parse_args(argv)
    chosen = [each for each in mutations() if not args.words or _names(each, args.words)]
    if not chosen:
        parser.error("no mutation has such a name")
    for mutation in chosen:
        mutation.check_fits()
    with ThreadPoolExecutor(args.jobs) as pool:
        outcomes = list(pool.map(_tried, chosen))
    caught = [test for outcome in outcomes for test in outcome.failed]
    problems = [one.name for one, each in zip(chosen, outcomes, strict=True) if not each.failed]
    for name in problems:
        print(f"not caught: {name}")
    if caught:
        with _copy() as folder:
            whole = _run(folder, sorted(set(caught)))
        if whole.status != PASSED:
            print(f"these fail without a mutation, too: {', '.join(whole.failed) or whole.output}")
            return 1
    print(f"{len(chosen) - len(problems)} of {len(chosen)} mutations were caught")
    return 1 if problems else 0


def _names(mutation: Mutation, words: Sequence[str]) -> bool:
    return any(word in mutation.name for word in words)


def _tried(mutation: Mutation) -> Outcome:
    """Run a mutation's tests on a copy that it has broken."""
    with _copy() as folder:
        mutation.apply(folder)
        outcome = _run(folder, mutation.tests)
    verdict = ", ".join(outcome.failed) or "NOT CAUGHT"
    print(f"{mutation.name}: {verdict} ({outcome.seconds:.0f} s)", flush=True)
    if outcome.status not in (PASSED, FAILED):
        print(outcome.output, flush=True)
    return outcome


def _run(folder: Path, tests: Sequence[str]) -> Outcome:
    """Run tests in a copy, up to the first that fails."""
    options = ["-n", "0", "-x", "-rfE", "--tb=no", "-p", "no:cacheprovider"]
    options += ["-m", "not gpu and not real"]  # Tests of both tiers.
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, f"--timeout={SECONDS}", *tests],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )
    output = done.stdout + done.stderr
    # A test that fails has been asked and has answered; files that cannot be imported have not.
    failed = (
        re.findall(r"^FAILED (\S+::.+?)(?: - .*)?$", output, re.M)
        if done.returncode == FAILED
        else []
    )
    return Outcome(done.returncode, tuple(failed), output[-2000:], time.monotonic() - begin)


@contextmanager
def _copy() -> Iterator[Path]:
    """A copy of the checkout's files, those that git ignores left out; deleted afterwards."""
    listed = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True, check=True)
    names = listed(["git", "ls-files", "--cached", "--others", "--exclude-standard"]).stdout
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        for name in names.splitlines():
            if (source := ROOT / name).is_file():
                target = Path(folder, name)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)
        yield Path(folder)


if __name__ == "__main__":
    sys.exit(main())
