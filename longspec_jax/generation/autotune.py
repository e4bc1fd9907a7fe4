"""The tree of calls that name none: the one that emits most tokens per second on this machine.

What a round costs depends on the machine and the model, what it earns on the draft: 64 nodes cost a
large target on a GPU little more than one, a CPU three times as much, and a small model on a GPU is
bound by launches, not by nodes. Several rows of a large target together cost more for every node,
too: at batch 8 of a 7B model a round of 16 nodes takes two thirds of the time of one of 64. So a
few trees are timed the first time that a model decodes on a machine, some thirty rounds each behind
the real prompt (:mod:`longspec_jax.generation.timed_rounds`), and the figures are kept. After that
every call of the kind runs the best of them from its first round on; plain decoding, if none pays.
"""

import contextlib
import hashlib
import importlib.metadata
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
from longspec_jax.drafters.base import NoDraft
from longspec_jax.drafters.draft import DefaultTrees, is_large
from longspec_jax.generation import runner
from longspec_jax.generation.activity import Compiling, OnActivity, Tuned, Tuning
from longspec_jax.generation.job import Job
from longspec_jax.generation.memory import free_bytes
from longspec_jax.generation.progress import Timing
from longspec_jax.generation.runner import Ready, Waiting, WarmShapes
from longspec_jax.generation.timed_rounds import LONG, PASSES, ROUNDS, most_tokens, timed_pace
from longspec_jax.generation.timings import KnownTimings, TreeTiming

PACES = "paces"
"""Folder of the figures, beside the compiled programs."""
SEVERAL = 4
"""Rows decoded together from which that is not taken for granted: 64 nodes of each are 256 in one
pass."""
FEW = 32
"""New tokens below which a call is not worth timing for; of a large target, whose rounds take long,
as many as rounds would be timed."""
GAIN = 1.03
"""How much faster than plain decoding a tree has to be: the figures are of few rounds."""


def trees_to_time(
    usual: DefaultTrees,
    target_params: Any,
    mesh: Mesh | None,
    *,
    rows: int = 1,
    others: bool = False,
) -> tuple[TreeConfig, ...]:
    """What a call without a tree may run, the usual one first: no other where none is timed.

    Args:
      usual: what tends to pay for its draft.
      target_params: parameters of the target.
      mesh: what they are spread over; None for one device.
      rows: how many are decoded together.
      others: whether there are other drafts to choose from, so that this one is timed anyhow.
    """
    large = is_large(target_params)
    settled = large and usual.settled
    trees = usual.large if large else usual.cpu if jax.default_backend() == "cpu" else usual.gpu
    if large and rows >= SEVERAL and usual.together:
        trees, settled = usual.together, False
    return trees if may_time(mesh) and (others or not settled) else trees[:1]


def may_time(mesh: Mesh | None) -> bool:
    """Whether calls may be settled by a clock whose figures are kept."""
    # Several processes would settle by their own clocks, and run different programs.
    return mesh is None and jax.process_count() == 1 and cache_folder() is not None


def ready_tuned(
    job: Job,
    warm: WarmShapes,
    known: KnownTimings,
    *,
    streams: bool,
    on_activity: OnActivity,
) -> Ready | Waiting:
    """As :func:`~longspec_jax.generation.runner.ready`, with the fastest of a job's drafters.

    Args:
      job: the prepared call, with every tree of :func:`trees_to_time`.
      warm: the shapes compiled so far.
      known: what is known of trees so far.
      streams: whether the run will be followed round by round.
      on_activity: told of everything that takes time, and what was settled.
    """
    paces: tuple[TreeTiming, ...] = ()
    if len(job.drafters) > 1:
        key, folder = measurement_key(job, streams), _folder()
        paces = known.find(key, _choices(job), folder) or ()
        if not paces and _can_be_timed(job):
            return _ready_after_timing(job, warm, known, key, streams, on_activity)
    drafter, tree = _settled(job, paces)
    on_activity(Tuned(drafter, tree, paces))
    chosen = job.settled_on(drafter, tree)
    return runner.ready(chosen, warm, streams=streams, on_activity=on_activity)


