"""What a record contributes to every figure, and the figures of many records.

Sums are taken over samples before they are divided, as in the published release: long texts weigh
more than short ones.

Every figure has a bootstrap interval. The unit of a resample is the sample, a prompt with
everything that was measured on it. Rounds of one text resemble each other, so resampling rounds
would make intervals too narrow. Methods that share samples are resampled together.

Percentiles of the resampled figures are too narrow for few samples. They are taken further out, by
as much as Student's t is wider than the normal distribution ("expanded percentile": Hesterberg,
*What Teachers Should Know About the Bootstrap*, The American Statistician 69, 2015, section 5.3).
"""

import bisect
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.special import ndtr, stdtrit

from longspec_jax.generation.result import ACCEPTANCE_DEFINITION

from ..eval.records import PLAIN_METHOD, SampleRecord
from ..eval.scores import score
from ..eval.tasks import metric_of
from .blocks import Block, Sample

LEVEL = 0.95
"""Share of the resamples that an interval holds."""
DRAWS = 4000
FEWEST = 4
"""Fewer samples have no interval: they have too few different resamples."""
SEED = 13
"""Fixed, so that a report is the same each time it is written."""
_CELLS = 4_000_000
"""Most counts held at once, so that thousands of samples fit in memory."""
DEFINITIONS = {
    "τ": f"{ACCEPTANCE_DEFINITION}; sums over samples",
    "tokens/s": "tokens of the decode rounds / their seconds, without prefill, the token drawn "
    "from it, compilation and detokenisation; sums over samples; of a batch all rows together",
    "speed-up": "tokens/s / tokens/s of plain decoding by this library (its own flash decoding, "
    "not an eager implementation), on the same samples and seeds",
    "draft, target, verify time": "the drafter proposes a tree; the target's forward over it; "
    "draws, acceptance, commit, drafter update and the host in between. They are measured in a "
    "run of its own that waits for every part, so their sum exceeds an untouched round",
    "small figures": f"{LEVEL:.0%} bootstrap intervals (expanded percentile, "
    f"{DRAWS} resamples of the samples). All seeds of a sample, and all rows that ever "
    f"shared a call, are resampled together. Fewer than {FEWEST} samples have no "
    "interval",
}
"""The figures of all tables, printed once in a report."""
PART_NAMES = {"draft_s": "draft time", "verify_s": "target time", "other_s": "verify time"}
"""Fields of a breakdown, and the names that the LongSpec paper's Table 4 gives them."""
PAPER_EDGES = (0, 5_000, 10_000, 15_000, 20_000, 25_000, 32_000)
"""Ends of the ranges of lengths in the LongSpec paper's Table 4."""
EDGES = (*PAPER_EDGES, 64_000, 128_000, 256_000, 512_000, 1_024_000)


class Fraction(NamedTuple):
    """What one sample contributes to a ratio of sums."""

    above: float
    below: float


@dataclass(frozen=True)
class Estimate:
    """A figure of some samples."""

    value: float
    low: float | None
    """Lower end of its interval; None where the samples are too few."""
    high: float | None
    samples: int

    def excludes(self, value: float) -> bool:
        """Whether there is an interval that does not hold a value."""
        return self.low is not None and self.high is not None and not self.low <= value <= self.high


Part = Callable[[Block, SampleRecord], Fraction | None]
"""What one record contributes to a figure; None if it says nothing about it."""


@dataclass(frozen=True)
class Range:
    """A range of lengths in tokens, the end excluded."""

    start: float
    stop: float
    name: str

    def __contains__(self, tokens: int) -> bool:
        """Whether a length lies in the range."""
        return self.start <= tokens < self.stop


def occupied(lengths: Iterable[int], edges: Sequence[int] = EDGES) -> list[Range]:
    """The ranges between ascending edges that hold a length; one more holds what lies beyond."""
    ascending = sorted(set(lengths))
    longest = ascending[-1] if ascending else 0
    if longest >= edges[-1]:
        edges = (*edges, longest + 1)
    return [
        Range(start, stop, f"{_short(start)}–{_short(stop)}")
        for start, stop in itertools.pairwise(edges)
        if bisect.bisect_left(ascending, start) < bisect.bisect_left(ascending, stop)
    ]


