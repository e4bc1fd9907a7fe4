"""Run a planned call on an engine, time its phases apart, and collect what it says.

A call whose rows all have a slot is prefilled, as one batch or row after row, and then decoded. In
a call with more rows than slots, prompts are prefilled between the rounds of the others.
"""

from collections import Counter
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from longspec_jax.decoding.batch_invariant import is_identical
from longspec_jax.decoding.engine import Engine
from longspec_jax.decoding.logprobs import TokenLogprob
from longspec_jax.decoding.report import RoundTree
from longspec_jax.drafters.base import NoDraft, proposers
from longspec_jax.generation.activity import Activity, OnActivity, Prefilling, Tuned
from longspec_jax.generation.call import Plan
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
from longspec_jax.generation.warm import WarmShapes, plan_engine


class Known(NamedTuple):
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
    sources: list[int] = field(default_factory=list)
    """Who proposed each, as bits."""
    pieces: list[Piece] = field(default_factory=list)
    """The text that became complete."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """Of every token, where they are reported."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    trees: list[RoundTree] = field(default_factory=list)
    """Of every round, where they are reported."""
    done: bool = False

    def since(self, tokens: int, pieces: int) -> tuple[tuple[Any, ...], ...]:
        """Tokens, drafted, pieces and log-probabilities behind the first ones."""
        by_token = self.tokens[tokens:], self.drafted[tokens:]
        return *map(tuple, by_token), tuple(self.pieces[pieces:]), tuple(self.logprobs[tokens:])

    def add(self, output: RequestOutput) -> None:
        """Take in what the row has gained."""
        self.pieces += output.pieces
        self.tokens += output.tokens
        self.drafted += output.drafted
        self.sources += output.sources
        self.logprobs += output.logprobs
        self.trees += output.trees
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
    requests: TextEngine
    rows: list[RowOutput]
    known: Known
    on_activity: OnActivity = field(repr=False)
    compile_seconds: float = 0.0
    kind: str | None = None
    """The kind of call, of which its speeds are remembered; None where they are not."""

    reads_text: bool = False
    """Whether text is read as tokens come; else behind the last one."""

    @property
    def engine(self) -> Engine:
        """What decodes its rows."""
        return self.requests.engine

    @property
    def stats(self) -> Stats:
        """The counts so far."""
        rows, engine, sources = self.rows, self.engine, self.plan.drafter.sources
        accepted = Counter(bits for row in rows for bits in row.sources if bits)
        return Stats(
            prompt_tokens=tuple(map(len, self.batch.prompts)),
            new_tokens=tuple(len(row.tokens) for row in rows),
            target_passes=tuple(sum(row.histogram) for row in rows),
            histograms=tuple(tuple(row.histogram) for row in rows),
            trees=tree_uses(engine),
            prefill_seconds=engine.seconds_of_prefill,
            decode_seconds=sum(total.seconds for total in engine.totals),
            compile_seconds=self.compile_seconds,
            draft_state_bytes=engine.draft_bytes,
            memory=self.plan.memory,
            accepted_by_source={proposers(sources, bits): n for bits, n in accepted.items()},
            lossless=self.plan.lossless,
        )

    def plainly(self, compile_seconds: float) -> "Run":
        """The same rows, prefilled as they are, without a draft; each a copy.

        Args:
          compile_seconds: that it took to make its programs.
        """
        plan = self.plan.without_draft()
        engine = self.engine.fork(plan.drafters, plan.params, ())
        engine.seconds_of_prefill = self.engine.seconds_of_prefill
        engine.round_seconds = self.known.warm.round_seconds(plan)
        rows = [
            RowOutput(
                _no_rounds(plan),
                tokens=list(row.tokens),
                drafted=list(row.drafted),
                logprobs=list(row.logprobs),
                prompt_logprobs=row.prompt_logprobs,
                done=row.done,
            )
            for row in self.rows
        ]
        requests = TextEngine(engine)
        for index, row in enumerate(rows):
            text = self.batch.text(index) if self.reads_text else None
            if text is not None:
                row.pieces += text.add(row.tokens, row.drafted, row.done).pieces
                requests.read(index, text)
        return Run(
            plan,
            self.batch,
            requests,
            rows,
            self.known,
            self.on_activity,
            compile_seconds,
            reads_text=self.reads_text,
        )

    def _add(self, output: RequestOutput) -> None:
        """Take in what a row has gained.

        Raises:
          FloatingPointError: if the target's logits were not finite.
          RuntimeError: if what the row has gained cannot be read.
        """
        row = self.rows[output.id]
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

    def prefill(self) -> "Run":
        """Run the prompts of a call whose rows all have a slot, to their first tokens."""
        engine, told, lengths = self.engine, -1, list(map(len, self.batch.prompts))
        total = max(lengths) if self.plan.together else sum(lengths)
        while engine.prefilling:
            if engine.prefilled > told:
                told = engine.prefilled
                self.on_activity(Prefilling(told, total))
            for output in self.requests.step(decode=False):
                self._add(output)
        return self

    def rounds(self) -> Generator["Run", None, None]:
        """Decode to the end; yield itself behind the prefill and whenever rows gain tokens.

        The time that the consumer takes is not counted. Close the iterator to stop early.
        """
        engine, begun = self.engine, any(row.tokens for row in self.rows)
        try:
            if begun:
                yield self
            while engine.busy:
                outputs = self.requests.step()
                for output in outputs:
                    self._add(output)
                if outputs:
                    begun = True
                    yield self
                elif not begun:
                    self.on_activity(Prefilling(engine.prefilled, len(self.batch.prompts[0])))
        finally:
            engine.finish()


