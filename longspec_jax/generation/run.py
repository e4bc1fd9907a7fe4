"""Run a planned call on an engine, time its phases apart, and collect what it says.

A call whose rows all have a slot is prefilled, as one batch or row after row, and then decoded. In
a call with more rows than slots, prompts are prefilled between the rounds of the others.
"""

import contextlib
import time
from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax

from longspec_jax.decoding import trials
from longspec_jax.decoding.engine import Engine
from longspec_jax.decoding.logprobs import TokenLogprob
from longspec_jax.decoding.slots import StepOutput
from longspec_jax.drafters.base import NoDraft
from longspec_jax.generation.activity import Compiling, OnActivity, Prefilling, Slower, Tuned
from longspec_jax.generation.autotune import (
    KnownTimings,
    fastest,
    time_trees,
    timing_key,
    worth_timing,
)
from longspec_jax.generation.call import Plan
from longspec_jax.generation.inputs import Batch
from longspec_jax.generation.memory import free_bytes
from longspec_jax.generation.result import (
    GenerateResult,
    Notices,
    OnRound,
    Stats,
    StreamRound,
    TreeUse,
)
from longspec_jax.generation.text import Piece, RowText, continuation
from longspec_jax.generation.warm import WarmShapes, compile_trials, plan_engine
from longspec_jax.ops.placement import tree_bytes


class Known(NamedTuple):
    """What a loaded model's earlier calls have shown; kept up by every call."""

    warm: WarmShapes
    timings: KnownTimings
    notices: Notices


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

    def since(self, tokens: int, pieces: int) -> tuple[tuple[Any, ...], ...]:
        """Tokens, drafted, pieces and log-probabilities behind the first ones."""
        by_token = self.tokens[tokens:], self.drafted[tokens:]
        return *map(tuple, by_token), tuple(self.pieces[pieces:]), tuple(self.logprobs[tokens:])

    def add(self, output: StepOutput) -> None:
        """Take in what the row has gained, up to its first stop string."""
        if self.text is not None:
            output, pieces = self.text.take(output)
            self.pieces += pieces
        self.tokens += output.tokens
        self.drafted += output.drafted
        self.logprobs += output.logprobs
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = tuple(output.prompt_logprobs)
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
    known: Known
    on_activity: OnActivity = field(repr=False)
    compile_seconds: float = 0.0
    timing_key: Mapping[str, Any] | None = None
    """Of the kept timings that chose its tree; None where none did."""

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
        engine.round_seconds = self.known.warm.round_seconds(plan)
        rows = [
            RowOutput(
                *(_no_rounds(plan), None, list(row.tokens), list(row.drafted)),
                logprobs=list(row.logprobs),
                prompt_logprobs=row.prompt_logprobs,
                done=row.done,
            )
            for row in self.rows
        ]
        return Run(plan, self.batch, engine, rows, self.known, self.on_activity)

    def _add(self, output: StepOutput) -> None:
        """Take in what a row has gained.

        Raises:
          FloatingPointError: if the target's logits were not finite.
          RuntimeError: if what the row has gained cannot be read.
        """
        row = self.rows[output.id]
        if row.done:
            return  # A stop string has ended it, and this was launched before.
        if output.reason is not None:
            raise RuntimeError(f"row {output.id} cannot go on: {output.reason}")
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
            if self.engine.prefilled > told:
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
                elif not any(row.tokens for row in self.rows):
                    self.on_activity(Prefilling(engine.prefilled, len(self.batch.prompts[0])))
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
    known: Known,
    *,
    streams: bool,
    on_activity: OnActivity | None,
    rounds: bool = True,
) -> Run:
    """Make a call ready to decode, an open plan with its fastest drafter.

    Args:
      streams: whether the run is followed round by round.
      on_activity: called with everything that takes time, and with the choice of a tree.
      rounds: whether it will be decoded at all, and not prefilled alone.
    """
    tell = known.notices.heard(on_activity)
    key, timings, choices = None, (), [each.choice for each in plan.alternatives]
    if plan.open and len(plan.drafters) > 1:
        key = timing_key(plan, streams)
        timings = known.timings.find(key, choices) or ()
        if not timings and worth_timing(plan):
            return _start_after_timing(plan, batch, known, key, streams, tell)
    if plan.open:
        plan = plan.alternatives[fastest(choices, timings)]
        tell(Tuned(*plan.choice, timings))
    run = prefilled(plan, batch, known, streams=streams, on_activity=tell, rounds=rounds)
    run.timing_key = key if timings else None
    return run


