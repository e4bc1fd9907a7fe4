"""What an evaluation keeps of every sample: raw counts, from which every figure is derived.

One definition holds throughout. The acceptance length is the tokens that decode rounds emit / the
target's forward passes, the bonus included, the prefill and its first token excluded. Tokens per
second are the same tokens / the seconds of the rounds.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

SCHEMA = 1
"""Version of the files; raised when an older reader would misread newer ones."""
PLAIN_METHOD = "plain"
"""The method that all others are compared with."""
MEASURED = "_s", "_tokens", "_passes"
"""How the names of fields end that hold seconds or counts."""

End = Literal["eos", "length"]
Stop = Literal["not proposed", "nothing below", "ended"]


@dataclass(frozen=True)
class Key:
    """Identifies a line of results: no two lines of a run have the same key."""

    task: str
    sample: str
    method: str
    temperature: float
    seed: int


@dataclass(frozen=True)
class Setting:
    """What a method ran with."""

    drafter: str | None
    """As it was named on the command line; None without one."""
    tree: str | None
    """As ``--tree`` takes it; None without a tree, or where the run chose among several."""
    nodes: int | None
    """Verified nodes of a round, the root included; None where rounds differ."""
    options: Mapping[str, Any]
    """Of the drafter's kind."""


@dataclass(frozen=True)
class Breakdown:
    """Seconds of the parts of decoding, measured in a run of their own.

    That run waits for every part, so the device overlaps none of them, and their sum exceeds
    ``SampleRecord.decode_s``, which is the untouched run's.
    """

    draft_s: float
    verify_s: float
    other_s: float
    """Draws, acceptance, commit, drafter update, and the host in between."""
    rounds: int


@dataclass(frozen=True)
class Divergence:
    """The first token that differs from plain decoding's."""

    index: int
    """Among the emitted tokens."""
    gap: float | None
    """How much plain decoding's own scores prefer its token, noise and temperature included: the
    distance of the draw from a tie. None if one of the two texts had ended, or it is unknown."""


@dataclass(frozen=True)
class RoundTree:
    """One round as a tree: node 0 is the token emitted last."""

    position: int
    """Of the root, among all tokens of prompt and text."""
    tokens: tuple[int, ...]
    texts: tuple[str, ...]
    parents: tuple[int, ...]
    """Index of every node's parent; -1 for the root."""
    drawn: tuple[int, ...]
    """What the target drew behind every node."""
    drawn_texts: tuple[str, ...]
    path: tuple[int, ...]
    """The accepted nodes, the root first; the draw behind the last is the round's last token."""
    stop: Stop
    """Why the path ended: the target's draw was not among the children, there were no children, or
    the text ended."""


@dataclass(frozen=True)
class SampleRecord:
    """One sample by one method."""

    task: str
    sample: str
    method: str
    """Such as ``plain`` or ``longspec-tree``."""
    temperature: float
    seed: int
    setting: Setting
    call: str
    """Names the call that decoded the sample: rows of one call share its seconds."""
    batch: int
    """Rows of that call."""
    prompt_tokens: int
    original_tokens: int
    """Of the prompt before the protocol cut it: those of the cut prompt, tokenised again and in its
    chat format, and those that were removed. The same as ``prompt_tokens`` if it was not cut."""
    new_tokens: int
    """Emitted tokens, a stop token included; the first comes from the prefill."""
    target_passes: int
    """Forward passes of the decode phase."""
    emitted_by_round: tuple[int, ...]
    """Tokens of every target pass, the bonus included. Their sum is ``new_tokens - 1``."""
    accepted_by_round: tuple[int, ...]
    """Draft tokens among them: one less, except in a last round that ended inside the draft."""
    prefill_s: float
    """Of the whole call, without compilation."""
    decode_s: float
    """Of the whole call's rounds, without compilation and prefill."""
    compile_s: float
    """Spent on programs that earlier calls had not compiled."""
    breakdown: Breakdown | None
    """None unless ``--breakdown`` was given."""
    tokens: tuple[int, ...]
    text: str
    references: tuple[str, ...]
    """What counts as an answer; empty where the task has none."""
    identical_to_plain: bool | None
    """None for plain decoding, and if plain decoding did not run."""
    divergence: Divergence | None
    ended: End
    pieces: tuple[str, ...] | None = None
    """The text by token, for samples whose rounds are kept."""
    rounds: tuple[RoundTree, ...] | None = None
    """The first rounds as trees, for samples whose rounds are kept."""
    start: int = 0
    """Which start of the run measured it: 0 the first, 1 the first resume, and so on. Seconds of
    different starts may have been measured under different loads."""

    @property
    def key(self) -> Key:
        """What the record identifies."""
        return Key(self.task, self.sample, self.method, self.temperature, self.seed)

    @property
    def truncated(self) -> bool:
        """Whether the protocol cut the prompt."""
        return self.prompt_tokens < self.original_tokens

    @property
    def decode_tokens(self) -> int:
        """Tokens of the decode rounds: all but the prefill's."""
        return sum(self.emitted_by_round)


@dataclass(frozen=True)
class SkippedSample:
    """A sample that the protocol excludes."""

    task: str
    sample: str
    original_tokens: int
    reason: str


