"""Incremental text: whole characters only, and in all exactly the text of the tokens."""

import random

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from longspec_jax.generation.text import Detokenizer, continuation
from tests.infer.toys import STOP, toy_tokenizer


def deltas(tokenizer, tokens, prompt=()) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt)
    return [*map(detokenizer.push, tokens), detokenizer.flush()]


def test_characters_are_held_back_until_whole() -> None:
    tokens = toy_tokenizer()("a€éb")["input_ids"]
    assert len(tokens) == 1 + 3 + 2 + 1
    assert deltas(toy_tokenizer(), tokens) == ["a", "", "", "€", "", "é", "b", ""]


def test_flush_shows_what_never_became_whole() -> None:
    tokens = toy_tokenizer()("a€")["input_ids"][:-1]
    assert deltas(toy_tokenizer(), tokens) == ["a", "", "", "\ufffd"]


def test_special_tokens_have_no_text() -> None:
    tokens = [*toy_tokenizer()("ab")["input_ids"], STOP]
    assert deltas(toy_tokenizer(), tokens) == ["a", "b", "", ""]


@pytest.mark.parametrize("seed", range(20))
def test_deltas_add_up_for_any_bytes(seed) -> None:
    tokens = random.Random(seed).choices(range(15), k=60)
    whole = toy_tokenizer().decode(tokens, skip_special_tokens=True)
    assert continuation(toy_tokenizer(), (), tokens) == whole
    assert "".join(deltas(toy_tokenizer(), tokens)) == whole


def test_a_continuation_keeps_its_leading_space() -> None:
    """SentencePiece-style decoding drops the space before the first word of what it decodes."""
    vocabulary = {"▁one": 0, "▁two": 1, "▁three": 2}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="▁one"))
    backend.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert tokenizer.decode([1, 2]) == "two three"
    assert deltas(tokenizer, [1, 2], prompt=[0]) == [" two", " three", ""]
    assert continuation(tokenizer, [0], [1, 2]) == " two three"
