"""What chunks say of tokens and rounds."""

from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models

from infer.serve.gains import Gain, rounds_of, token_text


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
    tree = SimpleNamespace(tokens=(0, 1, 2), parents=(-1, 0, 0), draws=(1, 3, 0), path=(0, 1))
    gain = Gain(tokens=(0, 1, 3), drafted=(False, True, False), rounds=(1,), trees=(tree,))
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
