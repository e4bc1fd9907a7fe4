"""What a run gave, in one row per task, method and temperature."""

import math
from collections.abc import Sequence
from typing import Any

from .records import (
    PLAIN_METHOD,
    SampleRecord,
    acceptance_length,
    compared_with_plain,
    tokens_per_second,
)


def rows(records: Sequence[SampleRecord]) -> list[dict[str, Any]]:
    """The rows, in the order of the records.

    ``speedup_over_plain`` compares the same samples; it and the fraction that is identical are null
    where there is nothing to compare with. ``gaps`` are of the samples that are not: how much plain
    decoding's scores prefer its token where the texts part.
    """
    groups: dict[tuple[str, str, float], list[SampleRecord]] = {}
    for record in records:
        key = record.task, record.method, record.temperature
        groups.setdefault(key, []).append(record)
    return [
        _row(key, found, groups.get((key[0], PLAIN_METHOD, key[2]), []))
        for key, found in groups.items()
    ]


def _row(
    key: tuple[str, str, float], found: Sequence[SampleRecord], plain: Sequence[SampleRecord]
) -> dict[str, Any]:
    task, method, temperature = key
    here = {(record.sample, record.seed) for record in found}
    there = [record for record in plain if (record.sample, record.seed) in here]
    # A method that was interrupted is compared over the samples that it has.
    speedup = (
        tokens_per_second(found) / tokens_per_second(there)
        if len(there) == len(here)
        else (math.nan)
    )
    same, compared = compared_with_plain(found)
    return {
        "task": task,
        "method": method,
        "temperature": temperature,
        "tree": found[0].setting.tree,
        "acceptance_length": _number(acceptance_length(found)),
        "tokens_per_second": _number(tokens_per_second(found)),
        "speedup_over_plain": None if method == PLAIN_METHOD else _number(speedup),
        "identical_to_plain_fraction": same / compared if compared else None,
        "gaps": sorted(_gaps(found)),
        "samples": len(found),
        "new_tokens": sum(record.new_tokens for record in found),
        "prefill_seconds": _number(
            sum({record.call: record.prefill_s for record in found}.values())
        ),
    }


def _gaps(found: Sequence[SampleRecord]) -> list[float]:
    partings = [record.divergence for record in found if record.divergence is not None]
    gaps = [_number(parting.gap) for parting in partings if parting.gap is not None]
    return [gap for gap in gaps if gap is not None]


def _number(value: float) -> float | None:
    """Four significant digits: more would not repeat; None for no number."""
    return float(f"{value:.4g}") if math.isfinite(value) else None
