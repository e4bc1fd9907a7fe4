"""The server over an engine that does what a test tells it: routes, formats, keys."""

import base64
import gzip
from typing import Any

import pytest
from openai import APIError, AuthenticationError, BadRequestError, OpenAI
from openai.types.chat.completion_create_params import (
    CompletionCreateParamsNonStreaming as ChatParams,
)
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming as TextParams

from infer.serve import answers
from infer.serve.openapi import GETS, POSTS
from tests.serve.kit import Client, ScriptedEngine, serving

TALK = [{"role": "user", "content": "ab"}]


def client_of(server: Client, key: str = "none", retries: int = 0) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=retries, timeout=30)


@pytest.fixture(scope="module")
def shared() -> Any:
    with serving(ScriptedEngine()) as server:
        yield server


def test_a_completion_has_usage_and_acceptance(shared: Client) -> None:
    status, body = shared.post("/v1/completions", prompt="ab", max_tokens=8)
    assert status == 200
    assert body["object"] == "text_completion" and body["model"] == "toy"
    assert body["choices"] == [
        {"index": 0, "text": "cdefghij", "finish_reason": "length", "logprobs": None}
    ]
    assert body["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 8,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    metrics = body["metrics"]
    assert metrics["speculative_decoding"] == {
        "mean_acceptance_length": 1 + 4 / 3,
        "draft_acceptance_rate": 4 / 7,
        "acceptance_histogram": [1, 0, 2, 0],
        "num_spec_steps": 3,
        "num_accepted_draft_tokens": 4,
        "num_draft_tokens": 7,
        "num_spec_tokens": 3,
    }
    assert metrics["time_to_first_token_ms"] > 0 and metrics["tokens_per_second"] > 0


def test_choices_of_several_prompts_come_in_order(shared: Client) -> None:
    _, body = shared.post("/v1/completions", prompt=["ab", "e"], n=2, max_tokens=2, echo=True)
    assert [choice["text"] for choice in body["choices"]] == ["abcd", "abcd", "efg", "efg"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["prompt_tokens"] == 3 and body["usage"]["completion_tokens"] == 8
    assert body["metrics"] is None


def test_log_probabilities_as_lm_eval_reads_them(shared: Client) -> None:
    asked = {"max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0, "seed": 1234}
    _, body = shared.post("/v1/completions", prompt=[[1, 2, 4]], **asked)
    [choice] = body["choices"]
    assert choice["text"] == "bcef"
    assert choice["logprobs"] == {
        "tokens": ["b", "c", "e", "f"],
        "token_logprobs": [None, -1.5, -1.5, -1.5],
        "top_logprobs": [
            None,
            {"c": -1.5, "d": -0.5},
            {"e": -1.5, "f": -0.5},
            {"f": -1.5, "g": -0.5},
        ],
        "text_offset": [0, 1, 2, 3],
    }
    _, body = shared.post("/v1/completions", prompt="bc", max_tokens=0, echo=True, logprobs=0)
    assert body["choices"][0]["text"] == "bc"
    assert body["choices"][0]["logprobs"]["top_logprobs"] == [None, {"c": -1.5}]
    assert body["usage"]["completion_tokens"] == 0


def test_log_probabilities_of_a_chat(shared: Client) -> None:
    asked = {"max_tokens": 2, "logprobs": True, "top_logprobs": 1}
    _, body = shared.post("/v1/chat/completions", messages=TALK, **asked)
    [choice] = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "cd", "refusal": None}
    assert choice["logprobs"]["content"][0] == {
        "token": "c",
        "logprob": -1.5,
        "bytes": [99],
        "top_logprobs": [{"token": "d", "logprob": -0.5, "bytes": [100]}],
    }


def test_a_stream_has_the_same_text_its_reason_apart_and_the_usage_last(shared: Client) -> None:
    asked = {"prompt": "ab", "max_tokens": 8, "stream_options": {"include_usage": True}}
    *chunks, closing, usage, done = shared.stream("/v1/completions", **asked)
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "cdefghij"
    assert {chunk["choices"][0]["finish_reason"] for chunk in chunks} == {None}
    assert {chunk["usage"] for chunk in chunks} == {None}
    assert closing["choices"] == [
        {"index": 0, "text": "", "finish_reason": "length", "logprobs": None}
    ]
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 8
    assert usage["metrics"]["speculative_decoding"]["num_spec_steps"] == 3
    assert len({chunk["id"] for chunk in (*chunks, closing, usage)}) == 1


def test_a_stream_of_several_choices_echo_and_scores(shared: Client) -> None:
    asked = {"n": 2, "echo": True, "logprobs": 0, "max_tokens": 4}
    *chunks, done = shared.stream("/v1/completions", prompt="ab", **asked)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    for index in range(2):
        own = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["text"] for choice in own) == "abcdef"
        scores = [choice["logprobs"] for choice in own if choice["logprobs"]]
        assert sum((one["tokens"] for one in scores), []) == [*"abcdef"]
        assert sum((one["text_offset"] for one in scores), []) == [*range(6)]
        assert own[-1]["finish_reason"] == "length"


def test_continuous_usage_counts_up(shared: Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, done = shared.stream(
        "/v1/chat/completions", messages=TALK, max_tokens=7, stream_options=options
    )
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] == 7
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}


