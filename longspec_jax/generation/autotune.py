"""The tree of calls that name none: the one that emits most tokens per second on this machine.

The cost of a round depends on the machine and the model, its gain on the draft. For a large target
on a GPU 64 nodes cost little more than one. On a CPU they cost three times as much, and a small
model on a GPU is bound by launches. Several rows of a large target make every node cost more, too:
at batch 8 of a 7B model a round of 16 nodes takes two thirds of the time of one of 64.

So a few trees are timed the first time that a model decodes on a machine, some thirty rounds of
each behind the real prompt, and the timings are kept. After that every call of the kind runs the
best of them from its first round on, or plain decoding if none pays. Runs correct what is kept.
"""

import contextlib
import hashlib
import importlib.metadata
import math
import platform
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from longspec_jax.compilation import cache_folder
from longspec_jax.config import TreeConfig
from longspec_jax.decoding.compiling import compile_side_by_side, processors
from longspec_jax.decoding.policy import Measurement
from longspec_jax.decoding.round import slack_slots
from longspec_jax.drafters.base import NoDraft
from longspec_jax.drafters.draft import DefaultTrees, is_large
from longspec_jax.generation.activity import Compiling, OnActivity, Slower, Tuned, Tuning
from longspec_jax.generation.call import Call
from longspec_jax.generation.memory import free_bytes
from longspec_jax.generation.run import Run, WarmShapes, start
from longspec_jax.generation.timings import KnownTimings, TreeTiming

TIMINGS = "timings"
"""Folder of the timings, beside the compiled programs."""
SEVERAL = 4
"""Rows decoded together from which the default tree of a large target is timed too: 64 nodes of
each are 256 in one pass."""
FEW = 32
"""New tokens below which a call is not worth timing for. Of a large target, whose rounds take long,
as many as rounds would be timed."""
GAIN = 1.03
"""How much faster than plain decoding a tree has to be: the timings are of few rounds."""
ROUNDS = 10
"""Rounds of one timing at least; the fastest timing counts, since whatever else runs only adds."""
PASSES = 2, 1
"""Timings of every tree in each pass over all trees; each follows a round that does not count."""
SPAN = 0.05
"""Seconds of one timing at least: ten rounds of a small model on a GPU take less than the threads
of a stream need to come into step."""
LONG = 2.0
"""Seconds of a timing after which a tree's next ones are left out."""


def trees_to_time(
    defaults: DefaultTrees,
    target_params: Any,
    mesh: Mesh | None,
    *,
    rows: int = 1,
    others: bool = False,
) -> tuple[TreeConfig, ...]:
    """What a call without a tree may run, the default one first: no other where none is timed.

    Args:
      defaults: of its draft.
      target_params: parameters of the target.
      mesh: what they are spread over; None for one device.
      rows: how many are decoded together.
      others: whether there are other drafts to choose from, so that this one is timed anyhow.
    """
    large = is_large(target_params)
    settled = large and defaults.settled
    small = defaults.cpu if jax.default_backend() == "cpu" else defaults.gpu
    trees = defaults.large if large else small
    if large and rows >= SEVERAL and defaults.together:
        trees, settled = defaults.together, False
    return trees if may_time(mesh) and (others or not settled) else trees[:1]


def may_time(mesh: Mesh | None) -> bool:
    """Whether calls may be settled by a clock whose timings are kept."""
    # Several processes would settle by their own clocks and run different programs.
    return mesh is None and jax.process_count() == 1 and cache_folder() is not None


def start_tuned(
    call: Call,
    warm: WarmShapes,
    known: KnownTimings,
    *,
    streams: bool,
    on_activity: OnActivity,
) -> Run:
    """As :func:`~longspec_jax.generation.run.start`, with the fastest of a call's drafters.

    Args:
      call: the prepared call, with every tree of :func:`trees_to_time`.
      warm: the shapes compiled so far.
      known: the timings known so far.
      streams: whether the run is followed round by round.
      on_activity: called with everything that takes time, and with the choice.
    """
    timings: tuple[TreeTiming, ...] = ()
    key = None
    if len(call.drafters) > 1:
        key, folder = timing_key(call, streams), timings_folder()
        timings = known.find(key, _choices(call), folder) or ()
        if not timings and _can_be_timed(call):
            run = _start_after_timing(call, warm, known, key, streams, on_activity)
            run.timing_key = key
            return run
    drafter, tree = _settled(call, timings)
    on_activity(Tuned(drafter, tree, timings))
    chosen = call.settled_on(drafter, tree)
    run = start(chosen, warm, streams=streams, on_activity=on_activity)
    run.timing_key = key if timings else None
    return run


