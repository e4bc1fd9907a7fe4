"""Where the time of a round goes: draft, target, the rest (the LongSpec paper's Figure 5)."""

from collections.abc import Sequence

from ..eval.records import SampleRecord
from .blocks import Block, all_temperatures
from .counting import Part, figure
from .intervals import Fraction
from .table import (
    Body,
    Group,
    Line,
    Table,
    milliseconds,
    shown,
    slug,
    temperature_words,
    with_figures,
)

PART_NAMES = {"draft_s": "draft time", "verify_s": "target time", "other_s": "verify time"}
"""Fields of a breakdown, and what the paper's Table 4 calls them."""
PART_NOTES = (
    "Draft time: the drafter proposes a tree; target time: the target's pass over it; verify time: "
    "draws, walk, commit, what the drafter learns, and the host in between. Milliseconds of a "
    "round, from a run of its own that waits for every part, so that their sum exceeds an "
    "untouched round.",
)


def part_of_round(field: str) -> Part:
    """Seconds of a part in one round.

    Args:
      field: of the breakdown.
    """

    def part(block: Block, record: SampleRecord) -> Fraction | None:
        breakdown = record.breakdown
        if breakdown is None or not breakdown.rounds:
            return None
        return Fraction(getattr(breakdown, field), breakdown.rounds)

    return part


def parts_sum(block: Block, record: SampleRecord) -> Fraction | None:
    """Seconds of all parts of a round."""
    each = [part_of_round(field)(block, record) for field in PART_NAMES]
    given = [fraction for fraction in each if fraction is not None]
    return Fraction(sum(part.above for part in given), given[0].below) if given else None


def untouched_round(block: Block, record: SampleRecord) -> Fraction | None:
    """Seconds of a round of the run in which no part was timed."""
    if record.breakdown is None or not record.target_passes:
        return None
    return Fraction(record.decode_s, block.rounds_of_call[record.call])


def tables(blocks: Sequence[Block]) -> list[Table]:
    """A table for every temperature at which rounds were timed in parts."""
    return with_figures(_table(blocks, value) for value in all_temperatures(blocks))


def _table(blocks: Sequence[Block], temperature: float) -> Table:
    return Table(
        key=slug("parts", temperature),
        caption=f"Where the time of a round goes, {temperature_words(temperature)}",
        corner="method",
        groups=(Group("ms a round", (*PART_NAMES.values(), "their sum", "untouched round")),),
        bodies=tuple(Body(block.label, _lines(block, temperature)) for block in blocks),
        notes=(
            "The figures of the LongSpec paper's Figure 5, without its split of the target's time "
            "into attention and the rest.",
            *PART_NOTES,
            "Untouched round: decode seconds / rounds of the run that all other tables show.",
        ),
    )


def _lines(block: Block, temperature: float) -> tuple[Line, ...]:
    parts = [*map(part_of_round, PART_NAMES), parts_sum, untouched_round]
    lines = []
    for method in block.methods:
        records = block.all_tasks(method, temperature)
        if any(record.breakdown for record in records):
            cells = [shown(figure(block, records, part), milliseconds) for part in parts]
            lines.append(Line(method, tuple(cells)))
    return tuple(lines)