@dataclass(frozen=True)
class Header:
    """Where, with what and how a run was made."""

    schema: int
    provenance: Mapping[str, Any]
    """Of the run's beginning: device, versions, commit, date."""
    command: str
    """As it was typed first."""
    target: str
    dtype: str
    protocol: str
    tasks: tuple[str, ...]
    methods: Mapping[str, Setting]
    """By name, in the order they run."""
    temperatures: tuple[float, ...]
    seeds: tuple[int, ...]
    batch: int
    options: Mapping[str, Any]
    """All other options that a continued run must share."""
    definitions: Mapping[str, str]
    """Of the figures, by their names."""
    continued: tuple[Mapping[str, Any], ...] = ()
    """Provenance of every later start."""


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


def summary_rows(records: Sequence[SampleRecord]) -> list[dict[str, Any]]:
    """A row per task, method and temperature, in the order of the records.

    ``speedup_over_plain`` compares the same samples; it and the fraction that is identical are null
    without anything to compare with. ``gaps`` are of the samples that differ.
    """
    groups: dict[tuple[str, str, float], list[SampleRecord]] = {}
    for record in records:
        key = record.task, record.method, record.temperature
        groups.setdefault(key, []).append(record)
    return [
        _summary_row(key, found, groups.get((key[0], PLAIN_METHOD, key[2]), []))
        for key, found in groups.items()
    ]


def _summary_row(
    key: tuple[str, str, float], found: Sequence[SampleRecord], plain: Sequence[SampleRecord]
) -> dict[str, Any]:
    task, method, temperature = key
    here = {(record.sample, record.seed) for record in found}
    there = [record for record in plain if (record.sample, record.seed) in here]
    # A method that was interrupted is compared over the samples that it has.
    complete = len(there) == len(here)
    speedup = tokens_per_second(found) / tokens_per_second(there) if complete else math.nan
    same, compared = compared_with_plain(found)
    divergences = [record.divergence for record in found if record.divergence is not None]
    gaps = [_number(each.gap) for each in divergences if each.gap is not None]
    return {
        "task": task,
        "method": method,
        "temperature": temperature,
        "tree": found[0].setting.tree,
        "acceptance_length": _number(acceptance_length(found)),
        "tokens_per_second": _number(tokens_per_second(found)),
        "speedup_over_plain": None if method == PLAIN_METHOD else _number(speedup),
        "identical_to_plain_fraction": same / compared if compared else None,
        "gaps": sorted(gap for gap in gaps if gap is not None),
        "samples": len(found),
        "new_tokens": sum(record.new_tokens for record in found),
        "prefill_seconds": _number(
            sum({record.call: record.prefill_s for record in found}.values())
        ),
    }


def _number(value: float) -> float | None:
    """Four significant digits: more would not repeat; None for no number."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


def figures_in_words(records: Sequence[SampleRecord]) -> list[str]:
    """Tokens per pass and per second, as far as they exist."""
    found = []
    if any(record.target_passes for record in records):
        found.append(f"{acceptance_length(records):.2f} tokens per pass")
    if any(record.decode_tokens for record in records):
        found.append(f"{tokens_per_second(records):.1f} tokens/s")
    return found


def from_json(kind: type[Any], value: Any, where: str) -> Any:
    """A record from its JSON values.

    Raises:
      ValueError: if a field is missing, unknown or of another type, or a measure is negative.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{where}: {kind.__name__} must be an object")
    hints = typing.get_type_hints(kind)
    required = {
        field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING
    }
    missing, unknown = sorted(required - set(value)), sorted(set(value) - set(hints))
    if missing or unknown:
        words = [f"lacks {', '.join(missing)}"] if missing else []
        words += [f"has unknown {', '.join(unknown)}"] if unknown else []
        raise ValueError(f"{where}: {kind.__name__} {' and '.join(words)}")
    fields = {name: _typed(hints[name], item, f"{where}: {name}") for name, item in value.items()}
    for name, item in fields.items():
        if name.endswith(MEASURED) and not item >= 0:  # NaN is not, either.
            raise ValueError(f"{where}: {name}: {item} must be 0 or more")
    return kind(**fields)


def _typed(hint: Any, value: Any, where: str) -> Any:
    """A value of the annotated type, tuples and records built from lists and objects."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin is types.UnionType:
        if value is None and types.NoneType in parts:
            return None
        [hint] = [part for part in parts if part is not types.NoneType]
        return _typed(hint, value, where)
    if origin is Literal:
        if value not in parts:
            raise ValueError(f"{where}: {value!r} is none of {', '.join(map(repr, parts))}")
        return value
    if origin is tuple and isinstance(value, Sequence) and not isinstance(value, str):
        if parts[0] is int and {*map(type, value)} <= {int}:  # Thousands in every record.
            return tuple(value)
        return tuple(_typed(parts[0], item, where) for item in value)
    if isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, dict):
        return {key: _typed(parts[1], item, where) for key, item in value.items()}
    if dataclasses.is_dataclass(hint):
        return from_json(typing.cast(type[Any], hint), value, where)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if origin is None and isinstance(value, hint) and (hint is not int or value is not True):
        return value
    raise ValueError(f"{where}: {value!r} has the wrong type")
