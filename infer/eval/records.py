"""What an evaluation keeps: raw counts, from which every figure is derived, in a folder.

One definition holds throughout. The acceptance length is the tokens that decode rounds emit / the
target's forward passes, the bonus included, the prefill and its first token excluded. Tokens per
second are the same tokens / the seconds of the rounds.

A folder has a header, a line of results per sample, and the skipped samples. Lines are
appended as samples end, so a killed run continues after its last whole line. A line that was cut
short in writing is removed before the next one is added.
"""

import dataclasses
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from longspec_jax import files
from longspec_jax.checks import LARGEST_NUMBER, OneOf, Real, Rule, That, Whole
from longspec_jax.schema import RENAMED, Section, build

SCHEMA = 2
"""Version of the files; raised when an older reader would misread newer ones."""
PLAIN_METHOD = "plain"
"""The method that all others are compared with."""
HEADER, SAMPLES, SKIPPED = "header.json", "samples.jsonl", "skipped.jsonl"
COMPARED = "target dtype tasks temperatures seeds batch".split()
"""Fields of the header that a continued run must share, besides methods and options."""

End = Literal["eos", "length"]


class _Wholes(Rule):
    """Whole numbers; thousands in every record, so that their types are looked at together."""

    def refusal(self, value: object) -> str | None:
        """Anything else than a list of them."""
        good = isinstance(value, list | tuple) and {*map(type, value)} <= {int}
        return None if good else "a list of whole numbers"

    def plain(self, value: object) -> tuple[int, ...]:
        """A tuple of them."""
        assert isinstance(value, list | tuple), "another value is refused"
        return tuple(value)


class _Settings(Rule):
    """Settings by the names of methods."""

    def refusal(self, value: object) -> str | None:
        """Anything else than an object."""
        return None if isinstance(value, Mapping) else "an object of settings"

    def read(self, name: str, value: object, row: int | None = None) -> "dict[str, Setting]":
        """The settings."""
        found = super().read(name, value, row)
        return {key: Section(Setting).read(f"{name}.{key}", each) for key, each in found.items()}


Wholes = Annotated[tuple[int, ...], _Wholes()]
Seed = Annotated[int, Whole(0, 2**32 - 1)]
Free = Annotated[
    Mapping[str, Any], That(lambda value: isinstance(value, Mapping), "an object of named values")
]
"""Whatever a version, a drafter or a device has to say."""


@dataclass(frozen=True)
class Key:
    """Identifies a line of results: no two lines of a run have the same key."""

    task: str
    sample: str
    method: str
    temperature: float
    seed: Seed


@dataclass(frozen=True)
class Setting:
    """What a method ran with."""

    drafter: str | None
    """As it was named on the command line; None without one."""
    tree: str | None
    """As ``--tree`` takes it; None without a tree, or where the run chose among several."""
    nodes: int | None
    """Verified nodes of a round, the root included; None where rounds differ."""
    options: Free
    """Of the drafter's kind."""


@dataclass(frozen=True)
class Divergence:
    """The first token that differs from plain decoding's."""

    index: int
    """Among the emitted tokens."""
    gap: Annotated[float | None, Real(-LARGEST_NUMBER, LARGEST_NUMBER)]
    """How much plain decoding's own scores prefer its token, noise and temperature included: the
    distance of the draw from a tie. None if one of the two texts had ended, or it is unknown."""


@dataclass(frozen=True)
class SampleRecord:
    """One sample by one method."""

    task: str
    sample: str
    method: str
    """Such as ``plain`` or ``longspec-tree``."""
    temperature: float
    seed: Seed
    setting: Setting
    call: str
    """Names the call that decoded the sample: rows of one call share its seconds."""
    batch: int
    """Rows of that call."""
    prompt_tokens: int
    new_tokens: int
    """Emitted tokens, a stop token included; the first comes from the prefill."""
    target_passes: int
    """Forward passes of the decode phase."""
    emitted_by_round: Wholes
    """Tokens of every target pass, the bonus included. Their sum is ``new_tokens - 1``."""
    accepted_by_round: Wholes
    """Draft tokens among them: one less, except in a last round that ended inside the draft."""
    prefill_s: float
    """Of the whole call, without compilation."""
    decode_s: float
    """Of the whole call's rounds, without compilation and prefill."""
    compile_s: float
    """Spent on programs that earlier calls had not compiled."""
    tokens: Wholes
    text: str
    references: tuple[str, ...]
    """What counts as an answer; empty where the task has none."""
    identical_to_plain: bool | None
    """None for plain decoding, and if plain decoding did not run."""
    divergence: Divergence | None
    ended: Annotated[End, OneOf(get_args(End))]
    start: int = 0
    """Which start of the run measured it: 0 the first, 1 the first resume, and so on. Seconds of
    different starts may have been measured under different loads."""

    @property
    def key(self) -> Key:
        """What the record identifies."""
        return Key(self.task, self.sample, self.method, self.temperature, self.seed)

    @property
    def decode_tokens(self) -> int:
        """Tokens of the decode rounds: all but the prefill's."""
        return sum(self.emitted_by_round)


