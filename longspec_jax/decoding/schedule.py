"""What an engine does next, as a pure function of what it holds: no arrays, no clock."""

from typing import NamedTuple


class Snapshot(NamedTuple):
    """What an engine holds at the beginning of a step."""

    queued: int
    """Requests that wait."""
    prefilling: tuple[int | None, ...]
    """Chunks left of every prefill under way; None of one that waits for a slot."""
    free: int
    """Vacant slots."""
    slots: int
    together: bool
    """Whether requests are prefilled as one batch that takes all slots."""
    most_prefills: int
    """Prefills that may be under way at once."""


class Plan(NamedTuple):
    """What a step does before it launches rounds."""

    admit: int
    """Requests to begin to prefill as one batch."""
    chunk: int | None
    """The prefill whose next chunk is launched."""
    place: int | None
    """The prefill whose rows move into slots."""


def plan(now: Snapshot) -> Plan:
    """The next step.

    A prompt is prefilled ahead of a free slot. Of several prompts the one with the fewest chunks
    left goes on, so that a long one does not hold up a short one.
    """
    size = now.slots if now.together else 1
    may_admit = now.queued >= size and len(now.prefilling) < now.most_prefills
    prefilling = now.prefilling
    left = [(chunks, index) for index, chunks in enumerate(prefilling) if chunks is not None]
    ready = [index for index, chunks in enumerate(prefilling) if chunks is None]
    return Plan(
        admit=size if may_admit else 0,
        chunk=min(left)[1] if left else None,
        place=ready[0] if ready and now.free >= size else None,
    )
