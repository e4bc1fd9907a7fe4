"""What chunks say of tokens and rounds."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from infer.serve.gains import rounds_of, token_text
from longspec_jax.generation.requests import RequestOutput


@pytest.mark.parametrize("piece, text", [("▁one", " one"), ("two", "two"), ("<0xE2>", "\ufffd")])
def test_a_token_has_its_text_inside_a_text(piece: str, text: str) -> None:
    tokenizer = Tokenizer(models.WordLevel({piece: 0}, unk_token=piece))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Strip(" ", 1, 0)]
        if piece.startswith("<")
        else [decoders.Metaspace()]
    )
    assert token_text(tokenizer.decode, 0) == text


def test_rounds_are_as_documented() -> None:
    tree: Any = SimpleNamespace(tokens=(0, 1, 2), parents=(-1, 0, 0), draws=(1, 3, 0), path=(0, 1))
    gain = RequestOutput(0, (0, 1, 3), (False, True, False), (1,), trees=(tree,))
    told = rounds_of(gain, "abcd".__getitem__, 2)
    assert told == {
        "index": 2,
        "tokens": [
            {"id": 0, "text": "a", "drafted": False, "depth": 0},
            {"id": 1, "text": "b", "drafted": True, "depth": 1},
            {"id": 3, "text": "d", "drafted": False, "depth": 0},
        ],
        "rounds": [
            {
                "accepted": 1,
                "tree": {
                    "tokens": ["a", "b", "c"],
                    "parents": [-1, 0, 0],
                    "draws": ["b", "d", "a"],
                    "path": [0, 1],
                },
            }
        ],
    }


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
