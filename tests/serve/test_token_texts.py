"""Texts, bytes and offsets of tokens that are parts of characters."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from infer.serve.streaming import MOST_TEXTS, Offsets, TokenTexts
from longspec_jax.generation.text import stored_bytes

TEXT = "a é € 你好 😀 ä"


def byte_level(pieces: Sequence[bytes]) -> tuple[Any, list[int]]:
    """A byte-level tokenizer of the pieces of a text, and the text's tokens."""
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    [(symbols, _)] = whole.pre_tokenize_str(b"".join(pieces).decode())
    names, at = list[str](), 0
    for piece in pieces:  # There is a symbol for each byte.
        names.append(symbols[at : at + len(piece)])
        at += len(piece)
    vocabulary = {name: id for id, name in enumerate(dict.fromkeys(names))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    found = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    return found, [vocabulary[name] for name in names]


def fallback(texts: Sequence[str]) -> Any:
    """A tokenizer of these texts and of all bytes, by byte fallback."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocabulary |= {text: 256 + index for index, text in enumerate(texts)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def texts_of(tokenizer: Any, special: frozenset[int] = frozenset()) -> TokenTexts:
    return TokenTexts(lambda ids: tokenizer.decode([*ids]), stored_bytes(tokenizer), special)


def check(texts: TokenTexts, tokens: Sequence[int], text: str) -> None:
    """All bytes together are the text's, and each token begins where its bytes do."""
    found = [texts.bytes_of(token) for token in tokens]
    assert b"".join(bytes(one or ()) for one in found) == text.encode()
    offsets, before = Offsets(), b""
    for token, own in zip(tokens, found, strict=True):
        assert offsets.add(token, texts) == len(before.decode(errors="ignore"))
        before += bytes(own or ())
    assert offsets.characters == len(text)


@pytest.mark.parametrize("seed", range(5))
def test_bytes_and_offsets_of_tokens_that_begin_and_end_anywhere(seed: int) -> None:
    whole = TEXT.encode()
    cuts = np.random.default_rng(seed).permutation(np.arange(1, len(whole)))[: len(whole) // 2]
    bounds = [0, *sorted(map(int, cuts)), len(whole)]
    pieces = [whole[begin:end] for begin, end in zip(bounds, bounds[1:], strict=False)]
    tokenizer, tokens = byte_level(pieces)
    check(texts_of(tokenizer), tokens, TEXT)


def test_bytes_and_offsets_by_byte_fallback() -> None:
    texts = texts_of(fallback(["x", "yz"]))
    check(texts, [256, *"é€".encode(), 257, *"😀".encode(), *b"a", 256], "xé€yz😀ax")


def test_what_is_no_character_is_counted_as_the_text_counts_it() -> None:
    texts, offsets = texts_of(fallback(["x", "y"])), Offsets()
    assert [offsets.add(token, texts) for token in (256, 0xFF, 257, 256)] == [0, 1, 2, 3]
    assert texts.bytes_of(0xFF) == [0xFF]


def test_a_special_token_has_no_bytes_and_unknown_ones_are_not_made_up() -> None:
    texts = texts_of(fallback(["x"]), frozenset({256}))
    assert texts.bytes_of(256) is None and texts.bytes_of(ord("a")) == [ord("a")]
    assert TokenTexts(lambda ids: "\ufffd" * len(ids)).bytes_of(3) is None


def test_no_more_texts_are_kept_than_a_bound() -> None:
    """Runs of tokens have no end: a stream with rounds asks for new ones as long as it lasts."""
    texts = TokenTexts(lambda ids: "." * len(ids))
    for index in range(2 * MOST_TEXTS):
        texts(index, index + 1)
    assert texts._text.cache_info().currsize == MOST_TEXTS
