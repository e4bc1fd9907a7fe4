"""Requests to a server, and when their tokens came: the load of ``benchmarks serve``.

It runs in a process of its own, so that a client's work does not slow down the server's threads,
and it imports no jax. Every request is a stream of its own connection.
"""

import http.client
import itertools
import json
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

Tokens = Sequence[int]
STARTED = 8
"""Events after which a stream counts as running."""


@dataclass
class Stream:
    """What a client saw of one request; times are seconds of one clock."""

    begun: float = 0.0
    """When the request was sent."""
    arrivals: list[float] = field(default_factory=list)
    """When tokens came."""
    tokens: list[int] = field(default_factory=list)
    """How many came then."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """What the server says of the request in the end."""

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.arrivals[0] - self.begun

    @property
    def between(self) -> list[float]:
        """Seconds from token to token; tokens that came together share theirs."""
        waits = itertools.pairwise(self.arrivals)
        counts = self.tokens[1:]
        return [
            (after - before) / count
            for (before, after), count in zip(waits, counts, strict=True)
            for _ in range(count)
        ]


def ask(
    port: int,
    prompt: Tokens,
    new_tokens: int,
    found: Stream | None = None,
    stop: threading.Event | None = None,
) -> Stream:
    """Stream one greedy completion.

    Args:
      port: of a server on this machine.
      prompt: token ids.
      new_tokens: to generate, whatever the text says.
      found: takes what comes, for others to see.
      stop: the stream is left once this is set.

    Raises:
      RuntimeError: says what the server has refused, or why the stream ended early.
    """
    found = found or Stream()
    for at, event in _events(port, prompt, new_tokens, found):
        new = (event.get("usage") or {}).get("completion_tokens", 0) - sum(found.tokens)
        if new > 0:
            found.tokens.append(new)
            found.arrivals.append(at)
        found.metrics = event.get("metrics") or found.metrics
        if stop is not None and stop.is_set():
            break
    return found


def _events(
    port: int, prompt: Tokens, new_tokens: int, stream: Stream
) -> Iterator[tuple[float, dict[str, Any]]]:
    """The events of a completion, each with the time at which it came."""
    body = {
        "prompt": list(prompt),
        "max_tokens": new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    data = json.dumps(body).encode()
    connection = http.client.HTTPConnection("127.0.0.1", port)
    stream.begun = time.perf_counter()
    connection.request("POST", "/v1/completions", data, {"Content-Type": "application/json"})
    try:
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"the server answers {response.status}: {response.read().decode()}")
        for line in response:
            at = time.perf_counter()
            if line.startswith(b"data: {"):
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise RuntimeError(f"the stream has ended: {event['error']['message']}")
                yield at, event
    finally:
        connection.close()


def at_once(
    port: int, prompts: Sequence[Tokens], new_tokens: int, concurrency: int, seconds: float
) -> list[Stream]:
    """``concurrency`` requests at any time, each after another.

    Args:
      port: of the server.
      prompts: of all requests.
      new_tokens: of each.
      concurrency: requests at any time.
      seconds: after which no further request begins.
    """
    left, deadline, lock = iter(prompts), time.perf_counter() + seconds, threading.Lock()

    def take_turns(_: int) -> list[Stream]:
        own: list[Stream] = []
        while not own or time.perf_counter() < deadline:
            with lock:
                prompt = next(left, None)
            if prompt is None:
                break
            own.append(ask(port, prompt, new_tokens))
        return own

    with ThreadPoolExecutor(concurrency) as pool:
        return [one for own in pool.map(take_turns, range(concurrency)) for one in own]


def with_long_prompt(
    port: int, prompts: Sequence[Tokens], most_tokens: int, long_prompt: Tokens
) -> tuple[list[Stream], Stream]:
    """A long prompt that is sent while others stream; they end after its first tokens.

    Args:
      port: of the server.
      prompts: of the streams that run.
      most_tokens: that each may generate.
      long_prompt: sent once all of them run.

    Returns:
      The streams, and that of the long prompt.
    """
    stop, streams = threading.Event(), [Stream() for _ in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        running = [
            pool.submit(ask, port, prompt, most_tokens, stream, stop)
            for prompt, stream in zip(prompts, streams, strict=True)
        ]
        try:
            while any(len(stream.arrivals) < STARTED for stream in streams):
                if ended := [one for one in running if one.done()]:
                    ended[0].result()
                    raise RuntimeError("a stream has ended before the long prompt was sent")
                time.sleep(0.01)
            admitted = ask(port, long_prompt, 2)
        finally:
            stop.set()
        for one in running:
            one.result()
    return streams, admitted
