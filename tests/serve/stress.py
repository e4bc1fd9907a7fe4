"""Many clients of a server at once: texts, late calls, clients that leave and hostile bodies.

    python -m tests.serve.stress PORT --requests=2000

A fault is an answer that a request must not get, a connection that ends without one, or a text that
differs from that of the same request alone. ``/health`` is asked all the while.
"""

import argparse
import http.client
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

LARGEST = 32 * 2**20
"""Bytes of a body."""
CLIENTS = 16
COMPLETIONS = "/v1/completions"
REFUSED = {400, 413, 429}
"""Of a hostile body. A full queue refuses any request."""
TIMEOUT = 120.0


@dataclass
class Report:
    """What has happened."""

    answers: Counter[str] = field(default_factory=Counter)
    """By kind of request and status."""
    faults: list[str] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    """Seconds of each answer of ``/health``, in the order of time."""

    def summary(self) -> dict[str, Any]:
        """For reading."""
        ordered = sorted(self.health)
        return {
            "requests": sum(self.answers.values()),
            "answers": dict(sorted(self.answers.items())),
            "faults": self.faults[:10],
            "health": {
                "asked": len(ordered),
                "median_ms": 1000 * ordered[len(ordered) // 2],
                "p99_ms": 1000 * ordered[len(ordered) * 99 // 100],
                "worst_ms": 1000 * ordered[-1],
            },
        }


def ask(port: int, path: str, data: bytes | None = None) -> tuple[int, bytes]:
    """Status and bytes of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
    try:
        kind = {"Content-Type": "application/json"}
        connection.request("GET" if data is None else "POST", path, data, kind)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def text_of(port: int, seed: int) -> str | int:
    """The text of a small request, or the status where it is refused."""
    asked = {"prompt": f"def f{seed}(", "max_tokens": 12, "seed": seed, "temperature": seed % 2}
    status, data = ask(port, COMPLETIONS, json.dumps(asked).encode())
    return json.loads(data)["choices"][0]["text"] if status == 200 else status


def alone(port: int, seed: int) -> str:
    """The text of a small request that runs next to no other."""
    for _ in range(20):
        if isinstance(found := text_of(port, seed), str):
            return found
    raise RuntimeError(f"the server answers {found} to a small request, the only one it has")


def hostile_bodies(draw: random.Random) -> bytes:
    """A body of a random size, that is no request or that asks for too much."""
    size = int(2 ** draw.uniform(0, 25))
    kinds: tuple[Callable[[], bytes], ...] = (
        lambda: draw.randbytes(min(size, 2**20)) * (size // 2**20 + 1),
        lambda: b" " * size,
        lambda: b'{"prompt": "' + b"a" * size + b'"}',
        lambda: b'{"prompt": "' + b"\\u4e2d" * (size // 6) + b'"}',
        lambda: b'{"' + b"p" * size + b'": 1}',
        lambda: b'{"prompt": [' + b"1," * (size // 2) + b"1]}",
        lambda: b'{"prompt": [' + b"1.5," * (size // 4) + b"1]}",
        lambda: b'{"prompt": ' + b"[" * size + b"]" * size + b"}",
        lambda: b'{"prompt": [' + b"[]," * (size // 3) + b"1]}",
        lambda: b'{"prompt": [' + b'"",' * (size // 3) + b'""]}',
        lambda: b"{" + b",".join(b'"%d":0' % one for one in range(min(size // 9, 2**20))) + b"}",
        lambda: b'{"messages": [{"role": "user", "content": "' + b"a" * size + b'"}]}',
        lambda: b'{"prompt": "a", "stop": ["' + b"a" * size + b'"]}',
        lambda: b'{"prompt": "a", "logit_bias": {' + b'"1": 1,' * (size // 7) + b'"1": 1}}',
    )
    return draw.choice(kinds)()[:LARGEST]


class Stress:
    """Sends requests of all kinds, in any order."""

    def __init__(self, port: int) -> None:
        """Bind a server that serves nobody else."""
        self.port, self.report = port, Report()
        self._texts = {seed: alone(port, seed) for seed in range(8)}
        self._lock = threading.Lock()

    def run(self, requests: int) -> Report:
        """Send them from several threads."""
        ended = threading.Event()
        watching = threading.Thread(target=self._watch, args=(ended,))
        watching.start()
        try:
            with ThreadPoolExecutor(CLIENTS) as pool:
                list(pool.map(self._one, range(requests)))
        finally:
            ended.set()
            watching.join()
        return self.report

    def _watch(self, ended: threading.Event) -> None:
        while not ended.wait(0.02):
            begun = time.monotonic()
            status, _ = ask(self.port, "/health")
            self.report.health.append(time.monotonic() - begun)
            if status != 200:
                self._fault(f"/health answers {status}")

    def _fault(self, words: str) -> None:
        with self._lock:
            self.report.faults.append(words)

    def _one(self, number: int) -> None:
        draw = random.Random(number)
        kind = draw.choice(
            (self._text, self._text, self._stream, self._late, self._leave, self._bad)
        )
        try:
            found = kind(draw)
        except Exception as error:  # noqa: BLE001 - whatever a client meets is told.
            found = type(error).__name__
            self._fault(f"request {number}, {kind.__name__}: {error!r}")
        with self._lock:
            self.report.answers[f"{kind.__name__.strip('_')} {found}"] += 1

    def _expect(self, found: Any, allowed: set[Any], words: str) -> None:
        if found not in allowed:
            self._fault(f"{words}: {found}")

    def _text(self, draw: random.Random) -> str:
        seed = draw.choice([*self._texts])
        found = text_of(self.port, seed)
        self._expect(found, {self._texts[seed], 429, 504}, f"the text of seed {seed}")
        return "refused" if isinstance(found, int) else "same"

    def _stream(self, draw: random.Random) -> str:
        asked = {"prompt": "abc", "max_tokens": 20, "stream": True, "n": draw.choice((1, 2))}
        asked["longspec"] = {"rounds": draw.random() < 0.5}
        status, data = ask(self.port, COMPLETIONS, json.dumps(asked).encode())
        self._expect(status, {200, 429, 504}, "a stream")
        if status == 200 and not data.endswith(b"data: [DONE]\n\n"):
            self._fault(f"a stream ends with {data[-80:]!r}")
        return str(status)

    def _late(self, draw: random.Random) -> int:
        """Many tokens, for which ``--request_seconds`` may be too short."""
        asked = {"prompt": "abc", "max_tokens": 200, "ignore_eos": True, "n": draw.choice((1, 4))}
        status, _ = ask(self.port, COMPLETIONS, json.dumps(asked).encode())
        self._expect(status, {200, 429, 504}, "a late call")
        return status

    def _leave(self, draw: random.Random) -> str:
        """Leave before the body has ended, before the answer, or inside a stream."""
        asked = {"prompt": "abc", "max_tokens": 200, "ignore_eos": True, "stream": True}
        body = json.dumps({**asked, "user": "x" * draw.choice((1, 10**5))}).encode()
        where = draw.choice(("body", "answer", "stream"))
        with socket.create_connection(("127.0.0.1", self.port), TIMEOUT) as client:
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}"
            client.sendall(f"{head}\r\nContent-Type: application/json\r\n\r\n".encode())
            client.sendall(body[: len(body) // 2] if where == "body" else body)
            if where == "stream":
                client.recv(draw.randrange(1, 2000))
            time.sleep(draw.uniform(0, 0.05))
        return where

    def _bad(self, draw: random.Random) -> int:
        path = draw.choice((COMPLETIONS, "/v1/chat/completions", "/tokenize", "/detokenize"))
        body = hostile_bodies(draw)
        status, data = ask(self.port, path, body)
        # A body may be a request: "1," over and over is a prompt.
        self._expect(status, {200, 504, *REFUSED}, f"{path}, {len(body)} bytes, {body[:40]!r}")
        if len(data) > 4096 and status != 200:
            self._fault(f"a refusal of {len(data)} bytes")
        return status


def idle(port: int, seconds: float = 60.0) -> bool:
    """Whether nothing runs or waits any more."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        stats = json.loads(ask(port, "/stats")[1])
        if not stats["running"] and not stats["waiting"]:
            return True
        time.sleep(0.05)
    return False


def main() -> None:
    """Run against a server of this machine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("--requests", type=int, default=2000)
    arguments = parser.parse_args()
    begun = time.monotonic()
    report = Stress(arguments.port).run(arguments.requests)
    found = {**report.summary(), "idle": idle(arguments.port), "seconds": time.monotonic() - begun}
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
