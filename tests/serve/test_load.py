"""The server over a scripted engine: queues, times, threads, what clients leave, and the end."""

import http.client
import json
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from infer.serve import app
from infer.serve.http_server import log_to_stderr
from longspec_jax.decoding import inflight
from tests.kit import each_row
from tests.serve.kit import ScriptedEngine, events, scripted_model, serving, until


def test_a_prefill_is_no_time_in_the_queue() -> None:
    engine = ScriptedEngine(held=True)
    step, stepping = engine.step, threading.Event()

    def slow() -> list[Any]:
        stepping.set()
        return step()

    engine.step = slow  # type: ignore[method-assign]
    with serving(engine) as server, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.post, "/v1/completions", prompt="ab", max_tokens=1)
        assert stepping.wait(30)
        time.sleep(0.1)
        engine.gate.set()
        times = asked.result()[1]["metrics"]
    assert times["time_to_first_token_ms"] - times["queue_time_ms"] > 90


# Limits.


def test_a_full_queue_answers_429_and_a_row_that_begins_makes_room() -> None:
    engine = ScriptedEngine(held=True)
    queue = serving(engine, queue_requests=3, queue_tokens=10)
    with ThreadPoolExecutor(2) as pool, queue as server:
        waiting = [
            pool.submit(server.post, "/v1/completions", prompt=prompt, max_tokens=2)
            for prompt in ("abcde", "abc")
        ]
        until(lambda: server.ask("GET", "/stats")[1]["waiting"] == 2)
        for body in ({"prompt": "a", "n": 2}, {"prompt": "abc"}):
            response, said = server.answer("POST", "/v1/completions", body)
            assert response.status == 429 and int(response.getheader("retry-after")) >= 1
            assert b"the queue is full" in said
        engine.gate.set()
        assert [one.result()[0] for one in waiting] == [200, 200]
        status, _ = server.post("/v1/completions", prompt="a" * 20, max_tokens=1)
        assert status == 200, "a prompt larger than the queue is taken while nothing waits"
        assert server.ask("GET", "/stats")[1]["waiting"] == 0


def test_a_request_that_takes_too_long_is_ended() -> None:
    engine = ScriptedEngine(single=threading.Semaphore(1))
    with serving(engine, request_seconds=0.3) as server:
        begun = time.monotonic()
        release = threading.Timer(0.5, engine.single.release, [1000])  # type: ignore[union-attr]
        release.start()
        status, body = server.post("/v1/completions", prompt="ab", max_tokens=50)
        assert status == 504 and "--request_seconds=0.3" in body["error"]["message"]
        assert time.monotonic() - begun < 10
        assert engine.cancelled == [0] and not engine.rows


def test_a_request_whose_time_is_over_before_it_begins_never_runs() -> None:
    """It ran to its end, and nobody read it: a step may take longer than a request may."""
    engine = ScriptedEngine(held=True)
    with serving(engine, request_seconds=0.3) as server, ThreadPoolExecutor(2) as pool:
        first = pool.submit(server.post, "/v1/completions", prompt="ab", max_tokens=50)
        until(lambda: engine.rows)
        second = pool.submit(server.post, "/v1/completions", prompt="c", max_tokens=50)
        until(lambda: server.thread.open_calls == 2)
        time.sleep(0.5)
        engine.gate.set()
        assert first.result()[0] == second.result()[0] == 504
        assert server.post("/v1/completions", prompt="e", max_tokens=2)[0] == 200
        assert [tokens for tokens, _ in engine.submitted] == [[0, 1], [4]] and not engine.rows
        assert server.ask("GET", "/stats")[1]["waiting"] == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("begun", [False, True])
def test_a_client_that_is_gone_is_cancelled(stream: bool, begun: bool) -> None:
    steps = threading.Semaphore(1 if begun else 0)
    engine = ScriptedEngine(single=steps)

    def stepped() -> bool:
        steps.release()
        return engine.cancelled == [0]

    with serving(engine, scripted_model(max_len=10_000)) as server, ExitStack() as last:
        last.callback(steps.release, 10_000)  # Where it fails, the server can end all the same.
        body = {"prompt": "ab", "max_tokens": 9000, "stream": stream}
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        kind = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), kind)
        until(lambda: engine.rows)
        if stream and begun:
            assert next(events(connection.getresponse()))
        connection.close()
        until(stepped)
        assert not engine.rows
        until(lambda: not server.thread.open_calls)
        steps.release(1000)
        assert server.post("/v1/completions", prompt="ab", max_tokens=2)[0] == 200


