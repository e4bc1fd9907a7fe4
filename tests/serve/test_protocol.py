"""Requests are read, bounded and refused without a server."""

import itertools
import json
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from infer.serve.calls import (
    OPTIONS,
    Call,
    Row,
    options_of,
    read_call,
    read_detokenize,
    read_tokenize,
    rows_of,
)
from infer.serve.fields import Neutral, Refused, read
from infer.serve.guards import (
    DEEPEST,
    MOST_BYTES,
    MOST_CONTAINERS,
    MOST_STRINGS,
    most_bytes,
    most_values,
    read_json,
)
from infer.serve.openapi import POSTS, describe
from infer.serve.protocol import MOST_PARTS, Chat, Completion, Detokenize, Tokenize
from longspec_jax import TreeConfig
from tests.serve.kit import MAX_LEN, scripted_model

MODEL = scripted_model()
TALK = [{"role": "user", "content": "ab"}]
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "a"}}


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
    assert options_of(completion(**fields), MODEL) == options
    assert options_of(chat(**fields), MODEL) == options


# Faults and edges of every field, by the description that clients read.

DOCUMENT = json.loads(json.dumps(describe(has_key=True)))
ASKED: dict[Any, dict[str, Any]] = {
    Completion: {"prompt": "ab", "stream": True, "echo": True},
    Chat: {"messages": TALK, "stream": True, "logprobs": True, "tools": [TOOL]},
    Tokenize: {"prompt": "ab"},
    Detokenize: {"tokens": [1]},
}
"""What every field needs of the others."""
SAMPLES: dict[str, Any] = {
    "null": None,
    "boolean": True,
    "integer": 10**9,
    "number": 0.37,
    "string": "another",
    "array": [0.37],
    "object": {"another": 1},
}


