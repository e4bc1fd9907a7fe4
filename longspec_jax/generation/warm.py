"""The programs of a plan: compiled side by side, tried out once, and remembered by their shape.

Before the first call of a shape comes a rehearsal: one prefill chunk and a round of every tree, two
of each on a mesh. Whatever is compiled or loaded on first use is paid there and reported as compile
time, so that prefill and decode seconds mean the same in every call.
"""

import math
import time
from collections.abc import Set
from dataclasses import replace
from threading import Lock
from typing import Any

import numpy as np

from longspec_jax.decoding import warmup
from longspec_jax.decoding.chooser import Choice
from longspec_jax.decoding.jit_cache import PROGRAMS, compile_side_by_side
from longspec_jax.decoding.round import weighs_trees
from longspec_jax.decoding.warmup import RoundTimes
from longspec_jax.generation.activity import Compiling, OnActivity
from longspec_jax.generation.call import CallPlan


def can_precompile(plan: CallPlan) -> bool:
    """Whether all shapes and shardings are known before an array is made."""
    return plan.target.mesh is None and not plan.target.offload and not plan.waits


def rehearse(plan: CallPlan, streams: bool, rounds: bool) -> RoundTimes:
    """Compile everything that a plan runs, and run a little of it.

    Arguments as in :meth:`WarmShapes.prepare`.

    Returns:
      What a round of every candidate takes, at the context of the longest prompt.
    """
    with plan.engine(streams) as engine:
        request = plan.empty_request
        if can_precompile(plan):
            compile_side_by_side(
                warmup.programs(
                    engine,
                    [request],
                    chunks=plan.chunks,
                    prompt_logprobs=[plan.contents.logprobs if plan.scored else None],
                    rounds=rounds,
                )
            )
        for length in _rehearsed_lengths(plan):
            engine.submit(np.zeros(length, np.int32), request)
        while engine.busy if plan.waits else engine.prefilling:
            engine.step(decode=plan.waits)
        if not rounds:
            return RoundTimes()
        alone = warmup.rehearse(engine, plan.kind)
        if len(plan.drafters) == 1:
            return RoundTimes((alone,))
        at = plan.slots, plan.longest, plan.kind
        times = warmup.round_times(engine, *at)
        if plan.params.costs is None:
            return times
        engine.runner = replace(engine.runner, params=plan.weighing(tree=math.inf).params)
        return times._replace(
            unverified=tuple(
                warmup.launch_seconds(engine, Choice(index, 1), *at) - times.wait
                if weighs_trees(drafter, plan.params)
                else times.seconds[index]
                for index, drafter in enumerate(plan.drafters)
            )
        )


def _rehearsed_lengths(plan: CallPlan) -> list[int]:
    """Tokens of the prompts of a rehearsal; all chunk sizes, if they are not compiled before it."""
    if plan.shape.alone:
        lengths = [min(chunk, plan.longest) for chunk in plan.chunks[: plan.rows]]
        return lengths + lengths[:1] * (plan.rows - len(lengths))
    # On a mesh the second chunk's arrays may lie elsewhere.
    length = 1 if can_precompile(plan) else min(1 + plan.shape.chunk, plan.longest)
    return [length] * plan.rows


class WarmShapes:
    """The shapes whose programs this process holds, and the seconds of their rounds."""

    def __init__(self) -> None:
        """Start with none."""
        self._programs: dict[Any, Set[Any]] = {}
        self._times: dict[Any, RoundTimes] = {}
        self._lock = Lock()

    def prepare(
        self, plan: CallPlan, streams: bool, on_activity: OnActivity, *, rounds: bool = True
    ) -> tuple[float, RoundTimes]:
        """Make a short run if the plan's shape is new.

        Args:
          rounds: whether it is decoded at all, and not only prefilled.

        Returns:
          The seconds of the short run, 0 without one, and what a round of every candidate takes.
        """
        signature = plan.signature
        used = self._programs.get((streams, rounds, signature))
        if used is not None and PROGRAMS.renew(used):
            return 0.0, self._times.get(signature, RoundTimes())
        on_activity(Compiling())
        start = time.perf_counter()
        plan.runners.clear()  # What they found before is not noted again.
        with PROGRAMS.noted() as used:
            times = rehearse(plan, streams, rounds)
        seconds = time.perf_counter() - start
        with self._lock:
            kept = {old: its for old, its in self._programs.items() if PROGRAMS.keeps(its)}
            self._programs = {**kept, (streams, rounds, signature): used}
            # Of shapes whose programs were let go nothing is remembered.
            known = {signature for *_, signature in self._programs} & self._times.keys()
            self._times = {one: self._times[one] for one in known}
            if times.seconds:
                self._times[signature] = times
            return seconds, self._times.get(signature, RoundTimes())

    def learn(self, plan: CallPlan, round_seconds: float) -> None:
        """Remember how long the rounds of a finished run took."""
        with self._lock:
            self._times[plan.signature] = RoundTimes((round_seconds,))
