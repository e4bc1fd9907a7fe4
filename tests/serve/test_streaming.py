"""What chunks say of tokens and rounds."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from infer.serve import answers
from infer.serve.answers import SLICE, Writer, json_bytes, long_json_bytes, rounds_of
from infer.serve.fields import read
from infer.serve.messages import MessageReader, Reading
from infer.serve.protocol import Completion
from infer.serve.streaming import Answer, RequestHandle, TokenTexts, token_text
from longspec_jax.decoding import logprobs
from longspec_jax.decoding.logprobs import unpacked_logprobs
from longspec_jax.generation.text import RequestOutput
from tests.serve.kit import Client, ScriptedEngine, serving


@pytest.mark.parametrize("piece, text", [("▁one", " one"), ("two", "two"), ("<0xE2>", "\ufffd")])
def test_a_token_has_its_text_inside_a_text(piece: str, text: str) -> None:
    tokenizer = Tokenizer(models.WordLevel({piece: 0}, unk_token=piece))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Strip(" ", 1, 0)]
        if piece.startswith("<")
        else [decoders.Metaspace()]
    )
    assert token_text(tokenizer.decode, 0) == text


def test_a_character_of_several_tokens_is_the_last_one_s() -> None:
    tokens = [b"a", *(bytes([byte]) for byte in "é€".encode()), b"\xff", b"b"]
    text_of = partial(
        token_text, lambda ids: b"".join(tokens[id] for id in ids).decode(errors="replace")
    )
    ids = range(len(tokens))
    whole = RequestOutput(0, tuple(ids), (False,) * len(ids), ())
    texts = [token["text"] for token in rounds_of(whole, text_of, 0)["tokens"]]
    assert texts == ["a", "", "é", "", "", "€", "", "b"]
    # In chunks of one token, each with those before it.
    for id in ids:
        one = RequestOutput(0, (id,), (False,), ())
        [told] = rounds_of(one, text_of, 0, range(id))["tokens"]
        assert told["text"] == texts[id]


def test_a_row_keeps_the_trees_of_its_rounds_only_where_they_are_shown() -> None:
    """A stream keeps none of its gains, and the counts are the same."""
    body: Any = {"prompt": "ab", "max_tokens": 60}
    told = []
    with watched() as (server, handles):
        for more in ({}, {"longspec": {"rounds": True}}, {"stream": True}):
            if "stream" in more:
                *_, usage, _ = server.stream(
                    "/v1/completions", **body, stream_options={"include_usage": True}
                )
                told.append(usage["metrics"]["speculative_decoding"])
            else:
                answer = server.post("/v1/completions", **body, **more)[1]
                told.append(answer["metrics"]["speculative_decoding"])
    assert told[0] == told[1] == told[2] and told[0]["num_draft_tokens"] > 50
    kept = [[gain for gain in handle.answers[0].gains] for handle in handles]
    trees = [sum(len(gain.trees) for gain in gains) for gains in kept]
    assert trees[0] == 0 and trees[1] == told[0]["num_spec_steps"] and kept[2] == []


@contextmanager
def watched() -> Iterator[tuple[Client, list[RequestHandle]]]:
    """A server and the handles of its calls."""
    handles: list[RequestHandle] = []
    with serving(ScriptedEngine()) as server:
        submit = server.thread.submit

        def noted(*given: Any) -> RequestHandle:
            handles.append(submit(*given))
            return handles[-1]

        server.thread.submit = noted  # type: ignore[method-assign]
        yield server, handles


def test_a_long_body_is_the_same_in_parts() -> None:
    bodies: list[Any] = [
        {},
        {"a": [], "b": {}, "c": None, "d": [1.5, "é\ud800"], "e": [{"f": [*range(200)]}, {}]},
        {"a": [{"b": [[index, "x"] for index in range(SLICE + 1)]}]},
    ]
    for body in bodies:
        assert long_json_bytes(body) == json_bytes(body)
    lazy = {"a": (index for index in range(3 * SLICE)), "b": iter([])}
    assert long_json_bytes(lazy) == json_bytes({"a": [*range(3 * SLICE)], "b": []})
    assert json_bytes({"a": iter("xy")}) == b'{"a":["x","y"]}'


def test_log_probabilities_of_a_long_prompt_hold_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are unpacked and written a few at a time: NumPy and json let no other thread run."""
    unpacked, written = list[int](), list[int]()

    def unpack(packed: np.ndarray, most: int) -> Any:
        unpacked.append(len(packed))
        return unpacked_logprobs(packed, most)

    def dumps(value: Any, **how: Any) -> str:
        text = json.dumps(value, **how)
        written.append(len(text))
        return text

    monkeypatch.setattr(logprobs, "unpacked_logprobs", unpack)
    monkeypatch.setattr(answers, "json", SimpleNamespace(dumps=dumps))
    tokens, most = 3000, 20
    packed = np.zeros((tokens, logprobs.packed_width(most)), np.int32)
    packed[:, 1 : 1 + most] = ord("a") + np.arange(most)
    packed[:, 0] = packed[:, 1 + most :] = np.asarray([-1.5], np.float32).view(np.int32)
    scored = logprobs.PromptLogprobs([packed[:900], packed[900:]], tokens - 1, most)
    own = unpacked_logprobs(packed[:1], most)
    gain = RequestOutput(0, (120,), (False,), (), "length", prompt_logprobs=scored, logprobs=own)
    assert not unpacked, "the engine's thread does not"
    answer = Answer((ord("x"),) * tokens, "x" * tokens)
    answer.add(gain, 0)
    texts = TokenTexts(lambda ids: "".join(map(chr, ids)))
    call = read(Completion, {"prompt": "x", "logprobs": most})
    writer = Writer(call, "toy", [answer], [MessageReader(Reading())], texts)
    body = writer.events(0, gain)
    lists = json.loads(body.partition(b"\n")[0].removeprefix(b"data: "))["choices"][0]["logprobs"]
    assert {*map(len, lists.values())} == {tokens + 1} and lists["top_logprobs"][0] is None
    assert lists["top_logprobs"][1] == {chr(ord("a") + index): -1.5 for index in range(most)} | {
        "x": -1.5
    }
    assert max(unpacked) <= 128 and max(written) < len(body) / 20
