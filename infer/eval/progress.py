"""How far a run has got: on a terminal at any moment, else when a method is through with a task."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from longspec_jax.cli import counted
from longspec_jax.generation.activity import Activity, Compiling, Prefilling, Tuning
from longspec_jax.status_line import StatusLine

from .records import (
    PLAIN_METHOD,
    SampleRecord,
    acceptance_length,
    compared_with_plain,
    tokens_per_second,
)


@dataclass(frozen=True)
class Part:
    """What a method does with a task at one temperature."""

    task: str
    method: str
    temperature: float
    samples: int

    @property
    def title(self) -> str:
        """For reading."""
        return f"{self.task}  {self.method}  T={self.temperature:g}"


class Progress:
    """Shows what is under way; the figures are those of the samples that have ended."""

    def __init__(self, status: StatusLine | None = None):
        """Show on standard error.

        Args:
          status: instead of it.
        """
        self._status = status or StatusLine(sys.stderr)
        self._part: Part | None = None
        self._detail = ""

    def starting(self, words: str) -> None:
        """Something begins that belongs to no part."""
        self._status.show(words)

    def clear(self) -> None:
        """What follows says of itself what it does."""
        self._status.clear()

    def at(self, part: Part, records: Sequence[SampleRecord]) -> None:
        """A part has got so far."""
        self._part = part
        done = f"{len(records)}/{part.samples} samples"
        self._detail = ", ".join([done, *figures(records)])
        self._status.show(part.title, self._detail)

    def activity(self, activity: Activity) -> None:
        """A call does something before its first round."""
        if self._part is None:
            return
        words = {Compiling: "compiling", Prefilling: "prefill", Tuning: "timing trees"}
        doing = words.get(type(activity), "decoding")
        if isinstance(activity, Prefilling):
            # Nothing is reported of decoding, which nobody is to slow down.
            doing = f"prefill {activity.done}/{activity.total}, then decoding"
        self._status.show(self._part.title, f"{self._detail}, {doing}")

    def line(self, text: str = "") -> None:
        """Print a line of the result."""
        self._status.clear()
        print(text, flush=True)

    def note(self, text: str) -> None:
        """Print what is no result on standard error."""
        self._status.clear()
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Nothing is shown any more."""
        self._status.close()


def figures(records: Sequence[SampleRecord]) -> list[str]:
    """Tokens per pass and per second, where there are any."""
    found = []
    if any(record.target_passes for record in records):
        found.append(f"{acceptance_length(records):.2f} tokens per pass")
    if any(record.decode_tokens for record in records):
        found.append(f"{tokens_per_second(records):.1f} tokens/s")
    return found


def part_line(part: Part, records: Sequence[SampleRecord], plain: Sequence[SampleRecord]) -> str:
    """What a method gave on a task, for reading."""
    words = [counted(len(records), "sample"), *figures(records)]
    if part.method != PLAIN_METHOD and plain and any(each.decode_tokens for each in plain):
        speedup = tokens_per_second(records) / tokens_per_second(plain)
        words.append(f"{speedup:.2f} times plain")
    same, compared = compared_with_plain(records)
    if compared:
        words.append(f"{same} of {compared} identical to plain")
    return f"{part.task:14} {part.method:18} T={part.temperature:<4g} {', '.join(words)}"
