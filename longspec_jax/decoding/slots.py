"""Who holds which slot of an engine, how far each request is, and what a scheduler gets of it."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from longspec_jax.decoding.constrained import Guarded
from longspec_jax.decoding.logprobs import TokenLogprob, unpacked_logprobs
from longspec_jax.decoding.prefixes import Names, PrefixCache
from longspec_jax.decoding.prompts import Prefill, Waiting
from longspec_jax.decoding.report import Report, RoundTree
from longspec_jax.decoding.sampling import NO_TOKEN


@dataclass(frozen=True)
class StepOutput:
    """What a request has gained: its first token from the prefill, or the tokens of a launch."""

    id: int
    """The request's, as :meth:`~longspec_jax.decoding.engine.Engine.submit` returned it."""
    tokens: tuple[int, ...]
    """At least one, but where the request ends with ``error``."""
    drafted: tuple[bool, ...]
    """Whether each token was an accepted draft token."""
    rounds: tuple[int, ...]
    """Accepted draft tokens of every round that the request took part in; none of the prefill."""
    finish: str | None = None
    """None while the request runs. ``stop`` after a stop token, ``length`` at the budget, ``error``
    where it cannot go on."""
    reason: str | None = None
    """Of an ``error``: what failed in this request only, such as its grammar. None where the
    target's logits were not finite, so that the last token is no token."""
    cached_tokens: int = 0
    """Of the first output: tokens of the prompt that were not prefilled anew."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """Of every token; empty if the request does not ask."""
    prompt_logprobs: Sequence[TokenLogprob | None] | None = None
    """Of the first output: of every token of the prompt but the first one, which has none. None if
    the request does not ask. Read it in the thread that needs it: a long prompt's take seconds."""
    trees: tuple[RoundTree, ...] = ()
    """Of every round, where the engine reports them."""
    sources: tuple[int, ...] = ()
    """Who proposed each token, as bits: bit ``i`` for entry ``i`` of
    :attr:`longspec_jax.drafters.base.Drafter.sources`. 0 for a token that is not an accepted draft
    token."""


def until(
    output: StepOutput, kept: int, finish: str = "stop", reason: str | None = None
) -> StepOutput:
    """The first tokens of a step output, with which its request ends.

    A round that is cut short counts the draft tokens that are left, and rounds after it are gone.
    """
    rounds, begin = [], 0
    for accepted in output.rounds:
        if begin >= kept:
            break
        rounds.append(min(accepted, kept - begin))
        begin += accepted + 1
    return replace(
        output,
        tokens=output.tokens[:kept],
        drafted=output.drafted[:kept],
        sources=output.sources[:kept],
        rounds=tuple(rounds),
        logprobs=output.logprobs[:kept],
        trees=output.trees[: len(rounds)],
        finish=finish,
        reason=reason,
    )


@dataclass(frozen=True)
class EngineStatus:
    """What an engine does now, and has done."""

    running: int
    """Requests that hold a slot."""
    waiting: int
    """Requests in the queue."""
    prefilling: int
    """Requests whose prompts are under way, or wait for a slot."""
    tokens: int
    """Of the running requests, prompt and text, as far as they were read."""
    capacity: int
    """Tokens that all slots hold."""
    prefix_queries: int
    """Tokens of all prompts since the start."""
    prefix_hits: int
    """How many of them were not prefilled anew."""
    host_bytes: int
    """Of chunks in the host's memory."""
    preemptions: int
    """Requests that lost a slot, or a place among the prefills, to a better one."""
    recoveries: int
    """Faults after which the engine went on."""


@dataclass
class Active:
    """A request that holds a slot, or was prefilled with one."""

    waiting: Waiting
    """What was prefilled."""
    left: int
    """Tokens that it may still emit after its first, by what was read."""
    cached: int = 0
    """Tokens of its prompt that were not prefilled, until that was reported."""
    tokens: list[int] = field(default_factory=list)
    """What it has emitted since, as far as it was read."""

    @property
    def length(self) -> int:
        """Tokens of its prompt and its text, as far as they were read."""
        return len(self.waiting.tokens) + len(self.tokens)

    def again(self) -> Waiting:
        """The request, to be prefilled after all that it has emitted."""
        if not self.tokens:
            return self.waiting
        was, fresh = self.waiting, np.asarray(self.tokens, np.int32)
        request = replace(was.request, max_new_tokens=was.request.max_new_tokens - len(fresh))
        tokens = np.concatenate([was.tokens, fresh])
        return was._replace(
            tokens=tokens,
            request=request,
            emitted=was.emitted + len(fresh),
            prompt_alternatives=-1,
        )