def _short(tokens: int) -> str:
    return f"{tokens // 1000}k" if tokens and tokens % 1000 == 0 else str(tokens)


@dataclass(frozen=True)
class Selection:
    """The records that a figure is of."""

    block: Block
    temperature: float
    method: str = PLAIN_METHOD
    task: str | None = None
    """None for all tasks."""
    baseline: str = PLAIN_METHOD
    """The method that ratios and differences compare with."""
    lengths: Range | None = None
    """Of the prompts; None for all lengths."""

    @property
    def records(self) -> list[SampleRecord]:
        """The records of the method."""
        return self._of(self.method)

    def figure(self, part: Part) -> Estimate | None:
        """A ratio of sums over the records; None if no record contributes to it."""
        return ratio([*self._by_unit(self.records, part).values()])

    def ratio(self, part: Part) -> Estimate | None:
        """The method's figure / the baseline's, over the samples that both decoded."""
        return ratio_of_ratios(self.pairs(part))

    def difference(self, part: Part) -> Estimate | None:
        """The method's figure minus the baseline's, over the samples that both decoded."""
        return difference_of_ratios(self.pairs(part))

    def pairs(self, part: Part) -> list[tuple[Fraction, Fraction]]:
        """What the shared samples contribute to the method's figure and to the baseline's."""
        mine, theirs = (
            {
                (record.task, record.sample, record.seed): record
                for record in self._of(method)
                if part(self.block, record) is not None
            }
            for method in (self.method, self.baseline)
        )
        shared = [key for key in mine if key in theirs]
        one, other = (
            self._by_unit([records[key] for key in shared], part) for records in (mine, theirs)
        )
        return [(one[unit], other[unit]) for unit in one]

    def _of(self, method: str) -> list[SampleRecord]:
        records = self.block.of(self.task, method, self.temperature)
        if self.lengths is None:
            return records
        return [record for record in records if record.prompt_tokens in self.lengths]

    def _by_unit(self, records: Iterable[SampleRecord], part: Part) -> dict[Sample, Fraction]:
        """The sums of every unit of the bootstrap."""
        sums: dict[Sample, Fraction] = {}
        for record in records:
            given = part(self.block, record)
            if given is not None:
                unit = self.block.units[record.task, record.sample]
                before = sums.get(unit, Fraction(0, 0))
                sums[unit] = Fraction(before.above + given.above, before.below + given.below)
        return sums


def acceptance(block: Block, record: SampleRecord) -> Fraction | None:
    """For τ: tokens / target forward passes."""
    passes = record.target_passes
    return Fraction(record.decode_tokens, passes) if passes else None


def speed(block: Block, record: SampleRecord) -> Fraction | None:
    """For tokens/s: tokens of the decode rounds / a row's share of their seconds."""
    seconds = record.decode_s / block.rows_of_call[record.call]
    return Fraction(record.decode_tokens, seconds) if record.decode_tokens else None


def whole_speed(block: Block, record: SampleRecord) -> Fraction | None:
    """For tokens/s with prefill: all tokens / a row's share of prefill and decoding."""
    seconds = (record.prefill_s + record.decode_s) / block.rows_of_call[record.call]
    return Fraction(record.new_tokens, seconds)


def seconds_of(field: str, block: Block, record: SampleRecord) -> Fraction:
    """A row's share of its call's seconds, per text; ``field`` is one of the record."""
    return Fraction(getattr(record, field) / block.rows_of_call[record.call], 1)


def stopped(block: Block, record: SampleRecord) -> Fraction:
    """The share of texts that ended with a stop token."""
    return Fraction(record.ended == "eos", 1)


def at_depth(depth: int, block: Block, record: SampleRecord) -> Fraction | None:
    """The share of rounds whose draft token at a depth was accepted."""
    accepted = record.accepted_by_round
    if not accepted:
        return None
    return Fraction(sum(count >= depth for count in accepted), len(accepted))


def positions(record: SampleRecord) -> list[int]:
    """The position of every round's first token, among all tokens of prompt and text; ascends."""
    start = record.prompt_tokens + 1  # The first token comes from the prefill.
    return [*itertools.accumulate(record.emitted_by_round, initial=start)][:-1]


