"""Device time of a decode loop by kernel, from the profiler's trace."""

from pathlib import Path
from typing import Any

import jax

from .decode_setting import Bench


def profile(bench: Bench, program: Any, drafter: Any, folder: Path, *given: Any) -> None:
    """Write device time by kernel, microseconds per round, slowest first, and the program."""
    state = jax.block_until_ready(bench.state(drafter))
    with jax.profiler.trace(str(folder)):
        state = jax.block_until_ready(program(*given, bench.model.params, state))
    bench.cache = state.rows.cache
    rounds = int(state.record.rounds.max())
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
    ordered = sorted(kernels.items(), key=lambda item: -sum(item[1]))
    lines = [
        f"{sum(times) / rounds:10.1f} us {len(times) / rounds:8.1f} x {name}"
        for name, times in ordered
    ]
    total = sum(map(sum, kernels.values())) / rounds
    name = folder.name
    summary = f"{total:10.1f} us of kernels per round, {rounds} rounds"
    (folder.parent / f"{name}.txt").write_text("\n".join([summary, *lines]))
    (folder.parent / f"{name}.hlo").write_text(program.as_text())
    print(folder.name, summary)