def correct(known: KnownTimings, run: Run) -> None:
    """Correct the kept timings by a finished run, and report a run that was slower."""
    if run.timing_key is None or run.call.waits:
        return
    drafter, [seen] = run.call.drafter, run.engine.totals
    told = drafter.name, drafter.tree
    speed = known.correct(run.timing_key, *told, seen, timings_folder())
    if speed is not None and run.on_activity is not None:
        run.on_activity(Slower(*told, speed))


def _start_after_timing(
    call: Call,
    warm: WarmShapes,
    known: KnownTimings,
    key: dict[str, Any],
    streams: bool,
    on_activity: OnActivity,
) -> Run:
    """Time all trees behind the call's own prompt, and keep the timings."""
    whole, call = call, call.first_rows()
    choices = (call.without_draft(), *map(call.only, call.drafters))
    shared = replace(call, drafters=(call.drafter,))
    on_activity(Compiling())
    begin = time.perf_counter()
    if call.can_precompile:
        # The more nodes, the longer a round takes to compile, as a rule; a prefill is one pass.
        longest_first = sorted(choices, key=lambda choice: -choice.drafter.tree.num_nodes)
        rounds = chain.from_iterable(choice.round_programs(streams) for choice in longest_first)
        compile_side_by_side(chain(rounds, shared.programs(streams, rounds=False)))
    compiled = time.perf_counter() - begin
    run = start(shared, warm, streams=streams, rounds=False, on_activity=on_activity)
    begin, timings = time.perf_counter(), ()
    # A row that has ended with its first token shows nothing.
    if not any(run.progress.done):
        timings = _time_all(choices, run, on_activity)
        known.keep(key, timings, timings_folder())
    drafter, tree = _settled(call, timings)
    on_activity(Tuned(drafter, tree, timings))
    chosen = call.settled_on(drafter, tree)
    seconds = compiled + run.compile_seconds + time.perf_counter() - begin
    if whole.waits:
        del run
        settled = whole.settled_on(drafter, tree)
        run = start(settled, warm, streams=streams, on_activity=on_activity)
        run.compile_seconds += seconds
        return run
    free = free_bytes()
    if free is None or free > call.memory.needed_bytes:
        # Later calls begin with a prefill of the chosen drafter's own, and compile nothing either.
        # That takes a second cache: if the estimate of what is free was wrong, they do compile.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            seconds += warm.prepare(chosen, streams)
    settled = run.branch(chosen, own_cache=False)
    settled.engine.seconds_of_prefill = run.engine.seconds_of_prefill
    run.engine.close()
    settled.compile_seconds = seconds
    settled.engine.round_seconds = warm.round_seconds(chosen)
    return settled


def _time_all(choices: Sequence[Call], run: Run, on_activity: OnActivity) -> tuple[TreeTiming, ...]:
    """Time rounds of every choice behind the same prefill.

    In several passes: what else runs on the machine may meet all of one's timings in one of them.
    """
    found: dict[int, TreeTiming] = {}
    for timings in PASSES:
        for index, choice in enumerate(choices):
            before = found.get(index)
            if before is not None and before.seconds * ROUNDS >= LONG:
                continue
            on_activity(Tuning(choice.drafter.name, choice.drafter.tree))
            timing = time_tree(run, choice, timings)
            if before is not None:
                timing = replace(before, seconds=min(before.seconds, timing.seconds))
            found[index] = timing
    return tuple(found.values())