def prefilled(
    plan: Plan,
    batch: Batch,
    known: Known,
    *,
    streams: bool,
    on_activity: OnActivity,
    rounds: bool = True,
) -> Run:
    """Compile what is new and, where every row has a slot, run the prompts.

    Arguments as of :func:`start`. The plan is not open; of a batch of more rows the first are its
    own.
    """
    compiled = known.warm.prepare(plan, streams, on_activity, rounds=rounds)
    engine = plan_engine(plan, streams=streams)
    engine.round_seconds = known.warm.round_seconds(plan)
    for row in range(plan.rows):  # The rows' numbers are those of the requests.
        engine.submit(batch.prompts[row], batch.request.row(row))
    rows = [RowOutput(_no_rounds(plan)) for _ in range(plan.rows)]
    run = Run(plan, batch, engine, rows, known, on_activity, compiled)
    return run if plan.waits else run.prefill()


def _start_after_timing(
    whole: Plan,
    batch: Batch,
    known: Known,
    key: Mapping[str, Any],
    streams: bool,
    on_activity: OnActivity,
) -> Run:
    """Time all trees behind the call's own prompts, keep the timings, and go on with the best."""
    first = replace(whole, rows=whole.slots)
    plans, shared = first.alternatives, replace(first, drafters=(first.drafter,), open=False)
    on_activity(Compiling())
    seconds = compile_trials(shared, plans, streams)
    how: Any = {"streams": streams, "on_activity": on_activity}
    run = prefilled(shared, batch, known, **how, rounds=False)
    begin, timings = time.perf_counter(), ()
    # A row that has ended with its first token shows nothing.
    if not any(row.done for row in run.rows):
        timings = time_trees(run.engine, shared, plans, on_activity)
        known.timings.keep(key, timings)
    index = fastest([each.choice for each in plans], timings)
    plan = plans[index]
    on_activity(Tuned(*plan.choice, timings))
    seconds += run.compile_seconds + time.perf_counter() - begin
    if whole.waits:
        plan = whole.alternatives[index]
        del run
        run = prefilled(plan, batch, known, **how)
        run.compile_seconds, run.timing_key = run.compile_seconds + seconds, key
        return run
    free = free_bytes()
    if free is None or free > plan.memory.needed_bytes:
        # Later calls begin with a prefill of the chosen drafter's own, and compile nothing either.
        # That takes a second cache: if the estimate of what is free was wrong, they do compile.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            seconds += known.warm.prepare(plan, streams, lambda activity: None)
    settled = run.branch(plan, own_cache=False)
    run.engine.close()
    settled.compile_seconds, settled.timing_key = seconds, key
    return settled


def reads_rounds(batch: Batch, on_round: OnRound | None) -> bool:
    """Whether every round of a call is read while the next one runs.

    It is where someone listens, and where a stop string may end a row at any round: of a launch of
    many rounds, all behind the stop string would be lost time.
    """
    return on_round is not None or bool(batch.stop_strings)


def learn(run: Run) -> None:
    """Correct what is known by a finished run, and report one that was slower."""
    known, seen = run.known, run.engine.totals[0]
    known.notices.look_at(run.stats)
    if len(run.plan.drafters) > 1 or not seen.rounds:
        return
    known.warm.learn(run.plan, seen.seconds / seen.rounds)
    if run.timing_key is not None and not run.plan.waits:
        speed = known.timings.correct(run.timing_key, *run.plan.choice, seen)
        if speed is not None:
            run.on_activity(Slower(*run.plan.choice, speed))


def follow(run: Run, on_round: OnRound | None = None) -> GenerateResult:
    """Run to the end and learn of it; ``on_round`` is called with what every round adds.

    Without a tokenizer there is no text.
    """
    if on_round is None:
        for _ in run.rounds():
            pass
    else:
        with closing(added_rounds(run)) as rounds:
            for added in rounds:
                on_round(added)
    texts = (_text(run, index) for index in range(len(run.rows)))
    result = GenerateResult(
        tuple(tuple(row.tokens) for row in run.rows),
        tuple(texts),
        tuple(tuple(row.drafted) for row in run.rows),
        run.stats,
        logprobs=tuple(tuple(row.logprobs) for row in run.rows),
        prompt_logprobs=tuple(row.prompt_logprobs for row in run.rows),
    )
    learn(run)
    return result


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
    begins = [(0, 0)] * len(run.rows)
    with closing(run.rounds()) as rounds:
        for _ in rounds:
            fresh = [row.since(*begin) for row, begin in zip(run.rows, begins, strict=True)]
            begins = [(len(row.tokens), len(row.pieces)) for row in run.rows]
            tokens, drafted, pieces, logprobs = zip(*fresh, strict=True)
            yield StreamRound(tokens, drafted, pieces, run.stats, logprobs=logprobs)
