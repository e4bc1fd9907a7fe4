"""Processes that a test starts: what they see of its environment, and what is left of them."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
WITHOUT_TORCH = Path(__file__).parent / "without_torch"


def environment(*import_from: Path, devices: int = 1, **variables: str) -> dict[str, str]:
    """This process's, with fewer devices, no PyTorch, and these folders to import from."""
    folders = [*import_from, WITHOUT_TORCH]
    # Of an option given twice the last counts.
    devices_option = f"--xla_force_host_platform_device_count={devices}"
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {devices_option}",
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        **variables,
    }


def opened(*given: str, devices: int = 1, **variables: str) -> subprocess.Popen[str]:
    """Another Python in the checkout, whose output is read."""
    return subprocess.Popen(
        [sys.executable, *given],
        cwd=ROOT,
        env=environment(ROOT, devices=devices, **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


class Ended(NamedTuple):
    """What is left of a process."""

    status: int
    printed: str
    errors: str


def finish(*processes: subprocess.Popen[str]) -> list[Ended]:
    """Waits for the end of all, and leaves none behind."""
    try:
        texts = [process.communicate(timeout=300) for process in processes]
        return [Ended(each.returncode, *text) for each, text in zip(processes, texts, strict=True)]
    finally:
        for process in processes:
            process.kill()


def ran(*given: str, **variables: str) -> Ended:
    """What is left of another Python that ran to its end."""
    [ended] = finish(opened(*given, **variables))
    return ended