def test_a_stream_that_waits_sends_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer.serve.app.PULSE", 0.05)
    engine = ScriptedEngine(single=threading.Semaphore(0))
    with serving(engine) as server:
        asked = {"prompt": "ab", "max_tokens": 2, "stream": True}
        stream = server.connect("POST", "/v1/completions", asked)
        assert [stream.readline() for _ in range(4)] == [b": waiting\n", b"\n"] * 2
        engine.single.release(1000)  # type: ignore[union-attr]
        *_, done = events(stream)
        assert done == "[DONE]"


def test_the_event_loop_does_no_work_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing, rules, tokens and texts of 31 MB kept streams and probes waiting for 38 seconds."""
    going, held, loops = threading.Event(), threading.Event(), []

    def holding(work: Any) -> Any:
        def held_back(*given: Any, **named: Any) -> Any:
            loops.append(threading.current_thread().name)
            held.set()
            assert going.wait(30)
            return work(*given, **named)

        return held_back

    model = scripted_model(decode=holding(scripted_model().decode))
    asked = {
        "/v1/completions": {"prompt": "ab", "max_tokens": 2},
        "/tokenize": {"prompt": "ab", "return_token_strs": True},
        "/detokenize": {"tokens": [1]},
    }
    for name in ("read_json", "read_call", "rows_of", "read_tokenize", "read_detokenize"):
        monkeypatch.setattr(app, name, holding(getattr(app, name)))
    with serving(ScriptedEngine(), model) as server, ThreadPoolExecutor(3) as pool:
        found = [pool.submit(server.post, path, **body) for path, body in asked.items()]
        assert held.wait(30)
        begun = time.monotonic()
        for _ in range(10):
            assert server.ask("GET", "/health")[0] == 200
        assert time.monotonic() - begun < 5
        going.set()
        assert [one.result()[0] for one in found] == [200] * 3
    assert "server" not in loops and len(loops) > 6


def test_forms_hold_up_no_texts_and_leave_with_their_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compiling a grammar may take seconds; here, until the test lets it end."""
    going, held, rows_of, read = threading.Event(), threading.Event(), app.rows_of, list[str]()

    def slow(call: Any, *given: Any) -> Any:
        if call.response_format.type != "text":
            read.append(call.user)
            held.set()
            assert going.wait(30)
        return rows_of(call, *given)

    monkeypatch.setattr(app, "rows_of", slow)
    body: dict[str, Any] = {"prompt": "ab", "response_format": {"type": "json_object"}}
    with serving(ScriptedEngine()) as server, ThreadPoolExecutor(1) as pool:
        first = pool.submit(server.post, "/v1/completions", **body, user="first")
        assert held.wait(30)
        left = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        kind = {"Content-Type": "application/json"}
        left.request("POST", "/v1/completions", json.dumps({**body, "user": "left"}), kind)
        left.close()
        for _ in range(3):
            assert server.post("/v1/completions", prompt="ab", max_tokens=2)[0] == 200
        going.set()
        # The scripted model knows no grammars.
        assert [first.result()[0], server.post("/v1/completions", **body, user="last")[0]] == [
            400,
            400,
        ]
    assert read == ["first", "last"]


