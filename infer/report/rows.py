"""A report's tables as CSV: one figure a line, with its interval, for whoever computes on."""

import csv
import io

from .sections import Report
from .table import ABSENT

COLUMNS = (
    "table",
    "caption",
    "body",
    "row",
    "group",
    "column",
    "text",
    "value",
    "low",
    "high",
    "samples",
)
DANGEROUS = ("=", "+", "-", "@", "\t", "\r")
"""Beginnings of texts that a spreadsheet would compute."""


def csv_text(report: Report) -> str:
    """All tables, one below the other; figures that do not exist have no line."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for section in report.sections:
        for table in section.tables:
            columns = [(group.name, name) for group in table.groups for name in group.columns]
            for body in table.bodies:
                for line in body.lines:
                    for (group, column), cell in zip(columns, line.cells, strict=True):
                        if cell.text == ABSENT:
                            continue
                        names = (table.key, table.caption, body.name, line.name, group, column)
                        estimate = cell.estimate
                        figures = (
                            (estimate.value, estimate.low, estimate.high, estimate.samples)
                            if estimate
                            else (None,) * 4
                        )
                        writer.writerow([*map(_harmless, (*names, cell.text)), *figures])
    return out.getvalue()


def _harmless(text: str) -> str:
    """A text that a spreadsheet shows as it is."""
    return f"'{text}" if text.startswith(DANGEROUS) else text
