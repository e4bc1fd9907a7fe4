"""Device time by kernel, from the profiler's trace."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from .decode_setting import Bench


def profile(bench: Bench, program: Any, drafter: Any, folder: Path, *given: Any) -> None:
    """Write device time by kernel, microseconds per round, slowest first, and the program."""
    state = jax.block_until_ready(bench.state(drafter))

    def decode() -> Any:
        return jax.block_until_ready(program(*given, bench.model.params, state))

    after, kernels = traced(decode, folder)
    bench.cache = after.rows.cache
    rounds = int(after.record.rounds.max())
    write(kernels, folder, rounds, f"us of kernels per round, {rounds} rounds")
    (folder.parent / f"{folder.name}.hlo").write_text(program.as_text())


def traced(run: Callable[[], Any], folder: Path) -> tuple[Any, dict[str, list[float]]]:
    """What a call returns, and the microseconds that each of its kernels took, by name."""
    with jax.profiler.trace(str(folder)):
        found = run()
    kernels: dict[str, list[float]] = {}
    for path in folder.rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            if not plane.name.startswith("/device:"):
                continue
            for stream in plane.lines:
                if not stream.name.startswith("Stream"):
                    continue
                for event in stream.events:
                    kernels.setdefault(event.name, []).append(event.duration_ns / 1e3)
    return found, kernels


def write(kernels: dict[str, list[float]], folder: Path, times: int, of_what: str) -> None:
    """Write kernels beside a trace's folder, slowest first, each divided by ``times``."""
    ordered = sorted(kernels.items(), key=lambda item: -sum(item[1]))
    lines = [
        f"{sum(each) / times:10.1f} us {len(each) / times:8.1f} x {name}" for name, each in ordered
    ]
    summary = f"{sum(map(sum, kernels.values())) / times:10.1f} {of_what}"
    (folder.parent / f"{folder.name}.txt").write_text("\n".join([summary, *lines]))
    print(folder.name, summary)
