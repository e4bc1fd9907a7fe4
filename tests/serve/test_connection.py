"""Clients that are late, and requests that another site's page sends."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from infer.serve import http_server
from infer.serve.command import open_to_all
from tests.serve.kit import Client, ScriptedEngine, scripted_model, serving, until

SOON = 0.3
"""Seconds that the tests give clients."""


def closed(client: socket.socket, seconds: float = 10.0) -> bool:
    """Whether the server ends a connection, whatever it sends before."""
    client.settimeout(seconds)
    try:
        while client.recv(65_536):
            pass
    except TimeoutError:
        return False
    except ConnectionResetError:
        pass
    return True


def head(path: str = "/health", *more: str, method: str = "GET") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: localhost", *more, "", ""]).encode()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.setattr(http_server, "SEND_SECONDS", SOON)
    with serving(ScriptedEngine(), api_key="key") as client:
        yield client


UNFINISHED: dict[str, bytes] = {
    "nothing": b"",
    "a part of a head": head()[:20],
    "the next head": head() + head()[:20],
    "a body that was refused": head("/v1/completions", "Content-Length: 9999", method="POST"),
}


@pytest.mark.parametrize("sent", UNFINISHED.values(), ids=UNFINISHED)
@pytest.mark.parametrize("drips", [False, True])
def test_a_request_that_does_not_come_ends_its_connection(
    server: Client, sent: bytes, drips: bool
) -> None:
    ended, place = threading.Event(), ("127.0.0.1", server.port)
    with ThreadPoolExecutor(1) as pool, socket.create_connection(place) as client:
        client.sendall(sent)

        def drip() -> None:
            with contextlib.suppress(OSError):
                while drips and not ended.wait(SOON / 4):
                    client.sendall(b"x")

        pool.submit(drip)
        begun = time.monotonic()
        assert closed(client, 3.0) and time.monotonic() - begun < 3.0
        ended.set()


CHUNKED = "Content-Type: application/json", "Transfer-Encoding: chunked"


def chunks(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (*parts, b""))


@pytest.mark.parametrize("key", ["key", "another"])
def test_a_body_of_tiny_chunks_is_not_parsed_to_its_end(key: str) -> None:
    """Parsing them takes the event loop longer than sending them, and every stream waits."""
    sent = head("/v1/completions", f"Authorization: Bearer {key}", *CHUNKED, method="POST")
    sent += chunks(*[b" "] * 2000).removesuffix(chunks())
    with (
        serving(ScriptedEngine(), api_key="key") as server,
        socket.create_connection(("127.0.0.1", server.port)) as client,
    ):
        client.sendall(sent)
        assert closed(client, 3.0), "the next one is not awaited"


def test_a_body_of_chunks_is_read(server: Client) -> None:
    body = json.dumps({"prompt": "ab", "user": "x" * 100_000, "max_tokens": 2}).encode()
    asked = head("/v1/completions", "Authorization: Bearer key", *CHUNKED, method="POST")
    for size in (50, 1000, 100_000):
        parts = [body[begin : begin + size] for begin in range(0, len(body), size)]
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(asked + chunks(*parts))
            assert client.recv(15) == b"HTTP/1.1 200 OK"


def test_a_long_head_is_refused_however_it_comes(server: Client) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(head("/health", *["a:"] * 9000))
        assert client.recv(12) == b"HTTP/1.1 400"
        assert closed(client)


def test_what_is_no_http_behind_an_answer_is_no_defect(
    server: Client, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(head("/v1/completions", *CHUNKED, method="POST") + b"1\r\na\r\n")
        assert client.recv(12) == b"HTTP/1.1 401"
        client.sendall(b"no number\r\n")
        assert closed(client)
    assert not any(one.exc_info for one in caplog.records)


def test_a_request_that_came_may_take_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "SEND_SECONDS", SOON)
    engine = ScriptedEngine(held=True)
    threading.Timer(4 * SOON, engine.gate.set).start()
    with serving(engine) as server:
        begun = time.monotonic()
        assert server.post("/v1/completions", prompt="ab", max_tokens=2)[0] == 200
        assert time.monotonic() - begun > 3 * SOON


def asking(server: Client, **asked: Any) -> socket.socket:
    """A client that has asked for a text and takes little at once."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", server.port))
    body = json.dumps({"prompt": "ab", **asked}).encode()
    kind = "Content-Type: application/json", f"Content-Length: {len(body)}"
    client.sendall(head("/v1/completions", *kind, method="POST") + body)
    return client


def test_a_reader_that_takes_nothing_is_cut_and_its_row_is_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "READ_SECONDS", SOON)
    steps = threading.Semaphore(0)
    engine = ScriptedEngine(single=steps)
    model = scripted_model(max_len=100_000)
    with (
        serving(engine, model, send_buffer=4096) as server,
        contextlib.ExitStack() as last,
        asking(server, max_tokens=99_000, stream=True) as client,
    ):
        last.callback(steps.release, 100_000)  # Where it fails, the server can end all the same.
        until(lambda: engine.rows)

        def stepped() -> bool:
            steps.release()
            return bool(engine.cancelled)

        until(stepped)
        steps.release(100_000)
        until(lambda: not server.thread.open_calls)
        assert engine.cancelled == [0] and not engine.rows
        assert closed(client)
        assert server.post("/v1/completions", prompt="ab", max_tokens=2)[0] == 200


