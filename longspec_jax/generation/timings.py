"""Seconds and tokens of a round of every tree on this machine, kept between processes.

There is one small JSON file for every kind of call. A file that is missing, damaged or old is
measured again. Every run corrects the figures of the tree that it ran, and a run that was slower
than plain decoding has all trees timed again.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import math
import platform
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from longspec_jax import files
from longspec_jax.compilation import cache_folder
from longspec_jax.config import TreeConfig
from longspec_jax.decoding.policy import Measurement
from longspec_jax.decoding.programs import processors
from longspec_jax.generation.call import Plan

DAYS = 30
"""After which trees are timed again: drivers, clocks and neighbours change."""
FEWEST_ROUNDS = 16
"""Rounds of a run from which it corrects what is kept."""
MOST_KEPT = 64
"""Earlier rounds that count against those of a run."""
GAIN = 1.03
"""How much faster than plain decoding a tree has to be: the timings are of few rounds."""
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
    def choice(self) -> tuple[str, TreeConfig]:
        """The drafter's name and its tree."""
        return self.drafter, self.tree

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
    """The timings that this process knows: measured here, or kept in :func:`timings_folder`."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self._known: dict[str, tuple[TreeTiming, ...]] = {}

    def find(
        self, key: Mapping[str, Any], choices: Collection[tuple[str, TreeConfig]]
    ) -> tuple[TreeTiming, ...] | None:
        """The timings of a key, if they are of exactly these drafters by name and trees."""
        name, folder = _name(key), timings_folder()
        if name not in self._known and folder is not None:
            kept = read_timings(folder, key)
            if kept is not None and {timing.choice for timing in kept} == set(choices):
                self._known[name] = kept
        return self._known.get(name)

    def keep(self, key: Mapping[str, Any], timings: Sequence[TreeTiming]) -> None:
        """Remember the timings of a key, for other processes too where there is a folder."""
        self._known[_name(key)] = tuple(timings)
        if (folder := timings_folder()) is not None:
            write_timings(folder, key, timings)

    def correct(
        self, key: Mapping[str, Any], drafter: str, tree: TreeConfig, seen: Measurement
    ) -> float | None:
        """Take in all rounds of a run of this drafter and tree.

        Returns:
          The run's speed over plain decoding's, where it was clearly slower, so that the timings
          are forgotten and all trees are timed again; None otherwise.
        """
        known = self._known.get(_name(key))
        if known is None or seen.rounds < FEWEST_ROUNDS:
            return None
        plain = next(timing for timing in known if not timing.tree.widths)
        speed = seen.tokens / seen.row_rounds / (seen.seconds / seen.rounds)
        if tree.widths and speed < SLOWER * plain.tokens_per_second:
            del self._known[_name(key)]
            if (folder := timings_folder()) is not None:
                with contextlib.suppress(OSError):
                    _file(folder, key).unlink(missing_ok=True)
            return speed / plain.tokens_per_second
        ran = drafter, tree
        mended = [one.corrected(seen) if one.choice == ran else one for one in known]
        self.keep(key, mended)
        return None


def timings_folder() -> Path | None:
    """Where timings are kept, beside the compiled programs; None for nowhere."""
    folder = cache_folder()
    return folder / "timings" if folder else None


def read_timings(folder: Path, key: Mapping[str, Any]) -> tuple[TreeTiming, ...] | None:
    """The kept timings of a key, of JSON values; None if there are none to be trusted."""
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


def fastest(choices: Sequence[tuple[str, TreeConfig]], timings: Sequence[TreeTiming]) -> int:
    """Index of the choice that was fastest; of the second, the default, without timings."""
    return choices.index(best_timing(timings).choice) if timings else 1


def best_timing(timings: Sequence[TreeTiming]) -> TreeTiming:
    """The one with most tokens per second; plain decoding unless one is clearly faster."""
    plain = next(timing for timing in timings if not timing.tree.widths)
    best = max(timings, key=lambda timing: timing.tokens_per_second)
    return best if best.tokens_per_second > GAIN * plain.tokens_per_second else plain


def timing_key(plan: Plan, streams: bool) -> dict[str, Any]:
    """Everything that the timings of a plan's trees depend on, coarsely."""
    return {
        "device": jax.devices()[0].device_kind,
        "processors": _processors(),
        "versions": [jax.__version__, _own_version()],
        "target": repr(plan.target),
        "drafters": [repr(drafter) for drafter in plan.drafters],
        "draft": _fingerprint(plan.params.draft),
        "rows": 1 << (plan.slots - 1).bit_length(),
        "context": 1 << max(9, (plan.longest - 1).bit_length()),
        "sampling": plan.kind.name,
        "streams": streams,
    }


def _processors() -> list[Any]:
    """What a CPU's rounds depend on: its model, and how many of it this process may use."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        model = platform.processor()
    return [processors(), model]


def _own_version() -> str | None:
    """The library's version: other kernels have other timings."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("longspec_jax")


def _fingerprint(draft: Any) -> str:
    """A hash of a draft's small arrays, which no two trained drafts share, and of all shapes."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(draft)[0]:
        digest.update(f"{path}{leaf.shape}{leaf.dtype}".encode())
        if leaf.ndim == 1:
            digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()
