"""What an evaluation keeps of every sample: raw counts, from which every figure is derived.

Counting follows one definition: the acceptance length is the tokens that decode rounds emit by the
target's forward passes, the bonus included and the prefill with its first token excluded; tokens
per second are the same tokens by the seconds of the rounds.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

SCHEMA = 1
"""Version of what is written below; raised when a reader of older files would misread them."""
PLAIN_METHOD = "plain"
"""The method whose text and speed all others are compared with."""

End = Literal["eos", "length"]
Stop = Literal["not proposed", "nothing below", "ended"]


@dataclass(frozen=True)
class Key:
    """What one line of results is about: no two lines of a run have the same."""

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
    """Seconds of the parts of decoding, taken in a run of their own.

    Waiting for every part keeps the device from overlapping them, so that their sum exceeds what
    the sample took: ``SampleRecord.decode_s`` is the untouched run's.
    """

    draft_s: float
    """The drafter proposes a tree."""
    verify_s: float
    """The target checks it."""
    other_s: float
    """Draws, walk, commit, what the drafter learns, and the host in between."""
    rounds: int
    """That were timed."""


@dataclass(frozen=True)
class Divergence:
    """The first token that differs from plain decoding's."""

    index: int
    """Among the emitted tokens."""
    gap: float | None
    """How much plain decoding's own scores prefer its token, noise and temperature included: how
    far from a tie the draw was. None where one of the two texts had ended, or it is not known."""


@dataclass(frozen=True)
class RoundTree:
    """One round as a tree: node 0 is the token that was emitted last."""

    position: int
    """Of the root, among all tokens of prompt and text."""
    tokens: tuple[int, ...]
    """Of the nodes."""
    texts: tuple[str, ...]
    """What the tokens read."""
    parents: tuple[int, ...]
    """Index of every node's parent; -1 for the root."""
    drawn: tuple[int, ...]
    """What the target drew behind every node."""
    drawn_texts: tuple[str, ...]
    path: tuple[int, ...]
    """The accepted nodes, the root first; the draw behind the last is the round's last token."""
    stop: Stop
    """Why the walk went no further: what the target drew was not among the children, there were
    none, or the text ended."""


@dataclass(frozen=True)
class SampleRecord:
    """One sample by one method."""

    task: str
    sample: str
    method: str
    """``plain``, ``longspec-tree`` and so on: what the report calls it."""
    temperature: float
    seed: int
    setting: Setting
    call: str
    """Names the call that decoded it: rows of one call share its seconds."""
    batch: int
    """Rows of that call."""
    prompt_tokens: int
    original_tokens: int
    """Of the prompt before the protocol cut it; the same where it did not."""
    new_tokens: int
    """Emitted, a stop token included; the first comes from the prefill."""
    target_passes: int | None
    """Forward passes of the decode phase; None where an outside method does not tell."""
    emitted_by_round: tuple[int, ...]
    """Tokens of every target pass, the bonus included: their sum is ``new_tokens - 1``, or less
    where an outside method drafts in its prefill; empty where one does not tell."""
    accepted_by_round: tuple[int, ...]
    """Draft tokens among them: one less, but for a last round that ended inside the draft."""
    prefill_s: float
    """Of the whole call, without compilation."""
    decode_s: float
    """Of the whole call's rounds, without compilation and prefill."""
    compile_s: float
    """Spent before, on programs that earlier calls had not compiled."""
    breakdown: Breakdown | None
    """None unless it was asked for."""
    tokens: tuple[int, ...]
    """Emitted token ids."""
    text: str
    references: tuple[str, ...]
    """What counts as an answer; empty where the task has none."""
    identical_to_plain: bool | None
    """None where plain decoding did not run, and for plain decoding."""
    divergence: Divergence | None
    ended: End
    pieces: tuple[str, ...] | None = None
    """The text by token, for samples whose rounds are kept."""
    rounds: tuple[RoundTree, ...] | None = None
    """The first rounds as trees, for the samples that they were asked for."""

    @property
    def key(self) -> Key:
        """What the record is about."""
        return Key(self.task, self.sample, self.method, self.temperature, self.seed)

    @property
    def truncated(self) -> bool:
        """Whether the protocol cut the prompt."""
        return self.prompt_tokens < self.original_tokens

    @property
    def decode_tokens(self) -> int:
        """Emitted by decode rounds: all but the prefill's."""
        return self.new_tokens - 1 if self.target_passes is None else sum(self.emitted_by_round)

    @property
    def accepted_by_depth(self) -> tuple[int, ...]:
        """Rounds whose draft token at depth 1, 2, ... was accepted."""
        deepest = max(self.accepted_by_round, default=0)
        return tuple(
            sum(count >= depth for count in self.accepted_by_round)
            for depth in range(1, deepest + 1)
        )


@dataclass(frozen=True)
class SkippedSample:
    """A sample that the protocol leaves out."""

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
    """Everything else that a run must have in common to be continued."""
    definitions: Mapping[str, str]
    """Of the figures, by their names."""
    continued: tuple[Mapping[str, Any], ...] = ()
    """Provenance of every later start."""


def acceptance_length(records: Iterable[SampleRecord]) -> float:
    """Tokens of the decode rounds by target passes, over all records; NaN without passes.

    Records of outside methods that do not count passes are left out.
    """
    counted = [record for record in records if record.target_passes is not None]
    passes = sum(record.target_passes or 0 for record in counted)
    return sum(record.decode_tokens for record in counted) / passes if passes else math.nan


def tokens_per_second(records: Iterable[SampleRecord]) -> float:
    """Tokens of the decode rounds by the seconds of their calls; NaN without either."""
    records = list(records)
    tokens, seconds = sum(record.decode_tokens for record in records), decode_seconds(records)
    return tokens / seconds if tokens and seconds else math.nan


def compared_with_plain(records: Iterable[SampleRecord]) -> tuple[int, int]:
    """Records that are identical to plain decoding, and those that were compared with it."""
    verdicts = [
        record.identical_to_plain for record in records if record.identical_to_plain is not None
    ]
    return sum(verdicts), len(verdicts)


def decode_seconds(records: Iterable[SampleRecord]) -> float:
    """Seconds of the rounds of all calls, each counted once."""
    return sum({record.call: record.decode_s for record in records}.values())


def to_json(record: Any) -> dict[str, Any]:
    """A record as JSON values."""
    return dataclasses.asdict(record)


def from_json(kind: type[Any], value: Any, where: str) -> Any:
    """A record from its JSON values.

    Args:
      kind: of the record.
      value: what was read.
      where: the file and its line, for messages.

    Raises:
      ValueError: if a field is missing, unknown or of another type.
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
    return kind(
        **{name: _typed(hints[name], item, f"{where}: {name}") for name, item in value.items()}
    )


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
