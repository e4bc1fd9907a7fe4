"""The server over the real engine: every text is the one that a call of its own gets."""

import math
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from infer.serve.calls import ServedModel
from infer.serve.command import served_model
from infer.serve.streaming import token_text
from longspec_jax import PLAIN
from tests.infer.toys import TREE, toy_spec
from tests.kit import compilations
from tests.serve.kit import Client, serving

MAX_LEN = 64
TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
TALK = [{"role": "user", "content": "ab"}, {"role": "user", "content": "cd"}]
REQUESTS: list[dict[str, Any]] = [
    {"prompt": "ab cd gh é", "temperature": 0, "max_tokens": 9},
    {"prompt": "cd", "temperature": 1.0, "seed": 3, "max_tokens": 14},
    {"prompt": "é ab ab ab gh cd", "temperature": 0.7, "top_p": 0.9, "seed": 5, "max_tokens": 1},
    {"prompt": "gh ab", "top_k": 5, "seed": 4, "max_tokens": 20, "ignore_eos": True},
    {"prompt": [3, 4, 5], "top_p": 0.8, "seed": 9, "max_tokens": 20, "stop_token_ids": [2]},
    {"prompt": "ab", "temperature": 0},
    {"prompt": "gh ab", "seed": 4, "max_tokens": 30, "ignore_eos": True, "stop": ["gh", "f"]},
    {"prompt": "ab ab", "logit_bias": {"3": 2.5, "5": -100}, "seed": 2, "max_tokens": 20},
    {"prompt": "ab ab", "presence_penalty": 1.5, "frequency_penalty": 0.5, "max_tokens": 20}
    | {"temperature": 0, "ignore_eos": True},
    {"prompt": "cd", "repetition_penalty": 1.8, "seed": 8, "max_tokens": 20, "ignore_eos": True},
    {"prompt": "gh ab", "min_p": 0.05, "seed": 6, "max_tokens": 20, "ignore_eos": True},
]


@pytest.fixture(scope="module")
def server() -> Any:
    spec = toy_spec()
    reported = {"logprobs": 17, "enable_penalties": True, "return_trees": True, "grammars": True}
    engine = spec.engine(max_num_seqs=2, max_model_len=MAX_LEN, prefixes=True, **reported)
    engine.prepare()
    model: ServedModel = served_model(
        spec, engine, names=("toy",), max_len=MAX_LEN, most_rows=64, template=TEMPLATE
    )
    with serving(engine, model, queue_requests=64, levels=TREE.num_levels) as client:
        yield client


CHAT = {"temperature": 0, "max_tokens": 9, "ignore_eos": True}
CHOICES = [{"prompt": "ab", "seed": seed, "max_tokens": 9} for seed in (7, 8, 9)]


@pytest.fixture(scope="module")
def alone() -> list[str | None]:
    """The texts of all requests, plainly decoded in one batch: requests, choices, chat."""
    spec = toy_spec()
    rows = [*REQUESTS, *CHOICES, {"prompt": "ab\ncd\n", **CHAT}]
    prompts = [
        spec.tokenizer(row["prompt"])["input_ids"]
        if isinstance(row["prompt"], str)
        else row["prompt"]
        for row in rows
    ]
    options = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 0}
    options |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
    biases = [
        {int(token): bias for token, bias in row.get("logit_bias", {}).items()} for row in rows
    ]
    found = spec.generate(
        prompts,
        max_new_tokens=[
            row.get("max_tokens", MAX_LEN - len(prompt))
            for row, prompt in zip(rows, prompts, strict=True)
        ],
        eos_token_id=[
            [*([] if row.get("ignore_eos") else [0]), *row.get("stop_token_ids", [])]
            for row in rows
        ],
        logit_bias=biases,
        stop_strings=[row.get("stop", []) for row in rows],
        tree=PLAIN,
        **{name: [row.get(name, value) for row in rows] for name, value in options.items()},
    )
    return [*found.text]


def streamed(server: Client, request: dict[str, Any]) -> str:
    chunks = server.stream("/v1/completions", **request)
    assert chunks[-1] == "[DONE]"
    return "".join(choice["text"] for chunk in chunks[:-1] for choice in chunk["choices"])


def test_concurrent_requests_get_the_texts_of_calls_of_their_own(
    server: Client, alone: list[str | None]
) -> None:
    with ThreadPoolExecutor(8) as pool, compilations() as compiled:
        whole = [pool.submit(server.post, "/v1/completions", **one) for one in REQUESTS * 2]
        streams = [pool.submit(streamed, server, one) for one in REQUESTS * 2]
        texts = [each.result()[1]["choices"][0]["text"] for each in whole]
        assert [each.result() for each in streams] == texts
    assert not compiled
    assert texts == alone[: len(REQUESTS)] * 2
    assert len({*texts}) > 3


