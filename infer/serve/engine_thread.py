"""The one thread that drives the engine.

The event loop submits rows and cancels them; the thread steps the engine and hands out what rows
have gained. Neither waits for the other: what a slow reader has not read yet is joined to one gain.
What is queued is bounded, in requests and in tokens.

Who owns what:

* Only the thread uses the engine, and what it knows of rows in it (``_rows``, ``_unstarted``, a
  handle's ``ids`` and ``open``). ``RequestEngine.trees`` is the exception: it is made of tuples
  that the thread replaces whole, so any thread may read it.
* Both sides use the inbox, the open handles, the counts of the queue, the ends of rows and the
  state. All of them are read and written under one lock, ``_changed``. Nobody calls the engine or
  waits for anything else while he holds it.
* A handle's answers are its reader's. The thread writes their ``times`` and nothing else; each of
  these is one assignment. Gains go from the thread to the reader through the handle's own queue.
* :class:`~infer.serve.metrics.Metrics` locks for itself.
"""

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import Any

from longspec_jax.cli import STACK_BYTES, USER_ERRORS, explained
from longspec_jax.generation.requests import RequestEngine
from longspec_jax.generation.text import RequestOutput

from .calls import Row
from .fields import Refused, defect
from .metrics import Metrics
from .streaming import Answer, RequestHandle, proposed_tokens, wake

LOG = logging.getLogger("longspec.serve")
SHUTTING_DOWN = "the server is shutting down; send the request to another one, or later"
LONGEST_RETRY = 60
"""Seconds."""
RECENT = 16
"""Rounds of each row in the numbers for the page."""


