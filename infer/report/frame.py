"""Runs as one data frame, and figures of its rows with their intervals.

Runs that agree in target, device, precision, protocol and options, and never measured the same
text, share a block, within which figures compare. A run that differs begins a block of its own.
Nothing is left out and nothing is counted twice.

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

from longspec_jax.cli import counted

from ..eval.records import PLAIN_METHOD, Header, Run, SampleRecord, read
from ..eval.scores import METRICS, score
from ..eval.tasks import metric_of

KEPT = ("breakdown", "rounds", "cases")
"""Options that add to what a run keeps and change none of its figures."""
TEXT = ["block", "task", "sample", "temperature", "seed"]
"""Columns that two methods share on one text."""
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

    condition: str
    """The target, and what distinguishes this block from others of the report but the batch."""
    label: str
    """The same with the batch, if the report has several."""
    runs: tuple[Run, ...]

    @property
    def batch(self) -> int:
        """Rows of a call."""
        return self.runs[0].header.batch

    @property
    def tasks(self) -> list[str]:
        """The tasks that its runs announce, also those without a sample."""
        return _union(run.header.tasks for run in self.runs)

    @property
    def methods(self) -> list[str]:
        """The methods that its runs announce, plain decoding first."""
        return methods([self])


def methods(blocks: Iterable[Block]) -> list[str]:
    """All methods, plain decoding first."""
    names = _union(run.header.methods for block in blocks for run in block.runs)
    return sorted(names, key=lambda name: name != PLAIN_METHOD)


def _union(names: Iterable[Iterable[str]]) -> list[str]:
    return list(dict.fromkeys(name for each in names for name in each))


def blocks_of(runs: Sequence[Run]) -> list[Block]:
    """Group runs that compare: those of one condition beside each other, by batch."""
    groups: list[list[Run]] = []
    for run in runs:
        fitting = (group for group in groups if all(_compare(run, other) for other in group))
        group = next(fitting, None)
        if group is None:
            groups.append([run])
        else:
            group.append(run)
    conditions = _conditions(groups)
    names_batch = len({run.header.batch for run in runs}) > 1
    found = [
        Block(
            condition,
            f"{condition}, batch {group[0].header.batch}" if names_batch else condition,
            tuple(group),
        )
        for condition, group in zip(conditions, groups, strict=True)
    ]
    return sorted(found, key=lambda block: (conditions.index(block.condition), block.batch))


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
        "protocol": header.protocol,
        "device": str(header.provenance.get("device", "unknown device")),
        "batch": f"batch {header.batch}",
    }
    for name, value in header.options.items():
        if name not in KEPT:
            words = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
            found[f"option {name}"] = f"{name}={words}"
    return found


def _conditions(groups: Sequence[Sequence[Run]]) -> list[str]:
    """A name for every block: target, settings that differ, and the folder if two names agree."""
    settings = pd.DataFrame([_circumstances(group[0].header) for group in groups])
    varied = settings.nunique(dropna=False) > 1
    varied["target"], varied["batch"] = True, False
    names = settings.loc[:, varied].apply(lambda row: ", ".join(row.dropna()), axis=1)
    twice = pd.DataFrame({"name": names, "batch": settings["batch"]}).duplicated(keep=False)
    return [
        f"{name} ({group[0].name})" if again else name
        for name, group, again in zip(names, groups, twice, strict=True)
    ]


def frame_of(blocks: Sequence[Block], edges: Sequence[int]) -> pd.DataFrame:
    """A row for every text: what it adds to the sums of every figure, and where tables show it.

    What a text says nothing about is NaN. Columns that end in ``_other`` are those of plain
    decoding on the same text and seed.

    Args:
      blocks: of a report.
      edges: of the ranges of prompt lengths, ascending from 0.
    """
    records = pd.DataFrame(
        {
            "block": block.label,
            "condition": block.condition,
            "call": f"{block.label}/{run.name}/{record.call}",
            "session": f"{run.name}/{record.start}",
            "batch": block.batch,
            "record": record,
            **_counts(record),
        }
        for block in blocks
        for run in block.runs
        for record in run.samples
    )
    order = {
        "block": [block.label for block in blocks],
        "condition": _union([block.condition] for block in blocks),
        "task": _union(block.tasks for block in blocks),
        "method": methods(blocks),
    }
    for name, values in order.items():
        records[name] = pd.Categorical(records[name], values, ordered=True)
    records = records.sort_values(["block", "task"], kind="stable", ignore_index=True)
    calls = records.groupby("call")
    rows = calls["call"].transform("size")
    records["seconds"] = (records["decode_s"] / rows).where(records["tokens"] > 0)
    records["prefill_share"] = records["prefill_s"] / rows
    records["decode_share"] = records["decode_s"] / rows
    records["all_seconds"] = records["prefill_share"] + records["decode_share"]
    records["untouched_s"] = records["decode_s"].where(records["passes"] > 0)
    records["untouched_rounds"] = calls["passes"].transform("max").where(records["parts"].notna())
    records["unit"] = _units(records)
    _add_labels(records, edges)
    plain = records[records["method"] == PLAIN_METHOD]
    return beside(records, plain, how="left")


def _add_labels(records: pd.DataFrame, edges: Sequence[int]) -> None:
    """Add the headings under which tables show a row; NaN where a table does not."""
    words = records["temperature"].map(temperature_words)
    records["at"] = _ordered(words, records["temperature"])
    task, block = records["task"].astype(str), records["block"].astype(str)
    places = records["task"].cat.codes.astype(int) * len(records) + records["block"].cat.codes
    several = records["block"].nunique() > 1
    records["task_and_block"] = _ordered(task + ", " + block if several else task, places)
    condition = records["condition"].astype(str)
    places = records["condition"].cat.codes.astype(int) * len(records) + records["task"].cat.codes
    batches = records.groupby("condition", observed=True)["batch"].transform("nunique")
    label = (task + ", " + condition).where(batches > 1)
    records["task_and_condition"] = _ordered(label, places)
    names = {
        batch: str(batch) if rows["block"].nunique() > 1 else _batch_words(rows)
        for batch, rows in records.groupby("batch")
    }
    records["batch_name"] = _ordered(records["batch"].map(names), records["batch"])
    records["length"] = in_ranges(records["prompt_tokens"], edges)
    metrics = ((name, metric_of(name)) for name in task.unique())
    names = {name: f"{name}: {METRICS[metric].name}" for name, metric in metrics if metric}
    scored = task.map(names, na_action=None).astype(object).where(records["score"].notna())
    records["scored"] = _ordered(scored, records["task"].cat.codes)


def _ordered(labels: pd.Series, places: pd.Series) -> pd.Categorical:
    """Labels in the order of their places."""
    known = labels.loc[places.sort_values(kind="stable").index].dropna().unique()
    return pd.Categorical(labels, known, ordered=True)


def temperature_words(temperature: float) -> str:
    """A temperature as captions have it."""
    return f"T = {temperature:g}"


def _batch_words(rows: pd.DataFrame) -> str:
    """The batch of a block's rows, and the rows of its largest call if no call was full."""
    batch, most = rows["batch"].iloc[0], rows.groupby("call").size().max()
    return f"{batch}" if most >= batch else f"{batch} ({counted(int(most), 'row')})"


