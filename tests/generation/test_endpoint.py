"""Texts by a server's requests: what is read of its answers, and what is said of its refusals."""

import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from infer.serve.fields import Refused
from longspec_jax import PLAIN
from longspec_jax.generation.endpoint import KEY, Endpoint
from tests.infer.toys import toy_spec
from tests.serve.kit import ScriptedEngine, serving


def reached(url: str) -> Endpoint:
    spec = toy_spec()
    return Endpoint(f"{url}/v1/", spec.target_config, spec.tokenizer, (25,)).reached()


def test_answers_come_in_order_and_a_full_server_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, waits = ScriptedEngine(), []
    with serving(engine) as server:
        endpoint = reached(server.url)
        assert endpoint.model == "toy"
        check, refusals = server.thread.check_room, [True, True]

        def refuse(*given: int) -> None:
            if refusals and refusals.pop():
                raise Refused("the queue is full", status=429, retry_after=7)
            check(*given)

        monkeypatch.setattr(server.thread, "check_room", refuse)
        monkeypatch.setattr(time, "sleep", waits.append)
        found = endpoint.generate([[1, 2], [5]], max_new_tokens=[7, 2], seed=[3, 4], top_p=0.5)
        monkeypatch.undo()
    assert waits == [7.0, 7.0]
    assert found.text == ("defghij", "gh") and found.sequences == ((*range(3, 10),), (6, 7))
    assert found.drafted[0] == (False, *[True, True, False] * 2)
    assert found.stats.target_passes == (2, 1)
    assert found.stats.prefill_seconds > 0 and found.stats.decode_seconds > 0
    seeds = {tuple(prompt): options["seed"] for prompt, options in engine.submitted}
    assert seeds == {(1, 2): 3, (5,): 4}
    assert all("speculate" not in options for _, options in engine.submitted)


def test_plain_decoding_and_stop_tokens_are_asked_for() -> None:
    engine = ScriptedEngine()
    with serving(engine) as server:
        asked = {"max_new_tokens": [3], "seed": 1, "temperature": 0.0, "eos_token_id": [4]}
        reached(server.url).generate([[1]], tree=PLAIN, **asked)
    [(_, options)] = engine.submitted
    assert options["speculate"] is False and options["eos_token_id"] == [4]
    assert options["temperature"] == 0.0 and options["seed"] == 1


def test_a_text_that_ended_with_an_error_is_no_text() -> None:
    with serving(ScriptedEngine(finish="error", reason="its tokenizer fails")) as server:
        with pytest.raises(OSError, match="--endpoint=.*: its tokenizer fails"):
            reached(server.url).generate([[1]], max_new_tokens=[3], seed=1)


def test_what_a_server_refuses_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(ScriptedEngine(), api_key="open") as server:
        with pytest.raises(ValueError, match=f"answers 401: the API key .* variable {KEY}"):
            reached(server.url)
        monkeypatch.setenv(KEY, "open")
        endpoint = reached(server.url)
        with pytest.raises(ValueError, match="answers 400: max_new_tokens=13 is unlucky"):
            endpoint.generate([[1]], max_new_tokens=[13], seed=0)
    with pytest.raises(OSError, match=r"--endpoint=http.*refused; is it the address of a server"):
        endpoint.generate([[1]], max_new_tokens=[2], seed=0)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("asked", ["GET", "POST"])
def test_the_key_follows_no_redirect(
    monkeypatch: pytest.MonkeyPatch, status: int, asked: str
) -> None:
    seen: list[str | None] = []

    class Elsewhere(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers.get("Authorization"))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"data": [{"id": "toy"}]}')

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    class Redirecting(Elsewhere):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Location", f"http://localhost:{elsewhere.server_port}/v1/models")
            self.end_headers()

        do_POST = do_GET

    elsewhere, first = (HTTPServer(("127.0.0.1", 0), one) for one in (Elsewhere, Redirecting))
    monkeypatch.setenv(KEY, "secret")
    spec = toy_spec()
    try:
        for server in (elsewhere, first):
            threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        url = f"http://127.0.0.1:{first.server_port}/v1"
        endpoint = Endpoint(url, spec.target_config, spec.tokenizer, (25,))
        with pytest.raises(ValueError, match="redirects to 'http://localhost.* nor the API key"):
            if asked == "GET":
                endpoint.reached()
            endpoint.generate([[1]], max_new_tokens=[2], seed=0)
    finally:
        for server in (elsewhere, first):
            server.shutdown()
            server.server_close()
    assert seen == []
