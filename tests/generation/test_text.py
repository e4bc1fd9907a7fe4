"""Incremental text: whole characters only, and in all exactly the text of the tokens."""

import functools
import os
import random

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from longspec_jax.generation.text import Detokenizer, continuation
from tests.infer.toys import STOP, toy_tokenizer
from tests.kit import each_row


class Counting:
    """A tokenizer that counts the tokens it decodes."""

    def __init__(self, tokenizer) -> None:
        self.decoded, self._tokenizer = 0, tokenizer

    def __getattr__(self, name: str):
        return getattr(self._tokenizer, name)

    def decode(self, tokens, **options):
        self.decoded += len(tokens)
        return self._tokenizer.decode(tokens, **options)


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


def test_a_continuation_keeps_its_leading_space() -> None:
    """SentencePiece-style decoding drops the space before the first word of what it decodes."""
    vocabulary = {"▁one": 0, "▁two": 1, "▁three": 2}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="▁one"))
    backend.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert tokenizer.decode([1, 2]) == "two three"
    assert deltas(tokenizer, [1, 2], prompt=[0]) == [" two", " three", ""]
    assert continuation(tokenizer, [0], [1, 2]) == " two three"


WORDS = ["▁", "▁a", "▁饕", "b", "é", "饕", "\n", "▁▁", ".", "\ufffd", "</s"]


def with_specials(backend: Tokenizer) -> PreTrainedTokenizerFast:
    """A control token that is in the map of special tokens, one that is not, and a visible one."""
    backend.add_special_tokens(["<s>", AddedToken("<|reserved|>", special=True)])
    backend.add_tokens(["<tool>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")


@functools.cache
def byte_fallback() -> PreTrainedTokenizerFast:
    """Decodes as Llama-2's: bytes that the vocabulary lacks are tokens such as ``<0xE2>``."""
    tokens = [*WORDS, *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return with_specials(backend)


@functools.cache
def byte_level() -> PreTrainedTokenizerFast:
    """Decodes as Llama-3's and Qwen's: any bytes are a token, whole characters or not."""
    symbols = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for text in [" a", " 饕", "饕餮", "é", "😀", "\ufffd"]:
        [(token, _)] = whole.pre_tokenize_str(text)
        symbols |= {token: None, token[1:]: None, token[:-1]: None}
    vocabulary = {token: index for index, token in enumerate(symbols)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = whole
    backend.decoder = decoders.ByteLevel()
    return with_specials(backend)


def random_tokens(tokenizer: PreTrainedTokenizerFast, choose: random.Random) -> list[int]:
    """Whole characters in bytes, loose bytes, words, special tokens, ids that there are none of."""
    name = "<0x{:02X}>".format if tokenizer is byte_fallback() else to_symbol
    stray = [bytes([byte]) for byte in (0x20, 0x61, 0x80, 0xA5, 0xC3, 0xE9, 0xF0, 0xFF)]
    tokens = []
    for _ in range(choose.randrange(1, 20)):
        kind = choose.randrange(6)
        if kind < 3:
            text = choose.choice(["饕", "餮饕", "😀", "👩‍💻", "é", "€€€"]).encode()
            run = [text, text[:-1], text[1:], choose.choice(stray)][
                choose.choice([0, 0, 0, 1, 2, 3])
            ]
            tokens += [tokenizer.convert_tokens_to_ids(name(byte)) for byte in run]
        elif kind < 5:
            tokens.append(choose.randrange(len(tokenizer)))
        else:
            tokens.append(
                choose.choice([len(tokenizer) - 3, len(tokenizer) - 2, len(tokenizer) + 5])
            )
    return tokens


@functools.cache
def to_symbol(byte: int) -> str:
    """A byte in the alphabet of byte-level tokenizers: itself if printable, else shifted up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [other for other in range(256) if other not in printable]
    return chr(byte if byte in printable else 256 + others.index(byte))


@each_row("tokenizer", [byte_fallback, byte_level])
def test_streamed_text_is_that_of_the_whole(tokenizer) -> None:
    """Any tokens, split anywhere between prompt and completion, with characters cut in half."""
    tokenizer, choose = tokenizer(), random.Random(0)
    decode = functools.partial(tokenizer.decode, skip_special_tokens=True)
    for _ in range(4000):
        tokens = random_tokens(tokenizer, choose)
        split = choose.randrange(len(tokens) + 1)
        prompt, rest = tokens[:split], tokens[split:]
        whole, before = decode(tokens), decode(prompt)
        expected = whole[len(os.path.commonprefix([whole, before])) :]
        assert continuation(tokenizer, prompt, rest) == expected, (prompt, rest)
        assert "".join(deltas(tokenizer, rest, prompt)) == expected, (prompt, rest)


@each_row("tokenizer", [byte_fallback, byte_level])
def test_a_character_begun_by_the_prompt_belongs_to_the_completion(tokenizer) -> None:
    tokenizer = tokenizer()
    name = "<0x{:02X}>".format if tokenizer is byte_fallback() else to_symbol
    character = [tokenizer.convert_tokens_to_ids(name(byte)) for byte in "餮".encode()]
    b = tokenizer.convert_tokens_to_ids("b")
    prompt, completion = [b, *character[:1]], [*character[1:], b]
    assert "".join(deltas(tokenizer, completion, prompt)) == "餮b"
    assert continuation(tokenizer, prompt, completion) == "餮b"


def test_text_is_not_held_longer_than_it_may_change() -> None:
    """One U+FFFD of a byte-level tokenizer, the run of bytes of one with byte fallback."""
    invalid = byte_level().convert_tokens_to_ids(to_symbol(0x80))
    assert deltas(byte_level(), [invalid] * 4) == ["", *["\ufffd"] * 3, "\ufffd"]
    run = [byte_fallback().convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "饕".encode()]
    assert deltas(byte_fallback(), [*run, 3, *run]) == ["", "", "", "饕b", "", "", "", "饕"]


@each_row("tokenizer", [byte_fallback, byte_level])
@each_row("kind", ["special", "unknown", "incomplete", "words"])
def test_the_time_is_linear(tokenizer, kind) -> None:
    """No token, however often it is repeated, makes the decoded window grow."""
    tokenizer = tokenizer()
    name = "<0x{:02X}>".format if tokenizer is byte_fallback() else to_symbol
    token = {
        "special": tokenizer.convert_tokens_to_ids("<s>"),
        "unknown": len(tokenizer) + 1,
        "incomplete": tokenizer.convert_tokens_to_ids(name(0xE9)),
        "words": 3,
    }[kind]
    counting = Counting(tokenizer)
    deltas(counting, [token] * 4000, prompt=[3] * 4)
    assert counting.decoded < 4000 * 25
