"""How deep drafts are accepted, and how acceptance changes along the context."""

import bisect
import itertools
from collections.abc import Sequence

from ..eval.records import SampleRecord
from .blocks import Block, all_temperatures
from .context_bins import Bin, occupied
from .counting import DEFINITIONS, Part, figure
from .intervals import Estimate, Fraction
from .table import (
    Body,
    Cell,
    Group,
    Line,
    Table,
    length,
    lines,
    percent,
    shown,
    slug,
    temperature_words,
    with_figures,
)


def at_depth(depth: int) -> Part:
    """The share of rounds whose draft token at a depth was accepted.

    Args:
      depth: from 1, below the root.
    """

    def part(block: Block, record: SampleRecord) -> Fraction | None:
        accepted = record.accepted_by_round
        return (
            Fraction(sum(count >= depth for count in accepted), len(accepted)) if accepted else None
        )

    return part


def within(context: Bin) -> Part:
    """Tokens of a round, over the rounds whose first new token has a position in a range.

    Args:
      context: positions among all tokens of prompt and text.
    """

    def part(block: Block, record: SampleRecord) -> Fraction | None:
        where = positions(record)
        first, last = (bisect.bisect_left(where, end) for end in (context.start, context.stop))
        rounds = record.emitted_by_round[first:last]
        return Fraction(sum(rounds), len(rounds)) if rounds else None

    return part


def positions(record: SampleRecord) -> list[int]:
    """Where the first token of every round stands, among all tokens of prompt and text; ascends."""
    start = record.prompt_tokens + 1  # The first token comes from the prefill.
    return [*itertools.accumulate(record.emitted_by_round, initial=start)][:-1]


def deepest(blocks: Sequence[Block], temperature: float) -> int:
    """The depth of the longest accepted path."""
    return max(
        (
            count
            for block in blocks
            for record in block.records
            if record.temperature == temperature
            for count in record.accepted_by_round
        ),
        default=0,
    )


def context_ranges(blocks: Sequence[Block], temperature: float, edges: Sequence[int]) -> list[Bin]:
    """Ranges of positions that hold a round of speculation."""
    return occupied(
        (
            position
            for block in blocks
            for method in block.speculative
            for record in block.all_tasks(method, temperature)
            for position in positions(record)
        ),
        edges,
    )


def depth_shares(
    block: Block, method: str, temperature: float, deepest: int
) -> list[Estimate | None]:
    """Shares of rounds that accept at least 1, 2, ... draft tokens, over all tasks."""
    records = block.all_tasks(method, temperature)
    return [figure(block, records, at_depth(depth)) for depth in range(1, deepest + 1)]


def depth_tables(blocks: Sequence[Block]) -> list[Table]:
    """One for every temperature at which a draft token was accepted."""
    return with_figures(_depth_table(blocks, value) for value in all_temperatures(blocks))


def _depth_table(blocks: Sequence[Block], temperature: float) -> Table:
    depth = deepest(blocks, temperature)
    return Table(
        key=slug("depth", temperature),
        caption=f"Acceptance by depth, {temperature_words(temperature)}",
        corner="method",
        groups=(Group("rounds that accept a draft token at depth", _numbers(depth)),),
        bodies=tuple(
            Body(block.label, _depth_lines(block, temperature, depth)) for block in blocks
        ),
        notes=(
            "Share of all rounds whose accepted path reaches the depth; one plus the sum of a line "
            "is τ, but for last rounds that end inside the draft. A share by the one before is the "
            "chance that a path goes on.",
        ),
    )


def _depth_lines(block: Block, temperature: float, depth: int) -> tuple[Line, ...]:
    def cells(method: str, depth: int) -> list[Cell]:
        return [shown(each, percent) for each in depth_shares(block, method, temperature, depth)]

    methods = [
        method
        for method in block.speculative
        if any(record.accepted_by_round for record in block.all_tasks(method, temperature))
    ]
    return lines(methods, [depth], cells)


def _numbers(count: int) -> tuple[str, ...]:
    return tuple(str(number) for number in range(1, count + 1))


def context_lengths(
    block: Block, method: str, temperature: float, ranges: Sequence[Bin]
) -> list[Estimate | None]:
    """τ of the rounds in every range of positions, over all tasks."""
    records = block.all_tasks(method, temperature)
    return [figure(block, records, within(context)) for context in ranges]


def context_tables(blocks: Sequence[Block], edges: Sequence[int]) -> list[Table]:
    """One for every temperature at which a method speculates.

    Args:
      blocks: of the report.
      edges: of the ranges, ascending from 0.
    """
    return with_figures(_context_table(blocks, value, edges) for value in all_temperatures(blocks))


def _context_table(blocks: Sequence[Block], temperature: float, edges: Sequence[int]) -> Table:
    ranges = context_ranges(blocks, temperature, edges)
    return Table(
        key=slug("context", temperature),
        caption=f"Acceptance by position in the context, {temperature_words(temperature)}",
        corner="method",
        groups=(Group("τ of rounds at position", tuple(each.name for each in ranges)),),
        bodies=tuple(
            Body(block.label, _context_lines(block, temperature, ranges)) for block in blocks
        ),
        notes=(
            f"τ: {DEFINITIONS['τ']}; here of the rounds whose first new token stands in the range, "
            "counted from the beginning of the prompt.",
        ),
    )


def _context_lines(block: Block, temperature: float, ranges: Sequence[Bin]) -> tuple[Line, ...]:
    def cells(method: str, ranges: Sequence[Bin]) -> list[Cell]:
        return [shown(each, length) for each in context_lengths(block, method, temperature, ranges)]

    return lines(block.speculative, [ranges], cells)
