"""The tree of calls that name none: the one that emits most tokens per second on this machine.

The cost of a round depends on the machine and the model, its gain on the draft. For a large target
on a GPU 64 nodes cost little more than one. On a CPU they cost three times as much, and a small
model on a GPU is bound by launches. Several rows of a large target make every node cost more, too:
at batch 8 of a 7B model a round of 16 nodes takes two thirds of the time of one of 64.

So a few trees are timed the first time that a model decodes on a machine, some thirty rounds of
each behind the real prompt. The timings are kept between processes, in one small JSON file for
every kind of call. One that is missing, damaged or old is measured again. After that every call of
the kind runs the best of them from its first round on, or plain decoding if none pays. Every run
corrects the timing of the tree that it ran. One that was slower than plain decoding has all trees
timed again.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import math
import platform
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from longspec_jax import files
from longspec_jax.compilation import cache_folder
from longspec_jax.config.tree import TreeConfig
from longspec_jax.decoding.engine import Engine
from longspec_jax.decoding.policy import Measurement
from longspec_jax.decoding.programs import processors
from longspec_jax.decoding.trials import branch, rejoin
from longspec_jax.generation.activity import OnActivity, TreeTiming, Tuning
from longspec_jax.generation.call import Plan
from longspec_jax.generation.memory import free_bytes
from longspec_jax.ops.matmul.quantised_weights import quantised_matrices

FEW = 32
"""New tokens below which a call is not worth timing for. Of a large target, whose rounds take long,
as many as rounds would be timed."""
ROUNDS = 10
"""Rounds of one timing at least; the fastest timing counts, since whatever else runs only adds."""
PASSES = 2, 1
"""Timings of every tree in each pass over all trees; each follows a round that does not count."""
SPAN = 0.05
"""Seconds of one timing at least: ten rounds of a small model on a GPU take less than the threads
of a stream need to come into step."""
LONG = 2.0
"""Seconds of a timing after which a tree's next ones are left out."""
DAYS = 30
"""After which trees are timed again: drivers, clocks and neighbours change."""
FEWEST_ROUNDS = 16
"""Rounds of a run from which it corrects what is kept."""
GAIN = 1.03
"""How much faster than plain decoding a tree has to be: the timings are of few rounds."""
SLOWER = 0.95
"""Speed over plain decoding's below which a run is slower than the noise of timings."""


def time_trees(
    engine: Engine, shared: Plan, plans: Sequence[Plan], on_activity: OnActivity
) -> tuple[TreeTiming, ...]:
    """Time rounds of every plan behind the same prefill.

    In several passes: what else runs on the machine may meet all of one's timings in one of them.
    """
    found: dict[int, TreeTiming] = {}
    for timings in PASSES:
        for index, plan in enumerate(plans):
            before = found.get(index)
            if before is not None and before.seconds * ROUNDS >= LONG:
                continue
            on_activity(Tuning(*plan.choice))
            timing = time_tree(engine, shared, plan, timings)
            if before is not None:
                timing = replace(before, seconds=min(before.seconds, timing.seconds))
            found[index] = timing
    return tuple(found.values())


def time_tree(engine: Engine, shared: Plan, plan: Plan, timings: int) -> TreeTiming:
    """Time some rounds of a plan's drafter, as it will run them, behind another plan's prefill.

    The fastest of the ``timings`` counts, the first round excluded. The rounds append to the
    engine's own cache, because of many rows no second one would fit. Nothing behind the committed
    tokens is ever read before it is written again. All else is copied.
    """
    draft = shared.state_of(plan, engine.rows.draft)
    own = {"own_cache": False, "tokens": shared.room - 1}
    trial, total = branch(engine, plan.drafters, plan.params, draft, **own), Measurement()
    if not trial.streams:
        # A timing ends with its last round read, unless each is read while the next one runs.
        trial.ahead, trial.rounds_per_launch = False, 1
    parts: list[Measurement] = []
    while trial.busy and len(parts) <= timings:
        trial.step()
        part = trial.totals[0] - total
        enough = part.rounds >= ROUNDS and part.seconds >= SPAN if parts else part.rounds > 0
        if enough or (part.rounds and part.seconds > LONG) or not trial.busy:
            parts.append(part)
            total = trial.totals[0]
            if part.seconds > LONG:
                break
            trial.rounds_per_launch = max(ROUNDS, math.ceil(SPAN * part.rounds / part.seconds))
    rejoin(engine, trial)
    # The first round may have to wait for the copy.
    seconds = min(part.seconds / part.rounds for part in parts[1:] or parts)
    return TreeTiming(*plan.choice, seconds, total.tokens / total.row_rounds, total.rounds)


def worth_timing(plan: Plan) -> bool:
    """Whether a call is long enough, with room for a second draft state and for some rounds."""
    if plan.target.offload:
        return False  # Moving the cache takes the same time under every tree.
    free = free_bytes()
    fits = free is None or free > plan.memory.needed_bytes + plan.memory.draft_state_bytes
    least = FEW
    if plan.large:
        rounds = sum(1 + timings * ROUNDS for timings in PASSES)
        least = max(FEW, (1 + len(plan.drafters)) * rounds)
    return fits and min(plan.new_tokens[0], plan.room) >= least


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
        files.make_private(file.parent)
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
        **_quantised(plan.params.target),
        "draft": _fingerprint(plan.params.draft),
        "rows": 1 << (plan.slots - 1).bit_length(),
        "context": 1 << max(9, (plan.longest - 1).bit_length()),
        "sampling": plan.kind.name,
        "streams": streams,
    }


def _quantised(target: Any) -> dict[str, Any]:
    """The kinds of quantised weights; nothing of a whole target."""
    labels = sorted({matrix.label for matrix in quantised_matrices(target)})
    return {"weights": labels} if labels else {}


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
