"""Run a planned call on an engine, time its phases apart, and collect what it says.

A call whose rows all have a slot is prefilled, as one batch or row after row, and then decoded. In
a call with more rows than slots, prompts are prefilled between the rounds of the others.

Before the first call of a shape comes a rehearsal: one prefill chunk and a round of every tree, two
of each on a mesh. Whatever is compiled or loaded on first use is paid there and reported as compile
time, so that prefill and decode seconds mean the same in every call.
"""

import math
import time
from collections.abc import Generator, Iterator, Mapping, Set
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from threading import Lock
from typing import Any

import jax
import numpy as np

from longspec_jax.decoding import trials
from longspec_jax.decoding.engine import Engine
from longspec_jax.decoding.logprobs import TokenLogprob
from longspec_jax.decoding.prefill import prefill_programs, rows_outline, slot_programs
from longspec_jax.decoding.programs import RECENT, compile_side_by_side
from longspec_jax.decoding.round import many_rounds, one_round
from longspec_jax.decoding.slots import StepOutput
from longspec_jax.drafters.base import NoDraft
from longspec_jax.generation.activity import Compiling, OnActivity, Prefilling, Slower
from longspec_jax.generation.call import Plan
from longspec_jax.generation.inputs import Batch
from longspec_jax.generation.result import GenerateResult, OnRound, Stats, StreamRound, TreeUse
from longspec_jax.generation.stops import until
from longspec_jax.generation.text import Piece, RowText, continuation
from longspec_jax.generation.timings import KnownTimings
from longspec_jax.ops.placement import tree_bytes


def plan_engine(plan: Plan, *, streams: bool) -> Engine:
    """An engine for the rows of a plan; of a stream, if the run is followed round by round."""
    streams = streams or plan.waits
    return Engine(
        *(plan.target, plan.drafters, plan.params),
        slots=plan.slots,
        capacity=plan.shape.capacity,
        chunk=plan.shape.chunk,
        short_chunks=plan.shape.short_chunks,
        stop_width=plan.stop_width,
        adjusted=plan.adjusted,
        contents=plan.contents,
        streams=streams,
        together=plan.together,
        # A run that nobody follows decides on the next tree by the last rounds.
        ahead=streams or len(plan.drafters) == 1,
    )


def can_precompile(plan: Plan) -> bool:
    """Whether all shapes and shardings are known before an array is made."""
    return plan.target.mesh is None and not plan.target.offload and not plan.waits


def plan_programs(plan: Plan, streams: bool, *, rounds: bool) -> Iterator[jax.stages.Lowered]:
    """Lower everything a plan runs, the slowest to compile first; see :func:`can_precompile`."""
    models, request = (plan.target, plan.drafter, plan.params), plan.empty_request
    batch, capacity, slots = plan.rows, plan.shape.capacity, ()
    if batch > 1 and not plan.together:
        slots = slot_programs(*models, request, slots=batch, capacity=capacity)
        batch, request = 1, request.row(0)
    logprobs = plan.contents.logprobs if plan.scored else None
    prompts = prefill_programs(
        *(*models, request),
        batch=batch,
        capacity=capacity,
        chunks=plan.chunks,
        logprobs=logprobs,
    )
    return chain(round_programs(plan, streams) if rounds else (), prompts, slots)


def round_programs(plan: Plan, streams: bool) -> Iterator[jax.stages.Lowered]:
    """Lower the launches of rounds alone."""
    models, request = (plan.target, plan.drafter, plan.params), plan.empty_request
    rows = rows_outline(*models, request, batch=plan.rows, capacity=plan.shape.capacity)
    for drafter in plan.drafters:
        args = plan.target, drafter, plan.kind, plan.params, rows
        contents = plan.contents.of_kind(plan.kind)
        launch = (one_round, args) if streams else (many_rounds, (*args, np.int32(1)))
        yield launch[0].lower(*launch[1], contents)


def rehearse(plan: Plan, streams: bool, rounds: bool) -> float:
    """Compile everything that a plan runs, and run a little of it; arguments as of :func:`start`.

    Returns:
      Seconds of a round; NaN where none ran alone.
    """
    if can_precompile(plan):
        compile_side_by_side(plan_programs(plan, streams, rounds=rounds))
    with plan_engine(plan, streams=streams) as engine:
        for row, length in enumerate(_rehearsed_lengths(plan)):
            engine.submit(np.zeros(length, np.int32), plan.empty_request.row(row))
        while engine.busy if plan.waits else engine.prefilling:
            engine.step(decode=plan.waits)
        return trials.rehearse(engine, plan.kind) if rounds and not plan.waits else math.nan