def _no_rounds(plan: Plan) -> list[int]:
    return [0] * (plan.drafter.tree.num_levels + 1)


def start(
    plan: Plan,
    batch: Batch,
    known: Known,
    *,
    streams: bool,
    on_activity: OnActivity | None,
    rounds: bool = True,
    fixed: bool = False,
) -> Run:
    """Make a call ready to decode.

    Args:
      streams: whether the run is followed round by round.
      on_activity: called with everything that takes time, and with what it begins with.
      rounds: whether it will be decoded at all, and not prefilled alone.
      fixed: whether it runs one tree to its end, whatever it names.
    """
    tell = on_activity or _nobody
    settled = Settled(plan)
    if plan.open:
        identical = is_identical(plan.target) and plan.lossless
        settled = settle(plan, known.speeds, streams=streams, identical=identical, fixed=fixed)
        first = settled.plan.drafters[settled.first]
        name = first.name if first.tree.num_levels else NoDraft().name
        tell(Tuned(name, first.tree, settled.timings))
    return prefilled(settled, batch, known, streams=streams, on_activity=tell, rounds=rounds)


def _nobody(activity: Activity) -> None:
    """Do nothing: the caller listens to no activities."""


def prefilled(
    settled: Settled,
    batch: Batch,
    known: Known,
    *,
    streams: bool,
    on_activity: OnActivity,
    rounds: bool = True,
) -> Run:
    """Compile what is new and, where every row has a slot, run the prompts.

    Arguments as of :func:`start`.
    """
    plan = settled.plan
    compiled = known.warm.prepare(plan, streams, on_activity, rounds=rounds)
    policy, ready = None, plan
    if len(plan.drafters) > 1:
        times = known.warm.times(plan)
        policy, ready = settled.policy(times), settled.weighing(times)
    engine = plan_engine(ready, streams=streams, policy=policy)
    engine.round_seconds = known.warm.round_seconds(plan)
    requests, rows = TextEngine(engine), list[RowOutput]()
    for row in range(plan.rows):  # The rows' numbers are those of the requests.
        request = batch.request if plan.rows == 1 else batch.request.row(row)
        engine.submit(batch.prompts[row], request)
        if streams:
            requests.read(row, batch.text(row))
        rows.append(RowOutput(_no_rounds(plan)))
    run = Run(
        plan,
        batch,
        requests,
        rows,
        known,
        on_activity,
        compiled,
        settled.kind,
        reads_text=streams,
    )
    return run if plan.waits else run.prefill()


def reads_rounds(batch: Batch, on_round: OnRound | None) -> bool:
    """Whether every round of a call is read while the next one runs.

    It is where someone listens, and where a stop string may end a row at any round: of a launch of
    many rounds, all behind the stop string would be lost time.
    """
    return on_round is not None or bool(batch.stop_strings)


def tree_uses(engine: Engine) -> tuple[TreeUse, ...]:
    """What every candidate of an engine has done so far; one without a tree decodes plainly."""
    return tuple(
        TreeUse(
            drafter.name if drafter.tree.num_levels else NoDraft().name,
            drafter.tree,
            total.rounds,
            total.tokens,
            total.seconds,
        )
        for drafter, total in zip(engine.runner.drafters, engine.totals, strict=True)
    )


def learn(run: Run, stats: Stats) -> None:
    """Remember what a finished run has shown of its candidates; ``stats`` are its counts."""
    known, totals = run.known, run.engine.totals
    if sum(total.rounds for total in totals) >= ROUNDS:
        known.notices.look_at(stats)
    if run.kind is not None and not run.plan.waits:
        known.speeds.learn(run.kind, run.plan.drafters, totals, known.warm.times(run.plan))
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
    texts = (_text(run, index) for index in range(len(run.rows)))
    result = GenerateResult(
        tuple(tuple(row.tokens) for row in run.rows),
        tuple(texts),
        tuple(tuple(row.drafted) for row in run.rows),
        run.stats,
        logprobs=tuple(tuple(row.logprobs) for row in run.rows),
        prompt_logprobs=tuple(row.prompt_logprobs for row in run.rows),
        trees=tuple(tuple(row.trees) for row in run.rows),
    )
    learn(run, result.stats)
    return result


def _text(run: Run, index: int) -> str | None:
    """The whole text of a row that has ended; None without a tokenizer."""
    row, batch = run.rows[index], run.batch
    if batch.tokenizer is None:
        return None
    if run.reads_text:
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