def choices(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """What a value may be, each without a choice of its own."""
    if "$ref" in schema:
        return choices(DOCUMENT["components"]["schemas"][schema["$ref"].rpartition("/")[2]])
    inner = schema.get("anyOf", schema.get("oneOf"))
    return [schema] if inner is None else [one for each in inner for one in choices(each)]


def faults(schema: dict[str, Any]) -> Iterator[Any]:
    """Values that a schema forbids: each wrong type, what is out of range, each fault inside."""
    own = choices(schema)
    types = {one.get("type") for one in own}
    types |= {"integer"} if "number" in types else set()
    words = [word for one in own for word in one.get("enum", [one.get("const")])]
    yield from (
        value for kind, value in SAMPLES.items() if kind not in types and value not in words
    )
    for one in own:
        if "minimum" in one or "exclusiveMinimum" in one:
            yield one["minimum"] - 1 if "minimum" in one else one["exclusiveMinimum"]
            yield 2 * one["maximum"] + 1
        if "maxLength" in one:
            yield "a" * (one["maxLength"] + 1)
            yield from [""] * ("minLength" in one)
        if "maxProperties" in one:
            yield {f"{number}": 0 for number in range(one["maxProperties"] + 1)}
        for name, inner in one.get("properties", {}).items():
            whole = next(edges(one))
            yield from ({**whole, name: wrong} for wrong in faults(inner))
            if name in one.get("required", ()):
                yield {other: value for other, value in whole.items() if other != name}
    lists = [one for one in own if one.get("type") == "array"]
    for one in lists if len(lists) == 1 else ():
        yield from ([wrong] for wrong in faults(one["items"]))
        yield from [[]] * ("minItems" in one)
        if "maxItems" in one:
            yield [next(edges(one["items"]))] * (one["maxItems"] + 1)


def edges(schema: dict[str, Any]) -> Iterator[Any]:
    """Values that a schema allows, at the ends of its ranges."""
    for one in choices(schema):
        match one:
            case {"enum": words}:
                yield from words
            case {"const": word}:
                yield word
            case {"type": "boolean"}:
                yield from (True, False)
            case {"type": "integer" | "number", "maximum": most}:
                yield from (one.get("minimum", most), most)
            case {"type": "string"}:
                yield from ("a" * one.get("minLength", 1), "a" * one.get("maxLength", 1))
            case {"type": "array", "items": inner}:
                yield [next(edges(inner))]
                yield [next(edges(inner))] * one.get("maxItems", 2)
            case {"type": "object"}:
                needed = ((name, one["properties"][name]) for name in one.get("required", ()))
                yield {name: next(edges(inner)) for name, inner in needed}


@pytest.mark.parametrize("kind", ASKED, ids=lambda kind: kind.__name__)
def test_every_field_takes_what_it_is_described_to_take_and_names_itself_for_the_rest(
    kind: Any,
) -> None:
    """Each field of wrong types, at its edges and out of its range, and all that is inside it."""
    asked, refused = ASKED[kind], 0
    for name, schema in DOCUMENT["components"]["schemas"][kind.__name__]["properties"].items():
        for wrong in faults(schema):
            error = refusal(read, kind, {**asked, name: wrong})
            assert (error.status, error.param) == (400, name), (name, wrong)
            assert str(error).startswith((name, "the field ", "unknown field ")), str(error)
            refused += 1
        for right in edges(schema):
            if name not in ("best_of", "tools"):  # Which must be n, and of different names.
                read(kind, {name: right} if name == "messages" else {**asked, name: right})
    assert refused > 15


def test_a_name_that_no_field_has_is_told_the_nearest() -> None:
    for kind, asked in ASKED.items():
        assert "leave it out" in str(refusal(read, kind, {**asked, "colour": 1}))
        error = refusal(read, kind, {**asked, "modle": 1})
        assert str(error) == "unknown field 'modle'; did you mean model?" and error.param == "modle"


TEXTS, CHATS = (completion,), (chat,)
BOTH = TEXTS + CHATS


@pytest.mark.parametrize(
    "kinds, fields, words",
    [
        (BOTH, {"top_k": 1.5}, "top_k=1.5 must be a whole number from -1"),
        (BOTH, {"longspec": 1}, "longspec=1 must be an object with named fields"),
        (BOTH, {"longspec": {"round": True}}, "unknown field 'round' of longspec; did you mean"),
        (BOTH, {"longspec": {"tree": "4,4"}}, "is not one of this server's trees, none, chain:3"),
        (BOTH, {"longspec": {"tree": "4,x"}}, "longspec.tree='4,x': "),
        (BOTH, {"longspec": {"drafter": "x"}}, "is not this server's, script"),
        (BOTH, {"stop": 5}, "stop=5 must be text, or a list of texts, none empty"),
        (BOTH, {"stop": ["a"] * 17}, "must have at most 16 items, got 17"),
        (BOTH, {"stop": ["a", ""]}, "stop[1]='' must be text that is not empty"),
        (BOTH, {"stop": "a" * 257}, "must be text of at most 256 characters, and has 257"),
        (BOTH, {"stop_token_ids": [*range(8)]}, "a row takes 8"),
        (BOTH, {"logit_bias": {"x": 1}}, "has the name 'x', which is no token id"),
        (BOTH, {"logit_bias": {"1": 101}}, "token 1=101 must be a number from -100 to 100"),
        (BOTH, {"model": "other"}, "the model 'other' does not exist; this server has toy"),
        (BOTH, {"n": 17}, "the request has 17 rows (prompts times n) and the server takes 16"),
        (BOTH, {"stream_options": {}}, "stream_options needs stream=true; leave it out"),
        (BOTH, {"response_format": {"type": "json_object"}}, "this server knows no grammars"),
        (BOTH, {"response_format": {"type": "regex"}}, "of type regex needs the field regex"),
        (
            BOTH,
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "the field schema of response_format.json_schema is missing: the JSON schema that",
        ),
        (
            BOTH,
            {"min_tokens": 3},
            "min_tokens=3 must be 0 or absent: nothing else is supported; leave the",
        ),
        (
            BOTH,
            {"use_beam_search": 0},
            "use_beam_search=0 must be False or absent: nothing else is",
        ),
        (TEXTS, {"prompt": ["a", 1]}, "must be text, token ids, or a list of one of these"),
        (TEXTS, {"max_tokens": 0}, "max_tokens=0 generates nothing"),
        (TEXTS, {"stop_token_ids": [1, 26]}, "token id 26 is outside the model's vocabulary"),
        (CHATS, {"logit_bias": {"1": 1, "99": 1}}, "token id 99 is outside the model's vocabul"),
        (TEXTS, {"best_of": 2}, "best_of=2 must be n=1: nothing is ranked"),
        (CHATS, {"max_tokens": 1, "max_completion_tokens": 2}, "both are given; drop it"),
        (CHATS, {"top_logprobs": 2}, "top_logprobs needs logprobs=true"),
        (CHATS, {"tools": [{}]}, "the field type of tools[0] is missing: function"),
        (CHATS, {"chat_template": "x"}, "--chat_template=FILE"),
        (CHATS, {"messages": [*TALK, {"role": "user"}]}, "the field content of messages[1] is mis"),
        (
            CHATS,
            {"messages": [{"role": "tool", "content": "x"}]},
            "chat template has calls of tools in no form that the server reads; it reads Hermes",
        ),
        (
            CHATS,
            {"messages": [{"role": "user", "content": 5}]},
            'content=5 must be text, or a list of parts {"type": "text", "text": ...}; images',
        ),
        (
            CHATS,
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}],
                    }
                ]
            },
            'must have the type "text"; images and sound are not supported',
        ),
    ],
)
def test_a_refusal_says_value_rule_and_remedy(
    kinds: tuple[Any, ...], fields: dict, words: str
) -> None:
    for kind in kinds:
        error = refusal(lambda kind=kind: rows_of(kind(**fields), MODEL))
        assert words in str(error) and error.param == [*fields][0]
        assert error.body["error"]["message"] == str(error)
        assert error.status == (404 if "model" in fields else 400)


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


