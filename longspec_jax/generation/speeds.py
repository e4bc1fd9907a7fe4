"""What rounds take and emit on this machine: learnt while calls run, kept in one small file.

The cost of a round depends on the machine and the model, its gain on the draft. For a large target
on a GPU 64 nodes cost little more than one. On a CPU they cost three times as much, and a small
model on a GPU is bound by launches. Several rows of a large target make every node cost more, too.

So a call that names no tree has candidates: plain decoding and a few trees. The warm-up of its
shape times a round of each at the call's own context, which compiles them anyway. The call begins
with the tree that is usual on such a machine, or with what was fastest in earlier calls of its
kind, or with a larger tree that shows what either would emit. The policy
(:mod:`longspec_jax.decoding.policy`) goes on choosing by the tokens a second of each. Nothing is
run only for timing.

What is kept is a prior. Other work on the machine makes all rounds longer, so seconds count next to
a plain round's of the same warm-up, and each process times its candidates itself. Texts differ, so
a process tries what earlier ones found slow at the cost of a first call. What a process leaves out
only because of earlier figures counts half as much in the next one, until it is tried again.
"""

import contextlib
import json
import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from threading import Lock

import jax

from longspec_jax import files
from longspec_jax.checks import is_whole
from longspec_jax.compilation import cache_folder
from longspec_jax.config.tree import PLAIN, TreeConfig
from longspec_jax.decoding.chooser import Measurement, Policy, TreeTiming
from longspec_jax.decoding.policy import KNOWN, FastestWithinBudget
from longspec_jax.decoding.report import shown_by
from longspec_jax.decoding.round import weighs_trees
from longspec_jax.decoding.warmup import RoundTimes
from longspec_jax.drafters.base import Drafter
from longspec_jax.generation.call import CallPlan

DAYS = 30
"""After which what was kept does not count: drivers, clocks and neighbours change."""
MOST_KINDS = 256
"""Kinds of calls in the file, the latest ones."""
WORSE, JUDGED = 0.8, 8
"""Speed over the fastest's below which a candidate of earlier processes is not compiled again, and
rounds that have to show it."""
MOST_OWN = 64.0
"""Rounds of this process in a mean that count against those of a run."""
MOST_EARLIER = 32
"""Rounds of earlier processes that count of a tree which a process leaves out: half of them in the
next one, so that the sixth one tries it whatever was kept."""
UNTIMED = RoundTimes()
"""Of calls with a single candidate."""
GAIN = 1.03
"""How much faster than plain decoding a tree must have been to be begun with."""
NARROW, WIDE = 0.55, 0.7
"""Guesses of how likely a level of a model's tree holds the target's token, by its width."""
FOUND, WEIGHED = 1.3, 1.15
"""Guesses of the tokens of a round of lookup alone: of one that verifies every tree, and, in plain
rounds' seconds, of one that weighs it. Joined to a chain it multiplies the chain's: SmolLM2's chain
of 3 with 6 nodes emitted 2.7 to 5.1 on code and prose
(``docs/results/texts_smollm2_cpu.json``)."""


def guessed_tokens(tree: TreeConfig) -> float:
    """A guess of what a round of a tree emits that has not run."""
    if not tree.widths:
        return FOUND if tree.num_levels else 1.0
    narrow = max(tree.widths) == 1
    share = NARROW if narrow else WIDE
    tokens = sum(share**depth for depth in range(1 + len(tree.widths)))
    # What lookup finds goes on after a chain. Among many nodes of a model it adds less.
    return FOUND * tokens if narrow and tree.lookup else tokens


def along_with(
    first: int, tokens: Sequence[float], trees: Sequence[TreeConfig], larger: Sequence[bool]
) -> list[float]:
    """What rounds may emit in a text like those that the first tree's figures are of.

    Means of several trees are of different texts: each ran where it was the fastest. So of the
    larger trees only what they may emit beyond the first one's is taken, which is a guess.

    Args:
      first: index of the tree that begins.
      tokens: means of a round by each tree.
      trees: the candidates.
      larger: whether a tree holds the nodes of the first one.
    """
    return [
        max(tokens[first] + guessed_tokens(tree) - guessed_tokens(trees[first]), 1.0)
        if holds and index != first
        else own
        for index, (own, tree, holds) in enumerate(zip(tokens, trees, larger, strict=True))
    ]


