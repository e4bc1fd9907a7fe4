"""Event loops submit, read and cancel while the engine's thread steps and ends what is late."""

import asyncio
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from infer.serve.calls import Row
from infer.serve.engine_thread import EngineThread, State
from infer.serve.fields import Refused
from infer.serve.metrics import Metrics
from infer.serve.streaming import RequestHandle
from longspec_jax.generation.text import RequestOutput
from tests.serve.kit import LEVELS, ScriptedEngine

CLIENTS, CALLS = 3, 120
"""Event loops, and calls of each, all open at once."""
NEVER = 10**6
"""New tokens of a call that is meant to be late."""


class OneRowAStep(ScriptedEngine):
    """Steps are short, whatever is open: one row gets its last token in each."""

    def step(self) -> list[Any]:
        done = next((id for id, (_, left) in self.rows.items() if left < NEVER), None)
        if done is None:
            return []
        del self.rows[done]
        return [RequestOutput(done, (1,), (False,), (), "length")]


class SlowlyRead(RequestHandle):
    """Whoever reads its deadline lets the other threads run first."""

    @property
    def deadline(self) -> float:
        time.sleep(0)
        return self._deadline

    @deadline.setter
    def deadline(self, value: float) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self._deadline = value


@pytest.fixture
def switching(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Threads take turns as often as they can."""
    monkeypatch.setattr("infer.serve.engine_thread.RequestHandle", SlowlyRead)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


async def follow(thread: EngineThread, handle: RequestHandle, index: int) -> str:
    """Read a call, or part of it, and say how it ended."""
    try:
        await handle.begun()
        if index % 5 == 0:
            return "cancelled"
        async for _ in handle.gains():
            pass
        return "whole"
    except Refused as refused:
        assert refused.code == "timeout", refused
        return "late"
    finally:
        thread.cancel(handle)


async def client(thread: EngineThread, ended: list[str]) -> None:
    calls = []
    for index in range(CALLS):
        new = 9 if index % 2 else NEVER
        rows = [Row((1, 2), {"max_new_tokens": new})] * (1 + index % 2)
        calls.append(asyncio.create_task(follow(thread, thread.submit(rows), index)))
        if index % 16 == 0:
            await asyncio.sleep(0)
            thread.stats()
    ended += await asyncio.gather(*calls)


def test_calls_come_leave_and_run_late_while_the_engine_steps(switching: None) -> None:
    """Every call ends, none by another's doing, and nothing is counted as open in the end."""
    metrics, failures = Metrics(LEVELS), list[BaseException]()
    thread = EngineThread(
        OneRowAStep(),  # pyright: ignore[reportArgumentType]
        metrics,
        queue_requests=10**6,
        queue_tokens=10**6,
        request_seconds=2.0,
        levels=LEVELS,
    )
    thread.on_failure = failures.append
    thread.start()
    ended: list[str] = []
    clients = [
        threading.Thread(target=lambda: asyncio.run(client(thread, ended))) for _ in range(CLIENTS)
    ]
    try:
        for each in clients:
            each.start()
        for each in clients:
            each.join(60)
        assert not failures and thread.state is State.READY
        assert len(ended) == CALLS * CLIENTS and {*ended} >= {"whole", "late"}
    finally:
        thread.close()
    assert not thread.open_calls and thread.stats()["waiting"] == 0
    assert thread.stats()["rows"] == []
