"""The progress of a run: at any moment on a terminal, else after every task of a method."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from longspec_jax.cli import counted
from longspec_jax.generation.activity import Activity, Compiling, Prefilling
from longspec_jax.status_line import StatusLine

from .records import (
    PLAIN_METHOD,
    SampleRecord,
    compared_with_plain,
    figures_in_words,
    tokens_per_second,
)


@dataclass(frozen=True)
class Part:
    """One method over one task at one temperature."""

    task: str
    method: str
    temperature: float
    samples: int

    def line(self, records: Sequence[SampleRecord], plain: Sequence[SampleRecord]) -> str:
        """Its figures, next to those of plain decoding on the same samples."""
        words = [counted(len(records), "sample"), *figures_in_words(records)]
        if self.method != PLAIN_METHOD and any(each.decode_tokens for each in plain):
            speedup = tokens_per_second(records) / tokens_per_second(plain)
            words.append(f"{speedup:.2f} times plain")
            if {each.start for each in records} != {each.start for each in plain}:
                words.append("plain timed in another start of this run")
        same, compared = compared_with_plain(records)
        if compared:
            words.append(f"{same} of {compared} identical to plain")
        return f"{self.task:14} {self.method:18} T={self.temperature:<4g} {', '.join(words)}"


class Progress:
    """Shows what is running, and the figures of the finished samples."""

    def __init__(self, status: StatusLine):
        self.status = status
        self._title = self._detail = ""

    def at(self, part: Part, records: Sequence[SampleRecord]) -> None:
        """Show the finished records of a part."""
        self._title = f"{part.task}  {part.method}  T={part.temperature:g}"
        done = f"{len(records)}/{part.samples} samples"
        self._detail = ", ".join([done, *figures_in_words(records)])
        self.status.show(self._title, self._detail)

    def activity(self, activity: Activity) -> None:
        """Show what a call does before its first round."""
        doing = "compiling" if isinstance(activity, Compiling) else "decoding"
        if isinstance(activity, Prefilling):  # Decoding reports nothing, which would slow it down.
            doing = f"prefill {activity.done}/{activity.total}, then decoding"
        self.status.show(self._title, f"{self._detail}, {doing}")

    def line(self, text: str) -> None:
        """Print a line of the result."""
        self.status.clear()
        print(text, flush=True)

    def note(self, text: str) -> None:
        """Print a line on standard error."""
        self.status.clear()
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Show nothing any more."""
        self.status.close()