def within(place: Range, block: Block, record: SampleRecord) -> Fraction | None:
    """Tokens per round, over the rounds whose first new token has a position in a range."""
    where = positions(record)
    first, last = (bisect.bisect_left(where, end) for end in (place.start, place.stop))
    rounds = record.emitted_by_round[first:last]
    return Fraction(sum(rounds), len(rounds)) if rounds else None


def part_of_round(fields: Sequence[str], block: Block, record: SampleRecord) -> Fraction | None:
    """Seconds of some parts of a round, together."""
    breakdown = record.breakdown
    if breakdown is None or not breakdown.rounds:
        return None
    return Fraction(sum(getattr(breakdown, field) for field in fields), breakdown.rounds)


def untouched_round(block: Block, record: SampleRecord) -> Fraction | None:
    """Seconds of a round in the run whose parts were not timed."""
    if record.breakdown is None or not record.target_passes:
        return None
    return Fraction(record.decode_s, block.rounds_of_call[record.call])


def quality(block: Block, record: SampleRecord) -> Fraction | None:
    """The score of a text by its task's metric."""
    metric = metric_of(record.task)
    if metric is None or not record.references:
        return None
    return Fraction(_score(metric, record.text, record.references), 1)


@functools.cache
def _score(metric: str, text: str, references: tuple[str, ...]) -> float:
    """Cached: lossless methods share a text, and ROUGE-L of a long text is slow."""
    return score(metric, text, references)


def ratio(parts: Sequence[Fraction]) -> Estimate | None:
    """The sum above the line / the sum below; None if it is not finite."""
    return _estimate([*parts], lambda sums: sums[0] / sums[1])


def ratio_of_ratios(pairs: Sequence[tuple[Fraction, Fraction]]) -> Estimate | None:
    """The first of two ratios / the second, of the same samples; None if it is not finite."""
    rows = [(*first, *second) for first, second in pairs]
    return _estimate(rows, lambda sums: sums[0] / sums[1] / (sums[2] / sums[3]))


def difference_of_ratios(pairs: Sequence[tuple[Fraction, Fraction]]) -> Estimate | None:
    """The first of two ratios minus the second, of the same samples; None if it is not finite."""
    rows = [(*first, *second) for first, second in pairs]
    return _estimate(rows, lambda sums: sums[0] / sums[1] - sums[2] / sums[3])


def _estimate(
    rows: Sequence[Sequence[float]], figure: Callable[[np.ndarray], np.ndarray]
) -> Estimate | None:
    """A figure of sums ``[columns, draws]`` over rows of one sample each, and its interval."""
    if not rows:
        return None
    values = np.asarray(rows, np.float64)
    count = len(values)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(figure(values.sum(axis=0)[:, None])[0])
        if not np.isfinite(value):
            return None
        if count < FEWEST:
            return Estimate(value, None, None, count)
        parts = np.array_split(_draws(count), max(1, DRAWS * count // _CELLS))
        drawn = figure(np.concatenate([part.astype(np.float64) @ values for part in parts]).T)
    # A resample without a pass or a second has no figure.
    tail = _tail(count)
    low, high = np.quantile(drawn[np.isfinite(drawn)], [tail, 1 - tail])
    return Estimate(value, float(low), float(high), count)


def _tail(count: int) -> float:
    """The share of the resamples beyond each end of an interval."""
    t = stdtrit(count - 1, (1 - LEVEL) / 2)
    return float(ndtr(t * math.sqrt(count / (count - 1))))


@functools.lru_cache(maxsize=64)
def _draws(count: int) -> np.ndarray:
    """How often every resample has every sample, ``[draws, samples]``: the same for all figures.

    Counts fit in eight bits: of many samples each is drawn a few times.
    """
    random = np.random.default_rng(SEED)
    most = max(1, _CELLS // count)
    parts = []
    for start in range(0, DRAWS, most):
        rows = np.arange(min(most, DRAWS - start))
        drawn = random.integers(count, size=(len(rows), count)) + count * rows[:, None]
        counts = np.bincount(drawn.ravel(), minlength=drawn.size)
        parts.append(counts.reshape(drawn.shape).astype(np.uint8))
    return np.concatenate(parts)
