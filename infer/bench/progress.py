"""What a benchmark says while it is silent otherwise: on standard error, beside the rows."""

import os
import sys


def announce(work: str, seconds: float) -> None:
    """Say what will run on a CPU, where it is small and takes long all the same.

    Args:
      work: what is measured, and how many programs are compiled for it.
      seconds: a rough estimate.
    """
    print(
        f"on a CPU ({os.cpu_count()} cores): {work}; about {_duration(seconds)}. "
        "A GPU measures the real shapes by default.",
        file=sys.stderr,
        flush=True,
    )


def step(words: str) -> None:
    """Say what is being done, to someone who watches."""
    if sys.stderr.isatty():
        print(f"... {words}", file=sys.stderr, flush=True)


def _duration(seconds: float) -> str:
    """In the unit that people would use."""
    if seconds < 90:
        return f"{max(5, 5 * round(seconds / 5))} seconds"
    if seconds < 5400:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.0f} hours"