class Slots:
    """The slots as the host sees them; the rows on the device are the engine's."""

    def __init__(self, count: int, prefixes: PrefixCache | None = None) -> None:
        """Begin with vacant slots.

        Args:
          count: how many there are.
          prefixes: records which prompts' chunks a slot holds, where they are reused.
        """
        self.held: list[int | None] = [None] * count
        """The request in every slot."""
        self.active: dict[int, Active] = {}
        """The requests in slots, by their numbers."""
        self.constraints: dict[int, Guarded] = {}
        """What the requests of some slots may emit, by slot."""
        self._prefixes, self._next = prefixes, 0
        """Where the search for a vacant slot begins: the first requests take the slots in order."""

    @property
    def by_age(self) -> list[int]:
        """The requests that hold a slot, the one that came last last."""
        return sorted(self.active)

    @property
    def priorities(self) -> list[int]:
        """Priorities of the requests, in the order of ``by_age``."""
        return [self.active[id].waiting.priority for id in self.by_age]

    def of_launch(self, sizes: Sequence[int]) -> list[int]:
        """The slots of a launch: the live ones, and vacant ones up to the least size that fits.

        Args:
          sizes: rows of a launch, ascending; the last one is all slots.
        """
        size = sizes[bisect.bisect_left(sizes, len(self.held) - self.held.count(None))]
        if size == len(self.held):
            return [*range(size)]
        by_need = sorted(range(len(self.held)), key=lambda slot: self.held[slot] is None)
        return sorted(by_need[:size])

    def vacant(self, names: Names) -> int:
        """A vacant slot for a prompt of these chunks: the next one in turn with nothing to lose."""
        count = len(self.held)
        turn = (*range(self._next, count), *range(self._next))
        vacant = [slot for slot in turn if self.held[slot] is None]
        slot = vacant[0]
        if self._prefixes is not None:
            slot = self._prefixes.slots.to_overwrite(vacant, names)
        self._next = (slot + 1) % count
        return slot

    def put(self, slot: int, prefill: Prefill) -> None:
        """Give the slots from this one on to the requests of a prefill."""
        if self._prefixes is not None:
            self._prefixes.slots.put(slot, prefill.waiting[0].names)
        for index, one in enumerate(prefill.waiting, slot):
            self.held[index] = one.id
            left = int(one.request.max_new_tokens[0]) - 1
            self.active[one.id] = Active(one, left, 0 if one.emitted else prefill.cached)
            if one.constraint is not None:
                self.constraints[index] = one.constraint

    def vacate(self, slot: int) -> None:
        """Take a slot from its request, if one holds it; its prompt's chunks stay."""
        if (id := self.held[slot]) is not None:
            del self.active[id]
        self.held[slot] = None
        self.constraints.pop(slot, None)

    def clear(self) -> None:
        """Take all slots from their requests."""
        for slot in range(len(self.held)):
            self.vacate(slot)

    def copy_of(self, other: "Slots") -> None:
        """Hold what the slots of another engine do, which has as many."""
        self.held, self.constraints = list(other.held), dict(other.constraints)
        self.active = {
            id: replace(active, tokens=list(active.tokens)) for id, active in other.active.items()
        }

    def first(self, first: np.ndarray, prefill: Prefill, row: int) -> StepOutput:
        """Take in the first token of a request of a prefill.

        Args:
          first: ``[B, 2 + m]`` of every row its token, how many may follow, and packed
            log-probabilities if one asks for them.
          row: of the request.
        """
        one = prefill.waiting[row]
        logprobs: tuple[TokenLogprob, ...] = ()
        if one.alternatives >= 0:
            logprobs = unpacked_logprobs(first[row : row + 1, 2:], one.alternatives)
        return self._take(
            StepOutput(
                one.id,
                (int(first[row, 0]),),
                (False,),
                (),
                sources=(0,),
                cached_tokens=self.active[one.id].cached,
                logprobs=logprobs,
                prompt_logprobs=prefill.prompt_logprobs(row),
            ),
            not first[row, 1],
        )

    def rounds(self, report: Report, row: int, id: int) -> StepOutput:
        """Take in the rounds of a request in this row of a launch; of some it emitted tokens."""
        tokens, sources, accepted, ended = report.of_row(row)
        active = self.active[id]
        output = self._take(
            StepOutput(
                id,
                tuple(tokens),
                tuple(map(bool, sources)),
                tuple(accepted),
                logprobs=report.logprobs_of(row, active.waiting.alternatives),
                trees=report.trees_of(row),
                sources=tuple(sources),
            ),
            ended,
        )
        active.left -= len(output.tokens)
        return output

    def _take(self, output: StepOutput, ended: bool) -> StepOutput:
        """Count what a request has gained; all of it, or less where its constraint fails.

        Args:
          output: without an end.
          ended: whether the request has ended on the device.
        """
        active = self.active[output.id]
        last, stops = output.tokens[-1], active.waiting.request.stop_tokens
        if ended:
            finish = "error" if last == NO_TOKEN else "stop" if last in stops else "length"
            output = replace(output, finish=finish)
        if (constraint := active.waiting.constraint) is not None:
            kept = constraint.take(output.tokens)
            # What may follow the last token of a row that has ended does not matter.
            if constraint.failure is not None and not (ended and kept == len(output.tokens)):
                output = until(output, kept, "error", constraint.failure)
        # Nothing can fail from here on: what is counted is reported.
        active.tokens += output.tokens
        active.cached = 0
        if ended:
            slot = self.held.index(output.id)
            if last == NO_TOKEN and self._prefixes is not None:  # Its keys may be NaN.
                self._prefixes.slots.put(slot, ())
            self.vacate(slot)
        return output