@dataclass(frozen=True)
class SkippedSample:
    """A sample that is left out."""

    task: str
    sample: str
    original_tokens: int
    reason: str


@dataclass(frozen=True)
class Header:
    """Where, with what and how a run was made."""

    schema: int
    provenance: Free
    """Of the run's beginning: device, versions, commit, date."""
    command: str
    """As it was typed first."""
    target: str
    dtype: str
    tasks: tuple[str, ...]
    methods: Annotated[Mapping[str, Setting], _Settings()]
    """By name, in the order they run."""
    temperatures: tuple[float, ...]
    seeds: Wholes
    batch: int
    options: Free
    """All other options that a continued run must share."""
    definitions: Free
    """Of the figures, by their names."""
    continued: tuple[Free, ...] = ()
    """Provenance of every later start."""
    contents: Free = dataclasses.field(default_factory=dict)
    """Digests of what lay under the names at the beginning: prompts, target and drafts."""


def acceptance_length(records: Iterable[SampleRecord]) -> float:
    """Tokens of the decode rounds / target passes of all records; NaN without a pass."""
    records = list(records)
    passes = sum(record.target_passes for record in records)
    return sum(record.decode_tokens for record in records) / passes if passes else math.nan


def tokens_per_second(records: Iterable[SampleRecord]) -> float:
    """Tokens of the decode rounds / the seconds of their calls; NaN without either."""
    records = list(records)
    tokens, seconds = sum(record.decode_tokens for record in records), decode_seconds(records)
    return tokens / seconds if tokens and seconds else math.nan


def compared_with_plain(records: Iterable[SampleRecord]) -> tuple[int, int]:
    """How many records are identical to plain decoding, and how many were compared with it."""
    verdicts = [
        record.identical_to_plain for record in records if record.identical_to_plain is not None
    ]
    return sum(verdicts), len(verdicts)


def decode_seconds(records: Iterable[SampleRecord]) -> float:
    """Seconds of the rounds of all calls, each counted once."""
    return sum({record.call: record.decode_s for record in records}.values())


def figures_in_words(records: Sequence[SampleRecord]) -> list[str]:
    """Tokens per pass and per second, as far as they exist."""
    found = []
    if any(record.target_passes for record in records):
        found.append(f"{acceptance_length(records):.2f} tokens per pass")
    if any(record.decode_tokens for record in records):
        found.append(f"{tokens_per_second(records):.1f} tokens/s")
    return found


