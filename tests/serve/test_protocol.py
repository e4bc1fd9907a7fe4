"""Requests are read, bounded and refused without a server."""

import itertools
import json
import time
from types import SimpleNamespace
from typing import Any

import pytest

from infer.serve.bodies import (
    DEEPEST,
    MOST_BYTES,
    MOST_CONTAINERS,
    MOST_STRINGS,
    most_bytes,
    most_values,
    read_json,
)
from infer.serve.documents import GETS, POSTS, describe
from infer.serve.fields import CHAT, COMPLETIONS, DETOKENIZE, SHARED, TOKENIZE
from infer.serve.protocol import (
    Call,
    Row,
    read_call,
    read_detokenize,
    read_tokenize,
    rows_of,
)
from infer.serve.rules import Neutral, Refused
from longspec_jax import TreeConfig
from tests.serve.kit import MAX_LEN, scripted_model

MODEL = scripted_model()
TALK = [{"role": "user", "content": "ab"}]


def completion(**fields: Any) -> Call:
    return read_call({"prompt": "ab", **fields}, MODEL, chat=False)


def chat(**fields: Any) -> Call:
    return read_call({"messages": TALK, **fields}, MODEL, chat=True)


def refusal(work: Any, *arguments: Any, **named: Any) -> Refused:
    with pytest.raises(Refused) as caught:
        work(*arguments, **named)
    return caught.value