def _rehearsed_lengths(plan: Plan) -> list[int]:
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

        Arguments as of :func:`start`.
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

    def learn(self, plan: Plan, round_seconds: float) -> None:
        """Remember how long the rounds of a finished run took."""
        with self._lock:
            self._round_seconds[plan.signature] = round_seconds


@dataclass
class RowOutput:
    """What a row has emitted so far, on the host."""

    histogram: list[int]
    """Rounds by accepted draft tokens."""
    text: RowText | None = None
    """Reads the tokens as they come; None where their text is read behind the last one."""
    tokens: list[int] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)
    """Whether each token was an accepted draft token."""
    pieces: list[Piece] = field(default_factory=list)
    """The text that became complete."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """Of every token, where they are reported."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    done: bool = False

    def read_with(self, text: RowText | None) -> None:
        """Have the tokens read as they come, and those that there are."""
        self.text = text
        if text is not None:
            self.pieces += text.add(self.tokens, self.drafted, self.done).pieces

    def add(self, output: StepOutput) -> None:
        """Take in what the row has gained, up to its first stop string."""
        tokens, drafted = output.tokens.tolist(), output.drafted.tolist()
        if self.text is not None:
            kept, pieces = self.text.add(tokens, drafted, output.finish is not None)
            self.pieces += pieces
            if self.text.stopped:
                output = until(output, kept)
                tokens, drafted = tokens[:kept], drafted[:kept]
        self.tokens += tokens
        self.drafted += drafted
        self.logprobs += output.logprobs[: len(tokens)]
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        for accepted in output.rounds:
            self.histogram[accepted] += 1
        self.done = output.finish is not None


