"""Counts of what the server does, for Prometheus and for the page.

The names are those of vLLM's metrics with ``longspec:`` for ``vllm:``, so that a dashboard needs no
more than another prefix.
"""

import threading
import time
from collections import deque
from collections.abc import Callable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from longspec_jax.decoding.slots import EngineStatus
from longspec_jax.generation.text import RequestOutput

TYPE = CONTENT_TYPE_LATEST
FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
WHOLE = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)
NOW = 5.0
"""Seconds over which tokens per second are averaged."""


class Metrics:
    """All counters; the engine's thread writes, the event loop reads."""

    def __init__(self, levels: int = 0) -> None:
        """Begin at zero; each of the tree's levels has a counter of accepted tokens."""
        disable_created_metrics()  # When each counter began, which nobody plots.
        self._registry = CollectorRegistry()
        self._levels = levels
        self._recent: deque[tuple[float, int]] = deque()
        self._lock = threading.Lock()
        self._prompt = self._counter("prompt_tokens", "Tokens of prompts that were run.")
        self._generated = self._counter("generation_tokens", "Generated tokens.")
        self._drafts = self._counter("spec_decode_num_drafts", "Rounds of rows with a draft.")
        self._proposed = self._counter("spec_decode_num_draft_tokens", "Draft tokens verified.")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "Draft tokens accepted.")
        self._by_position = self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "Accepted by level of the tree.", "position"
        )
        self._ends = self._counter("request_success", "Ended requests.", "finished_reason")
        self.refused = self._counter("requests_refused", "Requests that met a full queue.")
        self._cache = self._gauge("kv_cache_usage_perc", "Share of the slots' tokens in use.")
        self._engine = {
            name: self._counter(stem, words)
            for name, stem, words in (
                ("prefix_queries", "prefix_cache_queries", "Tokens of all prompts."),
                ("prefix_hits", "prefix_cache_hits", "Those that were not prefilled anew."),
                ("preemptions", "num_preemptions", "Rows that made room for better ones."),
                ("recoveries", "num_recoveries", "Faults after which the engine went on."),
            )
        }
        self._seen = dict.fromkeys(self._engine, 0)
        self._first = self._histogram("time_to_first_token_seconds", "To the first token.", FIRST)
        self._between = self._histogram("inter_token_latency_seconds", "A later token.", BETWEEN)
        self._whole = self._histogram("e2e_request_latency_seconds", "A whole request.", WHOLE)
        for level in range(levels):
            self._by_position.labels(str(level))

    def first(self, seconds: float, prompt: int) -> None:
        """A row has its first token."""
        self._first.observe(seconds)
        self._prompt.inc(prompt)

    def between(self, seconds: float, tokens: int) -> None:
        """A row has more tokens; ``seconds`` is the time since its last ones."""
        for _ in range(tokens):
            self._between.observe(seconds / tokens)

    def gained(self, now: float, gain: RequestOutput, proposed: int) -> None:
        """Count tokens and rounds, and the draft tokens that were proposed in them."""
        self._generated.inc(len(gain.tokens))
        with self._lock:
            self._recent.append((now, len(gain.tokens)))
            self._forget(now)
        if not proposed:
            return
        self._drafts.inc(len(gain.rounds))
        self._proposed.inc(proposed)
        self._accepted.inc(sum(gain.rounds))
        for accepted in gain.rounds:
            for level in range(accepted):
                self._by_position.labels(str(level)).inc()

    def ended(self, how: str, seconds: float) -> None:
        """A request has ended."""
        self._ends.labels(how).inc()
        self._whole.observe(seconds)

    def watch(self, running: Callable[[], float], waiting: Callable[[], float]) -> None:
        """Ask these functions for the numbers of rows whenever the metrics are read."""
        self._gauge("num_requests_running", "Rows that decode.").set_function(running)
        self._gauge("num_requests_waiting", "Rows without a first token.").set_function(waiting)

    def observe(self, status: EngineStatus) -> None:
        """Take over the engine's own counts."""
        self._cache.set(status.tokens / status.capacity)
        for name, counter in self._engine.items():
            value = getattr(status, name)
            counter.inc(value - self._seen[name])
            self._seen[name] = value

    def tokens_per_second(self) -> float:
        """Tokens per second of all rows together, over the last seconds."""
        with self._lock:
            self._forget(time.monotonic())
            return sum(count for _, count in self._recent) / NOW

    def text(self) -> bytes:
        """In the format of Prometheus."""
        return generate_latest(self._registry)

    def _forget(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - NOW:
            self._recent.popleft()

    def _gauge(self, name: str, words: str) -> Gauge:
        return Gauge(f"longspec:{name}", words, registry=self._registry)

    def _counter(self, name: str, words: str, *labels: str) -> Counter:
        return Counter(f"longspec:{name}", words, labels, registry=self._registry)

    def _histogram(self, name: str, words: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"longspec:{name}", words, registry=self._registry, buckets=buckets)