@pytest.mark.parametrize(
    "fields, options",
    [
        ({}, {"temperature": 1.0}),
        ({"temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.1}, {"temperature": 0.0}),
        ({"top_k": -1, "top_p": 0.5}, {"temperature": 1.0, "top_k": 0, "top_p": 0.5}),
        ({"stop": "x"}, {"temperature": 1.0, "stop_strings": ["x"]}),
        ({"stop": ["x", "yz"]}, {"temperature": 1.0, "stop_strings": ["x", "yz"]}),
        ({"stop": [], "seed": None}, {"temperature": 1.0}),
        ({"stop_token_ids": [3, 1, 3]}, {"temperature": 1.0, "eos_token_id": [1, 3, 25]}),
        ({"ignore_eos": True}, {"temperature": 1.0, "eos_token_id": []}),
        ({"ignore_eos": True, "stop_token_ids": [4]}, {"temperature": 1.0, "eos_token_id": [4]}),
        ({"logit_bias": {"3": -100}}, {"temperature": 1.0, "logit_bias": {3: -100.0}}),
        (
            {"presence_penalty": 1, "frequency_penalty": -2.0, "repetition_penalty": 1.5},
            {
                "temperature": 1.0,
                "presence_penalty": 1.0,
                "frequency_penalty": -2.0,
                "repetition_penalty": 1.5,
            },
        ),
        ({"priority": -3}, {"temperature": 1.0, "priority": -3}),
        ({"longspec": {"speculation": False}}, {"temperature": 1.0, "speculate": False}),
        ({"longspec": {"tree": "none"}}, {"temperature": 1.0, "speculate": False}),
        ({"longspec": {"drafter": "script"}}, {"temperature": 1.0}),
        *(
            ({"longspec": {"tree": tree}}, {"temperature": 1.0, "tree": TreeConfig((1, 1, 1))})
            for tree in ("1,1,1", "chain:3")
        ),
        ({"user": "somebody", "length_penalty": 1, "min_tokens": 0}, {"temperature": 1.0}),
    ],
)
def test_fields_become_the_options_of_the_engine(fields: dict, options: dict) -> None:
    assert completion(**fields).options == options
    assert chat(**fields).options == options


@pytest.mark.parametrize(
    "fields, words, param",
    [
        ({"colour": 1}, "unknown field 'colour'; leave it out", "colour"),
        ({"temperatur": 1}, "did you mean temperature?", "temperatur"),
        ({"temperature": "hot"}, "temperature='hot' must be a number", "temperature"),
        ({"temperature": True}, "must be a number", "temperature"),
        ({"temperature": -1}, "temperature=-1 must be >= 0", "temperature"),
        ({"top_p": 0}, "top_p=0 must be in (0, 1]", "top_p"),
        ({"top_k": 1.5}, "top_k=1.5 must be a whole number", "top_k"),
        ({"min_p": 2}, "min_p=2 must be in [0, 1]", "min_p"),
        ({"n": 0}, "n=0 must be a whole number from 1", "n"),
        ({"n": 17}, "the request has 17 rows (prompts times n) and the server takes 16", "n"),
        ({"seed": 2**32}, "must be a whole number from 0 to 4294967295", "seed"),
        ({"stop": ["a"] * 17}, "at most 16 items", "stop"),
        ({"stop": ""}, "must be text, or a list of texts, none empty", "stop"),
        ({"stop": "a" * 257}, "at most 256 characters", "stop"),
        ({"stop_token_ids": [*range(9)]}, "at most 8 items", "stop_token_ids"),
        ({"stop_token_ids": [*range(8)]}, "a row takes 8", "stop_token_ids"),
        ({"logit_bias": {"x": 1}}, "has the name 'x', which is no token id", "logit_bias"),
        ({"logit_bias": {"1": 101}}, "of token 1, 101, must be from -100 to 100", "logit_bias"),
        ({"logit_bias": dict.fromkeys(map(str, range(1025)), 1)}, "at most 1024", "logit_bias"),
        ({"presence_penalty": 3}, "must be from -2 to 2", "presence_penalty"),
        ({"repetition_penalty": 0}, "must be above 0", "repetition_penalty"),
        ({"model": "other"}, "the model 'other' does not exist; this server has toy", "model"),
        ({"stream": 1}, "must be true or false", "stream"),
        ({"stream_options": {}}, "stream_options needs stream=true", "stream_options"),
        (
            {"stream": True, "stream_options": {"usage": True}},
            "is wrong: unknown field 'usage'",
            "stream_options",
        ),
        (
            {"longspec": {"tree": "4,4"}},
            "is none of this server's trees, none, chain:3; name one of these",
            "longspec",
        ),
        ({"longspec": {"tree": "4,x"}}, "longspec.tree='4,x': ", "longspec"),
        ({"longspec": {"drafter": "x"}}, "is not this server's, script", "longspec"),
        ({"longspec": {"round": True}}, "did you mean rounds?", "longspec"),
        ({"response_format": {"type": "json_object"}}, "knows no grammars", "response_format"),
        ({"response_format": {"type": "regex"}}, "needs the field regex", "response_format"),
        ({"response_format": {"type": "json_schema"}}, "needs the field json", "response_format"),
        ({"min_tokens": 3}, "is not supported", "min_tokens"),
        ({"use_beam_search": 0}, "is not supported", "use_beam_search"),
    ],
)
def test_what_is_wrong_is_named_with_a_remedy(fields: dict, words: str, param: str) -> None:
    for kind in (completion, chat):
        error = refusal(kind, **fields)
        assert words in str(error) and error.param == param
        assert error.body["error"]["message"] == str(error)
        assert error.status == (404 if param == "model" else 400)


@pytest.mark.parametrize("end", ["<think>\n", "<seed:think>", "[THINK]", "<THINKING>\n\n"])
def test_a_form_is_refused_behind_a_template_that_opens_the_reasoning(end: str) -> None:
    """It would bind the reasoning. One that is closed, or a text of the caller's, is as good."""
    asked = {"response_format": {"type": "regex", "regex": "a+"}}

    def rows(given: dict[str, Any], end: str) -> tuple[Row, ...]:
        made = SimpleNamespace(state=lambda: "a state")
        model = scripted_model(grammar=lambda regex: made, decode=lambda tokens: f"ab{end}")
        call = read_call({**given, **asked, "max_tokens": 3}, model, chat="messages" in given)
        return rows_of(call, model)

    with pytest.raises(Refused, match="(?i)ends the prompt with .*think") as refused:
        rows({"messages": TALK}, end)
    assert refused.value.status == 400 and refused.value.param == "response_format"
    closed, text = {"messages": TALK}, {"prompt": "ab"}
    assert rows(closed, "<think>\n\n</think>\n\n")[0].options["grammar"] == "a state"
    assert rows(text, end)[0].options["grammar"] == "a state"


@pytest.mark.parametrize(
    "kind, fields, words",
    [
        (completion, {"prompt": []}, "must be text, token ids, or a list"),
        (completion, {"prompt": [[]]}, "must be text, token ids, or a list"),
        (completion, {"prompt": ["a", 1]}, "must be text, token ids, or a list"),
        (completion, {"prompt": None}, "must be text, token ids, or a list"),
        (completion, {"max_tokens": 0}, "max_tokens=0 generates nothing"),
        (completion, {"best_of": 2}, "best_of=2 must be n=1"),
        (completion, {"logprobs": 21}, "from 0 to 20"),
        (completion, {"logprobs": True}, "must be a whole number"),
        (completion, {"suffix": "x"}, "put everything into prompt"),
        (chat, {"max_tokens": 0}, "must be a whole number from 1"),
        (chat, {"max_tokens": 1, "max_completion_tokens": 2}, "both are given"),
        (chat, {"top_logprobs": 2}, "top_logprobs needs logprobs=true"),
        (chat, {"tools": [{}]}, "is not supported; put what the model must know"),
        (chat, {"tool_choice": "auto"}, "is not supported; put what"),
        (chat, {"modalities": ["audio"]}, "is not supported; answers are text"),
        (chat, {"messages": []}, "at least 1 item"),
        (chat, {"messages": [{"role": "user"}]}, "the field content is missing"),
        (chat, {"messages": [{"role": "tool", "content": "x"}]}, "tools are not supported"),
        (
            chat,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "images and sound are not supported",
        ),
        (chat, {"chat_template": "x"}, "--chat_template=FILE"),
    ],
)
def test_what_is_wrong_of_one_endpoint(kind: Any, fields: dict, words: str) -> None:
    assert words in str(refusal(kind, **fields))


def test_a_prompt_that_is_missing_is_named() -> None:
    error = refusal(read_call, {}, MODEL, chat=False)
    assert str(error) == "the field prompt is missing: what to continue"
    assert error.param == "prompt"


def test_every_neutral_value_and_null_is_accepted() -> None:
    for chats, fields in ((False, COMPLETIONS), (True, CHAT)):
        base = {"messages": TALK} if chats else {"prompt": "ab"}
        plain = read_call({**base, "seed": 1}, MODEL, chat=chats)
        for name, one in fields.items():
            if one.required or name == "seed":
                continue
            values = one.rule.values if isinstance(one.rule, Neutral) else ()
            for value in (None, *values):
                given = {**base, "seed": 1, name: value}
                assert read_call(given, MODEL, chat=chats) == plain, name


def test_rows_have_seeds_budgets_and_the_order_of_choices() -> None:
    call = completion(prompt=["ab", "c"], n=2, seed=2**32 - 1, max_tokens=5)
    rows = rows_of(call, MODEL)
    assert [row.tokens for row in rows] == [(0, 1), (0, 1), (2,), (2,)]
    assert [row.options["seed"] for row in rows] == [2**32 - 1, 0] * 2
    assert {row.options["max_new_tokens"] for row in rows} == {5}
    [row] = rows_of(completion(prompt=[3, 4.0]), MODEL)
    assert row.tokens == (3, 4) and row.options["max_new_tokens"] == MAX_LEN - 2
    seeds = {rows_of(completion(), MODEL)[0].options["seed"] for _ in range(3)}
    assert len(seeds) > 1, "without a seed every request draws anew"


def test_scores_of_a_prompt_as_lm_eval_asks_for_them() -> None:
    call = completion(prompt=[[1, 2]], max_tokens=1, logprobs=1, echo=True, temperature=0, seed=1)
    [row] = rows_of(call, MODEL)
    assert row.options == {
        "temperature": 0.0,
        "logprobs": 1,
        "prompt_logprobs": 1,
        "max_new_tokens": 1,
        "seed": 1,
    }
    [row] = rows_of(completion(max_tokens=0, echo=True), MODEL)
    assert row.options["max_new_tokens"] == 1


def test_messages_are_made_of_parts_and_developers_are_systems() -> None:
    call = chat(
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "a"}] * 2},
            {"role": "assistant", "content": "", "tool_calls": [], "refusal": None},
            {"role": "user", "content": "b", "name": "x"},
        ],
        max_completion_tokens=3,
        logprobs=True,
        top_logprobs=2,
    )
    assert call.messages == (
        {"role": "system", "content": "aa"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "b", "name": "x"},
    )
    assert call.logprobs == call.options["logprobs"] == 2
    [row] = rows_of(call, MODEL)
    assert row.tokens == (0, 0, 1) and row.options["max_new_tokens"] == 3