class KnownSpeeds:
    """What this process knows of the candidates of each kind of call, measured here or kept."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self._known: dict[str, tuple[TreeTiming, ...]] = {}
        self._earlier: dict[str, tuple[TreeTiming, ...]] = {}
        """What other processes had found by the first call of a kind."""
        self._worth: dict[tuple[str, tuple[Drafter, ...]], tuple[Drafter, ...]] = {}
        self._written: dict[str, int] = {}
        """Rounds in what this process has last written of a kind."""
        self._seen: dict[str, frozenset[TreeConfig]] = {}
        """Trees of which this process has run rounds."""
        self._lock = Lock()

    def find(self, kind: str) -> tuple[TreeTiming, ...]:
        """What is known of a kind; nothing of a new one."""
        with self._lock:
            if kind not in self._known:
                self._known[kind] = self._earlier[kind] = kept_speeds(kind)
            return self._known[kind]

    def candidates(self, kind: str, drafters: tuple[Drafter, ...]) -> tuple[Drafter, ...]:
        """The drafters that are worth a program, the cheapest first; the same for a process."""
        if (kind, drafters) not in self._worth:
            self.find(kind)
            trees = {one.tree for one in drafters}
            pruned = _clearly_worse([one for one in self._earlier[kind] if one.tree in trees])
            worth = [one for one in drafters if one.tree not in pruned]
            worth.sort(key=lambda drafter: drafter.tree.num_nodes)
            self._worth[kind, drafters] = tuple(worth)
        return self._worth[kind, drafters]

    def seen(self, kind: str) -> frozenset[TreeConfig]:
        """Trees of which this process itself has run rounds in calls of a kind."""
        return self._seen.get(kind, frozenset())

    def learn(
        self,
        kind: str,
        drafters: Sequence[Drafter],
        totals: Sequence[Measurement],
        times: RoundTimes = UNTIMED,
    ) -> None:
        """Take in what a run did with each of its candidates, and keep it.

        Args:
          kind: of the call.
          drafters: its candidates.
          totals: what each of them did.
          times: of their rounds in one warm-up, where there are several.
        """
        known, seen = {one.tree: one for one in self.find(kind)}, self.seen(kind)
        timed = _timed_together(drafters, totals, times)
        if PLAIN in timed and PLAIN in known:
            scale = timed[PLAIN] / known[PLAIN].seconds
            known = {tree: replace(one, seconds=scale * one.seconds) for tree, one in known.items()}
        for drafter, total in zip(drafters, totals, strict=True):
            tree, own = drafter.tree, known.get(drafter.tree)
            if total.row_rounds:
                most = MOST_OWN if tree in seen else KNOWN
                after = (own or TreeTiming(drafter.label, tree, 1.0, 1.0)).corrected(total, most)
                if own is not None and len(known) > 1:
                    # Next to other trees' seconds those of another hour would mislead.
                    after = replace(after, seconds=own.seconds)
                known[tree], seen = after, seen | {tree}
            if tree in known and tree in timed:
                known[tree] = replace(known[tree], seconds=timed[tree])
        with self._lock:
            self._known[kind], self._seen[kind] = tuple(known.values()), seen
            rounds = sum(one.rounds for one in known.values())
            # What is known changes less and less.
            if rounds < 2 * self._written.get(kind, 0):
                return
            self._written[kind] = rounds
            ran = seen | {drafter.tree for drafter in drafters}
            kept_speeds(kind, _faded(self._known[kind], ran))


def _timed_together(
    drafters: Sequence[Drafter], totals: Sequence[Measurement], times: RoundTimes
) -> dict[TreeConfig, float]:
    """Seconds of a round of each of several candidates, by one warm-up; none without it."""
    if len(times.seconds) != len(drafters) or len(drafters) < 2:
        return {}
    found = {}
    least = times.unverified or times.seconds
    for drafter, total, low, high in zip(drafters, totals, least, times.seconds, strict=True):
        # What weighs its tree verifies it in some rounds.
        ran = total.seconds / total.rounds if total.rounds else low
        found[drafter.tree] = min(max(ran, low), high)
    return found


def _faded(known: Sequence[TreeTiming], ran: Collection[TreeConfig]) -> tuple[TreeTiming, ...]:
    """What is kept, less of what a process left out only because of earlier figures.

    Args:
      known: all figures of a kind of call.
      ran: the candidates of the process.
    """
    left_out = {
        one.tree: min(one.rounds, MOST_EARLIER) // 2 for one in known if one.tree not in ran
    }
    faded = [replace(one, rounds=left_out.get(one.tree, one.rounds)) for one in known]
    kept = tuple(one for one in faded if one.rounds or one.tree not in left_out)
    # Without any tree plain decoding would seem to be all there is.
    forgotten = len(kept) < len(known) and not any(one.tree.num_levels for one in kept)
    return () if forgotten else kept


@dataclass(frozen=True)
class Settled:
    """A plan with what its call may run."""

    plan: CallPlan
    first: int = 0
    """The candidate that it begins with."""
    timings: tuple[TreeTiming, ...] = ()
    """What earlier calls of its kind have shown."""
    seen: frozenset[TreeConfig] = frozenset()
    """Trees of which this process has run rounds."""
    kind: str | None = None
    """The kind of call; None where nothing is learnt."""

    def policy(self, times: RoundTimes) -> Policy | None:
        """What chooses among several candidates; None where their seconds are not known.

        Args:
          times: of a round of each, as the warm-up found them.
        """
        if len(times.seconds) < 2:
            return None
        known = {one.tree: one for one in self.timings}
        drafters, params = self.plan.drafters, self.plan.params
        weighing = [index for index, one in enumerate(drafters) if weighs_trees(one, params)]
        least, plain = times.unverified or times.seconds, known.get(PLAIN)
        scale = times.seconds[0] / plain.seconds if plain else 1.0
        seconds, tokens = list(least), list[float]()
        for index, drafter in enumerate(drafters):
            one, weighed = known.get(drafter.tree), index in weighing
            guess = WEIGHED if weighed else guessed_tokens(drafter.tree)
            tokens.append(guess)
            if one is None or not drafter.tree.num_levels:
                continue
            # It verifies some trees: none, or as many as in earlier calls.
            usual = min(max(scale * one.seconds, least[index]), times.seconds[index])
            usual = usual if weighed else seconds[index]
            slower = one.tokens / usual < guess / seconds[index]
            # What texts of other processes emitted says little of this one.
            if drafter.tree in self.seen or not slower:
                tokens[index], seconds[index] = one.tokens, usual
        shows, first = shown_by(drafters, params), drafters[self.first].tree
        if first.num_levels and first in self.seen:
            larger = [shown[self.first] for shown in shows]
            tokens = along_with(self.first, tokens, [one.tree for one in drafters], larger)
        return FastestWithinBudget.timed(
            seconds,
            tokens,
            wait=times.wait,
            shows=shows,
            least={index: least[index] for index in weighing},
        )

    def weighing(self, times: RoundTimes) -> CallPlan:
        """The plan with the seconds by which a round weighs its tree, where it does."""
        drafters, params = self.plan.drafters, self.plan.params
        free = [index for index, one in enumerate(drafters) if weighs_trees(one, params)]
        if not free or not times.unverified:
            return self.plan
        slowest = max(free, key=lambda index: times.seconds[index])
        return self.plan.weighing(times.unverified[slowest], times.seconds[slowest])


def settle(
    plan: CallPlan, speeds: KnownSpeeds, *, streams: bool, identical: bool, fixed: bool = False
) -> Settled:
    """The candidates of a call: those of an open plan, plain decoding among them.

    Args:
      streams: whether the run is followed round by round.
      identical: whether text is that of plain decoding, so that the clock may choose during the
        run. Else only the first call of a kind does, and the others run what was fastest in it.
      fixed: whether the call runs one candidate to its end.
    """
    if not plan.open or len(plan.drafters) == 1:
        return Settled(plan)
    usual, kind = plan.drafters[0].tree, f"{plan.kind_of_call}{' streamed' * streams}"
    timings, seen = speeds.find(kind), speeds.seen(kind)
    own = speeds.candidates(kind, plan.drafters)
    first = begun_with(own, timings, usual)
    if fixed or plan.short or (timings and not identical):
        own, first = (own[first],), 0
    if not any(one.tree.num_levels for one in own):
        return Settled(plan.without_draft, 0, timings, seen, kind)
    free = identical and len(own) > 1 and weighs() and any(one.proposes_freely for one in own)
    return Settled(plan.narrowed(own, weighs=free), first, timings, seen, kind)


def weighs() -> bool:
    """Whether rounds weigh what lookup proposes: on a CPU, where a node takes half a plain round.

    A GPU would wait for the host in the midst of every round.
    """
    return jax.default_backend() == "cpu"


def begun_with(drafters: Sequence[Drafter], known: Sequence[TreeTiming], usual: TreeConfig) -> int:
    """Index of the candidate that a call begins with.

    Args:
      drafters: the candidates.
      known: of earlier calls of the kind.
      usual: the tree of such a machine, which runs where nothing is known.
    """
    trees = [drafter.tree for drafter in drafters]
    speeds = {one.tree: one.tokens_per_second for one in known if one.tree in trees}
    if not speeds:
        return trees.index(usual) if usual in trees else 0
    plain = max((speed for tree, speed in speeds.items() if not tree.num_levels), default=0.0)
    best = max(speeds, key=speeds.__getitem__)
    pays = speeds[best] > GAIN * plain or not plain
    return trees.index(best if pays else trees[0])


def _clearly_worse(known: Sequence[TreeTiming]) -> frozenset[TreeConfig]:
    """Trees that earlier processes found slow; never all, as seconds of another hour may mislead.

    The fastest one is timed in every process next to plain decoding.
    """
    best = max((one.tokens_per_second for one in known), default=0.0)
    trees = [one for one in known if one.tree.num_levels]
    fastest = max((one.tokens_per_second for one in trees), default=0.0)
    least = min(WORSE * best, fastest)
    slow = (one for one in trees if one.tokens_per_second < least)
    return frozenset(one.tree for one in slow if one.rounds >= JUDGED)


def kept_speeds(kind: str, found: Sequence[TreeTiming] | None = None) -> tuple[TreeTiming, ...]:
    """The speeds of a kind of call in the file that this machine keeps, or none.

    A file that is missing, damaged or old counts for nothing, and one that cannot be written is
    done without.

    Args:
      kind: of call.
      found: what to write in their place; None to only read.
    """
    folder = cache_folder()
    if folder is None:
        return ()
    now = time.time()
    file, kinds = folder / "speeds.json", {}
    with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
        kinds = dict(json.loads(file.read_text("utf-8")))
    kept: dict[TreeTiming, float] = {}
    with contextlib.suppress(KeyError, TypeError, ValueError):
        for label, named, seconds, tokens, rounds, written in kinds[kind]:
            tree = TreeConfig.parse(named)
            possible = 0 < seconds < math.inf and 1 <= tokens <= tree.num_levels + 1
            counted = isinstance(label, str) and is_whole(rounds) and rounds >= 0
            if possible and counted and now - written < DAYS * 86400:
                kept[TreeTiming(label, tree, seconds, tokens, rounds)] = written
    if found is not None:
        # What this run did not correct keeps its day.
        trees = [
            [one.drafter, str(one.tree), one.seconds, one.tokens, one.rounds, kept.get(one, now)]
            for one in found
        ]
        kinds.pop(kind, None)
        latest = dict([*kinds.items(), (kind, trees)][-MOST_KINDS:])
        with contextlib.suppress(OSError):
            files.make_private(folder)
            files.replace(file, json.dumps(latest).encode())
        return tuple(found)
    return tuple(kept)
