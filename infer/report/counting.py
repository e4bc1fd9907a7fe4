"""What a sample gives to every figure, and figures of many samples with their intervals.

Sums are taken over samples before they are divided (the published release counts so, too), so that
long texts weigh more than short ones.
"""

from collections.abc import Callable, Iterable

from longspec_jax.generation.result import ACCEPTANCE_DEFINITION

from ..eval.records import PLAIN_METHOD, SampleRecord
from . import intervals
from .blocks import Block, Sample
from .intervals import Estimate, Fraction

DEFINITIONS = {
    "τ": f"{ACCEPTANCE_DEFINITION}; sums over samples",
    "tokens/s": "tokens of the decode rounds / their seconds: without prefill, the token drawn "
    "from it, compilation and detokenisation; sums over samples; of a batch all rows together",
    "speed-up": "tokens/s / tokens/s of plain decoding by this library (its own flash decoding, "
    "not an eager implementation), on the same samples and seeds",
}
"""Of the figures below, printed under every table that has them."""
INTERVALS = (
    f"{intervals.LEVEL:.0%} bootstrap (expanded percentile), samples drawn anew {intervals.DRAWS} "
    "times; of several seeds and of rows that shared a call all together; none of fewer than "
    f"{intervals.FEWEST}"
)
"""What all of them are, printed once."""

Part = Callable[[Block, SampleRecord], Fraction | None]
"""What one record gives to a figure; None where it says nothing about it."""


def acceptance(block: Block, record: SampleRecord) -> Fraction | None:
    """For τ: tokens by target passes."""
    passes = record.target_passes
    return Fraction(record.decode_tokens, passes) if passes else None


def speed(block: Block, record: SampleRecord) -> Fraction | None:
    """For tokens/s: tokens of the decode rounds by a row's share of their seconds."""
    seconds = record.decode_s / block.rows_of_call[record.call]
    return Fraction(record.decode_tokens, seconds) if record.decode_tokens else None


def whole_speed(block: Block, record: SampleRecord) -> Fraction | None:
    """For tokens/s from end to end: all tokens by a row's share of prefill and decoding."""
    seconds = (record.prefill_s + record.decode_s) / block.rows_of_call[record.call]
    return Fraction(record.new_tokens, seconds)


def figure(block: Block, records: Iterable[SampleRecord], part: Part) -> Estimate | None:
    """A ratio of sums over records; None where none of them says anything about it."""
    return intervals.ratio([*_by_unit(block, records, part).values()])


def pairs(
    block: Block, first: Iterable[SampleRecord], second: Iterable[SampleRecord], part: Part
) -> list[tuple[Fraction, Fraction]]:
    """What the samples that two methods share give to a figure of each.

    Args:
      block: of both.
      first: records of one method.
      second: those of the other.
      part: of the figure.
    """
    left, right = ({_place(record): record for record in records} for records in (first, second))
    counted = [
        place
        for place in left
        if place in right
        and part(block, left[place]) is not None
        and part(block, right[place]) is not None
    ]
    one, other = (
        _by_unit(block, [records[place] for place in counted], part) for records in (left, right)
    )
    return [(one[unit], other[unit]) for unit in one]


def speed_up(block: Block, task: str, method: str, temperature: float) -> Estimate | None:
    """Tokens/s by that of plain decoding, on the samples of a task that both have."""
    mine, plain = (block.of(task, name, temperature) for name in (method, PLAIN_METHOD))
    return intervals.ratio_of_ratios(pairs(block, mine, plain, speed))


def _place(record: SampleRecord) -> tuple[str, str, float, int]:
    """What two methods have in common of a record."""
    return record.task, record.sample, record.temperature, record.seed


def _by_unit(block: Block, records: Iterable[SampleRecord], part: Part) -> dict[Sample, Fraction]:
    """The sums of what is drawn anew together."""
    sums: dict[Sample, Fraction] = {}
    for record in records:
        given = part(block, record)
        if given is not None:
            unit = block.units[record.task, record.sample]
            before = sums.get(unit, Fraction(0, 0))
            sums[unit] = Fraction(before.above + given.above, before.below + given.below)
    return sums
