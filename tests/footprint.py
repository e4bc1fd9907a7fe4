"""What a test process holds and costs: programs dropped between modules, a limit on what they take.

Every executable that XLA compiles for a CPU stays mapped into the process, some 700 mappings for
one shape of calls, and the kernel allows a process 65,530 (``vm.max_map_count``): past that the
compiler itself crashes.
"""

import ctypes
import gc
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

MOST_MAPPINGS = 20_000
MOST_BYTES = 2_500_000_000
MUCH_BYTES = 1_800_000_000
"""From here on programs are dropped after a test, in the middle of a module."""
SMALL_MAPPINGS = 8_000
SMALL_BYTES = 1_200_000_000
"""Up to here programs stay for the next module: what small modules share is compiled once."""


class Footprint(NamedTuple):
    """Memory of this process."""

    mappings: int = 0
    bytes: int = 0

    @classmethod
    def now(cls) -> "Footprint":
        """As Linux counts it; nothing where there is no ``/proc``."""
        if not (size := resident_bytes()):
            return cls()
        return cls(Path("/proc/self/maps").read_bytes().count(b"\n"), size)

    def most(self, other: "Footprint") -> "Footprint":
        """The larger of each."""
        return Footprint(*map(max, self, other))

    def __str__(self) -> str:
        return f"{self.mappings:,} memory mappings and {self.bytes / 1e9:.2f} GB"


def resident_bytes() -> int:
    """Of this process, 0 where Linux does not count them; takes microseconds."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


class FootprintCheck:
    """A pytest plugin: measures at the end of every module, drops programs, reports the largest.

    Also the files that cost most: processor seconds, of all threads and without further processes,
    and programs, whether they were compiled or read from what earlier runs kept.
    """

    def __init__(self) -> None:
        self._largest: dict[str, Footprint] = {}
        self._costs: dict[str, tuple[float, int]] = {}
        self._programs, self._listens, self._much = 0, False, MUCH_BYTES

    def _note(self, event: str, seconds: float, **_: object) -> None:
        self._programs += event == "/jax/core/compile/backend_compile_duration"

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self) -> None:
        if resident_bytes() > self._much:
            drop_programs()
            # What stays now would stay after every test: with jax 0.12 it comes near to as much.
            self._much = max(MUCH_BYTES, resident_bytes() + 50_000_000)

    @pytest.fixture(scope="module", autouse=True)
    def _programs_end_with_their_module(self, request: pytest.FixtureRequest) -> Iterator[None]:
        begun, programs = time.process_time(), self._programs
        if not self._listens and (jax := sys.modules.get("jax")):
            jax.monitoring.register_event_duration_secs_listener(self._note)
            self._listens = True
        yield
        seconds = time.process_time() - begun
        self._costs[request.node.nodeid] = seconds, self._programs - programs
        now = Footprint.now()
        worker = getattr(request.config, "workerinput", {}).get("workerid", "this process")
        self._largest[worker] = now.most(self._largest.get(worker, now))
        if now.mappings > SMALL_MAPPINGS or now.bytes > SMALL_BYTES:
            drop_programs()
        if now.mappings > MOST_MAPPINGS or now.bytes > MOST_BYTES:
            pytest.fail(
                f"{request.node.nodeid} ended with {now}, the limit being {MOST_MAPPINGS:,} and "
                f"{MOST_BYTES / 1e9} GB; let it compile fewer shapes, or split it",
                pytrace=False,
            )

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["footprint"] = {worker: tuple(it) for worker, it in self._largest.items()}
            output["costs"] = self._costs

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        # A worker that crashed has no output.
        output = getattr(node, "workeroutput", {})
        reported = output.get("footprint", {})
        self._largest |= {worker: Footprint(*it) for worker, it in reported.items()}
        self._costs |= output.get("costs", {})

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for worker, largest in sorted(self._largest.items()):
            terminalreporter.write_line(f"{worker}: at most {largest}")
        if not self._costs:
            return
        most = sorted(self._costs.items(), key=lambda item: item[1], reverse=True)
        shown = ", ".join(f"{name} {one:.0f} s ({programs})" for name, (one, programs) in most[:10])
        terminalreporter.write_line(
            f"{sum(one for _, (one, _) in most):.0f} processor seconds, "
            f"{sum(programs for _, (_, programs) in most)} programs; most of them in {shown}"
        )


def drop_programs() -> None:
    """Unmap executables, and give what the compiler allocated back to the system.

    All of them; but an engine that is prepared compiles nothing any more, so as long as one is open
    only those that nobody has pinned.
    """
    pinned = []
    if programs := sys.modules.get("longspec_jax.decoding.jit_cache"):
        with programs.PROGRAMS.limited(0):
            pinned = programs.PROGRAMS.values()
    gc.collect()
    if (jax := sys.modules.get("jax")) and not pinned:
        jax.clear_caches()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