def test_a_model_without_a_template_says_which_flag_gives_one() -> None:
    model = scripted_model(encode_chat=None)
    assert "--chat_template=FILE" in str(refusal(read_call, {"messages": TALK}, model, chat=True))
    assert "--chat_template=FILE" in str(refusal(read_tokenize, {"messages": TALK}, model))


@pytest.mark.parametrize("prompt, new", [(60, 5), (64, None), (70, 1)])
def test_what_exceeds_the_context_is_refused_in_the_words_that_litellm_knows(
    prompt: int, new: int | None
) -> None:
    error = refusal(rows_of, completion(prompt="a" * prompt, max_tokens=new), MODEL)
    assert str(error).startswith(
        f"This model's maximum context length is {MAX_LEN} tokens. However, you requested "
        f"{prompt + (new or 1)} tokens ({prompt} in the prompt, {new or 1} in the completion)."
    )
    assert (error.status, error.code) == (400, "context_length_exceeded")


def test_prompts_that_are_none_are_refused() -> None:
    assert "the prompt is empty" in str(refusal(rows_of, completion(prompt=""), MODEL))
    assert "token id 26 is outside" in str(refusal(rows_of, completion(prompt=[26]), MODEL))
    assert "substring not found" in str(refusal(rows_of, completion(prompt="?"), MODEL))