def test_rounds_come_with_their_trees(shared: Client) -> None:
    asked = {"prompt": "ab", "max_tokens": 4, "longspec": {"rounds": True}}
    *chunks, done = shared.stream("/v1/completions", **asked)
    told = [chunk["longspec"] for chunk in chunks if "longspec" in chunk]
    tokens = [token for one in told for token in one["tokens"]]
    assert [token["text"] for token in tokens] == [*"cdef"]
    assert [token["depth"] for token in tokens] == [0, 1, 2, 0]
    assert [token["drafted"] for token in tokens] == [False, True, True, False]
    assert [one for each in told for one in each["rounds"]] == [
        {
            "accepted": 2,
            "tree": {
                "tokens": ["c", "d", "e", "a"],
                "parents": [-1, 0, 1, 0],
                "draws": ["d", "e", "f", "b"],
                "path": [0],
            },
        }
    ]
    _, body = shared.post("/v1/completions", **asked)
    assert body["longspec"][0]["index"] == 0 and body["longspec"][0]["rounds"]


def test_what_the_engine_refuses_is_refused(shared: Client) -> None:
    for stream in (False, True):
        status, body = shared.post("/v1/completions", prompt="a", max_tokens=13, stream=stream)
        assert status == 400 and "unlucky" in body["error"]["message"]
    assert not shared.thread.open_calls


def test_other_routes(shared: Client) -> None:
    assert shared.ask("GET", "/health") == (200, {"status": "ready"})
    _, models = shared.ask("GET", "/v1/models")
    assert [model["id"] for model in models["data"]] == ["toy", "alias"]
    assert shared.ask("GET", "/v1/models/alias")[1]["max_model_len"] == 64
    assert shared.ask("GET", "/v1/models/x")[0] == 404
    status, missing = shared.post("/completions", prompt="ab")
    assert status == 404 and "base URL ends with /v1" in missing["error"]["message"]
    assert shared.post("/tokenize", prompt="abc", return_token_strs=True)[1] == {
        "count": 3,
        "max_model_len": 64,
        "tokens": [0, 1, 2],
        "token_strs": ["a", "b", "c"],
    }
    assert shared.post("/detokenize", tokens=[0, 2])[1] == {"prompt": "ac"}
    assert shared.ask("GET", "/stats")[1].keys() >= {"running", "waiting", "slots", "trees", "rows"}
    assert shared.ask("GET", "/nowhere")[1]["error"]["type"] == "not_found_error"
    assert shared.ask("GET", "/tokenize")[0] == 405
    page, _ = shared.answer("GET", "/")
    assert page.status == 200 and "default-src 'none'" in page.getheader("content-security-policy")
    head, _ = shared.answer("HEAD", "/metrics")
    assert head.status == 200 and head.getheader("content-type").startswith("text/plain")


def test_bodies_that_are_no_json(shared: Client) -> None:
    assert shared.ask("POST", "/v1/completions", b"{")[0] == 400
    plain = {"Content-Type": "text/plain"}
    status, body = shared.ask("POST", "/v1/completions", b'{"prompt": "a"}', **plain)
    assert status == 415 and "Content-Type: application/json" in body["error"]["message"]
    packed = gzip.compress(b'{"prompt": "a"}')
    status, body = shared.ask("POST", "/v1/completions", packed, **{"Content-Encoding": "gzip"})
    assert status == 415 and "gzip; send it uncompressed" in body["error"]["message"]
    assert shared.ask("POST", "/v1/completions", b" " * (33 * 2**20))[0] == 413