@dataclass(eq=False)
class Run:
    """A call on its way."""

    plan: Plan
    batch: Batch
    engine: Engine
    rows: list[RowOutput]
    compile_seconds: float = 0.0
    timing_key: Mapping[str, Any] | None = None
    """Of the kept timings that chose its tree; None where none did."""
    on_activity: OnActivity | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Watch for stop strings from the first token on."""
        if self.batch.stop_strings:
            self.read_text()

    def read_text(self) -> None:
        """Have the text of every row read as its tokens come."""
        for index, row in enumerate(self.rows):
            if row.text is None:
                row.read_with(self.batch.text(index))

    @property
    def stats(self) -> Stats:
        """The counts so far."""
        rows, engine = self.rows, self.engine
        return Stats(
            prompt_tokens=tuple(map(len, self.batch.prompts)),
            new_tokens=tuple(len(row.tokens) for row in rows),
            target_passes=tuple(sum(row.histogram) for row in rows),
            histograms=tuple(tuple(row.histogram) for row in rows),
            trees=tree_uses(engine),
            prefill_seconds=engine.seconds_of_prefill,
            decode_seconds=sum(total.seconds for total in engine.totals),
            compile_seconds=self.compile_seconds,
            draft_state_bytes=tree_bytes(engine.rows.draft),
            memory=self.plan.memory,
            lossless=all(drafter.lossless for drafter in self.plan.drafters),
        )

    def branch(self, plan: Plan, *, own_cache: bool, **options: Any) -> "Run":
        """The same rows behind their prefill, with one of the plan's alternatives.

        The other arguments are those of :func:`longspec_jax.decoding.trials.branch`.
        """
        draft = self.plan.state_of(plan, self.engine.rows.draft)
        engine = trials.branch(
            *(self.engine, plan.drafters, plan.params, draft), own_cache=own_cache, **options
        )
        engine.seconds_of_prefill = self.engine.seconds_of_prefill
        rows = [
            RowOutput(
                *(_no_rounds(plan), None, list(row.tokens), list(row.drafted)),
                logprobs=list(row.logprobs),
                prompt_logprobs=row.prompt_logprobs,
                done=row.done,
            )
            for row in self.rows
        ]
        return Run(plan, self.batch, engine, rows, on_activity=self.on_activity)

    def _add(self, output: StepOutput) -> None:
        """Take in what a row has gained.

        Raises:
          FloatingPointError: if the target's logits were not finite.
        """
        row = self.rows[output.id]
        if row.done:
            return  # A stop string has ended it, and this was launched before.
        if output.finish == "error":
            where = f"of row {output.id} " if len(self.rows) > 1 else ""
            before = len(row.tokens) + len(output.tokens) - 1
            tokens = len(self.batch.prompts[output.id]) + before
            dtype = self.plan.target.config.dtype
            remedy = "" if dtype == "float32" else "dtype float32, which has more range, or "
            raise FloatingPointError(
                f"the target's logits {where}behind {tokens} tokens are not finite, so that no "
                f"token can be drawn: its weights or norms overflow {dtype}; try {remedy}another "
                "checkpoint"
            )
        row.add(output)
        if row.done and output.finish is None:
            self.engine.cancel(output.id)

    def prefill(self) -> "Run":
        """Run the prompts of a call whose rows all have a slot, to their first tokens."""
        told, total = -1, self.plan.longest
        if not self.plan.together:
            total = sum(map(len, self.batch.prompts[: self.plan.rows]))
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
        engine = self.engine
        try:
            if any(row.tokens for row in self.rows):
                yield self
            while engine.busy:
                outputs = engine.step()
                for output in outputs:
                    self._add(output)
                if outputs:
                    yield self
                elif self.on_activity is not None and not any(row.tokens for row in self.rows):
                    total = len(self.batch.prompts[0])
                    self.on_activity(Prefilling(engine.prefilled, total))
        finally:
            engine.finish()


def _no_rounds(plan: Plan) -> list[int]:
    return [0] * (plan.drafter.tree.num_levels + 1)


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
    rows = [RowOutput(_no_rounds(plan)) for _ in range(plan.rows)]
    run = Run(plan, batch, engine, rows, compiled, on_activity=on_activity)
    return run if plan.waits else run.prefill()


def reads_rounds(batch: Batch, on_round: OnRound | None) -> bool:
    """Whether every round of a call is read while the next one runs.

    It is where someone listens, and where a stop string may end a row at any round: of a launch of
    many rounds, all behind the stop string would be lost time.
    """
    return on_round is not None or bool(batch.stop_strings)


def learn(run: Run, warm: WarmShapes, known: KnownTimings) -> None:
    """Correct what is known by a finished run of one drafter, and report one that was slower."""
    seen = run.engine.totals[0]
    if len(run.plan.drafters) > 1 or not seen.rounds:
        return
    warm.learn(run.plan, seen.seconds / seen.rounds)
    if run.timing_key is not None and not run.plan.waits:
        speed = known.correct(run.timing_key, *run.plan.choice, seen)
        if speed is not None and run.on_activity is not None:
            run.on_activity(Slower(*run.plan.choice, speed))


def follow(run: Run, on_round: OnRound | None = None) -> GenerateResult:
    """Run to the end; ``on_round`` is called with what every round adds.

    Without a tokenizer there is no text.
    """
    if on_round is None:
        for _ in run.rounds():
            pass
    else:
        with closing(added_rounds(run)) as rounds:
            for added in rounds:
                on_round(added)
    sequences = tuple(tuple(row.tokens) for row in run.rows)
    drafted = tuple(tuple(row.drafted) for row in run.rows)
    texts = tuple(_text(run, index) for index in range(len(run.rows)))
    return GenerateResult(
        *(sequences, texts, drafted, run.stats),
        logprobs=tuple(tuple(row.logprobs) for row in run.rows),
        prompt_logprobs=tuple(row.prompt_logprobs for row in run.rows),
    )


def _text(run: Run, index: int) -> str | None:
    """The whole text of a row that has ended; None without a tokenizer."""
    row, batch = run.rows[index], run.batch
    if batch.tokenizer is None:
        return None
    if row.text is not None:
        return "".join(piece.text for piece in row.pieces)
    return continuation(batch.tokenizer, batch.prompts[index].tolist(), row.tokens)


def added_rounds(run: Run) -> Generator[StreamRound, None, None]:
    """Decode to the end, and yield what every round adds; close the generator to stop early."""
    run.read_text()
    seen = [(0, 0)] * len(run.rows)
    with closing(run.rounds()) as rounds:
        for _ in rounds:
            tokens, drafted, pieces, logprobs = [], [], [], []
            for index, row in enumerate(run.rows):
                new, new_pieces = (slice(begin, None) for begin in seen[index])
                tokens.append(tuple(row.tokens[new]))
                drafted.append(tuple(row.drafted[new]))
                pieces.append(tuple(row.pieces[new_pieces]))
                logprobs.append(tuple(row.logprobs[new]))
                seen[index] = len(row.tokens), len(row.pieces)
            yield StreamRound(
                *(tuple(tokens), tuple(drafted), tuple(pieces), run.stats),
                logprobs=tuple(logprobs),
            )
