"""What an engine does next, as a pure function of what it holds: no arrays, no clock.

A lower priority goes first. Of equal ones the request that came first is admitted first, and of
several prompts under way the shortest goes on first.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Queued(NamedTuple):
    """A request that waits."""

    priority: int = 0
    held_back: bool = False
    """Whether a prompt under way shares its first chunks, so that it had better wait for these."""


class Prompt(NamedTuple):
    """A prefill under way."""

    left: int | None
    """Chunks left; None if it waits for a slot."""
    priority: int = 0


class Snapshot(NamedTuple):
    """What an engine holds at the beginning of a step."""

    queued: Sequence[Queued]
    """Requests that wait, in the order in which they are admitted."""
    prefilling: Sequence[Prompt]
    """Prefills under way, in the order in which they began."""
    free: int
    """Vacant slots."""
    slots: int
    together: bool
    """Whether requests are prefilled as one batch that takes all slots."""
    most_prefills: int
    """Prefills that may be under way at once."""
    live: Sequence[int] = ()
    """Priorities of the requests that hold a slot and may lose it, the one that came last last."""


class Plan(NamedTuple):
    """What a step does before it launches rounds."""

    admit: Sequence[int] = ()
    """Of the queue: requests to begin to prefill as one batch."""
    chunk: int | None = None
    """The prefill whose next chunk is launched."""
    place: int | None = None
    """The prefill whose rows move into slots."""
    postpone: int | None = None
    """The prefill that goes back to the queue, because a better request waits."""
    preempt: int | None = None
    """The live request that loses its slot to a better one, and goes back to the queue."""


def plan(now: Snapshot) -> Plan:
    """The next step.

    A prompt is prefilled ahead of a free slot. Of several prompts of the best priority the one with
    the fewest chunks left goes on, so that a long one does not hold up a short one.
    """
    size = now.slots if now.together else 1
    eligible = [index for index, one in enumerate(now.queued) if not one.held_back]
    full = len(now.prefilling) >= now.most_prefills
    may_admit = len(eligible) >= size and not full
    left = [
        (one.priority, one.left, index)
        for index, one in enumerate(now.prefilling)
        if one.left is not None
    ]
    ready = [(one.priority, index) for index, one in enumerate(now.prefilling) if one.left is None]
    best = min(ready, default=None)
    worst = max(((priority, index) for index, priority in enumerate(now.live)), default=None)
    preempt = best and worst and not now.free and best[0] < worst[0]
    return Plan(
        admit=tuple(eligible[:size]) if may_admit else (),
        chunk=min(left)[2] if left else None,
        place=best[1] if best and now.free >= size else None,
        postpone=_to_postpone(now, eligible) if full and not now.together else None,
        preempt=worst[1] if preempt and worst else None,
    )


def _to_postpone(now: Snapshot, eligible: Sequence[int]) -> int | None:
    """Of the prefills the worst that began last, if a request of a better priority waits."""
    priority, index = max((one.priority, index) for index, one in enumerate(now.prefilling))
    better = bool(eligible) and now.queued[eligible[0]].priority < priority
    return index if better else None