def test_tokens_of_texts_and_texts_of_tokens() -> None:
    assert read_tokenize({"prompt": "abc"}, MODEL) == ([0, 1, 2], False)
    assert read_tokenize({"messages": TALK, "return_token_strs": True}, MODEL) == ([0, 1], True)
    assert read_detokenize({"tokens": [2, 1]}, MODEL) == (2, 1)
    assert "either prompt or messages" in str(refusal(read_tokenize, {}, MODEL))
    assert "outside the model's vocabulary" in str(
        refusal(read_detokenize, {"tokens": [99]}, MODEL)
    )


@pytest.mark.parametrize(
    "body, words, status",
    [
        (b"", "the body is not JSON", 400),
        (b"\xff", "the body is not JSON", 400),
        (b"[1]", "the body must be a JSON object", 400),
        (b'{"a": NaN}', "NaN is no number of JSON", 400),
        (b'{"a": 1, "a": 2}', "the body is not JSON", 400),
        (b'{"a": ' + b"9" * 5000 + b"}", "the body is not JSON", 400),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "levels deep", 400),
        (b'{"a": ' + b"[" * DEEPEST + b"]" * DEEPEST + b"}", "levels deep", 400),
        (b" " * (MOST_BYTES + 1), "send less", 413),
    ],
)
def test_bodies_that_are_no_small_json_object(body: bytes, words: str, status: int) -> None:
    error = refusal(read_json, body, MAX_LEN)
    assert words in str(error) and error.status == status


def test_a_body_is_read() -> None:
    deep = "[" * (DEEPEST - 1) + "]" * (DEEPEST - 1)
    assert read_json(f'{{"a": {deep}, "b": "\\ud800"}}'.encode(), MAX_LEN)["b"] == "\ud800"


CONTEXT = 32_768
"""Of a server that takes bodies of 32 MiB."""


