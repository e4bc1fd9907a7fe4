"""The tree of calls that name none: the one that emits most tokens a second on this machine.

What a round costs depends on the machine and the model, what it earns on the draft: 64 nodes cost a
large target on a GPU little more than one, a CPU three times as much, and a small model on a GPU is
bound by launches, not by nodes. So a few trees are timed the first time that a model decodes on a
machine, a dozen rounds each behind the real prompt, and the figures are kept. After that every call
of the kind runs the best of them from its first round on; plain decoding, if none pays.
"""

import hashlib
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longspec_jax.config import DEFAULT_TREE, TreeConfig
from longspec_jax.decoding import adaptive
from longspec_jax.decoding.engine import SpecState, room
from longspec_jax.generation import runner
from longspec_jax.generation.activity import Compiling, Fitted, Fitting, OnActivity
from longspec_jax.generation.job import Job
from longspec_jax.generation.kept import TreePace, read_paces, write_paces
from longspec_jax.generation.memory import free_bytes, tree_bytes
from longspec_jax.generation.runner import Ready, WarmShapes

CPU_TREES = (TreeConfig((1, 1, 1)), TreeConfig((4, 4, 4)))
GPU_TREES = (TreeConfig((1, 1, 1)), DEFAULT_TREE)
LARGE = 2_000_000_000
"""Bytes of a target from which on a GPU reads weights for most of a round: nodes are nearly free there
and the default tree pays, so that nothing needs to be timed."""
ROUNDS = 6
"""Of one timing; the faster of two counts, since whatever else runs only adds."""
LONG = 2.0
"""Seconds after which a tree's second timing is left out."""
GAIN = 1.03
"""How much faster than plain decoding a tree has to be: the figures are of a dozen rounds."""


def default_trees() -> tuple[TreeConfig, ...]:
    """What is worth timing beside plain decoding on this kind of machine, the cheapest first."""
    return CPU_TREES if jax.default_backend() == "cpu" else GPU_TREES


def usual_tree() -> TreeConfig:
    """What usually pays on this kind of machine, for calls that nothing was timed for."""
    return CPU_TREES[0] if jax.default_backend() == "cpu" else DEFAULT_TREE


def worth_timing(target_params: Any) -> bool:
    """Whether it is not known beforehand which tree pays for a target on this kind of machine."""
    return jax.default_backend() == "cpu" or tree_bytes(target_params) < LARGE


def ready_to_fit(
    job: Job, warm: WarmShapes, folder: Path, *, streams: bool, on_activity: OnActivity | None
) -> Ready:
    """As :func:`~longspec_jax.generation.runner.ready`, for the fastest of a job's drafters or none.

    Args:
      job: the prepared call, with every drafter that is worth timing.
      warm: the shapes compiled so far.
      folder: of the kept figures.
      streams: whether the run will be followed round by round.
      on_activity: told of everything that takes time.
    """
    tell = on_activity or (lambda activity: None)
    choices = (job.without_draft(), *map(job.only, job.drafters))
    tell(Compiling())
    compiled = sum(warm.prepare(choice, streams) for choice in choices)
    tallest = job.only(job.drafter)
    start = runner.ready(tallest, warm, streams=streams, on_activity=on_activity)
    begin, paces = time.perf_counter(), []
    if _can_be_timed(start):
        for choice in choices:
            tell(Fitting(choice.drafter.tree))
            paces.append(_pace(start, choice, streams))
        write_paces(folder, measurement_key(job), paces)
    tree = best_tree(paces) if paces else usual_tree()
    tell(Fitted(tree, tuple(paces)))
    chosen = job.settled_on(tree)
    seconds = compiled + start.timing.compile + time.perf_counter() - begin
    timing = replace(start.timing, compile=seconds)
    return Ready(chosen, runner.state_for(chosen, start.state), timing)


def best_tree(paces: Sequence[TreePace]) -> TreeConfig:
    """The tree with most tokens a second; plain decoding unless one is clearly faster."""
    plain = next(pace for pace in paces if not pace.tree.widths)
    best = max(paces, key=lambda pace: pace.tokens_per_second)
    return best.tree if best.tokens_per_second > GAIN * plain.tokens_per_second else plain.tree


def kept_paces(job: Job, folder: Path) -> tuple[TreePace, ...] | None:
    """What is kept of a job's trees and of plain decoding; None if they are to be timed."""
    return read_paces(folder, measurement_key(job))


def measurement_key(job: Job) -> dict[str, Any]:
    """Everything that the figures of a job's trees depend on, coarsely."""
    longest = max(map(len, job.prompts))
    return {
        "device": jax.devices()[0].device_kind,
        "processors": _processors(),
        "jax": jax.__version__,
        "target": repr(job.target),
        "drafters": [repr(drafter) for drafter in job.drafters],
        "draft": _fingerprint(job.params.draft),
        "rows": 1 << (len(job.prompts) - 1).bit_length(),
        "context": 1 << max(12, (longest - 1).bit_length()),
        "samples": job.request.sampling.stochastic,
        "filters": job.request.sampling.filtered,
    }


def _processors() -> int:
    """Processors that this process may use: what a CPU's rounds depend on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _fingerprint(draft: Any) -> str:
    """A hash of a draft's small arrays, which no two trained drafts share, and of all its shapes."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(draft)[0]:
        digest.update(f"{path}{leaf.shape}{leaf.dtype}".encode())
        if leaf.ndim == 1 and jax.process_count() == 1:
            digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


def _can_be_timed(start: Ready) -> bool:
    """Whether rows go on behind the prompt, with room for a copy of the state and for some rounds."""
    job, state = start.job, start.state
    free = free_bytes()
    fits = free is None or free > tree_bytes(state) + job.memory.working_bytes
    return fits and not np.asarray(state.done).any() and _most_tokens(start) > 2 * ROUNDS


def _most_tokens(start: Ready) -> int:
    """Tokens that a row of the state has room for."""
    overhang = room(start.job.drafter.tree.num_levels)
    longest = max(map(len, start.job.prompts))
    return min(start.state.output.shape[1], start.state.cache.capacity - longest) - overhang


def _pace(start: Ready, choice: Job, streams: bool) -> TreePace:
    """Time some rounds of a job, from a copy of the prefilled state."""
    most = jnp.full_like(choice.request.max_new_tokens, _most_tokens(start))
    job = replace(choice, request=replace(choice.request, max_new_tokens=most))
    state = jax.tree.map(jnp.copy, runner.state_for(choice, start.state))
    state, _ = _rounds(job, state, 1, streams)
    paces: list[float] = []
    while len(paces) < 2 and not np.asarray(state.done).any():
        before = int(np.asarray(state.rounds).max())
        state, seconds = _rounds(job, state, ROUNDS, streams)
        paces.append(seconds / (int(np.asarray(state.rounds).max()) - before))
        if seconds > LONG:
            break
    rounds = np.asarray(state.rounds).sum()
    tokens = np.asarray(state.emitted).sum() - len(job.prompts)
    return TreePace(job.drafter.tree, min(paces), float(tokens / rounds))


def _rounds(job: Job, state: SpecState, count: int, streams: bool) -> tuple[SpecState, float]:
    """Run some rounds as the job will, and time them; the state is donated."""
    begin = time.perf_counter()
    if streams:
        for _ in range(count):
            state, _ = job.launch(0, state)
    else:
        models = job.target, job.drafter, job.params, job.request
        state, _ = adaptive.burst(*models, state, np.int32(count))
    jax.block_until_ready(state)
    return state, time.perf_counter() - begin
