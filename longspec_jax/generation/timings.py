"""Seconds and tokens of a round of every tree on this machine, kept between processes.

There is one small JSON file for every kind of call. A file that is missing, damaged or old is
measured again. Every run corrects the figures of the tree that it ran, and a run that was slower
than plain decoding has all trees timed again.
"""

import contextlib
import hashlib
import json
import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from longspec_jax import files
from longspec_jax.config import TreeConfig
from longspec_jax.decoding.policy import Measurement

DAYS = 30
"""After which trees are timed again: drivers, clocks and neighbours change."""
FEWEST_ROUNDS = 16
"""Rounds of a run from which it corrects what is kept."""
MOST_KEPT = 64
"""Earlier rounds that count against those of a run."""
SLOWER = 0.95
"""Speed over plain decoding's below which a run is slower than the noise of timings."""


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
    rounds: int = 0
    """How many rounds the tokens are a mean of."""

    @property
    def tokens_per_second(self) -> float:
        """Of one row."""
        return self.tokens / self.seconds

    def corrected(self, seen: Measurement) -> "TreeTiming":
        """The timing after a run of the same tree; its rounds count more than those kept before."""
        kept = min(self.rounds, seen.rounds, MOST_KEPT)
        share = kept / (kept + seen.rounds)
        return replace(
            self,
            seconds=share * self.seconds + (1 - share) * seen.seconds / seen.rounds,
            tokens=share * self.tokens + (1 - share) * seen.tokens / seen.row_rounds,
            rounds=self.rounds + seen.rounds,
        )


class KnownTimings:
    """The timings that this process knows: measured here, or kept by others."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self._known: dict[str, tuple[TreeTiming, ...]] = {}

    def find(
        self,
        key: Mapping[str, Any],
        choices: Collection[tuple[str, TreeConfig]],
        folder: Path | None,
    ) -> tuple[TreeTiming, ...] | None:
        """The timings of a key; None if there are none to be trusted.

        Args:
          key: everything that they depend on, as JSON values.
          choices: the drafters by name and trees that were timed, all of them and no others.
          folder: where others may have kept them; None for nowhere.
        """
        name = _name(key)
        if name not in self._known and folder is not None:
            kept = read_timings(folder, key)
            found = {(timing.drafter, timing.tree) for timing in kept or ()}
            if kept is not None and found == set(choices):
                self._known[name] = kept
        return self._known.get(name)

    def keep(
        self, key: Mapping[str, Any], timings: Sequence[TreeTiming], folder: Path | None
    ) -> None:
        """Remember the timings of a key, for other processes too where a folder is named."""
        self._known[_name(key)] = tuple(timings)
        if folder is not None:
            write_timings(folder, key, timings)

    def correct(
        self,
        key: Mapping[str, Any],
        drafter: str,
        tree: TreeConfig,
        seen: Measurement,
        folder: Path | None,
    ) -> float | None:
        """Take in what a run measured of the tree that it ran.

        Args:
          key: of the call.
          drafter: the name of what the run ran.
          tree: its tree.
          seen: all rounds of the run.
          folder: where others keep theirs; None for nowhere.

        Returns:
          The run's speed over plain decoding's, where it was clearly slower, so that the timings
          are forgotten; None otherwise.
        """
        known = self._known.get(_name(key))
        if known is None or seen.rounds < FEWEST_ROUNDS:
            return None
        plain = next(timing for timing in known if not timing.tree.widths)
        speed = seen.tokens / seen.row_rounds / (seen.seconds / seen.rounds)
        if tree.widths and speed < SLOWER * plain.tokens_per_second:
            self.forget(key, folder)
            return speed / plain.tokens_per_second
        mended = [
            timing.corrected(seen) if (timing.drafter, timing.tree) == (drafter, tree) else timing
            for timing in known
        ]
        self.keep(key, mended, folder)
        return None

    def forget(self, key: Mapping[str, Any], folder: Path | None) -> None:
        """Have the trees of a key timed again."""
        self._known.pop(_name(key), None)
        if folder is not None:
            with contextlib.suppress(OSError):
                _file(folder, key).unlink(missing_ok=True)


def read_timings(folder: Path, key: Mapping[str, Any]) -> tuple[TreeTiming, ...] | None:
    """The kept timings of a key; None if there are none to be trusted.

    Args:
      folder: of the timings.
      key: everything that they depend on, as JSON values.
    """
    try:
        kept = json.loads(_file(folder, key).read_text("utf-8"))
        if kept["key"] != json.loads(json.dumps(key)) or time.time() - kept["time"] > DAYS * 86400:
            return None
        timings = tuple(
            TreeTiming(tree=TreeConfig(**one.pop("tree")), **one) for one in kept["timings"]
        )
        return timings if all(map(_is_sound, timings)) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def write_timings(folder: Path, key: Mapping[str, Any], timings: Sequence[TreeTiming]) -> None:
    """Keep the timings of a key; a folder that cannot be written to keeps none."""
    file = _file(folder, key)
    whole = {"key": key, "time": time.time(), "timings": [asdict(timing) for timing in timings]}
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        files.replace(file, json.dumps(whole, indent=1).encode())


def _is_sound(timing: TreeTiming) -> bool:
    """Whether a timing's numbers are possible."""
    named, most = isinstance(timing.drafter, str), timing.tree.num_levels + 1
    return named and 0 < timing.seconds < math.inf and 1 <= timing.tokens <= most


def _file(folder: Path, key: Mapping[str, Any]) -> Path:
    return folder / f"{_name(key)}.json"


def _name(key: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
