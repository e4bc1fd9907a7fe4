"""Run a planned call on an engine, time its phases apart, and collect what it says.

A call whose rows all have a slot is prefilled, as one batch or row after row, and then decoded. In
a call with more rows than slots, prompts are prefilled between the rounds of the others.
"""

import math
from collections import Counter
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from longspec_jax.decoding.engine import Engine
from longspec_jax.decoding.logprobs import TokenLogprob
from longspec_jax.decoding.report import RoundTree
from longspec_jax.decoding.warmup import RoundTimes
from longspec_jax.drafters.base import proposers
from longspec_jax.generation.activity import Activity, OnActivity, Prefilling, Tuned
from longspec_jax.generation.call import CallPlan
from longspec_jax.generation.inputs import Batch
from longspec_jax.generation.result import (
    ROUNDS,
    GenerateResult,
    Notices,
    OnRound,
    Stats,
    StreamRound,
    TreeUse,
)
from longspec_jax.generation.speeds import KnownSpeeds, Settled, settle
from longspec_jax.generation.text import Piece, RequestOutput, TextEngine, continuation
from longspec_jax.generation.warm import WarmShapes


class CallCache(NamedTuple):
    """What a loaded model's earlier calls have shown; kept up by every call."""

    warm: WarmShapes
    speeds: KnownSpeeds
    notices: Notices


@dataclass
class RowOutput:
    """What a row has emitted so far, on the host."""

    histogram: list[int]
    """Rounds by accepted draft tokens."""
    tokens: list[int] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)
    """Whether each token was an accepted draft token."""
    pieces: list[Piece] = field(default_factory=list)
    """The text that became complete."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """Of every token, where they are reported."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    trees: list[RoundTree] = field(default_factory=list)
    """Of every round, where they are reported."""
    done: bool = False

    def since(self, tokens: int, pieces: int) -> tuple[tuple[Any, ...], ...]:
        """Tokens, drafted, pieces and log-probabilities after the first ones."""
        by_token = self.tokens[tokens:], self.drafted[tokens:]
        return *map(tuple, by_token), tuple(self.pieces[pieces:]), tuple(self.logprobs[tokens:])

    def add(self, output: RequestOutput) -> None:
        """Take in what the row has gained."""
        self.pieces += output.pieces
        self.tokens += output.tokens
        self.drafted += output.drafted
        self.logprobs += output.logprobs
        self.trees += output.trees
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = tuple(output.prompt_logprobs)
        for accepted in output.rounds:
            self.histogram[accepted] += 1
        self.done = output.finish is not None