class State(Enum):
    """Whether requests are taken."""

    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class EngineThread:
    """Drives an engine in a thread of its own."""

    def __init__(
        self,
        engine: RequestEngine,
        metrics: Metrics,
        *,
        queue_requests: int,
        queue_tokens: int,
        request_seconds: float | None = None,
        levels: int = 0,
    ) -> None:
        """Bind a prepared engine, which only the thread uses and closes; :meth:`start` begins.

        Args:
          queue_requests: most rows that wait for their first token.
          queue_tokens: most tokens of their prompts together.
          request_seconds: after which a call is ended; None for no limit.
          levels: of the engine's tree, for what answers say of it.
        """
        self._engine, self._metrics = engine, metrics
        self._most_requests, self._most_tokens = queue_requests, queue_tokens
        self._seconds = math.inf if request_seconds is None else request_seconds
        self._levels = levels
        self.on_failure: Callable[[BaseException], object] | None = None
        """Called in the thread with what has ended it."""
        self._changed = threading.Condition()
        """The lock. Of the same thread a second ``with`` may stand in a first one."""
        # Under the lock.
        self._inbox: deque[Callable[[], None]] = deque()
        self._handles: set[RequestHandle] = set()
        """All that have not ended, those in the inbox too; only the thread takes them out."""
        self._queued_rows = self._queued_tokens = 0
        self._ended: deque[float] = deque(maxlen=32)
        """When the last rows ended."""
        self._closing = False
        self._state = State.READY
        # The thread's.
        self._rows: dict[int, tuple[RequestHandle, int]] = {}
        self._unstarted: set[int] = set()
        """Requests in the engine's queue, as far as is known."""
        self._thread = threading.Thread(target=self._run, name="engine")
        metrics.watch(lambda: len(self._running()), lambda: self.waiting)

    def start(self) -> None:
        """Begin to step."""
        before = threading.stack_size(STACK_BYTES)
        try:
            self._thread.start()
        finally:
            threading.stack_size(before)

    # Called by the event loop.

    @property
    def state(self) -> State:
        """Whether requests are taken."""
        with self._changed:
            return self._state

    @property
    def open_calls(self) -> int:
        """Calls that have not ended."""
        with self._changed:
            return len(self._handles)

    @property
    def waiting(self) -> int:
        """Rows without a first token."""
        with self._changed:
            return self._queued_rows

    def stats(self) -> dict[str, Any]:
        """Numbers for the page: no texts and no names."""
        rows = self._running()
        return {
            "running": len(rows),
            "waiting": self.waiting,
            "tokens_per_second": self._metrics.tokens_per_second(),
            "trees": [
                {
                    "drafter": use.drafter,
                    "tree": str(use.tree) if use.tree.num_levels else None,
                    "rounds": use.rounds,
                }
                for use in self._engine.trees
            ],
            "rows": [
                {
                    "prompt_tokens": len(answer.prompt),
                    "tokens": answer.new,
                    "accepted": answer.rounds[-RECENT:],
                }
                for answer in rows
            ],
        }

    def _running(self) -> list[Answer]:
        """The rows with a first token that have not ended."""
        with self._changed:
            return [
                answer
                for handle in self._handles
                for answer in handle.answers
                if answer.times.first is not None and answer.finish is None
            ]

    def check_room(self, rows: int = 1, tokens: int = 0) -> None:
        """Refuse requests for which the queue has no room.

        Args:
          rows: of the request.
          tokens: of their prompts together. A prompt of more tokens than the queue holds is taken
            when nothing waits.

        Raises:
          Refused: also while the server drains, and after a failure.
        """
        with self._changed:
            state, retry = self._state, self._retry_after()
            waiting, queued = self._queued_rows, self._queued_tokens
        if state is State.DRAINING:
            raise Refused(SHUTTING_DOWN, status=503, code="draining", retry_after=5)
        if state is State.FAILED:
            raise Refused("the engine has failed and the server ends", status=503, retry_after=5)
        full = waiting + rows > self._most_requests
        long = queued + tokens > self._most_tokens and waiting
        if full or long:
            self._metrics.refused.inc()
            raise Refused(
                f"the queue is full: {waiting} requests of {queued} tokens wait; try again later",
                status=429,
                code="queue_full",
                retry_after=retry,
            )

    def submit(self, rows: Sequence[Row]) -> RequestHandle:
        """Queue the rows of a call, all or none.

        Raises:
          Refused: if the queue is full, or no requests are taken.
        """
        tokens = sum(len(row.tokens) for row in rows)
        with self._changed:
            self.check_room(len(rows), tokens)
            handle = RequestHandle(rows, time.monotonic() + self._seconds, self._levels)
            self._queued_rows += len(rows)
            self._queued_tokens += tokens
            self._handles.add(handle)
            self._post(partial(self._begin, handle))
        return handle

    def cancel(self, handle: RequestHandle) -> None:
        """End a call before its time, if it has not ended."""
        with self._changed:
            if handle in self._handles:
                self._post(partial(self._end, handle, "cancelled"))

    def drain(self) -> None:
        """Take no more requests; those that were taken go on."""
        with self._changed:
            if self._state is State.READY:
                self._state = State.DRAINING

    def abandon(self) -> None:
        """End all calls, as the server shuts down."""
        with self._changed:
            for handle in self._handles:
                refused = Refused(SHUTTING_DOWN, status=503, code="shutting_down", retry_after=5)
                self._post(partial(self._end, handle, "abandoned", refused))

    def close(self) -> None:
        """End the thread once nothing is open, and wait for it."""
        self.drain()
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()

    def _post(self, work: Callable[[], None]) -> None:
        """Ask the thread for something; under the lock."""
        self._inbox.append(work)
        self._changed.notify()

    def _retry_after(self) -> int:
        """Seconds in which one more row is likely to have ended; under the lock."""
        if len(self._ended) < 2:
            return 1
        each = (time.monotonic() - self._ended[0]) / len(self._ended)
        return min(LONGEST_RETRY, max(1, math.ceil(each)))

    # Called by the thread.

    def _run(self) -> None:
        try:
            while self._take_in():
                if self._engine.busy:
                    begun = time.monotonic()
                    outputs = self._engine.step()
                    self._note_started(begun)  # Before first tokens, whose times follow.
                    self._publish(outputs)
                    self._metrics.observe(self._engine.status)
                self._end_late()
        except BaseException as error:  # noqa: BLE001 - every open call gets it.
            self._fail(error)
        finally:
            with contextlib.suppress(Exception):
                self._engine.close()

    def _take_in(self) -> bool:
        """Do what the event loop has asked for; whether the thread goes on."""
        with self._changed:
            while not (self._inbox or self._engine.busy):
                if self._closing:
                    return False
                self._changed.wait()
            work = [*self._inbox]
            self._inbox.clear()
        for each in work:
            each()
        return True

    def _begin(self, handle: RequestHandle) -> None:
        """Submit the rows of a call, unless it has ended before, as one may whose time was over."""
        with self._changed:
            if handle not in self._handles:
                return
        for index, row in enumerate(handle.rows):
            try:
                id = self._engine.submit([*row.tokens], **row.options)
            except (*USER_ERRORS, TypeError) as error:
                self._end(handle, "refused", Refused(str(error)))
                return
            except Exception as error:  # Only this request's: the engine has taken nothing.
                LOG.exception("a request could not be submitted")
                self._end(handle, "refused", defect(error))
                return
            handle.ids.append(id)
            self._rows[id] = handle, index
            self._unstarted.add(id)
        handle.begin()
        wake([handle])

    def _publish(self, outputs: Iterable[RequestOutput]) -> None:
        now, woken = time.monotonic(), set()
        for output in outputs:
            if output.id not in self._rows:
                continue
            handle, index = self._rows[output.id]
            answer = handle.answers[index]
            times, prompt = answer.times, len(answer.prompt)
            if times.first is None:
                self._count_first(prompt)
                self._metrics.first(now - handle.arrived, prompt)
                times.first = now
            else:
                self._metrics.between(now - (times.last or now), len(output.tokens))
            times.last = now
            proposed = proposed_tokens(output, answer.speculates)
            self._metrics.gained(now, output, proposed)
            # A tree has hundreds of numbers: 50 MB of them in a text of 32,000 tokens.
            shed = output.trees and not handle.rows[index].traced
            kept = replace(output, trees=()) if shed else output
            handle.put(index, kept, proposed)
            woken.add(handle)
            if output.finish is not None:
                del self._rows[output.id]
                handle.open -= 1
                with self._changed:
                    self._ended.append(now)
                self._metrics.ended(output.finish, now - handle.arrived)
            if not handle.open:
                self._forget(handle)
        wake(woken)

    def _note_started(self, begun: float) -> None:
        """Note which rows have left the engine's queue in the step that began then."""
        if self._unstarted:
            started = self._unstarted - {*self._engine.queued}
            for handle, index in (self._rows[id] for id in started if id in self._rows):
                handle.answers[index].times.started = begun
            self._unstarted -= started

    def _count_first(self, tokens: int) -> None:
        """A row waits no longer; ``tokens`` is the length of its prompt."""
        with self._changed:
            self._queued_rows -= 1
            self._queued_tokens -= tokens

    def _end(self, handle: RequestHandle, how: str, refused: Refused | None = None) -> None:
        """End a call before its time, if it has not ended."""
        with self._changed:
            if handle not in self._handles:
                return
        for id in handle.ids:
            if self._rows.pop(id, None) is not None:
                self._engine.cancel(id)
        for index, row in enumerate(handle.rows):
            if handle.answers[index].times.first is None:
                self._count_first(len(row.tokens))
        for _ in range(handle.open):
            self._metrics.ended(how, time.monotonic() - handle.arrived)
        handle.fail(refused or Refused("the request was cancelled", status=499))
        self._forget(handle)
        wake([handle])

    def _forget(self, handle: RequestHandle) -> None:
        with self._changed:
            self._handles.discard(handle)

    def _end_late(self) -> None:
        """End calls that take too long."""
        if self._seconds == math.inf:
            return
        now = time.monotonic()
        with self._changed:
            late = [handle for handle in self._handles if handle.deadline < now]
        for handle in late:
            message = f"the request took longer than --request_seconds={self._seconds:g}"
            self._end(handle, "late", Refused(message, status=504, code="timeout"))

    def _fail(self, error: BaseException) -> None:
        """Tell every open call, and take no more."""
        with self._changed:
            self._state = State.FAILED
            self._inbox.clear()
            handles, self._handles = [*self._handles], set()
        message = explained(error)[0] if isinstance(error, Exception) else repr(error)
        for handle in handles:
            handle.fail(Refused(f"the engine has failed: {message}", status=500))
            self._metrics.ended("failed", time.monotonic() - handle.arrived)
        wake(handles)
        if self.on_failure is not None:
            self.on_failure(error)
