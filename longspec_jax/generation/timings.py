"""What trees turned out to cost and to earn on this machine, kept between processes.

One small JSON file for everything the figures depend on. A file that is missing, damaged or old is
measured anew; one that cannot be written is done without.
"""

import contextlib
import hashlib
import json
import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from longspec_jax import files
from longspec_jax.config import TreeConfig

DAYS = 30
"""After which figures are measured again: drivers, clocks and neighbours change."""


@dataclass(frozen=True)
class TreeTiming:
    """What rounds of one drafter with one tree did."""

    drafter: str
    """Its name."""
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


class KnownTimings:
    """What this process knows of its trees: measured here, or read from what others kept."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self._known: dict[str, tuple[TreeTiming, ...]] = {}

    def find(
        self,
        key: Mapping[str, Any],
        choices: Collection[tuple[str, TreeConfig]],
        folder: Path | None,
    ) -> tuple[TreeTiming, ...] | None:
        """The figures of a key, None if there are none to be trusted.

        Args:
          key: everything they depend on, as JSON values.
          choices: the drafters by name and trees whose figures they must be, and no others.
          folder: where others may have kept them; None for nowhere.
        """
        name = _name(key)
        if name not in self._known and folder is not None:
            kept = read_paces(folder, key)
            found = {(pace.drafter, pace.tree) for pace in kept or ()}
            if kept is not None and found == set(choices):
                self._known[name] = kept
        return self._known.get(name)

    def keep(
        self, key: Mapping[str, Any], paces: Sequence[TreeTiming], folder: Path | None
    ) -> None:
        """Remember the figures of a key, for other processes too where a folder is named."""
        self._known[_name(key)] = tuple(paces)
        if folder is not None:
            write_paces(folder, key, paces)


def read_paces(folder: Path, key: Mapping[str, Any]) -> tuple[TreeTiming, ...] | None:
    """The kept figures of a key, None if there are none to be trusted.

    Args:
      folder: of the figures.
      key: everything they depend on, as JSON values.
    """
    try:
        kept = json.loads(_file(folder, key).read_text("utf-8"))
        if kept["key"] != json.loads(json.dumps(key)) or time.time() - kept["time"] > DAYS * 86400:
            return None
        paces = tuple(
            TreeTiming(tree=TreeConfig(**pace.pop("tree")), **pace) for pace in kept["paces"]
        )
        return paces if all(map(_is_sound, paces)) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def write_paces(folder: Path, key: Mapping[str, Any], paces: Sequence[TreeTiming]) -> None:
    """Keep the figures of a key; a folder that cannot be written to keeps none."""
    file = _file(folder, key)
    whole = {"key": key, "time": time.time(), "paces": [asdict(pace) for pace in paces]}
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        files.replace(file, json.dumps(whole, indent=1).encode())


def _is_sound(pace: TreeTiming) -> bool:
    """Whether figures are numbers that rounds can have."""
    named = isinstance(pace.drafter, str)
    return named and 0 < pace.seconds < math.inf and 1 <= pace.tokens <= pace.tree.num_levels + 1


def _file(folder: Path, key: Mapping[str, Any]) -> Path:
    return folder / f"{_name(key)}.json"


def _name(key: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