def test_choices_have_seeds_of_their_own(server: Client, alone: list[str | None]) -> None:
    _, body = server.post("/v1/completions", n=3, **CHOICES[0])
    texts = [choice["text"] for choice in body["choices"]]
    assert texts == alone[len(REQUESTS) : -1] and len({*texts}) > 1


def test_a_text_has_the_form_that_was_asked_for(server: Client) -> None:
    """Whether speculated or not; and a form that cannot be read is refused."""
    form = {"type": "regex", "regex": "(ab|cd){2,6}gh"}
    asked = [{"prompt": "ab", "seed": seed, "response_format": form} for seed in (1, 2, 3)]
    plain = [{**one, "longspec": {"speculation": False}} for one in asked]
    with ThreadPoolExecutor(6) as pool, compilations() as compiled:
        posted = [pool.submit(server.post, "/v1/completions", **one) for one in asked + plain]
        texts = [each.result()[1]["choices"][0]["text"] for each in posted]
    assert texts[:3] == texts[3:] and not compiled
    assert all(re.fullmatch(form["regex"], text) for text in texts)
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "objekt"}}}
    status, body = server.post("/v1/completions", prompt="ab", response_format=schema)
    assert status == 400 and body["error"]["param"] == "response_format"
    assert "Invalid type: objekt" in body["error"]["message"]


def test_a_form_that_grows_too_large_ends_its_own_text(
    server: Client, alone: list[str | None]
) -> None:
    """Twice within a minute; one choice of two may go on; the neighbour's text is its own."""
    form = {"type": "regex", "regex": "(b[cd]{3}|(a?){500}a{500})"}
    asked = {"prompt": "ab", "response_format": form, "temperature": 0, "max_tokens": 9}
    asked |= {"logit_bias": {"1": 90, "2": 80}}
    for _ in range(2):
        with ThreadPoolExecutor(3) as pool:
            neighbour = pool.submit(server.post, "/v1/completions", **REQUESTS[1])
            grown = pool.submit(server.post, "/v1/completions", **asked)
            other = {**asked, "logit_bias": {"1": -100}}
            fine = pool.submit(server.post, "/v1/completions", **other)
        [choice] = grown.result()[1]["choices"]
        assert choice["finish_reason"] == "error" and choice["text"] == "aa"
        assert "too many expressions" in choice["error"]["message"]
        assert re.fullmatch("b[cd]{3}", fine.result()[1]["choices"][0]["text"])
        assert neighbour.result()[1]["choices"][0]["text"] == alone[1]
    assert server.ask("GET", "/health")[0] == 200
    assert b"longspec:num_recoveries_total 0.0" in server.answer("GET", "/metrics")[1]


def test_a_prompt_that_a_slot_holds_is_not_read_again(server: Client) -> None:
    request = {"prompt": "ab cd" * 8, "temperature": 0, "max_tokens": 9, "ignore_eos": True}
    found = [server.post("/v1/completions", **request)[1] for _ in range(2)]
    assert [body["choices"] for body in found[:1]] == [body["choices"] for body in found[1:]]
    cached = [body["usage"]["prompt_tokens_details"]["cached_tokens"] for body in found]
    assert cached == [0, 32] and found[0]["usage"]["prompt_tokens"] == 40
    assert found[1]["metrics"]["queue_time_ms"] >= 0


def test_a_chat_continues_what_its_template_makes_of_the_messages(
    server: Client, alone: list[str | None]
) -> None:
    _, body = server.post("/v1/chat/completions", messages=TALK, **CHAT)
    [choice] = body["choices"]
    assert choice["message"]["content"] == alone[-1]
    acceptance = body["metrics"]["speculative_decoding"]
    emitted = acceptance["num_accepted_draft_tokens"] + acceptance["num_spec_steps"]
    # The prefill gives the first token; the budget may take the last round's bonus.
    assert body["usage"]["completion_tokens"] == 9 and emitted in (8, 9)
    assert body["usage"]["prompt_tokens"] == 6


def test_a_plain_row_has_the_same_text_and_no_acceptance(
    server: Client, alone: list[str | None]
) -> None:
    request = {**REQUESTS[1], "longspec": {"speculation": False, "rounds": True}}
    _, body = server.post("/v1/completions", **request)
    assert body["choices"][0]["text"] == alone[1]
    assert body["metrics"]["speculative_decoding"] is None
    assert {one["accepted"] for one in body["longspec"][0]["rounds"]} == {0}