def time_tree(run: Run, choice: Call, timings: int) -> TreeTiming:
    """Time some rounds of a call's drafter, as it will run them, behind another call's prefill.

    The fastest of the ``timings`` counts, the first round excluded. The rounds append to the
    run's own cache, of which nothing behind the committed tokens is ever read before it is written
    again: of many rows no second one would fit. All else is copied.
    """
    tokens = most_tokens(run.call) - 1
    # A timing ends with its last round read, unless every round is read while the next one runs.
    trial = run.branch(choice, own_cache=False, tokens=tokens)
    engine, seen = trial.engine, [Measurement()]
    if not engine.streams:
        engine.ahead, engine.rounds_per_launch = False, 1
    parts: list[Measurement] = []
    while engine.busy and len(parts) <= timings:
        engine.step()
        part = engine.totals[0] - seen[-1]
        enough = part.rounds >= ROUNDS and part.seconds >= SPAN if parts else part.rounds > 0
        if enough or (part.rounds and part.seconds > LONG) or not engine.busy:
            parts.append(part)
            seen.append(engine.totals[0])
            if part.seconds > LONG:
                break
            engine.rounds_per_launch = max(ROUNDS, math.ceil(SPAN * part.rounds / part.seconds))
    run.engine.rejoin(engine)
    total = seen[-1]
    # The first round may have to wait for the copy.
    seconds = min(part.seconds / part.rounds for part in parts[1:] or parts)
    name, tree = choice.drafter.name, choice.drafter.tree
    return TreeTiming(name, tree, seconds, total.tokens / total.row_rounds, total.rounds)


def most_tokens(call: Call) -> int:
    """Tokens that a row of the call's cache can hold behind its prompt."""
    longest = max(map(len, call.prompts))
    return call.shape.capacity - longest - slack_slots(call.drafter.tree.num_levels)


def timings_folder() -> Path | None:
    """Where timings are kept."""
    folder = cache_folder()
    return folder / TIMINGS if folder else None


def _choices(call: Call) -> set[tuple[str, TreeConfig]]:
    """What a call may settle on: drafters by name, and their trees."""
    plain = NoDraft()
    return {(drafter.name, drafter.tree) for drafter in (plain, *call.drafters)}


def _settled(call: Call, timings: Sequence[TreeTiming]) -> tuple[str, TreeConfig]:
    """The drafter and tree of a call by its timings; the first draft's default tree without."""
    if timings:
        best = best_timing(timings)
        return best.drafter, best.tree
    return call.drafters[0].name, call.drafters[0].tree


def best_timing(timings: Sequence[TreeTiming]) -> TreeTiming:
    """The one with most tokens per second; plain decoding unless one is clearly faster."""
    plain = next(timing for timing in timings if not timing.tree.widths)
    best = max(timings, key=lambda timing: timing.tokens_per_second)
    return best if best.tokens_per_second > GAIN * plain.tokens_per_second else plain


def timing_key(call: Call, streams: bool) -> dict[str, Any]:
    """Everything that the timings of a call's trees depend on, coarsely."""
    longest = max(map(len, call.prompts))
    return {
        "device": jax.devices()[0].device_kind,
        "processors": _processors(),
        "versions": [jax.__version__, _own_version()],
        "target": repr(call.target),
        "drafters": [repr(drafter) for drafter in call.drafters],
        "draft": _fingerprint(call.params.draft),
        "rows": 1 << (len(call.first_rows().prompts) - 1).bit_length(),
        "context": 1 << max(9, (longest - 1).bit_length()),
        "sampling": list(call.request.sampling.kind),
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
    try:
        return importlib.metadata.version("longspec_jax")
    except importlib.metadata.PackageNotFoundError:
        return None


def _fingerprint(draft: Any) -> str:
    """A hash of a draft's small arrays, which no two trained drafts share, and of all shapes."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(draft)[0]:
        digest.update(f"{path}{leaf.shape}{leaf.dtype}".encode())
        if leaf.ndim == 1:
            digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


def _can_be_timed(call: Call) -> bool:
    """Whether a call is long enough, with room for a second draft state and for some rounds."""
    if call.target.offload:
        return False  # Moving the cache takes the same time under every tree.
    free = free_bytes()
    fits = free is None or free > call.memory.needed_bytes + call.memory.draft_state_bytes
    wanted = int(np.asarray(call.request.max_new_tokens).min())
    least = FEW
    if is_large(call.params.target):
        rounds = sum(1 + timings * ROUNDS for timings in PASSES)
        least = max(FEW, len(_choices(call)) * rounds)
    return fits and min(wanted, most_tokens(call)) >= least
