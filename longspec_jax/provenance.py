"""Where, with what and when something was measured: the head of every file of results."""

import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

PACKAGES = ("jax", "jaxlib", "flax", "jax-triton", "torch", "triton", "transformers")
CUDA_PACKAGES = (
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "nvidia-cuda-runtime-cu12",
    "nvidia-cuda-runtime",  # CUDA 13's
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
)
"""Named only where they are installed."""
DRIVER, PROCESSORS = Path("/proc/driver/nvidia/version"), Path("/proc/cpuinfo")


def provenance(device: str) -> dict[str, Any]:
    """Devices, versions of what computes, commit and date, as JSON values.

    Args:
      device: what computed, such as the name of a GPU.

    Returns:
      What is unknown is null. ``dirty`` is whether files of the commit were changed;
      ``LONGSPEC_COMMIT`` names a commit about which that is not known.
    """
    named = os.environ.get("LONGSPEC_COMMIT")
    commit, dirty = (named, None) if named else _checked_out()
    found = {package: version(package) for package in (*PACKAGES, *CUDA_PACKAGES)}
    versions = {name: one for name, one in found.items() if one or name in PACKAGES}
    return {
        "device": device,
        "cpu": f"{processor_model()}, {os.cpu_count()} processors",
        "driver": _driver(),
        "versions": {"python": platform.python_version(), **versions},
        "commit": commit or "unknown",
        "dirty": dirty,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def version(package: str) -> str | None:
    """The installed version; None if there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def processor_model() -> str:
    """The processor's model, such as ``AMD EPYC 9654``."""
    model = re.search(r"^model name\s*:\s*(.+)$", _text(PROCESSORS), re.MULTILINE)
    return model[1] if model else platform.machine()


def _driver() -> str | None:
    """The version of NVIDIA's kernel module; None without one."""
    version = re.search(r"Module.*?\s(\d+\.[\d.]+)", _text(DRIVER))
    return version[1] if version else None


def _text(file: Path) -> str:
    """What a file of the system says; nothing where it cannot be read."""
    try:
        return file.read_text()
    except OSError:
        return ""


def _checked_out() -> tuple[str | None, bool | None]:
    """The commit of the working tree that holds this file, and whether its files were changed.

    None and None outside a tree, in a tree of something else, or without git.
    """
    file = Path(__file__)
    answers = []
    for command in (
        ["ls-files", "--error-unmatch", file.name],  # Else the repository around an installation.
        ["rev-parse", "HEAD"],
        ["status", "--porcelain", "--untracked-files=no"],
    ):
        try:
            found = subprocess.run(
                ["git", "-C", str(file.parent), *command],
                capture_output=True,
                text=True,
                check=False,
            )
        except OSError:
            return None, None
        if found.returncode:
            return None, None
        answers.append(found.stdout.strip())
    return answers[1], bool(answers[2])
