"""An engine tried out beside its requests: a rehearsal before them, and branches off their rows.

What is here reads and sets an engine's own state; the engine knows nothing of it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longspec_jax.decoding.compiling import compile_side_by_side
from longspec_jax.decoding.constrained import FREE, Anything, Constraint, constrained_programs
from longspec_jax.decoding.engine import Engine
from longspec_jax.decoding.policy import Choice
from longspec_jax.decoding.prefill import prefill_programs, rows_outline, slot_programs
from longspec_jax.decoding.round import one_round, slack_slots
from longspec_jax.decoding.rows import Request, release, stack
from longspec_jax.decoding.sampling import SamplingKind
from longspec_jax.drafters.base import Drafter, Params


def rehearse(
    engine: Engine, kind: SamplingKind, constraints: Mapping[int, Constraint] = FREE
) -> float:
    """Run a round of every candidate, so that no later one compiles.

    The engine is of no use afterwards, unless it is idle. On a mesh there are two: a launch's rows
    may be sharded otherwise than those of the prefill, so that the second round compiles, too.

    Args:
      engine: whose launches are compiled.
      kind: of the launches to come.
      constraints: of the launches to come, by slot.

    Returns:
      Seconds of the last candidate's last round, at most.
    """
    length, remaining = engine.rows.length, jnp.maximum(engine.rows.remaining, 1)
    begun = 0.0
    for candidate in range(len(engine.drafters)):
        # From the start again, so that no row outgrows its budget.
        fresh = {"length": jnp.copy(length), "remaining": jnp.copy(remaining)}
        engine._rows = replace(engine.rows, **fresh)
        for _ in range(1 if engine.target.mesh is None else 2):
            begun = engine.clock()
            engine._rows, report = engine._launch(Choice(candidate, 1), kind, constraints)
            np.asarray(report)
    return engine.clock() - begun


def programs_of_requests(
    engine: Engine, requests: Sequence[Request], *, constrained: bool
) -> Iterator[jax.stages.Lowered]:
    """Lower what takes longest to compile of all that requests may ask for, the slowest first.

    Arguments as of :func:`rehearse_requests`, on one device.
    """
    models = engine.target, engine.drafter, engine.params
    own = [engine.as_it_takes(request) for request in requests]
    slots = stack([own[-1]] * engine.slots)
    rows = rows_outline(*models, slots, batch=engine.slots, capacity=engine.capacity)
    for drafter in reversed(engine.drafters):
        round_of = engine.target, drafter, engine.params, rows
        if constrained:
            yield from constrained_programs(*round_of, engine.contents)
        for kind in sorted({request.sampling.kind for request in requests}, reverse=True):
            launched = engine.target, drafter, kind, engine.params, rows
            yield one_round.lower(*launched, engine.contents.of_kind(kind))
    prompts = engine.prompts
    sizes = {"capacity": engine.capacity, "chunks": (*prompts.short_chunks, prompts.chunk)}
    for logprobs in {None, engine.contents.logprobs}:
        first = stack([own[-1]])
        yield from prefill_programs(*models, first, batch=1, logprobs=logprobs, **sizes)
    if engine.slots > 1:
        yield from slot_programs(*models, slots, slots=engine.slots, capacity=engine.capacity)


def rehearse_requests(
    engine: Engine, requests: Sequence[Request], *, constrained: bool = False
) -> None:
    """Run requests through an idle engine, so that no later one compiles anything.

    Args:
      engine: an idle one, that goes on to serve.
      requests: of one row, one of every kind, of few new tokens; the last one asks for all that
        can be reported.
      constrained: whether requests may have a constraint.
    """
    if engine.target.mesh is None and engine.streams:
        programs = programs_of_requests(engine, requests, constrained=constrained)
        compile_side_by_side(programs)

    def pass_through(length: int, request: Request, constraint: Constraint | None = None) -> None:
        engine.submit(np.zeros(length, np.int32), request, constraint=constraint)
        while engine.busy:
            engine.step()

    for request in requests:
        pass_through(1, request)
        if constrained:
            pass_through(1, request, Anything())
    prompts, slack = engine.prompts, slack_slots(engine.drafter.tree.num_levels)
    most = engine.capacity - slack - int(requests[0].max_new_tokens[0])
    for chunk in (*prompts.short_chunks, prompts.chunk):
        for request in (requests[0], requests[-1]):
            pass_through(min(chunk, most), request)
    # The second one copies the first one's chunk out of its slot, and the third one moves it there.
    twice = min(prompts.chunk + 1, most)
    pass_through(twice, requests[0])
    pass_through(twice, requests[0])
    engine.prefixes.collect(wait=True)
    engine.prefixes.forget_slots()
    pass_through(twice, requests[0])
    # A vacated slot, as a request leaves it that is cancelled.
    engine._rows = release(engine.rows, 0)
    for request in requests:
        rehearse(engine, request.sampling.kind)
    if constrained:
        rehearse(engine, SamplingKind.ANY, {0: Anything()})
    engine._rows = release(engine.rows, 0)


def branch(
    engine: Engine,
    drafters: Sequence[Drafter],
    params: Params,
    draft: Any,
    *,
    own_cache: bool,
    tokens: int | None = None,
    **options: Any,
) -> Engine:
    """An engine whose rows go on from where another's are, with other drafters.

    Call it when all that was submitted is placed and read.

    Args:
      engine: the other one.
      drafters: its candidates.
      params: parameters of both models, as they take them.
      draft: their state behind the same tokens; copied.
      own_cache: whether the cache is copied. Else the other engine must not be stepped before
        :func:`rejoin`.
      tokens: most tokens that its rows emit, instead of what they may still emit.
      **options: of the constructor, instead of the other engine's.
    """
    own = {"streams": engine.streams, "ahead": engine.ahead, "clock": engine.clock, **options}
    other = Engine(
        *(engine.target, drafters, params),
        slots=engine.slots,
        capacity=engine.capacity,
        chunk=engine.prompts.chunk,
        short_chunks=engine.prompts.short_chunks,
        stop_width=engine.stop_width,
        adjusted=engine.adjusted,
        contents=engine.contents,
        **own,
    )
    shared = engine.rows.cache
    rows = jax.tree.map(
        lambda part: part if part is shared and not own_cache else jax.tree.map(jnp.copy, part),
        replace(engine.rows, draft=draft),
        is_leaf=lambda part: part is shared,
    )
    if tokens is not None:
        rows = replace(rows, remaining=jnp.full_like(rows.remaining, tokens))
    other._rows, other._next_id = rows, engine._next_id
    other._slots.copy_of(engine._slots, tokens)
    return other


def rejoin(engine: Engine, branch: Engine) -> None:
    """Take the cache back from a branch; what it appended is never read."""
    engine._rows = replace(engine.rows, cache=branch.rows.cache)
    branch.close()
