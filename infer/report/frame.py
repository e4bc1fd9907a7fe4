"""Runs as one data frame with a row for every text, and figures of its rows with intervals.

Runs that agree in target, device, precision, batch and options, and never measured the
same text, share a block, within which figures compare. A run that differs begins a block of its
own. Nothing is left out and nothing is counted twice.

Every figure is a ratio of sums over texts, as in the published release: long texts weigh more than
short ones. Its interval is a bootstrap interval. The unit of a resample is a prompt with everything
that was measured on it, and with all prompts that ever shared a call with it: rounds of one text
resemble each other, so resampling rounds would make intervals too narrow.

Percentiles of the resampled figures are too narrow for few units. They are taken further out, by as
much as Student's t is wider than the normal distribution ("expanded percentile": Hesterberg, *What
Teachers Should Know About the Bootstrap*, The American Statistician 69, 2015, section 5.3).
"""

# pandas' own annotations name everything that a call might return for any arguments:
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAssignmentType=false
# pyright: reportIndexIssue=false, reportCallIssue=false

import dataclasses
import functools
import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from scipy.special import ndtr, stdtrit

from ..eval.records import PLAIN_METHOD, Header, Run, SampleRecord, read
from ..eval.scores import METRICS, score
from ..eval.tasks import metric_of