@dataclass(eq=False, repr=False)
class Run(TextEngine):
    """A call on its way: its rows are the requests of an engine, by the same numbers."""

    plan: CallPlan
    batch: Batch
    known: CallCache
    streams: bool
    """Whether text is read as tokens come; else after the last one."""
    on_activity: OnActivity
    compile_seconds: float
    times: RoundTimes
    """Of a round of every candidate, as far as they are known."""
    kind: str | None = None
    """The kind of call that its speeds are kept by; None where they are not kept."""
    rows: list[RowOutput] = field(init=False)
    accepted: Counter[int] = field(default_factory=Counter, init=False)
    """Accepted draft tokens of all rows by who proposed them, as bits."""
    begun: bool = field(default=False, init=False)
    """Whether a row has a token."""

    def __post_init__(self) -> None:
        """Begin without a token."""
        known, levels = self.times.seconds, self.plan.drafter.tree.num_levels
        self.engine.round_seconds = known[0] if len(known) == 1 else math.nan
        self.rows = [RowOutput([0] * (levels + 1)) for _ in self.batch.prompts]

    @property
    def stats(self) -> Stats:
        """The counts so far."""
        engine, sources = self.engine, self.plan.drafter.sources
        new_tokens, passes, histograms = [], [], []
        for row in self.rows:
            new_tokens.append(len(row.tokens))
            passes.append(sum(row.histogram))
            histograms.append(tuple(row.histogram))
        trees, seconds = tree_uses(engine), 0.0
        for tree in trees:
            seconds += tree.seconds
        accepted = {proposers(sources, bits): count for bits, count in self.accepted.items()}
        return Stats(
            prompt_tokens=tuple(map(len, self.batch.prompts)),
            new_tokens=tuple(new_tokens),
            target_passes=tuple(passes),
            histograms=tuple(histograms),
            trees=trees,
            prefill_seconds=engine.seconds_of_prefill,
            decode_seconds=seconds,
            compile_seconds=self.compile_seconds,
            draft_state_bytes=engine.draft_bytes,
            memory=self.plan.memory,
            accepted_by_source=accepted,
            lossless=self.plan.lossless,
        )

    def plainly(self) -> "Run":
        """The same rows, prefilled as they are, without a draft; each a copy."""
        plan = self.plan.without_draft
        compiled, times = self.known.warm.prepare(plan, self.streams, self.on_activity)
        engine = self.engine.fork(plan.drafters, plan.params, ())
        engine.seconds_of_prefill = self.engine.seconds_of_prefill
        run = replace(
            self, engine=engine, plan=plan, compile_seconds=compiled, times=times, kind=None
        )
        run.begun = self.begun
        for index, (row, own) in enumerate(zip(self.rows, run.rows, strict=True)):
            own.tokens, own.drafted = list(row.tokens), list(row.drafted)
            own.logprobs, own.prompt_logprobs = list(row.logprobs), row.prompt_logprobs
            own.done = row.done
            text = self.batch.text(index) if self.streams else None
            if text is not None:
                own.pieces += text.add(row.tokens, row.drafted, row.done).pieces
                run.read(index, text)
        return run

    def advance(self, *, decode: bool = True) -> bool:
        """Take a step, and take in what rows have gained.

        Args:
          decode: whether rounds are launched, not only prompts.

        Returns:
          Whether a row has gained anything.

        Raises:
          FloatingPointError: if the target's logits were not finite.
          RuntimeError: if what a row has gained cannot be read.
        """
        outputs = self.step(decode=decode)
        for output in outputs:
            if output.reason is not None:
                raise RuntimeError(f"row {output.id} cannot go on: {output.reason}")
            if output.finish == "error":
                raise self._not_finite(output)
            self.rows[output.id].add(output)
            self.accepted.update(filter(None, output.sources))
            self.begun = True
        return bool(outputs)

    def _not_finite(self, output: RequestOutput) -> FloatingPointError:
        """What says where a row's logits were not finite."""
        where = f"of row {output.id} " if len(self.rows) > 1 else ""
        before = len(self.rows[output.id].tokens) + len(output.tokens) - 1
        tokens = len(self.batch.prompts[output.id]) + before
        dtype = self.plan.target.config.dtype
        remedy = "" if dtype == "float32" else "dtype float32, which has more range, or "
        return FloatingPointError(
            f"the target's logits {where}after {tokens} tokens are not finite, so that no "
            f"token can be drawn: its weights or norms overflow {dtype}; try {remedy}another "
            "checkpoint"
        )

    def prefill(self) -> "Run":
        """Run the prompts of a call whose rows all have a slot, to their first tokens."""
        engine, told, lengths = self.engine, -1, list(map(len, self.batch.prompts))
        total = max(lengths) if self.plan.together else sum(lengths)
        while engine.prefilling:
            if engine.prefilled > told:
                told = engine.prefilled
                self.on_activity(Prefilling(told, total))
            self.advance(decode=False)
        return self

    def rounds(self) -> Generator["Run", None, None]:
        """Decode to the end; yield itself after the prefill and whenever rows gain tokens.

        The time that the consumer takes is not counted. Close the iterator to stop early.
        """
        engine = self.engine
        try:
            if self.begun:
                yield self
            while engine.busy:
                if self.advance():
                    yield self
                elif not self.begun:
                    self.on_activity(Prefilling(engine.prefilled, len(self.batch.prompts[0])))
        finally:
            engine.finish()