def _counts(record: SampleRecord) -> dict[str, Any]:
    """The raw counts of a record, by columns."""
    breakdown = record.breakdown if record.breakdown and record.breakdown.rounds else None
    parts = dataclasses.asdict(breakdown) if breakdown else {}
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
        "draft_s": parts.get("draft_s", np.nan),
        "verify_s": parts.get("verify_s", np.nan),
        "other_s": parts.get("other_s", np.nan),
        "parts": parts.get("rounds", np.nan),
        "parts_s": parts["draft_s"] + parts["verify_s"] + parts["other_s"] if parts else np.nan,
        "stopped": record.ended == "eos",
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


def beside(rows: pd.DataFrame, others: pd.DataFrame, how: Any = "inner") -> pd.DataFrame:
    """Each row with those of ``others`` of the same text and seed, as columns ``_other``."""
    measures = others[[*TEXT, "method", "tokens", "passes", "seconds", "new_tokens", "all_seconds"]]
    own = rows.loc[:, ~rows.columns.str.endswith("_other")]
    return own.merge(measures, on=TEXT, how=how, suffixes=("", "_other"))


def rounds_of(records: pd.DataFrame) -> pd.DataFrame:
    """A row for every round of a drafting method: the tokens that it emitted and accepted.

    ``position`` is that of its first new token among all tokens of prompt and text: the prefill's
    token stands behind the prompt, and the first round begins behind it.
    """
    records = records[records["method"] != PLAIN_METHOD]
    lengths = [len(record.emitted_by_round) for record in records["record"]]
    columns = ["block", "method", "unit", "prompt_tokens"]
    rounds = records.loc[np.repeat(records.index, lengths), columns]
    for name in ("emitted", "accepted"):
        counts = (count for r in records["record"] for count in getattr(r, f"{name}_by_round"))
        rounds[name] = np.fromiter(counts, int, len(rounds))
    before = rounds.groupby(level=0)["emitted"].cumsum() - rounds["emitted"]
    rounds["position"] = rounds.pop("prompt_tokens") + 1 + before
    return rounds.assign(rounds=1)


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


def difference(sums: np.ndarray) -> np.ndarray:
    """The ratio of the first two sums minus that of the last two."""
    return quotient(sums[:2]) - quotient(sums[2:])


Of = Callable[[np.ndarray], np.ndarray]
"""A figure: from sums ``[columns, resamples]`` to values ``[resamples]``."""


def sums_by_unit(rows: pd.DataFrame, columns: Sequence[str]) -> np.ndarray:
    """The sums of every unit, ``[units, columns]``, over the rows that have all columns."""
    names = list(columns)
    told = rows.loc[rows[names].notna().all(axis=1), ["unit", *names]]
    return told.groupby("unit", sort=False)[names].sum().to_numpy(float)


def value_of(units: np.ndarray, of: Of) -> float | None:
    """A figure of sums over units; None if there is no unit, or it is not finite."""
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(of(units.sum(axis=0)[:, None])[0])
    return value if len(units) and math.isfinite(value) else None


def estimate(units: np.ndarray, of: Of) -> Estimate | None:
    """A figure of sums over units, ``[units, columns]``, and its interval.

    The interval is that of ``scipy.stats.bootstrap`` with the same seed, whose resampling of the
    units' numbers takes a hundred times as long as these counts, which all figures share.
    """
    value, count = value_of(units, of), len(units)
    if value is None:
        return None
    if count < FEWEST:
        return Estimate(value, math.nan, math.nan, count)
    with np.errstate(divide="ignore", invalid="ignore"):
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