def test_log_probabilities_are_the_models_own(server: Client) -> None:
    request = {"prompt": [3, 4, 5, 6], "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    more = {"logprobs": 2, "echo": True, "longspec": {"rounds": True}}
    _, body = server.post("/v1/completions", **more, **request)
    found = body["choices"][0]["logprobs"]
    own, best = found["token_logprobs"], found["top_logprobs"]
    assert own[0] is best[0] is None and len(own) == len(best) == 4 + 6
    text, offsets = body["choices"][0]["text"], found["text_offset"]
    whole = [token for token in found["tokens"] if "\ufffd" not in token]
    assert len(whole) > 3 and offsets == sorted(offsets)
    assert all(
        text[at:].startswith(token)
        for at, token in zip(offsets, found["tokens"], strict=True)
        if token in whole
    )
    # lm-eval compares floats: the greedy token is the best one exactly.
    assert own[4:] == [max(top.values()) for top in best[4:]]
    # Read as a prompt, the whole text has the same ones.
    whole_text = [3, 4, 5, 6, *(token["id"] for token in body["longspec"][0]["tokens"])]
    scores = {"prompt": whole_text, "max_tokens": 0, "echo": True, "logprobs": 0}
    _, read = server.post("/v1/completions", **scores)
    assert read["choices"][0]["logprobs"]["token_logprobs"][1:] == pytest.approx(own[1:], abs=1e-4)
    _, last = server.post("/v1/completions", **{**request, "prompt": [3, 4, 5]}, logprobs=17)
    assert sum(map(math.exp, last["choices"][0]["logprobs"]["top_logprobs"][0].values())) <= 1.001


def test_the_bytes_of_a_chat_are_its_text_s_and_offsets_do_not_drift(server: Client) -> None:
    """The toy keeps emitting parts of characters, also such as never become whole ones."""
    incomplete = 0
    for seed in range(4):
        asked = {"seed": seed, "ignore_eos": True, "max_tokens": 40}
        more = {"logprobs": True, "top_logprobs": 17}
        _, body = server.post("/v1/chat/completions", messages=TALK, **asked, **more)
        text = body["choices"][0]["message"]["content"]
        content = body["choices"][0]["logprobs"]["content"]
        emitted = b"".join(bytes(one["bytes"] or ()) for one in content)
        assert emitted.decode(errors="replace") == text
        incomplete += sum(one["token"] == "\ufffd" for one in content)
        for one in content:  # No two alternatives with one text have the same bytes.
            parts = [other["bytes"] for other in one["top_logprobs"] if other["bytes"]]
            assert len({*map(tuple, parts)}) == len(parts) >= 14
        _, body = server.post("/v1/completions", prompt="ab\ncd\n", **asked, logprobs=0, echo=True)
        text, found = body["choices"][0]["text"], body["choices"][0]["logprobs"]
        for token, at in zip(found["tokens"], found["text_offset"], strict=True):
            shown = "" if token == "<end>" else token
            assert "\ufffd" in token or text[at : at + len(shown)] == shown
    assert incomplete > 20


def test_the_rounds_of_a_text_explain_it(server: Client) -> None:
    asked = {"prompt": "ab cd", "seed": 1, "max_tokens": 20, "ignore_eos": True}
    _, body = server.post("/v1/completions", longspec={"rounds": True}, **asked)
    [told] = body["longspec"]
    assert len(told["tokens"]) == 20 and told["tokens"][0]["depth"] == 0
    # By id: the texts of tokens that are parts of one character are shown with its last one.
    decode = toy_spec().tokenizer.decode
    emitted = [token_text(decode, token["id"]) for token in told["tokens"][1:]]
    for one in told["rounds"]:
        tree, accepted = one["tree"], one["accepted"]
        assert [node for node, parent in enumerate(tree["parents"]) if parent < 0] == [0]
        walked = [tree["tokens"][node] for node in tree["path"]]
        draws = [tree["draws"][node] for node in tree["path"]]
        assert walked[1:] == draws[:-1] and accepted <= len(walked) - 1
        assert emitted[: accepted + 1] == draws[: len(emitted[: accepted + 1])]
        emitted = emitted[accepted + 1 :]
    assert not emitted
    acceptance = body["metrics"]["speculative_decoding"]
    assert acceptance["num_accepted_draft_tokens"] == sum(one["accepted"] for one in told["rounds"])
    assert acceptance["num_draft_tokens"] == len(told["rounds"]) * (TREE.num_nodes - 1)


def test_tokens_and_texts(server: Client) -> None:
    _, found = server.post("/tokenize", prompt="ab é", return_token_strs=True)
    assert "".join(found["token_strs"][:3]) == "ab " and found["count"] == 5
    assert server.post("/detokenize", tokens=found["tokens"])[1] == {"prompt": "ab é"}


def test_what_has_no_utf8_is_refused(server: Client) -> None:
    bodies = [
        {"prompt": "\ud800"},
        {"prompt": "a", "model": "\ud800"},
        {"prompt": "a", "\ud800": 1},
    ]
    for body in bodies:
        status, answer = server.post("/v1/completions", **body)
        assert status in (400, 404) and answer["error"]["message"]