def start(
    plan: CallPlan,
    batch: Batch,
    known: CallCache,
    *,
    streams: bool,
    on_activity: OnActivity | None,
    rounds: bool = True,
    fixed: bool = False,
) -> Run:
    """Make a call ready: compile what is new and, where every row has a slot, run the prompts.

    Args:
      streams: whether the run is followed round by round.
      on_activity: called with everything that takes time, and with what it begins with.
      rounds: whether it will be decoded at all, and not only prefilled.
      fixed: whether it runs one tree to its end, whatever it names.
    """
    tell, settled = on_activity or _nobody, Settled(plan)
    if plan.open:
        settled = settle(plan, known.speeds, streams=streams, identical=plan.identical, fixed=fixed)
        first = settled.plan.drafters[settled.first]
        tell(Tuned(first.label, first.tree, settled.timings))
    plan = ready = settled.plan
    compiled, times = known.warm.prepare(plan, streams, tell, rounds=rounds)
    policy = None
    if len(plan.drafters) > 1:
        policy, ready = settled.policy(times), settled.weighing(times)
    engine = ready.engine(streams, policy)
    run = Run(engine, plan, batch, known, streams, tell, compiled, times, settled.kind)
    for row, prompt in enumerate(batch.prompts):
        engine.submit(prompt, batch.request if plan.rows == 1 else batch.request.row(row))
        if streams:
            run.read(row, batch.text(row))
    return run if plan.waits else run.prefill()


def _nobody(activity: Activity) -> None:
    """Do nothing: the caller listens to no activities."""


def reads_rounds(batch: Batch, on_round: OnRound | None) -> bool:
    """Whether every round of a call is read while the next one runs.

    It is where someone listens, and where a stop string may end a row at any round: of a launch of
    many rounds, all after the stop string would be lost time.
    """
    return on_round is not None or bool(batch.stop_strings)


def tree_uses(engine: Engine) -> tuple[TreeUse, ...]:
    """What every candidate of an engine has done so far; one without a tree decodes plainly."""
    return tuple(
        TreeUse(drafter.label, drafter.tree, total.rounds, total.tokens, total.seconds)
        for drafter, total in zip(engine.runner.drafters, engine.totals, strict=True)
    )


def learn(run: Run, stats: Stats) -> None:
    """Remember what a finished run has shown of its candidates; ``stats`` are its counts."""
    known, totals = run.known, run.engine.totals
    if sum(total.rounds for total in totals) >= ROUNDS:
        known.notices.look_at(stats)
    if run.kind is not None and not run.plan.waits:
        known.speeds.learn(run.kind, run.plan.drafters, totals, run.times)
        known.notices.look_at_speeds(known.speeds.find(run.kind))
    if len(totals) == 1 and totals[0].rounds:
        known.warm.learn(run.plan, totals[0].seconds / totals[0].rounds)


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
    sequences, texts, drafted, logprobs, of_prompts, trees = [], [], [], [], [], []
    for index, row in enumerate(run.rows):
        sequences.append(tuple(row.tokens))
        texts.append(_text(run, index))
        drafted.append(tuple(row.drafted))
        logprobs.append(tuple(row.logprobs))
        of_prompts.append(row.prompt_logprobs)
        trees.append(tuple(row.trees))
    result = GenerateResult(
        tuple(sequences),
        tuple(texts),
        tuple(drafted),
        run.stats,
        logprobs=tuple(logprobs),
        prompt_logprobs=tuple(of_prompts),
        trees=tuple(trees),
    )
    learn(run, result.stats)
    return result


def _text(run: Run, index: int) -> str | None:
    """The whole text of a row that has ended; None without a tokenizer."""
    row, batch = run.rows[index], run.batch
    if batch.tokenizer is None:
        return None
    if run.streams:
        return "".join(piece.text for piece in row.pieces)
    return continuation(batch.tokenizer, batch.prompts[index].tolist(), row.tokens)


def added_rounds(run: Run) -> Generator[StreamRound, None, None]:
    """Decode to the end, and yield what every round adds; close the generator to stop early."""
    begins = [(0, 0)] * len(run.rows)
    with closing(run.rounds()) as rounds:
        for _ in rounds:
            fresh = [row.since(*begin) for row, begin in zip(run.rows, begins, strict=True)]
            begins = [(len(row.tokens), len(row.pieces)) for row in run.rows]
            tokens, drafted, pieces, logprobs = zip(*fresh, strict=True)
            yield StreamRound(tokens, drafted, pieces, run.stats, logprobs=logprobs)
