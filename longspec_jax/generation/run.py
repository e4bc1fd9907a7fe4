"""Run a prepared call on an engine, and time its phases apart.

A call whose rows all have a slot is prefilled as one batch and then decoded. In a call with more
rows than slots, prompts are prefilled between the rounds of the others.

The first call of a shape is preceded by a short run of the same shape: at most two prefill chunks
and one round of every tree. Whatever is compiled or loaded on first use is paid there and reported
as compile time, so that prefill and decode seconds mean the same in every call.
"""

import math
import time
from collections.abc import Callable, Generator, Mapping, Set
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from longspec_jax.decoding.compiling import compile_side_by_side
from longspec_jax.decoding.engine import Engine, StepOutput
from longspec_jax.decoding.programs import RECENT
from longspec_jax.drafters.base import NoDraft
from longspec_jax.generation.activity import Compiling, OnActivity, Prefilling
from longspec_jax.generation.call import Call
from longspec_jax.generation.result import Stats, TreeUse
from longspec_jax.ops.placement import tree_bytes


class WarmShapes:
    """The shapes whose programs this process holds, and how to compile one more."""

    def __init__(self) -> None:
        """Start with none."""
        self._programs: dict[Any, Set[Any]] = {}
        self._round_seconds: dict[Any, float] = {}
        self._lock = Lock()

    def prepare(self, call: Call, streams: bool = False, rounds: bool = True) -> float:
        """Make a short run if the call's shape is new; return its seconds, 0 if it is not.

        Args:
          call: the prepared call.
          streams: whether the run is followed round by round.
          rounds: whether it will be decoded at all, and not prefilled alone.
        """
        if self.knows(call, streams, rounds):
            return 0.0
        two = np.minimum(call.request.max_new_tokens, 2)
        short = replace(
            call,
            # Two chunks where there are two: on a mesh the second one's arrays may lie elsewhere.
            prompts=tuple(row[: 2 * call.shape.chunk] for row in call.prompts),
            request=replace(call.request, max_new_tokens=jnp.asarray(two)),
        )
        start, round_seconds = time.perf_counter(), math.nan
        with RECENT.noted() as used:
            if call.can_precompile:
                compile_side_by_side(short.programs(streams, rounds=rounds))
            with short.engine(streams=streams) as engine:
                while engine.busy if call.waits else engine.prefilling:
                    engine.step(decode=call.waits)
                if rounds and not call.waits:
                    round_seconds = engine.rehearse(call.request.sampling.kind)
        seconds = time.perf_counter() - start
        with self._lock:
            kept = {old: its for old, its in self._programs.items() if RECENT.keeps(its)}
            self._programs = {**kept, (streams, rounds, call.signature): used}
            # Of shapes whose programs were let go nothing is remembered.
            known = {signature for *_, signature in self._programs} & self._round_seconds.keys()
            self._round_seconds = {one: self._round_seconds[one] for one in known}
            if not math.isnan(round_seconds):
                self._round_seconds[call.signature] = round_seconds
        return seconds

    def round_seconds(self, call: Call) -> float:
        """Seconds of a round of such a call, as it last ran; NaN where none did."""
        return self._round_seconds.get(call.signature, math.nan)

    def learn(self, run: "Run") -> None:
        """Remember how long the rounds of a finished run took."""
        rounds = [total for total in run.engine.totals if total.rounds]
        if len(rounds) == len(run.call.drafters) == 1:
            with self._lock:
                self._round_seconds[run.call.signature] = rounds[0].seconds / rounds[0].rounds

    def knows(self, call: Call, streams: bool = False, rounds: bool = True) -> bool:
        """Whether everything the call will run is compiled; it is then the last to be evicted."""
        used = self._programs.get((streams, rounds, call.signature))
        return used is not None and RECENT.renew(used)


@dataclass
class Progress:
    """The tokens and counts of a call's rows so far, on the host."""

    tokens: list[list[int]]
    """Emitted tokens of every row."""
    drafted: list[list[bool]]
    """Whether each was an accepted draft token."""
    histogram: np.ndarray
    """``[rows, h]`` rounds by accepted draft tokens."""
    done: list[bool]

    @classmethod
    def of(cls, call: Call) -> "Progress":
        """Before the first token."""
        rows, height = len(call.prompts), call.drafter.tree.num_levels + 1
        texts, flags = [[] for _ in range(rows)], [[] for _ in range(rows)]
        return cls(texts, flags, np.zeros((rows, height), np.int64), [False] * rows)

    def copy(self, call: Call) -> "Progress":
        """The same tokens, for another call of the same rows."""
        new = Progress.of(call)
        new.tokens = [list(row) for row in self.tokens]
        new.drafted, new.done = [list(row) for row in self.drafted], list(self.done)
        return new

    def add(self, call: Call, output: StepOutput) -> None:
        """Take in the output of a step for a row.

        Raises:
          FloatingPointError: if the target's logits were not finite.
        """
        row = output.id
        self.tokens[row] += output.tokens.tolist()
        self.drafted[row] += output.drafted.tolist()
        for accepted in output.rounds:
            self.histogram[row, accepted] += 1
        self.done[row] = output.finish is not None
        if output.finish == "error":
            where = f"of row {row} " if len(self.tokens) > 1 else ""
            dtype = call.target.config.dtype
            remedy = "" if dtype == "float32" else "dtype float32, which has more range, or "
            raise FloatingPointError(
                f"the target's logits {where}behind "
                f"{len(call.prompts[row]) + len(self.tokens[row]) - 1} tokens are not finite, so "
                "that no token can be drawn: its weights or norms overflow "
                f"{dtype}; try {remedy}another checkpoint"
            )


