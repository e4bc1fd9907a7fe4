"""The runs of a report, in blocks whose figures compare.

Runs that agree in target, device, precision, protocol and options, and never measured the same
text, share a block: methods may be evaluated one after another. A run that differs begins a block
of its own. Nothing is left out and nothing is counted twice.
"""

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from longspec_jax.cli import counted

from ..eval.records import PLAIN_METHOD, Header, SampleRecord
from ..eval.run_folder import Run, read

Sample = tuple[str, str]
"""A task and the name of one of its samples."""
KEPT = ("breakdown", "rounds", "cases")
"""Options that add to what a run keeps and change none of its figures."""


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
    runs = [
        dataclasses.replace(read(folder), name=name)
        for name, folder in zip(names, real, strict=True)
    ]
    for folder, run in zip(folders, runs, strict=True):
        if not run.samples:
            raise ValueError(
                f"{folder} holds no finished sample yet; continue the run with the command that "
                "began it"
            )
    return runs


@dataclass(frozen=True)
class Block:
    """Records whose figures compare."""

    condition: str
    """The target, and what distinguishes this block from others of the report but the batch."""
    label: str
    """The same with the batch, if the report has several."""
    batch: int
    """Rows of a call."""
    names: tuple[str, ...]
    methods: tuple[str, ...]
    """In the order they ran, plain decoding first."""
    tasks: tuple[str, ...]
    temperatures: tuple[float, ...]
    records: tuple[SampleRecord, ...]

    @property
    def speculative(self) -> tuple[str, ...]:
        """All methods except plain decoding."""
        return tuple(method for method in self.methods if method != PLAIN_METHOD)

    @cached_property
    def _index(self) -> dict[tuple[str, str, float], list[SampleRecord]]:
        index: dict[tuple[str, str, float], list[SampleRecord]] = {}
        for record in self.records:
            index.setdefault((record.task, record.method, record.temperature), []).append(record)
        return index

    def of(self, task: str | None, method: str, temperature: float) -> list[SampleRecord]:
        """The records of a method; of all tasks if ``task`` is None."""
        tasks = self.tasks if task is None else (task,)
        keys = [(each, method, temperature) for each in tasks]
        return [record for key in keys for record in self._index.get(key, [])]

    @cached_property
    def rows_of_call(self) -> dict[str, int]:
        """Records of every call, which share its seconds."""
        return Counter(record.call for record in self.records)

    @property
    def batch_words(self) -> str:
        """The batch, and the rows of the largest call if no call was full."""
        most = max(self.rows_of_call.values(), default=self.batch)
        return f"{self.batch}" if most >= self.batch else f"{self.batch} ({counted(most, 'row')})"

    @cached_property
    def rounds_of_call(self) -> dict[str, int]:
        """Rounds of every call: the passes of its longest row."""
        rounds: dict[str, int] = {}
        for record in self.records:
            rounds[record.call] = max(rounds.get(record.call, 0), record.target_passes)
        return rounds

    @cached_property
    def units(self) -> dict[Sample, Sample]:
        """The bootstrap's unit of every sample: samples that ever shared a call have one unit."""
        parents: dict[Sample, Sample] = {}

        def root(sample: Sample) -> Sample:
            while parents.setdefault(sample, sample) != sample:
                parents[sample] = parents[parents[sample]]
                sample = parents[sample]
            return sample

        first_of_call: dict[str, Sample] = {}
        for record in self.records:
            sample = (record.task, record.sample)
            parents[root(sample)] = root(first_of_call.setdefault(record.call, sample))
        return {sample: root(sample) for sample in list(parents)}


def blocks(runs: Sequence[Run]) -> tuple[Block, ...]:
    """Group runs that compare."""
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
        _block(group, condition, names_batch)
        for group, condition in zip(groups, conditions, strict=True)
    ]
    order = list(dict.fromkeys(conditions))
    return tuple(sorted(found, key=lambda block: (order.index(block.condition), block.batch)))


def _compare(one: Run, other: Run) -> bool:
    """Whether two runs compare: all settings agree, and no text was measured twice."""
    left, right = one.header, other.header
    if _circumstances(left) != _circumstances(right):
        return False
    common = left.methods.keys() & right.methods.keys()
    if any(left.methods[method] != right.methods[method] for method in common):
        return False
    keys = {record.key for record in one.samples}
    return not any(record.key in keys for record in other.samples)


def _circumstances(header: Header) -> dict[str, str]:
    """The settings in which runs must agree to be compared, in words."""
    return {
        "target": header.target,
        "dtype": header.dtype,
        "protocol": header.protocol,
        "device": str(header.provenance.get("device", "unknown device")),
        "batch": f"batch {header.batch}",
        **{
            f"option {name}": f"{name}={_words(value)}"
            for name, value in header.options.items()
            if name not in KEPT
        },
    }


def _words(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _conditions(groups: Sequence[Sequence[Run]]) -> list[str]:
    """A name for every block: target, settings that differ, and the folder if two names agree."""
    circumstances = [_circumstances(group[0].header) for group in groups]
    names = list(dict.fromkeys(name for each in circumstances for name in each))
    varied = {name for name in names if len({each.get(name) for each in circumstances}) > 1}
    shown = [name for name in names if name == "target" or name in varied - {"batch"}]
    conditions = [", ".join(each[name] for name in shown if name in each) for each in circumstances]
    pairs = [
        (condition, each["batch"])
        for condition, each in zip(conditions, circumstances, strict=True)
    ]
    return [
        condition if pairs.count(pair) == 1 else f"{condition} ({group[0].name})"
        for condition, pair, group in zip(conditions, pairs, groups, strict=True)
    ]


def _block(group: Sequence[Run], condition: str, names_batch: bool) -> Block:
    headers = [each.header for each in group]
    batch = headers[0].batch
    methods = dict.fromkeys(name for header in headers for name in header.methods)
    # Calls are named within their run.
    records = tuple(
        dataclasses.replace(record, call=f"{place}/{record.call}")
        for place, each in enumerate(group)
        for record in each.samples
    )
    return Block(
        condition=condition,
        label=f"{condition}, batch {batch}" if names_batch else condition,
        batch=batch,
        names=tuple(each.name for each in group),
        methods=tuple(sorted(methods, key=lambda method: method != PLAIN_METHOD)),
        tasks=tuple(dict.fromkeys(task for header in headers for task in header.tasks)),
        temperatures=tuple(sorted({value for each in headers for value in each.temperatures})),
        records=records,
    )


def all_tasks(blocks: Iterable[Block]) -> tuple[str, ...]:
    """The tasks of all blocks, in their order."""
    return tuple(dict.fromkeys(task for block in blocks for task in block.tasks))


def all_temperatures(blocks: Iterable[Block]) -> tuple[float, ...]:
    """The temperatures of all blocks, ascending."""
    return tuple(sorted({value for block in blocks for value in block.temperatures}))