def test_an_answer_does_not_wait_for_the_texts_of_other_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whole ones, and those of streams that are long, were written by what tokenises."""
    going, rows_of, slow = threading.Event(), app.rows_of, list[str]()

    def held_back(call: Any, *given: Any) -> Any:
        if call.user == "slow":
            slow.append(call.user)
            assert going.wait(30)
        return rows_of(call, *given)

    monkeypatch.setattr(app, "rows_of", held_back)
    engine = ScriptedEngine(held=True)
    body = {"prompt": "ab", "max_tokens": 2}
    with serving(engine) as server, ThreadPoolExecutor(4) as pool:
        answer = pool.submit(server.post, "/v1/completions", **body)
        until(lambda: engine.rows)
        others = [
            pool.submit(server.post, "/v1/completions", **body, user="slow") for _ in range(2)
        ]
        until(lambda: len(slow) == 2)
        engine.gate.set()
        assert answer.result(5)[0] == 200
        going.set()
        assert [one.result()[0] for one in others] == [200, 200]


@each_row(
    "name, path",
    [
        ("read_json", "/v1/completions"),
        ("rows_of", "/v1/completions"),
        ("read_tokenize", "/tokenize"),
        ("read_detokenize", "/detokenize"),
    ],
)
def test_bodies_that_wait_to_be_tokenised_are_bounded(
    monkeypatch: pytest.MonkeyPatch, name: str, path: str
) -> None:
    """From their first byte on, while they are parsed and while they are tokenised."""
    monkeypatch.setattr(app, "MOST_HELD", 100_000)
    monkeypatch.setattr(app, "MOST_CONVERTED", 100_000)
    going, working, work = threading.Event(), threading.Event(), getattr(app, name)

    def slow(*given: Any) -> Any:
        working.set()
        assert going.wait(30)
        return work(*given)

    with monkeypatch.context() as patch, serving(ScriptedEngine()) as server:
        patch.setattr(app, name, slow)
        own = {"tokens": [0]} if path == "/detokenize" else {"prompt": "ab"}
        body = json.dumps(own).encode() + b" " * 90_000
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(server.ask, "POST", path, body)
            assert working.wait(30)
            response, _ = server.answer("POST", path, body)
            assert response.status == 429 and response.getheader("retry-after"), name
            if path != "/v1/completions":  # Which do not wait for conversions.
                assert server.post("/v1/completions", prompt="ab", max_tokens=1)[0] == 200
            going.set()
            assert first.result()[0] == 200
        assert server.ask("POST", path, body)[0] == 200, name


def test_a_drain_finishes_what_runs_and_refuses_what_comes() -> None:
    engine = ScriptedEngine(single=threading.Semaphore(1))
    with serving(engine) as server:
        asked = {"prompt": "ab", "max_tokens": 20, "stream": True}
        stream = server.connect("POST", "/v1/completions", asked)
        chunks = events(stream)
        assert next(chunks)["choices"][0]["text"] == "c"
        server.server.stop()
        until(lambda: server.ask("GET", "/health") == (503, {"status": "draining"}))
        response, _ = server.answer("POST", "/v1/completions", {"prompt": "ab"})
        assert response.status == 503 and response.getheader("retry-after")
        engine.single.release(1000)  # type: ignore[union-attr]
        *texts, closing, done = chunks
        assert sum(len(chunk["choices"][0]["text"]) for chunk in texts) == 19
        assert closing["choices"][0]["finish_reason"] == "length" and done == "[DONE]"
    assert server.status == [0] and engine.closed


def test_what_does_not_end_in_time_gets_an_error_event() -> None:
    engine = ScriptedEngine(single=threading.Semaphore(1))
    with serving(engine, drain_seconds=0.2) as server:
        asked = {"prompt": "ab", "max_tokens": 20, "stream": True}
        stream = server.connect("POST", "/v1/completions", asked)
        chunks = events(stream)
        assert next(chunks)["choices"]
        threading.Timer(0.5, engine.single.release, [1]).start()  # type: ignore[union-attr]
        server.server.stop()
        *_, error, done = chunks
        assert error["error"]["code"] == "shutting_down" and done == "[DONE]"
    assert server.status == [0] and engine.closed


def test_an_engine_that_fails_ends_every_request_with_an_error_and_the_server() -> None:
    engine = ScriptedEngine(single=threading.Semaphore(1))
    with serving(engine) as server:
        asked = {"prompt": "ab", "max_tokens": 20, "stream": True}
        streams = [server.connect("POST", "/v1/completions", asked)]
        chunks = events(streams[0])
        assert next(chunks)["choices"]
        engine.fail = RuntimeError("out of sparks")
        engine.single.release(1)  # type: ignore[union-attr]
        *_, error, done = chunks
        assert "the engine has failed" in error["error"]["message"] and done == "[DONE]"
        assert "out of sparks" in error["error"]["message"]
        until(lambda: server.status)
    assert server.status == [1] and engine.closed


def test_faults_of_the_engine_are_in_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    names = ("longspec.serve", "longspec_jax", "uvicorn")
    loggers = [logging.getLogger(name) for name in names]
    before = [(each.handlers, each.propagate, each.level) for each in loggers]
    try:
        log_to_stderr()
        logging.getLogger(inflight.__name__).error("a step failed")
    finally:
        for each, (handlers, propagate, level) in zip(loggers, before, strict=True):
            each.handlers, each.propagate = handlers, propagate
            each.setLevel(level)
    assert capfd.readouterr().err.endswith(" a step failed\n")