@dataclass(eq=False)
class Run:
    """A call on its way."""

    call: Call
    engine: Engine
    progress: Progress
    compile_seconds: float = 0.0
    timing_key: Mapping[str, Any] | None = None
    """Of the kept timings that chose its tree; None where none did."""
    on_activity: OnActivity | None = field(default=None, repr=False)

    @property
    def stats(self) -> Stats:
        """The counts so far."""
        call, progress, engine = self.call, self.progress, self.engine
        return Stats(
            prompt_tokens=tuple(len(row) for row in call.prompts),
            new_tokens=tuple(map(len, progress.tokens)),
            target_passes=tuple(progress.histogram.sum(axis=1).tolist()),
            histograms=tuple(map(tuple, progress.histogram.tolist())),
            trees=tree_uses(engine),
            prefill_seconds=engine.seconds_of_prefill,
            decode_seconds=sum(total.seconds for total in engine.totals),
            compile_seconds=self.compile_seconds,
            draft_state_bytes=tree_bytes(engine.rows.draft),
            memory=call.memory,
            lossless=all(drafter.lossless for drafter in call.drafters),
        )

    def branch(self, call: Call, *, own_cache: bool, **options: Any) -> "Run":
        """The same rows behind their prefill, for another call that runs one of the drafters.

        Args:
          call: the other call.
          own_cache: as of :meth:`~longspec_jax.decoding.engine.Engine.branch`.
          **options: the same.
        """
        draft = self.call.state_of(call, self.engine.rows.draft)
        engine = self.engine.branch(
            *(call.drafters, call.params, draft), own_cache=own_cache, **options
        )
        return Run(call, engine, self.progress.copy(call), on_activity=self.on_activity)

    def prefill(self) -> "Run":
        """Run the prompts of a call whose rows all have a slot, to their first tokens."""
        total, told = max(map(len, self.call.prompts)), -1
        while self.engine.prefilling:
            if self.on_activity is not None and self.engine.prefilled > told:
                told = self.engine.prefilled
                self.on_activity(Prefilling(told, total))
            for output in self.engine.step(decode=False):
                self.progress.add(self.call, output)
        return self

    def rounds(self) -> Generator["Run", None, None]:
        """Decode to the end; yield itself behind the prefill and whenever rows gain tokens.

        The time that the consumer takes is not counted. Close the iterator to stop early.
        """
        engine, progress = self.engine, self.progress
        try:
            if any(progress.tokens):
                yield self
            while engine.busy:
                outputs = engine.step()
                for output in outputs:
                    progress.add(self.call, output)
                if outputs:
                    yield self
                elif self.on_activity is not None and not any(progress.tokens):
                    total = len(self.call.prompts[0])
                    self.on_activity(Prefilling(engine.prefilled, total))
        finally:
            engine.finish()


Begin: TypeAlias = Callable[[bool], Run]
"""``streams -> run``: makes a call ready to decode."""


def tree_uses(engine: Engine) -> tuple[TreeUse, ...]:
    """What every candidate of an engine has done so far; one without a tree decodes plainly."""
    return tuple(
        TreeUse(
            drafter.name if drafter.tree.widths else NoDraft().name,
            drafter.tree,
            total.rounds,
            total.tokens,
            total.seconds,
        )
        for drafter, total in zip(engine.drafters, engine.totals, strict=True)
    )


def start(
    call: Call,
    warm: WarmShapes,
    *,
    streams: bool,
    rounds: bool = True,
    ahead: bool | None = None,
    on_activity: OnActivity | None = None,
) -> Run:
    """Compile what is new and, where every row has a slot, run the prompts.

    Args:
      call: the prepared call.
      warm: the shapes compiled so far.
      streams: whether the run is followed round by round.
      rounds: whether it will be decoded at all, and not prefilled alone.
      ahead: as of :meth:`Call.engine`.
      on_activity: called with compilation and prefill.
    """
    if on_activity and not warm.knows(call, streams, rounds):
        on_activity(Compiling())
    compiled = warm.prepare(call, streams, rounds)
    engine = call.engine(streams=streams, ahead=ahead)
    engine.round_seconds = warm.round_seconds(call)
    run = Run(call, engine, Progress.of(call), compiled, on_activity=on_activity)
    return run if call.waits else run.prefill()