def test_metrics_count_tokens_rounds_and_acceptance() -> None:
    with serving(ScriptedEngine()) as server:
        server.post("/v1/completions", prompt="ab", max_tokens=8)
        text = server.answer("GET", "/metrics")[1].decode()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
    expected = {
        "longspec:spec_decode_num_drafts_total": 3,
        "longspec:spec_decode_num_draft_tokens_total": 7,
        "longspec:spec_decode_num_accepted_tokens_total": 4,
        'longspec:spec_decode_num_accepted_tokens_per_pos_total{position="0"}': 2,
        'longspec:spec_decode_num_accepted_tokens_per_pos_total{position="1"}': 2,
        'longspec:spec_decode_num_accepted_tokens_per_pos_total{position="2"}': 0,
        "longspec:prompt_tokens_total": 2,
        "longspec:generation_tokens_total": 8,
        "longspec:num_requests_running": 0,
        "longspec:num_requests_waiting": 0,
        "longspec:kv_cache_usage_perc": 0.5,
        "longspec:prefix_cache_hits_total": 7,
        'longspec:request_success_total{finished_reason="length"}': 1,
        "longspec:time_to_first_token_seconds_count": 1,
        "longspec:inter_token_latency_seconds_count": 7,
    }
    assert {name: float(values[name]) for name in expected} == expected


# The openai package as its users call it.


