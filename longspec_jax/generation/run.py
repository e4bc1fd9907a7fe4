"""Run a prepared call on an engine, time its phases apart, and collect what it says.

A call whose rows all have a slot is prefilled as one batch and then decoded. In a call with more
rows than slots, prompts are prefilled between the rounds of the others.
"""

import math
import time
from collections.abc import Generator, Mapping, Set
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any

import numpy as np

from longspec_jax.decoding.engine import Engine, StepOutput
from longspec_jax.decoding.programs import RECENT
from longspec_jax.drafters.base import NoDraft
from longspec_jax.generation.activity import Compiling, OnActivity, Prefilling
from longspec_jax.generation.batch import Batch
from longspec_jax.generation.call import Plan
from longspec_jax.generation.engines import plan_engine, rehearse
from longspec_jax.generation.result import GenerateResult, OnRound, Stats, StreamRound, TreeUse
from longspec_jax.generation.text import Detokenizer, continuation
from longspec_jax.ops.placement import tree_bytes


class WarmShapes:
    """The shapes whose programs this process holds, and the seconds of their rounds."""

    def __init__(self) -> None:
        """Start with none."""
        self._programs: dict[Any, Set[Any]] = {}
        self._round_seconds: dict[Any, float] = {}
        self._lock = Lock()

    def prepare(
        self,
        plan: Plan,
        streams: bool = False,
        rounds: bool = True,
        on_activity: OnActivity | None = None,
    ) -> float:
        """Make a short run if the plan's shape is new; return its seconds, 0 if it is not.

        Args:
          plan: of the call.
          streams: whether the run is followed round by round.
          rounds: whether it will be decoded at all, and not prefilled alone.
          on_activity: called if there is something to compile.
        """
        signature, rehearsal = plan.signature, partial(rehearse, plan, streams, rounds)
        used = self._programs.get((streams, rounds, signature))
        if used is not None and RECENT.renew(used):
            return 0.0
        if on_activity is not None:
            on_activity(Compiling())
        start = time.perf_counter()
        with RECENT.noted() as used:
            round_seconds = rehearsal()
        seconds = time.perf_counter() - start
        with self._lock:
            kept = {old: its for old, its in self._programs.items() if RECENT.keeps(its)}
            self._programs = {**kept, (streams, rounds, signature): used}
            # Of shapes whose programs were let go nothing is remembered.
            known = {signature for *_, signature in self._programs} & self._round_seconds.keys()
            self._round_seconds = {one: self._round_seconds[one] for one in known}
            if not math.isnan(round_seconds):
                self._round_seconds[signature] = round_seconds
        return seconds

    def round_seconds(self, plan: Plan) -> float:
        """Seconds of a round of such a call, as it last ran; NaN where none did."""
        return self._round_seconds.get(plan.signature, math.nan)

    def learn(self, run: "Run") -> None:
        """Remember how long the rounds of a finished run took, if it ran one tree."""
        rounds = [total for total in run.engine.totals if total.rounds]
        if len(rounds) == len(run.plan.drafters) == 1:
            with self._lock:
                self._round_seconds[run.plan.signature] = rounds[0].seconds / rounds[0].rounds


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
    def of(cls, plan: Plan) -> "Progress":
        """Before the first token."""
        rows, height = plan.rows, plan.drafter.tree.num_levels + 1
        texts, flags = [[] for _ in range(rows)], [[] for _ in range(rows)]
        return cls(texts, flags, np.zeros((rows, height), np.int64), [False] * rows)

    def copy(self, plan: Plan) -> "Progress":
        """The same tokens, for another plan of the same rows."""
        new = Progress.of(plan)
        new.tokens = [list(row) for row in self.tokens]
        new.drafted, new.done = [list(row) for row in self.drafted], list(self.done)
        return new

    def add(self, output: StepOutput, prompt_tokens: int, dtype: str) -> None:
        """Take in the output of a step for a row.

        Args:
          output: of the row.
          prompt_tokens: of the row, for the error's words.
          dtype: of the target, for the same.

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
            remedy = "" if dtype == "float32" else "dtype float32, which has more range, or "
            raise FloatingPointError(
                f"the target's logits {where}behind "
                f"{prompt_tokens + len(self.tokens[row]) - 1} tokens are not finite, so "
                "that no token can be drawn: its weights or norms overflow "
                f"{dtype}; try {remedy}another checkpoint"
            )


@dataclass(eq=False)
class Run:
    """A call on its way."""

    plan: Plan
    batch: Batch
    engine: Engine
    progress: Progress
    compile_seconds: float = 0.0
    timing_key: Mapping[str, Any] | None = None
    """Of the kept timings that chose its tree; None where none did."""
    on_activity: OnActivity | None = field(default=None, repr=False)

    @property
    def stats(self) -> Stats:
        """The counts so far."""
        progress, engine = self.progress, self.engine
        return Stats(
            prompt_tokens=tuple(map(len, self.batch.prompts)),
            new_tokens=tuple(map(len, progress.tokens)),
            target_passes=tuple(progress.histogram.sum(axis=1).tolist()),
            histograms=tuple(map(tuple, progress.histogram.tolist())),
            trees=tree_uses(engine),
            prefill_seconds=engine.seconds_of_prefill,
            decode_seconds=sum(total.seconds for total in engine.totals),
            compile_seconds=self.compile_seconds,
            draft_state_bytes=tree_bytes(engine.rows.draft),
            memory=self.plan.memory,
            lossless=all(drafter.lossless for drafter in self.plan.drafters),
        )

    def branch(self, plan: Plan, *, own_cache: bool, **options: Any) -> "Run":
        """The same rows behind their prefill, with one of the drafters alone.

        Args:
          plan: one of the :meth:`~longspec_jax.generation.call.Plan.alternatives`.
          own_cache: as of :meth:`~longspec_jax.decoding.engine.Engine.branch`.
          **options: the same.
        """
        draft = self.plan.state_of(plan, self.engine.rows.draft)
        engine = self.engine.branch(
            *(plan.drafters, plan.params, draft), own_cache=own_cache, **options
        )
        engine.seconds_of_prefill = self.engine.seconds_of_prefill
        progress = self.progress.copy(plan)
        return Run(plan, self.batch, engine, progress, on_activity=self.on_activity)

    def _add(self, output: StepOutput) -> None:
        prompt, dtype = self.batch.prompts[output.id], self.plan.target.config.dtype
        self.progress.add(output, len(prompt), dtype)

    def prefill(self) -> "Run":
        """Run the prompts of a call whose rows all have a slot, to their first tokens."""
        total, told = self.plan.longest, -1
        while self.engine.prefilling:
            if self.on_activity is not None and self.engine.prefilled > told:
                told = self.engine.prefilled
                self.on_activity(Prefilling(told, total))
            for output in self.engine.step(decode=False):
                self._add(output)
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
                    self._add(output)
                if outputs:
                    yield self
                elif self.on_activity is not None and not any(progress.tokens):
                    total = len(self.batch.prompts[0])
                    self.on_activity(Prefilling(engine.prefilled, total))
        finally:
            engine.finish()


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
    plan: Plan,
    batch: Batch,
    warm: WarmShapes,
    *,
    streams: bool,
    rounds: bool = True,
    on_activity: OnActivity | None = None,
) -> Run:
    """Compile what is new and, where every row has a slot, run the prompts.

    Args:
      plan: of the call.
      batch: its rows; of more than the plan's the first.
      warm: the shapes compiled so far.
      streams: whether the run is followed round by round.
      rounds: whether it will be decoded at all, and not prefilled alone.
      on_activity: called with compilation and prefill.
    """
    compiled = warm.prepare(plan, streams, rounds, on_activity)
    engine = plan_engine(plan, streams=streams)
    engine.round_seconds = warm.round_seconds(plan)
    for row in range(plan.rows):  # The rows' numbers are those of the requests.
        engine.submit(batch.prompts[row], batch.request.row(row))
    run = Run(plan, batch, engine, Progress.of(plan), compiled, on_activity=on_activity)
    return run if plan.waits else run.prefill()


def follow(run: Run, tokenizer: Any, on_round: OnRound | None = None) -> GenerateResult:
    """Run to the end.

    Args:
      run: ready to decode.
      tokenizer: a transformers tokenizer, or None for no text.
      on_round: called with what every round adds.
    """
    if on_round is None:
        for _ in run.rounds():
            pass
    else:
        with closing(added_rounds(run, tokenizer)) as rounds:
            for added in rounds:
                on_round(added)
    progress = run.progress
    text = [
        None if tokenizer is None else continuation(tokenizer, prompt.tolist(), tokens)
        for prompt, tokens in zip(run.batch.prompts, progress.tokens, strict=True)
    ]
    sequences, drafted = tuple(map(tuple, progress.tokens)), tuple(map(tuple, progress.drafted))
    return GenerateResult(sequences, tuple(text), drafted, run.stats)


def added_rounds(run: Run, tokenizer: Any) -> Generator[StreamRound, None, None]:
    """Decode to the end, and yield what every round adds; close the generator to stop early.

    Args:
      run: ready to decode.
      tokenizer: a transformers tokenizer, or None for no text.
    """
    progress = run.progress
    texts = [
        None if tokenizer is None else Detokenizer(tokenizer, prompt.tolist())
        for prompt in run.batch.prompts
    ]
    seen, ended = [0] * len(texts), [False] * len(texts)
    with closing(run.rounds()) as rounds:
        for _ in rounds:
            tokens, drafted, pieces = [], [], []
            for row, text in enumerate(texts):
                tokens.append(tuple(progress.tokens[row][seen[row] :]))
                drafted.append(tuple(progress.drafted[row][seen[row] :]))
                ending = progress.done[row] and not ended[row]
                said = () if text is None else text.pieces(tokens[row], drafted[row], ending)
                pieces.append(said)
            seen, ended = list(map(len, progress.tokens)), list(progress.done)
            yield StreamRound(tuple(tokens), tuple(drafted), tuple(pieces), run.stats)