def test_a_short_answer_that_nobody_reads_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that fits into the server's own buffer, of which nothing is told to the application."""
    monkeypatch.setattr(http_server, "READ_SECONDS", SOON)
    with serving(ScriptedEngine(), send_buffer=4096) as server, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.port))
        client.sendall(head("/openapi.json"))
        time.sleep(10 * SOON)
        received = b""
        client.settimeout(5.0)
        try:
            while part := client.recv(65_536):
                received += part
        except ConnectionResetError:
            pass
        assert len(received) < 20_000, "the whole document has more"


def test_a_slow_reader_gets_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "READ_SECONDS", SOON)
    model = scripted_model(max_len=10_000)
    with (
        serving(ScriptedEngine(), model, send_buffer=4096) as server,
        asking(server, max_tokens=6000, logprobs=5) as client,
    ):
        client.settimeout(10.0)
        received, begun = client.recv(1024), time.monotonic()
        length = int(received.lower().split(b"content-length: ")[1].split()[0])
        while len(received) < length:
            received += client.recv(4096)
            time.sleep(SOON / 20)
        assert length > 200_000 and time.monotonic() - begun > 2 * SOON


def test_connections_leave_files_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that has sent no request for the longest time makes room, and none that runs."""
    monkeypatch.setattr(http_server, "most_connections", lambda: 6, raising=False)
    engine = ScriptedEngine(held=True)
    with serving(engine) as server, contextlib.ExitStack() as stack:
        running = stack.enter_context(asking(server, max_tokens=2))
        until(lambda: engine.rows)
        idle = list[socket.socket]()
        for _ in range(8):
            idle.append(socket.create_connection(("127.0.0.1", server.port)))
            stack.enter_context(idle[-1]).sendall(head()[:20])
            time.sleep(0.02)
        assert [closed(one, 0.5) for one in idle] == [True] * 3 + [False] * 5
        assert server.ask("GET", "/health")[0] == 200
        engine.gate.set()
        assert running.recv(15) == b"HTTP/1.1 200 OK"


def received(client: socket.socket) -> int:
    """Bytes until the server ends the connection."""
    client.settimeout(10.0)
    count = 0
    with contextlib.suppress(ConnectionResetError):
        while part := client.recv(65_536):
            count += len(part)
    return count


def test_what_nobody_reads_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer that waits the longest goes; one that waits alone may be as long as it is."""
    monkeypatch.setattr(http_server, "LARGE", 50_000, raising=False)
    monkeypatch.setattr(http_server, "MOST_UNREAD", 150_000, raising=False)
    model = scripted_model(max_len=10_000)
    long: dict[str, Any] = {"max_tokens": 6000, "logprobs": 5}
    with serving(ScriptedEngine(), model, send_buffer=4096) as server:
        with asking(server, **long) as first, asking(server, **long) as second:
            time.sleep(10 * SOON)
            assert sorted([received(first) > 200_000, received(second) > 200_000]) == [False, True]


@pytest.mark.parametrize(
    "host, allowed",
    [
        ("127.0.0.1:8000", True),
        ("[::1]:8000", True),
        ("192.168.7.9", True),
        ("localhost:8000", True),
        ("LOCALHOST.", True),
        ("longspec", True),
        ("gpu.local:80", True),
        ("llm.example.com:8000", True),
        ("evil.example", False),
        ("127.0.0.1.evil.example:8000", False),
        ("localhost.evil.example", False),
        ("xlocalhost.example", False),
    ],
)
def test_without_a_key_a_request_must_name_a_host_of_ours(host: str, allowed: bool) -> None:
    """A name of another site that leads here gives its page the answers: DNS rebinding."""
    with serving(ScriptedEngine(), host="llm.example.com") as server:
        status, body = server.ask("GET", "/v1/models", Host=host)
        assert status == (200 if allowed else 403)
        if not allowed:
            assert "by which a page of another site" in body["error"]["message"]
        assert server.ask("GET", "/health", Host=host)[0] == 200, "probes may name anything"


def test_with_a_key_a_request_may_name_any_host() -> None:
    with serving(ScriptedEngine(), api_key="key") as server:
        assert server.ask("GET", "/v1/models", Host="evil.example")[0] == 200


@pytest.mark.parametrize(
    "address, key, said",
    [
        ("0.0.0.0", None, True),
        ("::", None, True),
        ("192.168.7.9", None, True),
        ("127.0.0.1", None, False),
        ("::1", None, False),
        ("0.0.0.0", "key", False),
    ],
)
def test_a_server_that_is_open_to_others_says_so(address: str, key: str | None, said: bool) -> None:
    warning = open_to_all(address, key)
    assert (warning is not None) == said
    assert warning is None or (address in warning and "--api_key_file=FILE" in warning)
