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
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import jax

from longspec_jax.decoding.policy import Measurement
from longspec_jax.decoding.programs import compile_side_by_side
from longspec_jax.decoding.trials import rejoin
from longspec_jax.generation.activity import Compiling, OnActivity, Tuned, Tuning
from longspec_jax.generation.call import Plan
from longspec_jax.generation.inputs import Batch
from longspec_jax.generation.memory import free_bytes
from longspec_jax.generation.run import (
    Run,
    WarmShapes,
    can_precompile,
    plan_programs,
    round_programs,
    start,
)
from longspec_jax.generation.timings import KnownTimings, TreeTiming, fastest, timing_key

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


def start_call(
    plan: Plan,
    batch: Batch,
    warm: WarmShapes,
    known: KnownTimings,
    *,
    streams: bool,
    on_activity: OnActivity,
) -> Run:
    """As :func:`~longspec_jax.generation.run.start`, an open plan with its fastest drafter.

    ``on_activity`` is called with everything that takes time, and with the choice.
    """
    key, timings = None, ()
    if plan.open:
        choices = [each.choice for each in plan.alternatives]
        if len(plan.drafters) > 1:
            may_time, key = _can_be_timed(plan), timing_key(plan, streams)
            timings = known.find(key, choices) or ()
            if not timings and may_time:
                run = _start_after_timing(plan, batch, warm, known, key, streams, on_activity)
                run.timing_key = key
                return run
        plan = plan.alternatives[fastest(choices, timings)]
        on_activity(Tuned(*plan.choice, timings))
    run = start(plan, batch, warm, streams=streams, on_activity=on_activity)
    run.timing_key = key if timings else None
    return run


def _start_after_timing(
    whole: Plan,
    batch: Batch,
    warm: WarmShapes,
    known: KnownTimings,
    key: dict[str, Any],
    streams: bool,
    on_activity: OnActivity,
) -> Run:
    """Time all trees behind the call's own prompts, keep the timings, and go on with the best."""
    first = replace(whole, rows=whole.slots)
    plans = first.alternatives
    shared = replace(first, drafters=(first.drafter,), open=False)
    on_activity(Compiling())
    begin = time.perf_counter()
    if can_precompile(shared):
        # The more nodes, the longer a round takes to compile, as a rule; a prefill is one pass.
        longest_first = sorted(plans, key=lambda plan: -plan.drafter.tree.num_nodes)
        rounds = chain.from_iterable(round_programs(plan, streams) for plan in longest_first)
        compile_side_by_side(chain(rounds, plan_programs(shared, streams, rounds=False)))
    compiled = time.perf_counter() - begin
    run = start(shared, batch, warm, streams=streams, rounds=False, on_activity=on_activity)
    begin, timings = time.perf_counter(), ()
    # A row that has ended with its first token shows nothing.
    if not any(row.done for row in run.rows):
        timings = _time_all(plans, run, on_activity)
        known.keep(key, timings)
    index = fastest([each.choice for each in plans], timings)
    plan = plans[index]
    on_activity(Tuned(*plan.choice, timings))
    seconds = compiled + run.compile_seconds + time.perf_counter() - begin
    if whole.waits:
        del run
        plan = whole.alternatives[index]
        run = start(plan, batch, warm, streams=streams, on_activity=on_activity)
        run.compile_seconds += seconds
        return run
    free = free_bytes()
    if free is None or free > plan.memory.needed_bytes:
        # Later calls begin with a prefill of the chosen drafter's own, and compile nothing either.
        # That takes a second cache: if the estimate of what is free was wrong, they do compile.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            seconds += warm.prepare(plan, streams)
    settled = run.branch(plan, own_cache=False)
    run.engine.close()
    settled.compile_seconds = seconds
    settled.engine.round_seconds = warm.round_seconds(plan)
    return settled


def _time_all(plans: Sequence[Plan], run: Run, on_activity: OnActivity) -> tuple[TreeTiming, ...]:
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
            timing = time_tree(run, plan, timings)
            if before is not None:
                timing = replace(before, seconds=min(before.seconds, timing.seconds))
            found[index] = timing
    return tuple(found.values())


def time_tree(run: Run, plan: Plan, timings: int) -> TreeTiming:
    """Time some rounds of a plan's drafter, as it will run them, behind another run's prefill.

    The fastest of the ``timings`` counts, the first round excluded. The rounds append to the
    run's own cache, of which nothing behind the committed tokens is ever read before it is written
    again: of many rows no second one would fit. All else is copied.
    """
    tokens = run.plan.room - 1
    # A timing ends with its last round read, unless every round is read while the next one runs.
    trial = run.branch(plan, own_cache=False, tokens=tokens)
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
    rejoin(run.engine, engine)
    total = seen[-1]
    # The first round may have to wait for the copy.
    seconds = min(part.seconds / part.rounds for part in parts[1:] or parts)
    return TreeTiming(*plan.choice, seconds, total.tokens / total.row_rounds, total.rounds)


def _can_be_timed(plan: Plan) -> bool:
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