@pytest.mark.parametrize(
    "body, words",
    [
        (b'{"a": [' + b"0," * most_values(CONTEXT) + b"0]}", "values"),
        (b'{"a": [' + b"{}," * MOST_CONTAINERS + b"0]}", "lists and objects"),
        (b'{"a": [' + b'"",' * MOST_STRINGS + b"0]}", "texts and names"),
        (b'{"\\\\": "\\"", "b": [' + b"[]," * MOST_CONTAINERS + b"0]}", "lists and objects"),
    ],
)
def test_the_values_of_a_body_are_counted_before_it_is_parsed(
    body: bytes, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json, "loads", None)
    error = refusal(read_json, body, CONTEXT)
    assert f" {words}, and a request may have " in str(error) and error.status == 413


def test_what_prompts_of_the_context_need_is_read() -> None:
    assert most_bytes(CONTEXT) == MOST_BYTES and most_bytes(64) < 2 * 2**20
    ids = [[131_071] * CONTEXT] * 4
    assert read_json(json.dumps({"prompt": ids}).encode(), CONTEXT)["prompt"] == ids
    text = '{[, \\" \\\\ 中' * 100_000
    for ascii in (True, False):
        body = json.dumps({"prompt": text}, ensure_ascii=ascii).encode()
        assert read_json(body, CONTEXT)["prompt"] == text
    error = refusal(read_json, b" " * (most_bytes(64) + 1), 64)
    assert "16 for each token of 64 prompts of 64 tokens" in str(error) and error.status == 413


def test_json_is_utf_8() -> None:
    """In UTF-16 a character may hold the byte of a quote, by which texts are counted."""
    error = refusal(read_json, '{"a": 1}'.encode("utf-16"), CONTEXT)
    assert "the body is not JSON" in str(error)


def test_refusals_of_large_values_take_no_time() -> None:
    """A name of 31 MB took 38 seconds, and as many names as fit, one of them twice, hours."""
    large = 2**24
    begun = time.monotonic()
    for given in (
        {"p" * large: 1},
        {"prompt": "a", "model": "x" * large},
        {"prompt": {"x": ["y" * large] * 9}},
        {"prompt": "a", "stop": [["z" * large]] * 9},
        {"prompt": "a", "longspec": {"t" * large: 1}},
        {"prompt": "a", "logit_bias": {"1" * large: 1}},
    ):
        assert len(str(refusal(read_call, given, MODEL, chat=False))) < 400
    names = ", ".join(f'"{number}": 0' for number in [*range(200_000), 5])
    assert "the key '5' is given 2 times" in str(
        refusal(read_json, f"{{{names}}}".encode(), CONTEXT)
    )
    assert time.monotonic() - begun < 5


def test_the_description_has_every_route_and_field() -> None:
    document = json.loads(json.dumps(describe(has_key=True)))
    assert document["paths"].keys() == {*POSTS, *GETS}
    tables = (COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE)
    for path, fields in zip(POSTS, tables, strict=True):
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        assert body["schema"]["properties"].keys() == fields.keys()
        assert body["schema"]["additionalProperties"] == {"type": "null"}
    assert document["paths"]["/health"]["get"]["security"] == []
    seed = SHARED["seed"].schema["anyOf"][0]
    assert seed == {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}


HOSTILE: list[Any] = [
    *(None, True, False, 0, -1, 1, 1.5, 1e308, -1e308, 10**30, 2**63, 0.1),
    *("", "a", "\ud800", "\0", "none", "a" * 10_000),
    *([], [None], [[]], ["a", 1], [1.0], [True], [-1], [{}], [["a"]], [[1], "a"]),
    *({}, {"a": None}, {"1": "x"}, {"type": "text"}, {"include_usage": 1}, {"": {"": []}}),
]


def test_whatever_a_field_holds_is_read_or_refused_by_name() -> None:
    accepted = 0
    for kind, fields in ((completion, COMPLETIONS), (chat, CHAT)):
        for name, value in itertools.product(fields, HOSTILE):
            try:
                rows_of(kind(**{name: value}), MODEL)
                accepted += 1
            except Refused as error:
                assert str(error) and error.param, (name, value)
    assert accepted > 200