def _ready_after_timing(
    job: Job,
    warm: WarmShapes,
    known: KnownTimings,
    key: dict[str, Any],
    streams: bool,
    on_activity: OnActivity,
) -> Ready | Waiting:
    """Time all trees behind the call's own prompt, and keep the figures."""
    whole, job = job, job.at_once()
    choices = (job.without_draft(), *map(job.only, job.drafters))
    shared = replace(job, drafters=(job.drafter,))
    on_activity(Compiling())
    begin = time.perf_counter()
    if job.foreseeable:
        # The more nodes, the longer a round takes to compile, as a rule; a prefill is one pass.
        longest_first = sorted(choices, key=lambda choice: -choice.drafter.tree.num_nodes)
        rounds = (choice.round_programs(streams) for choice in longest_first)
        compile_side_by_side(chain(chain.from_iterable(rounds), shared.prefill_programs()))
    compiled = time.perf_counter() - begin
    start = runner.ready(shared, warm, streams=streams, rounds=False, on_activity=on_activity)
    assert isinstance(start, Ready), "these rows all have a slot"
    begin, paces = time.perf_counter(), ()
    # A row that has ended with its first token shows nothing.
    if not np.asarray(start.state.rows.done).any():
        paces, start = _timed(choices, start, streams, on_activity)
        known.keep(key, paces, _folder())
    drafter, tree = _settled(job, paces)
    on_activity(Tuned(drafter, tree, paces))
    chosen = job.settled_on(drafter, tree)
    seconds = compiled + start.timing.compile + time.perf_counter() - begin
    if whole.flows:
        del start
        flowing = whole.settled_on(drafter, tree)
        ready = runner.ready(flowing, warm, streams=streams, on_activity=on_activity)
        return ready._replace(timing=Timing(seconds + ready.timing.compile))
    free = free_bytes()
    if free is None or free > job.memory.needed_bytes:
        # Later calls begin with a prefill of the chosen drafter's own, and compile nothing either.
        # That takes a second cache: if the estimate of what is free was wrong, they do compile.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            seconds += warm.prepare(chosen, streams)
    timing = replace(start.timing, compile=seconds)
    return Ready(chosen, runner.state_for(chosen, start), timing)


def _timed(
    choices: Sequence[Job], start: Ready, streams: bool, on_activity: OnActivity
) -> tuple[tuple[TreeTiming, ...], Ready]:
    """The pace of every choice behind the same prefill, which is given back.

    In several passes: what else runs on the machine may meet all of one's timings in one of them.
    """
    paces: dict[int, TreeTiming] = {}
    for timings in PASSES:
        for index, choice in enumerate(choices):
            before = paces.get(index)
            if before is not None and before.seconds * ROUNDS >= LONG:
                continue
            on_activity(Tuning(choice.drafter.name, choice.drafter.tree))
            pace, start = timed_pace(start, choice, streams, timings)
            if before is not None:
                pace = replace(before, seconds=min(before.seconds, pace.seconds))
            paces[index] = pace
    return tuple(paces.values()), start


def _folder() -> Path | None:
    """Where figures are kept."""
    folder = cache_folder()
    return folder / PACES if folder else None


def _choices(job: Job) -> set[tuple[str, TreeConfig]]:
    """What a job may settle on: drafters by name, and their trees."""
    plain = NoDraft()
    return {(drafter.name, drafter.tree) for drafter in (plain, *job.drafters)}


def _settled(job: Job, paces: Sequence[TreeTiming]) -> tuple[str, TreeConfig]:
    """The drafter and tree of a call by their figures; the first draft's usual tree without."""
    if paces:
        best = best_pace(paces)
        return best.drafter, best.tree
    return job.drafters[0].name, job.drafters[0].tree


def best_pace(paces: Sequence[TreeTiming]) -> TreeTiming:
    """The one with most tokens per second; plain decoding unless one is clearly faster."""
    plain = next(pace for pace in paces if not pace.tree.widths)
    best = max(paces, key=lambda pace: pace.tokens_per_second)
    return best if best.tokens_per_second > GAIN * plain.tokens_per_second else plain


def measurement_key(job: Job, streams: bool) -> dict[str, Any]:
    """Everything that the figures of a job's trees depend on, coarsely."""
    longest = max(map(len, job.prompts))
    return {
        "device": jax.devices()[0].device_kind,
        "processors": _processors(),
        "versions": [jax.__version__, _own_version()],
        "target": repr(job.target),
        "drafters": [repr(drafter) for drafter in job.drafters],
        "draft": _fingerprint(job.params.draft),
        "rows": 1 << (len(job.at_once().prompts) - 1).bit_length(),
        "context": 1 << max(9, (longest - 1).bit_length()),
        "samples": job.request.sampling.stochastic,
        "filters": job.request.sampling.filtered,
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
    """The library's version: other kernels have other figures."""
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


def _can_be_timed(job: Job) -> bool:
    """Whether a call is long enough, with room for a second draft state and for some rounds."""
    if job.target.offload:
        return False  # Moving the cache takes the same time under every tree.
    free = free_bytes()
    fits = free is None or free > job.memory.needed_bytes + job.memory.draft_state_bytes
    wanted = int(np.asarray(job.request.max_new_tokens).min())
    least = FEW
    if is_large(job.params.target):
        rounds = sum(1 + timings * ROUNDS for timings in PASSES)
        least = max(FEW, len(_choices(job)) * rounds)
    return fits and min(wanted, most_tokens(job)) >= least
