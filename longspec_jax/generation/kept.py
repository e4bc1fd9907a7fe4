"""What trees turned out to cost and to earn on this machine, kept between processes.

One small JSON file for everything the figures depend on. A file that is missing, damaged or old is
measured anew; one that cannot be written is done without.
"""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from longspec_jax.config import TreeConfig

DAYS = 30
"""After which figures are measured again: drivers, clocks and neighbours change."""


@dataclass(frozen=True)
class TreePace:
    """What rounds of one tree did."""

    tree: TreeConfig
    """Its shape; without levels, plain decoding."""
    seconds: float
    """Of one round."""
    tokens: float
    """Emitted in one round by a row."""

    @property
    def tokens_per_second(self) -> float:
        """Of one row."""
        return self.tokens / self.seconds


def read_paces(folder: Path, key: Mapping[str, Any]) -> tuple[TreePace, ...] | None:
    """The kept figures of a key, None if there are none to be trusted.

    Args:
      folder: of the figures.
      key: everything they depend on, as JSON values.
    """
    try:
        kept = json.loads(_file(folder, key).read_text("utf-8"))
        if kept["key"] != json.loads(json.dumps(key)) or time.time() - kept["time"] > DAYS * 86400:
            return None
        paces = tuple(TreePace(TreeConfig(**pace.pop("tree")), **pace) for pace in kept["paces"])
        return paces if all(pace.seconds > 0 for pace in paces) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def write_paces(folder: Path, key: Mapping[str, Any], paces: Sequence[TreePace]) -> None:
    """Keep the figures of a key; a folder that cannot be written to keeps none."""
    file = _file(folder, key)
    whole = {"key": key, "time": time.time(), "paces": [asdict(pace) for pace in paces]}
    # Under a name of its own first: another process may read or write the same figures.
    draft = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(whole, indent=1), "utf-8")
        draft.replace(file)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()


def _file(folder: Path, key: Mapping[str, Any]) -> Path:
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    return folder / f"{name}.json"