TEXT = ["block", "task", "sample", "temperature", "seed"]
"""Columns that two methods share on one text."""
SUMS = ["tokens", "passes", "seconds", "new_tokens"]
"""Columns that a text has of plain decoding, too, as ``SUM_plain``."""
LEVEL = 0.95
"""Share of the resamples that an interval holds."""
DRAWS = 4000
FEWEST = 4
"""Fewer units have no interval: they have too few different resamples."""
SEED = 13
"""Fixed, so that a report is the same each time it is written."""


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read runs. A run has the name of its folder, with the folders above it where two agree.

    Raises:
      OSError: for a folder that holds no run.
      ValueError: for a run without a sample, a folder given twice, and a file that is no record.
    """
    real = [folder.expanduser().resolve() for folder in folders]
    for index, folder in enumerate(real):
        if folder in real[:index]:
            raise ValueError(
                f"{folders[index]} is given twice, so that its samples would count twice; name it "
                "once"
            )
    names = [folder.name for folder in real]
    if len(set(names)) < len(names):
        above = os.path.commonpath(real)
        names = [str(folder.relative_to(above)) for folder in real]
    runs = []
    for name, folder, given in zip(names, real, folders, strict=True):
        run = read(folder)
        if not run.samples:
            raise ValueError(
                f"{given} holds no finished sample yet; continue the run with the command that "
                "began it"
            )
        runs.append(dataclasses.replace(run, name=name))
    return runs


@dataclass(frozen=True)
class Block:
    """Runs whose figures compare."""

    label: str
    """The target, and what distinguishes this block from others of the report."""
    runs: tuple[Run, ...]

    @property
    def tasks(self) -> list[str]:
        """The tasks that its runs announce, also those without a sample."""
        return _union(run.header.tasks for run in self.runs)

    @property
    def methods(self) -> list[str]:
        """The methods that its runs announce, plain decoding first."""
        names = _union(run.header.methods for run in self.runs)
        return sorted(names, key=lambda name: name != PLAIN_METHOD)


def _union(names: Iterable[Iterable[str]]) -> list[str]:
    return list(dict.fromkeys(name for each in names for name in each))


def blocks_of(runs: Sequence[Run]) -> list[Block]:
    """Group runs that compare, in the order of the first of each."""
    groups: list[list[Run]] = []
    for run in runs:
        fitting = (group for group in groups if all(_compare(run, other) for other in group))
        group = next(fitting, None)
        if group is None:
            groups.append([run])
        else:
            group.append(run)
    labels = _labels(groups)
    return [Block(label, tuple(group)) for label, group in zip(labels, groups, strict=True)]


def _compare(one: Run, other: Run) -> bool:
    """Whether two runs compare: all settings agree, and no text was measured twice."""
    left, right = one.header, other.header
    if _circumstances(left) != _circumstances(right):
        return False
    common = left.methods.keys() & right.methods.keys()
    if any(left.methods[method] != right.methods[method] for method in common):
        return False
    return {record.key for record in one.samples}.isdisjoint(each.key for each in other.samples)


def _circumstances(header: Header) -> dict[str, str]:
    """The settings in which runs must agree to be compared, in words."""
    found = {
        "target": header.target,
        "dtype": header.dtype,
        "device": str(header.provenance.get("device", "unknown device")),
        "batch": f"batch {header.batch}",
    }
    for name, value in header.options.items():
        words = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
        found[f"option {name}"] = f"{name}={words}"
    return found


def _labels(groups: Sequence[Sequence[Run]]) -> list[str]:
    """A name for every block: target, settings that differ, and the folder if two names agree."""
    settings = pd.DataFrame([_circumstances(group[0].header) for group in groups])
    varied = settings.nunique(dropna=False) > 1
    varied["target"] = True
    names = settings.loc[:, varied].apply(lambda row: ", ".join(row.dropna()), axis=1)
    twice = names.duplicated(keep=False)
    return [
        f"{name} ({group[0].name})" if again else name
        for name, group, again in zip(names, groups, twice, strict=True)
    ]


def frame_of(blocks: Sequence[Block]) -> pd.DataFrame:
    """A row for every text: what it adds to the sums of every figure, and where tables show it.

    What a text says nothing about is NaN. Columns that end in ``_plain`` are those of plain
    decoding on the same text and seed.
    """
    records = pd.DataFrame(
        {
            "block": block.label,
            "call": f"{block.label}/{run.name}/{record.call}",
            "session": f"{run.name}/{record.start}",
            "record": record,
            **_counts(record),
        }
        for block in blocks
        for run in block.runs
        for record in run.samples
    )
    order = {
        "block": [block.label for block in blocks],
        "task": _union(block.tasks for block in blocks),
        "method": sorted(
            _union(block.methods for block in blocks), key=lambda name: name != PLAIN_METHOD
        ),
    }
    for name, values in order.items():
        records[name] = pd.Categorical(records[name], values, ordered=True)
    records = records.sort_values(["block", "task"], kind="stable", ignore_index=True)
    # Rows of a call share its seconds.
    rows = records.groupby("call")["call"].transform("size")
    records["prefill_s"] /= rows
    records["decode_s"] /= rows
    records["seconds"] = records["decode_s"].where(records["tokens"] > 0)
    records["unit"] = _units(records)
    plain = records.loc[records["method"] == PLAIN_METHOD, [*TEXT, *SUMS]]
    return records.merge(plain, on=TEXT, how="left", suffixes=("", "_plain"))


def _counts(record: SampleRecord) -> dict[str, Any]:
    """The raw counts of a record, by columns."""
    return {
        "task": record.task,
        "sample": record.sample,
        "method": record.method,
        "temperature": record.temperature,
        "seed": record.seed,
        "texts": 1,
        "prompt_tokens": record.prompt_tokens,
        "new_tokens": record.new_tokens,
        "tokens": record.decode_tokens,
        "passes": record.target_passes or np.nan,
        "prefill_s": record.prefill_s,
        "decode_s": record.decode_s,
        "score": _quality(record),
        "is_identical": record.identical_to_plain,
        "differs_at": record.divergence.index if record.divergence else np.nan,
        "gap": record.divergence.gap if record.divergence else np.nan,
    }


def _quality(record: SampleRecord) -> float:
    """The score of a text by its task's metric; NaN if it has none, or lacks a package."""
    metric = metric_of(record.task)
    if metric is None or not record.references or METRICS[metric].missing:
        return np.nan
    return _score(metric, record.text, record.references)


@functools.cache
def _score(metric: str, text: str, references: tuple[str, ...]) -> float:
    """Cached: lossless methods share a text, and ROUGE-L of a long text is slow."""
    return score(metric, text, references)


def _units(records: pd.DataFrame) -> np.ndarray:
    """The bootstrap's unit of every row: samples that ever shared a call have one unit."""
    samples = records.groupby(["block", "task", "sample"], observed=True).ngroup().to_numpy()
    calls = records.groupby("call").ngroup().to_numpy() + samples.max() + 1
    size = calls.max() + 1
    shared = coo_array((np.ones(len(records)), (samples, calls)), shape=(size, size))
    return connected_components(shared, directed=False)[1][samples]


