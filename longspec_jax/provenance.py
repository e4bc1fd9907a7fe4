"""Where, with what and when something was measured: the head of every file of results."""

import datetime
import importlib.metadata
import os
import subprocess
from pathlib import Path
from typing import Any

PACKAGES = ("jax", "jaxlib", "jax-triton", "torch", "triton", "transformers")


def provenance(device: str) -> dict[str, Any]:
    """Device, versions of what computes, commit and date, as JSON values."""
    return {
        "device": device,
        "versions": {package: _version(package) for package in PACKAGES},
        "commit": os.environ.get("LONGSPEC_COMMIT") or _checked_out() or "unknown",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _version(package: str) -> str | None:
    """The installed version; None if there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _checked_out() -> str | None:
    """The commit of the working tree that holds this file; none outside one, or without git."""
    file = Path(__file__)
    for command in (["ls-files", "--error-unmatch", file.name], ["rev-parse", "HEAD"]):
        try:
            found = subprocess.run(
                ["git", "-C", str(file.parent), *command],
                capture_output=True,
                text=True,
                check=False,
            )
        except OSError:
            return None
        if found.returncode:
            return None  # Not of this project: the repository around an installation.
    return found.stdout.strip()