def test_openai_completions_and_chats(shared: Client) -> None:
    client = client_of(shared)
    assert [model.id for model in client.models.list()] == ["toy", "alias"]
    completion = client.completions.create(model="toy", prompt="ab", max_tokens=3)
    assert completion.choices[0].text == "cde"
    messages: Any = [{"role": "developer", "content": [{"type": "text", "text": "ab"}]}]
    chat = client.chat.completions.create(
        model="toy", messages=messages, max_completion_tokens=4, logprobs=True, top_logprobs=1
    )
    assert chat.choices[0].message.content == "cdef"
    assert chat.choices[0].logprobs and chat.choices[0].logprobs.content
    stream = client.chat.completions.create(
        model="alias", messages=messages, stream=True, stream_options={"include_usage": True}
    )
    chunks = [*stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert len(text) == 62 and text.startswith("cdef")
    assert chunks[-1].choices == [] and chunks[-1].usage
    assert chunks[-1].usage.completion_tokens == 62
    with pytest.raises(BadRequestError, match="unknown field 'colour'") as caught:
        client.completions.create(model="toy", prompt="ab", extra_body={"colour": 1})
    assert caught.value.param == "colour"


def test_null_is_as_absent_of_every_field_that_openai_knows(shared: Client) -> None:
    """A conversation goes on with the answers as the client holds and dumps them."""
    client = client_of(shared)
    messages: list[Any] = [{"role": "user", "content": "ab"}]
    for sent_back in (lambda message: message, lambda message: message.model_dump()):
        [choice] = client.chat.completions.create(
            model="toy", messages=messages, max_tokens=2
        ).choices
        messages += [sent_back(choice.message), {"role": "user", "content": "c"}]
    dumped = messages[-2]
    assert dumped["annotations"] is dumped["function_call"] is dumped["tool_calls"] is None
    nothing: dict[str, Any] = {"annotations": [], "tool_calls": [], "parsed": None}
    messages += [{**dumped, **nothing}, {"role": "user", "content": "c"}]
    nulls = {name: None for name in ChatParams.__annotations__ if name not in ("messages", "model")}
    assert len(nulls) > 25
    chat = client.chat.completions.create(
        model="toy", messages=messages, extra_body={**nulls, "max_tokens": 2}
    )
    assert chat.choices[0].message.content == "de"
    of_parts = [{"type": "text", "text": "ab", "prompt_cache_breakpoint": None}]
    messages = [{"role": "user", "content": of_parts, "name": None}]
    assert client.chat.completions.create(model="toy", messages=messages, max_tokens=1).choices
    nulls = {name: None for name in TextParams.__annotations__ if name not in ("prompt", "model")}
    text = client.completions.create(
        model="toy", prompt="ab", extra_body={**nulls, "max_tokens": 2}
    )
    assert text.choices[0].text == "cd"
    for name in ("prompt", "messages"):
        path = "/v1/completions" if name == "prompt" else "/v1/chat/completions"
        status, body = shared.post(path, **{name: None})
        assert status == 400 and body["error"]["param"] == name, "what is required is no null"


def test_an_error_in_a_stream_raises_in_the_openai_client() -> None:
    engine = ScriptedEngine(finish="error")
    with serving(engine) as server:
        client = client_of(server)
        stream = client.completions.create(model="toy", prompt="ab", max_tokens=9, stream=True)
        with pytest.raises(APIError, match="logits were not finite"):
            for _ in stream:
                pass
        status, body = server.post("/v1/completions", prompt="ab", max_tokens=9)
        assert status == 500 and "not finite" in body["error"]["message"]
        assert server.ask("GET", "/health")[0] == 200, "the other requests go on"


def test_a_row_that_fails_alone_says_why(shared: Client) -> None:
    """Its text so far has the finish reason error, whole and as a stream."""
    with serving(ScriptedEngine(finish="error", reason="the grammar is too large")) as server:
        client = client_of(server)
        asked: Any = {"model": "toy", "max_tokens": 5}
        said: Any = client.completions.create(prompt="ab", n=2, **asked)
        assert [choice.finish_reason for choice in said.choices] == ["error"] * 2
        assert [choice.text for choice in said.choices] == ["cdefg"] * 2
        assert said.choices[0].error == {"message": "the grammar is too large"}
        chat: Any = client.chat.completions.create(messages=TALK, **asked)  # type: ignore[call-overload]
        assert chat.choices[0].finish_reason == "error" and chat.choices[0].error
        *_, closing, done = server.stream("/v1/completions", prompt="ab", max_tokens=5)
        [choice] = closing["choices"]
        assert choice["finish_reason"] == "error" and done == "[DONE]"
        assert choice["error"] == {"message": "the grammar is too large"}
    _, whole = shared.post("/v1/completions", prompt="ab", max_tokens=5)
    assert "error" not in whole["choices"][0]


def test_a_request_that_breaks_the_submission_breaks_no_other(shared: Client) -> None:
    status, body = shared.post("/v1/completions", prompt="ab", max_tokens=17)
    assert status == 500 and body["error"]["message"] == "the server has a defect: KeyError"
    assert shared.post("/v1/completions", prompt="ab", max_tokens=3)[0] == 200
    assert shared.ask("GET", "/health")[0] == 200


# The key.


def test_every_route_but_health_wants_the_key() -> None:
    with serving(ScriptedEngine(), api_key="sésame") as server:
        bearer = "Bearer sésame".encode().decode("latin-1")
        server.key = None
        for method, paths in (("POST", POSTS), ("GET", GETS), ("HEAD", GETS), ("GET", ["/x"])):
            for path in paths:
                is_open = path == "/health"
                for given in ({}, {"Authorization": "Bearer x"}, {"Authorization": bearer[7:]}):
                    response, said = server.answer(method, path, b"{}", **given)
                    assert (response.status == 401) != is_open, (method, path)
                    assert b"<html" not in said
        assert server.ask("GET", "/v1/models", None, Authorization=bearer)[0] == 200
        # A browser asks for the key when it opens the page, and sends it as a password.
        page, _ = server.answer("GET", "/")
        assert page.getheader("www-authenticate") == 'Basic realm="API key"'
        for word, allowed in (("sésame", True), ("sesam", False)):
            basic = "Basic " + base64.b64encode(f"me:{word}".encode()).decode()
            for path in ("/", "/v1/models"):
                response, _ = server.answer("GET", path, None, Authorization=basic)
                assert (response.status == 200) == allowed
        broken, _ = server.answer("GET", "/", None, Authorization="Basic sésame"[:7] + "=x")
        assert broken.status == 401
    with serving(ScriptedEngine(), api_key="sesame") as server:
        with pytest.raises(AuthenticationError):
            client_of(server, "other").models.list()
        assert client_of(server, "sesame").models.list().data


def test_many_tokens_are_written_in_parts(shared: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Millions of them at once would hold up every stream."""
    written, whole = list[object](), answers._json
    monkeypatch.setattr(answers, "_json", lambda value: (written.append(value), whole(value))[1])
    assert shared.post("/tokenize", prompt="ab" * 100)[1]["tokens"] == [0, 1] * 100
    assert max(len(one) for one in written if isinstance(one, list)) == answers.SLICE


# The end.