def by_round(drafted: Sequence[bool]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tokens of every target pass, and the draft tokens among them.

    A pass ends with the token that no draft proposed. The last pass may have been cut before that
    token; all of its tokens are then the draft's.

    Args:
      drafted: of every token of a text whether a draft proposed it; the first is the prefill's.
    """
    emitted, accepted = [], []
    count = 0
    for draft in drafted[1:]:
        count += 1
        if not draft:
            emitted.append(count)
            accepted.append(count - 1)
            count = 0
    if count:
        emitted.append(count)
        accepted.append(count)
    return tuple(emitted), tuple(accepted)


@dataclass(frozen=True)
class Run:
    """What a folder holds."""

    name: str
    """Of the folder, or what tells it from others."""
    header: Header
    samples: tuple[SampleRecord, ...]
    skipped: tuple[SkippedSample, ...]
    torn: int
    """Bytes of a last line that was cut short; it is not counted."""


def read(folder: Path) -> Run:
    """Everything a run has written.

    Raises:
      FileNotFoundError: if this is no folder of a run.
      ValueError: for a line that is no record, naming the file, the line and the remedy.
    """
    header = read_header(folder)
    samples, torn = _lines(folder / SAMPLES, SampleRecord)
    skipped, _ = _lines(folder / SKIPPED, SkippedSample)
    for key, number in Counter(record.key for record in samples).items():
        if number > 1:
            raise ValueError(
                f"{folder / SAMPLES} holds {key} twice, so its figures would count it twice; "
                "remove one of the two lines"
            )
    return Run(folder.resolve().name, header, tuple(samples), tuple(skipped), torn)


def read_header(folder: Path) -> Header:
    """The header of a run."""
    path = folder / HEADER
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no {HEADER}; name the folder of an evaluation run")
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{path} is not JSON ({error}); start the run again in another folder"
        ) from None
    schema = value.get("schema") if isinstance(value, dict) else None
    if schema != SCHEMA:
        raise ValueError(
            f"{path} is of schema {schema} and this version reads {SCHEMA}; repeat the run, or "
            "read it with the version of its commit"
        )
    if isinstance(given := value.get("options"), dict):  # A run may have begun with older names.
        value["options"] = {RENAMED.get(name, name): each for name, each in given.items()}
    return build(Header, value, f"{path}: ")


def write_header(folder: Path, header: Header) -> None:
    """Write a header, whole or not at all."""
    text = json.dumps(dataclasses.asdict(header), indent=1, ensure_ascii=False) + "\n"
    files.replace(folder / HEADER, text.encode())


def differences(one: Header, other: Header) -> list[str]:
    """The options that differ, so that the second run cannot continue the first, in words."""
    left, right = (_compared(header) for header in (one, other))
    named = [
        f"{name}: {left.get(name)} there, {right.get(name)} now"
        for name in dict.fromkeys([*left, *right])
        if left.get(name) != right.get(name)
    ]
    # Those of older versions have none.
    kept = [name for name in other.contents if name in one.contents]
    changed = [name for name in kept if one.contents[name] != other.contents[name]]
    return named + [f"{name}: changed under the same name" for name in changed]


def _compared(header: Header) -> dict[str, Any]:
    """What a continued run must share with it, as JSON values."""
    values = json.loads(json.dumps(dataclasses.asdict(header)))
    methods = {f"method {name}": setting for name, setting in values["methods"].items()}
    return {**{name: values[name] for name in COMPARED}, **methods, **values["options"]}


class Writer:
    """Adds whole lines to a run's files, each on the disk before the next."""

    def __init__(self, folder: Path):
        """Open the files of a folder, and remove a last line that was cut short.

        Args:
          folder: of the run; it exists.
        """
        self._paths = {SampleRecord: folder / SAMPLES, SkippedSample: folder / SKIPPED}
        for path in self._paths.values():
            _remove_torn_line(path)

    def add(self, records: Iterable[SampleRecord] | Iterable[SkippedSample]) -> None:
        """Add the records of one call, all of them or none."""
        lines: dict[Path, list[str]] = {}
        for record in records:
            text = json.dumps(dataclasses.asdict(record), ensure_ascii=False, allow_nan=False)
            lines.setdefault(self._paths[type(record)], []).append(text + "\n")
        for path, texts in lines.items():
            data = "".join(texts).encode("utf-8", "backslashreplace")
            before = path.stat().st_size if path.exists() else 0
            with path.open("ab", buffering=0) as file:
                try:
                    left = memoryview(data)
                    while left:  # A write may take a part; the next one raises the reason.
                        left = left[file.write(left) :]
                    os.fsync(file.fileno())
                except BaseException:  # On a full disk no half of a call may stay.
                    file.truncate(before)
                    raise


def _remove_torn_line(path: Path) -> None:
    """Remove the bytes after the last whole line."""
    if path.exists():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


def _lines(path: Path, kind: type[Any]) -> tuple[Sequence[Any], int]:
    """The records of a file, and the bytes of a last line that was cut short."""
    if not path.exists():
        return [], 0
    data = path.read_bytes()
    *whole, rest = data.split(b"\n")
    records = []
    for number, line in enumerate(whole, start=1):
        where = f"{path}, line {number}"
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ValueError(
                f"{where} is not JSON ({error}); remove the line, and the run measures it again"
            ) from None
        if not isinstance(value, dict):
            raise ValueError(f"{where} must be an object; remove the line")
        records.append(build(kind, value, f"{where}: "))
    return records, len(rest)