def rounds_of(records: pd.DataFrame) -> pd.DataFrame:
    """A row for every round of a drafting method: the tokens that it emitted and accepted.

    ``position`` is that of its first new token among all tokens of prompt and text: the prefill's
    token stands after the prompt, and the first round begins after it.
    """
    records = records[records["method"] != PLAIN_METHOD]
    lengths = [len(record.emitted_by_round) for record in records["record"]]
    columns = ["block", "method", "temperature", "unit", "prompt_tokens"]
    rounds = records.loc[np.repeat(records.index, lengths), columns]
    for name in ("emitted", "accepted"):
        counts = (count for r in records["record"] for count in getattr(r, f"{name}_by_round"))
        rounds[name] = np.fromiter(counts, int, len(rounds))
    before = rounds.groupby(level=0)["emitted"].cumsum() - rounds["emitted"]
    rounds["position"] = rounds.pop("prompt_tokens") + 1 + before
    return rounds.assign(rounds=1)


def depths_of(rounds: pd.DataFrame) -> pd.DataFrame:
    """A row for every depth, with the rounds of a unit that accepted a draft token there."""
    by = ["block", "method", "temperature", "unit", "accepted"]
    counts = rounds.groupby(by, observed=True, as_index=False, sort=False)["rounds"].sum()
    deepest = int(counts["accepted"].max()) if len(counts) else 0
    found = counts.merge(pd.DataFrame({"depth": range(1, deepest + 1)}), how="cross")
    return found.assign(reached=found["rounds"].where(found["accepted"] >= found["depth"], 0))


def in_ranges(lengths: pd.Series, edges: Sequence[int]) -> pd.Series:
    """The range of every length in words, ordered; one more holds what lies beyond the edges.

    Args:
      lengths: in tokens.
      edges: of the ranges, ascending from 0; a range holds its beginning and not its end.
    """
    beyond = lengths.max()
    ends = [*edges, beyond + 1] if beyond >= edges[-1] else [*edges]
    names = [f"{_short(one)}–{_short(other)}" for one, other in zip(ends, ends[1:], strict=False)]
    return pd.cut(lengths, ends, right=False, labels=names).cat.remove_unused_categories()


def _short(tokens: int) -> str:
    return f"{tokens // 1000}k" if tokens and tokens % 1000 == 0 else str(tokens)


@dataclass(frozen=True)
class Estimate:
    """A figure of some rows."""

    value: float
    low: float
    """Lower end of its interval; NaN where the units are too few."""
    high: float
    samples: int
    """Units of the bootstrap."""


def quotient(sums: np.ndarray) -> np.ndarray:
    """The first sum / the second."""
    return sums[0] / sums[1]


def gain(sums: np.ndarray) -> np.ndarray:
    """The ratio of the first two sums / that of the last two."""
    return quotient(sums[:2]) / quotient(sums[2:])


Of = Callable[[np.ndarray], np.ndarray]
"""A figure: from sums ``[columns, resamples]`` to values ``[resamples]``."""


def sums_by_unit(rows: pd.DataFrame, columns: Sequence[str]) -> np.ndarray:
    """The sums of every unit, ``[units, columns]``, over the rows that have all columns."""
    names = list(columns)
    told = rows.loc[rows[names].notna().all(axis=1), ["unit", *names]]
    return told.groupby("unit", sort=False)[names].sum().to_numpy(float)


def estimate(units: np.ndarray, of: Of) -> Estimate | None:
    """A figure of sums over units, ``[units, columns]``, and its interval.

    None if there is no unit, or the figure is not finite. The interval is that of
    ``scipy.stats.bootstrap`` with the same seed, whose resampling of the units' numbers takes a
    hundred times as long as these counts, which all figures share.
    """
    count = len(units)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(of(units.sum(axis=0)[:, None])[0])
        if not count or not math.isfinite(value):
            return None
        if count < FEWEST:
            return Estimate(value, math.nan, math.nan, count)
        drawn = of((_draws(count) @ units).T)
    # A resample without a pass or a second has no figure.
    tail = _tail(count)
    low, high = np.quantile(drawn[np.isfinite(drawn)], [tail, 1 - tail])
    return Estimate(value, float(low), float(high), count)


def _tail(count: int) -> float:
    """The share of the resamples beyond each end of an interval."""
    t = stdtrit(count - 1, (1 - LEVEL) / 2)
    return float(ndtr(t * math.sqrt(count / (count - 1))))


@functools.lru_cache(maxsize=8)
def _draws(count: int) -> np.ndarray:
    """How often every resample has every unit, ``[resamples, units]``."""
    drawn = np.random.default_rng(SEED).integers(count, size=(DRAWS, count))
    places = drawn + count * np.arange(DRAWS)[:, None]
    counts = np.bincount(places.ravel(), minlength=DRAWS * count)
    return counts.reshape(DRAWS, count).astype(float)
