"""Whether speculation changed the text: what equals plain decoding, and how close the rest was."""

import math
import statistics
from collections.abc import Sequence
from functools import partial

from ..eval.records import compared_with_plain
from .blocks import Block, all_temperatures
from .table import ABSENT, Body, Cell, Group, Table, lines, said, temperature_words, with_figures

COLUMNS = ("identical", "share", "first differs at", "widest gap")


def tables(blocks: Sequence[Block]) -> list[Table]:
    """One table, if anything was compared with plain decoding."""
    temperatures = all_temperatures(blocks)
    bodies = tuple(
        Body(block.label, lines(block.speculative, temperatures, partial(_cells, block)))
        for block in blocks
    )
    table = Table(
        key="lossless",
        caption="Is the text that of plain decoding?",
        corner="method",
        groups=tuple(Group(temperature_words(value), COLUMNS) for value in temperatures),
        bodies=bodies,
        notes=(
            "Identical: equal, token for token, to plain decoding of the same sample, temperature "
            "and seed; of the texts that were compared.",
            "In exact arithmetic all are. In bfloat16 and float16 sums of another shape may flip a "
            "near-tie. Widest gap: how much plain decoding's own scores prefer its token at the "
            "first one that differs, noise and temperature included; the greatest of the texts "
            "where it is known. First differs at: the median of the texts that do.",
        ),
    )
    return with_figures([table])


def _cells(block: Block, method: str, temperature: float) -> tuple[Cell, ...]:
    records = block.all_tasks(method, temperature)
    same, compared = compared_with_plain(records)
    if not compared:
        return (Cell(ABSENT),) * len(COLUMNS)
    found = [record.divergence for record in records if record.divergence]
    gaps = [divergence.gap for divergence in found if divergence.gap is not None]
    percent = math.floor(10_000 * same / compared) / 100  # Never 100 % of what is not all.
    where = statistics.median(divergence.index for divergence in found) if found else None
    return (
        said(f"{same} of {compared}"),
        said(f"{percent:.4g} %"),
        said(f"token {where:g}") if where is not None else Cell(ABSENT),
        said(f"{max(gaps):.3g}") if gaps else Cell(ABSENT),
    )
