"""The engine of a plan, its programs, and the short run that comes before the first of a shape.

The short run takes one prefill chunk and a round of every tree, two of each on a mesh. Whatever is
compiled or loaded on first use is paid there and reported as compile time, so that prefill and
decode seconds mean the same in every call.
"""

import math
from collections.abc import Iterator
from itertools import chain

import jax
import numpy as np

from longspec_jax.decoding.compiling import compile_side_by_side
from longspec_jax.decoding.engine import Engine
from longspec_jax.decoding.prefill import prefill_programs, rows_outline
from longspec_jax.decoding.round import many_rounds, one_round
from longspec_jax.generation.call import Plan


def plan_engine(plan: Plan, *, streams: bool) -> Engine:
    """An engine for the rows of a call.

    Args:
      plan: of the call.
      streams: whether the run is followed round by round.
    """
    streams = streams or plan.waits
    return Engine(
        *(plan.target, plan.drafters, plan.params),
        slots=plan.slots,
        capacity=plan.shape.capacity,
        chunk=plan.shape.chunk,
        stop_width=plan.stop_width,
        streams=streams,
        together=not plan.waits,
        # A run that nobody follows decides on the next tree by the last rounds.
        ahead=streams or len(plan.drafters) == 1,
    )


def can_precompile(plan: Plan) -> bool:
    """Whether all shapes and shardings are known before an array is made."""
    return plan.target.mesh is None and not plan.target.offload and not plan.waits


def plan_programs(plan: Plan, streams: bool, *, rounds: bool) -> Iterator[jax.stages.Lowered]:
    """Lower everything a call runs, the slowest to compile first; see :func:`can_precompile`.

    Args:
      plan: of the call.
      streams: whether the run is followed round by round.
      rounds: whether rounds run at all, and not the prefill alone.
    """
    models, request = (plan.target, plan.drafter, plan.params), plan.empty_request
    sizes = {"batch": plan.rows, "capacity": plan.shape.capacity}
    prompts = prefill_programs(*models, request, chunk=plan.shape.chunk, **sizes)
    return chain(round_programs(plan, streams) if rounds else (), prompts)


def round_programs(plan: Plan, streams: bool) -> Iterator[jax.stages.Lowered]:
    """Lower the launches of rounds alone."""
    models, request = (plan.target, plan.drafter, plan.params), plan.empty_request
    rows = rows_outline(*models, request, batch=plan.rows, capacity=plan.shape.capacity)
    for drafter in plan.drafters:
        args = plan.target, drafter, plan.kind, plan.params, rows
        yield one_round.lower(*args) if streams else many_rounds.lower(*args, np.int32(1))


def rehearse(plan: Plan, streams: bool, rounds: bool) -> float:
    """Compile everything that a call runs, and run a little of it.

    Args:
      plan: of the call.
      streams: whether the run is followed round by round.
      rounds: whether rounds run at all, and not the prefill alone.

    Returns:
      Seconds of a round; NaN where none ran alone.
    """
    if can_precompile(plan):
        compile_side_by_side(plan_programs(plan, streams, rounds=rounds))
    # On a mesh the second chunk's arrays may lie elsewhere.
    length = 1 if can_precompile(plan) else min(1 + plan.shape.chunk, plan.longest)
    with plan_engine(plan, streams=streams) as engine:
        for row in range(plan.rows):
            engine.submit(np.zeros(length, np.int32), plan.empty_request.row(row))
        while engine.busy if plan.waits else engine.prefilling:
            engine.step(decode=plan.waits)
        return engine.rehearse(plan.kind) if rounds and not plan.waits else math.nan