def test_forms_of_many_choices_are_compiled_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each choice has a grammar of its own: some hundred could hold a thread for minutes."""
    monkeypatch.setattr("infer.serve.calls.COMPILE_SECONDS", -1.0)
    form = {"type": "regex", "regex": "a+"}
    model = scripted_model(grammar=lambda regex: SimpleNamespace(state=lambda: regex))
    assert len(rows_of(completion(response_format=form), model)) == 1
    error = refusal(rows_of, completion(response_format=form, n=3), model)
    assert error.param == "response_format" and "the forms of 3 choices" in str(error)


def test_a_prompt_that_is_missing_is_named() -> None:
    error = refusal(read, Completion, {})
    assert str(error) == "the field prompt is missing: what to continue"
    assert error.param == "prompt"


def test_every_neutral_value_and_null_is_accepted() -> None:
    for kind, base in ((Completion, {"prompt": "ab"}), (Chat, {"messages": TALK})):
        plain = read(kind, {**base, "seed": 1})
        for name, one in kind.model_fields.items():
            if one.is_required() or name == "seed":
                continue
            neutral = [
                value for rule in one.metadata if isinstance(rule, Neutral) for value in rule.values
            ]
            for value in (None, *neutral):
                assert read(kind, {**base, "seed": 1, name: value}) == plain, name


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


def test_scores_of_prompts_are_bounded() -> None:
    """128 choices with the scores of 3 kB of token ids were 69 MB, and more with longer prompts."""
    model = scripted_model(max_len=100_000)
    large = {"prompt": [1] * 90_000, "echo": True, "max_tokens": 1}
    for fields in ({"logprobs": 1}, {"logprobs": 20}, {"n": 16}, {"n": 16, "logprobs": 3}):
        assert rows_of(completion(**large | fields), model)
    error = refusal(rows_of, completion(**large, n=16, logprobs=4), model)
    assert error.param == "logprobs" and "are 8640096 numbers" in str(error)


def test_scores_and_rounds_of_whole_answers_are_bounded() -> None:
    """128 choices of 8,000 tokens with 20 alternatives each would be a gigabyte of JSON."""
    model = scripted_model(max_len=100_000)
    long = {"prompt": [1], "max_tokens": 50_000, "n": 16}
    rounds = {"longspec": {"rounds": True}}
    for fields in ({}, {"logprobs": 5}, {"logprobs": 20, "stream": True}, {**rounds, "n": 4}):
        assert rows_of(completion(**long | fields), model)
    for fields, param in (({"logprobs": 20}, "logprobs"), (rounds, "longspec")):
        error = refusal(rows_of, completion(**long, **fields), model)
        assert error.param == param and "max_tokens" in str(error)


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
    assert [one.turn for one in call.messages] == [
        {"role": "system", "content": "aa"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "b", "name": "x"},
    ]
    [row] = rows_of(call, MODEL)
    assert call.alternatives == row.options["logprobs"] == 2
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


def test_numbers_of_many_digits_are_refused_before_they_are_read() -> None:
    """33 MB of them took a second, in which nothing else of the process ran."""
    for number in ("9" * 101, "0." + "9" * 99):
        for body in (f'{{"a": {number}}}', f'{{"a": [{f"{number}," * 10_000}1]}}'):
            error = refusal(read_json, body.encode(), CONTEXT)
            assert "is not JSON: a number has more than 100 characters" in str(error)
    assert read_json(b'{"a": 1.50, "b": -7e2}', CONTEXT) == {"a": 1.5, "b": -700.0}


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
    """A name of 31 MB took 38 seconds, and as many names as fit, one of them twice, hours.

    A variable of a template whose name has a megabyte took seconds and 20 MB, which stayed.
    """
    large = 2**24
    begun = time.thread_time()
    for given in (
        {"p" * large: 1},
        {"prompt": "a", "model": "x" * large},
        {"prompt": {"x": ["y" * large] * 9}},
        {"prompt": "a", "stop": [["z" * large]] * 9},
        {"prompt": "a", "longspec": {"t" * large: 1}},
        {"prompt": "a", "logit_bias": {"1" * large: 1}},
        {f"name {number}": 1 for number in range(200_000)},
        {"prompt": [1.5] * 400_000},
        {"prompt": "a", "stop": [1] * 400_000},
        {"prompt": "a", "stop_token_ids": [-1] * 400_000},
    ):
        assert len(str(refusal(read_call, given, MODEL, chat=False))) < 400
    turn = {"role": "user", "content": [{"type": "text", "text": "a"}] * MOST_PARTS}
    for wrong in ({}, {"role": "user", "content": [1] * 400_000}):
        given = {"messages": [turn] * 100 + [wrong] * 400_000}
        assert len(str(refusal(read_call, given, MODEL, chat=True))) < 400
    for number in range(8):
        given = {"messages": [turn], "chat_template_kwargs": {f"{number}{'v' * 2**20}": 1}}
        assert len(str(refusal(read_call, given, MODEL, chat=True))) < 400
    names = ", ".join(f'"{number}": 0' for number in [*range(200_000), 5])
    assert "the key '5' is given 2 times" in str(
        refusal(read_json, f"{{{names}}}".encode(), CONTEXT)
    )
    assert time.thread_time() - begun < 5


def test_the_description_has_every_field() -> None:
    assert Completion.model_fields.keys() >= OPTIONS
    schemas = DOCUMENT["components"]["schemas"]
    for path, kind in zip(POSTS, ASKED, strict=True):
        body = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        assert body["schema"] == {"$ref": f"#/components/schemas/{kind.__name__}"}
        assert schemas[kind.__name__]["properties"].keys() == kind.model_fields.keys()
        assert schemas[kind.__name__]["additionalProperties"] == {"type": "null"}
    assert DOCUMENT["paths"]["/health"]["get"]["security"] == []
    seed = schemas["Chat"]["properties"]["seed"]
    assert seed["anyOf"][0] == {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}
    assert seed["description"] == "Of the draws; a new one if absent."


HOSTILE: list[Any] = [
    *(None, True, False, 0, -1, 1, 1.5, 1e308, -1e308, 10**30, 2**63, 0.1),
    *("", "a", "\ud800", "\0", "none", "a" * 10_000),
    *([], [None], [[]], ["a", 1], [1.0], [True], [-1], [{}], [["a"]], [[1], "a"]),
    *({}, {"a": None}, {"1": "x"}, {"type": "text"}, {"include_usage": 1}, {"": {"": []}}),
]


def test_whatever_a_field_holds_is_read_or_refused_by_name() -> None:
    accepted = 0
    for kind, model in ((completion, Completion), (chat, Chat)):
        for name, value in itertools.product(model.model_fields, HOSTILE):
            try:
                rows_of(kind(**{name: value}), MODEL)
                accepted += 1
            except Refused as error:
                assert str(error) and error.param, (name, value)
    assert accepted > 200
