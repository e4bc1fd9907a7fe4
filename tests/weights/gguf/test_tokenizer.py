"""The tokenizer of a GGUF file is the one that it was made of, text for text.

Byte-level vocabularies are trained here, with the splits of published ``tokenizer.json`` files
written out; sentencepiece is compared with llama.cpp's algorithm in plain Python.
"""

from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from longspec_jax.loading import load_tokenizer
from longspec_jax.weights.gguf.tokenizer import SPLITS, merges_of
from longspec_jax.weights.hf import load_stop_tokens
from tests.kit import each_row
from tests.weights.gguf.test_damaged import SHAPES, write
from tests.weights.gguf.tokens import SENTENCES, joined_by_scores

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PUBLISHED = {
    "gpt-2": (None, {}),
    "olmo": (None, {}),
    "smollm": (None, {"digits": True}),
    "llama-bpe": (LLAMA3, {"ignore_merges": True}),
    "dbrx": (LLAMA3, {}),
    "qwen2": (LLAMA3.replace("{1,3}", ""), {"nfc": True}),
    "qwen35": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
        r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        {"nfc": True},
    ),
    "tekken": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        {"ignore_merges": True},
    ),
    "gpt-4o": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        {},
    ),
}
"""What the published tokenizers do before merges, by llama.cpp's names."""
SPECIAL = ["<|begin|>", "<|im_end|>", "<|endoftext|>"]
CONTROL, USER, UNUSED = 3, 4, 5


def published(pre: str) -> Tokenizer:
    """A tokenizer of the family, trained on the sentences."""
    pattern, switches = PUBLISHED[pre]
    tokenizer = Tokenizer(models.BPE(ignore_merges=switches.get("ignore_merges", False)))
    steps = [pre_tokenizers.Digits(individual_digits=True)] if switches.get("digits") else []
    if pattern is None:
        steps += [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    else:
        steps += [pre_tokenizers.Split(Regex(pattern), "isolated")]
        steps += [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if switches.get("nfc"):
        tokenizer.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


def as_keys(tokenizer: Tokenizer, pre: str) -> dict:
    """Its keys in a GGUF file, with two unused tokens after it."""
    import json

    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, "[PAD1]", "[PAD2]"],
        "tokenizer.ggml.token_type": [CONTROL] * len(SPECIAL)
        + [1] * (len(tokens) - len(SPECIAL))
        + [UNUSED] * 2,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}<|im_end|>",
    }


def write_with(path: Path, keys: dict, **more) -> Path:
    """A model with these tokens."""
    rows = {"token_embd": (len(keys["tokenizer.ggml.tokens"]), 32)}
    return write(path / "model.gguf", tensors=SHAPES | rows, tokenizer=keys, **more)


@each_row("pre", PUBLISHED)
def test_byte_level(tmp_path, pre):
    expected = published(pre)
    path = write_with(tmp_path, as_keys(expected, pre))
    tokenizer = load_tokenizer(path)
    for text in SENTENCES:
        ids = expected.encode(text, add_special_tokens=False).ids
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == ids, text
        begins = pre in ("llama-bpe", "tekken")
        assert tokenizer(text)["input_ids"] == [0] * begins + ids
    assert len(tokenizer) == expected.get_vocab_size()
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|begin|>", "<|im_end|>")
    assert tokenizer.decode([1, 5, 2], skip_special_tokens=True) == expected.decode([5])
    assert tokenizer.chat_template.endswith("<|im_end|>")
    assert {*PUBLISHED} == {*SPLITS}


def test_stop_tokens(tmp_path):
    """The named one first, then control tokens that end a text by their own."""
    keys = as_keys(published("gpt-2"), "gpt-2")
    assert load_stop_tokens(write_with(tmp_path, keys)) == (1, 2)
    harmony = ["<|return|>", "<|end|>", "<|call|>"]
    assert load_stop_tokens(write_with(tmp_path, renamed(keys, harmony))) == (1, 0, 2)
    gemma = renamed(keys, ["<turn|>", "<|tool_response>", "<eos>"])
    types = [CONTROL, USER, *gemma["tokenizer.ggml.token_type"][2:]]
    gemma |= {"tokenizer.ggml.token_type": types, "tokenizer.ggml.eos_token_id": 2}
    assert load_stop_tokens(write_with(tmp_path, gemma)) == (2, 0, 1)
    phi = ["<|user|>", "<|end|>", "</s>"]
    assert load_stop_tokens(write_with(tmp_path, renamed(keys, phi))) == (1, 2)


def renamed(keys: dict, names: list[str]) -> dict:
    tokens = keys["tokenizer.ggml.tokens"]
    return keys | {"tokenizer.ggml.tokens": [*names, *tokens[len(names) :]]}


def test_what_ends_a_text_is_put_there_where_the_file_says_so(tmp_path):
    keys = as_keys(published("llama-bpe"), "llama-bpe")
    keys |= {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True}
    ids = load_tokenizer(write_with(tmp_path, keys))("the end")["input_ids"]
    assert ids[0] != 0 and ids[-1] == 1


@each_row(
    ("changes", "message"),
    [
        ({"pre": "default"}, "pre='default' names a way to split texts that is not read"),
        ({"model": "t5"}, "model='t5' is a tokenizer that is not read from GGUF files"),
        ({"tokens": ["a"] * 500}, "tokens holds a text twice"),
        ({"tokens": ["a"] * 5000}, "has 5000 texts, and the model 40 embeddings"),
        ({"token_type": [1, 2]}, "token_type must be a number from 1 to 6 for each"),
        ({"token_type": [9] * 40}, "token_type must be a number from 1 to 6 for each"),
        ({"merges": ["ab"]}, "merges holds 'ab', which is not a pair"),
        ({"merges": ["zz zz"]}, "merges do not fit the tokens"),
        ({"eos_token_id": 99}, "eos_token_id=99 must be token ids"),
        ({"normalizer.lowercase": True}, "may change tokens, and is not read"),
    ],
)
def test_other_tokenizers_are_refused_by_name(tmp_path, changes, message):
    keys = {"model": "gpt2", "pre": "gpt-2", "tokens": [chr(97 + i) for i in range(26)]}
    keys = {f"tokenizer.ggml.{key}": value for key, value in (keys | changes).items()}
    rows = {"token_embd": (600 if "twice" in message else 40, 32)}
    path = write(tmp_path / "model.gguf", tensors=SHAPES | rows, tokenizer=keys)
    with pytest.raises(ValueError, match=message) as error:
        load_tokenizer(path)
    assert str(path) in str(error.value)


def sentencepiece_keys(prefix: bool) -> dict:
    """A vocabulary of pieces with scores, runs of spaces as tokens of the user, and all bytes."""
    words = ["▁the", "▁t", "th", "he", "in", "ing", "▁in", "er", "an", "and", "▁and", "on"]
    words += ["re", "ed", "▁de", "def", "▁def", "lf", "self", "▁self", "se", "▁s"]
    letters = sorted({*"".join(SENTENCES).replace(" ", "▁")} - {"ß"})
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = [*words, *(letter for letter in letters if letter.isascii() or letter == "▁")]
    # No family has runs of spaces and a space before a text, too.
    own = [*["  ", "   ", "    "] * (not prefix), "\n\n", "<b>"]
    special = ["<unk>", "<s>", "</s>"]
    tokens = [*special, *bytes_, *own, *dict.fromkeys(pieces)]
    types = [2, CONTROL, CONTROL] + [6] * 256 + [USER] * len(own)
    types += [1] * (len(tokens) - len(types))
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [float(-index) for index in range(len(tokens))],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": prefix,
    }


@each_row(("prefix", "listed"), [(False, False), (True, False), (True, True)])
def test_sentencepiece(tmp_path, prefix, listed):
    """Merges follow from scores, or are listed, as Gemma 4's are."""
    keys = values = sentencepiece_keys(prefix)
    if listed:
        keys = {**values, "tokenizer.ggml.model": "gemma4"}
        tokens, scores = keys["tokenizer.ggml.tokens"], keys.pop("tokenizer.ggml.scores")
        pieces = {text: one for text, one in zip(tokens, scores, strict=True) if "<" not in text}
        keys["tokenizer.ggml.merges"] = [*map(" ".join, merges_of(pieces))]
    tokenizer = load_tokenizer(write_with(tmp_path, keys))
    texts = [*SENTENCES, "a</s>b", "x    y", " " * 9 + "z"]
    for text, expected in zip(texts, joined_by_scores(values, texts), strict=True):
        assert tokenizer(text)["input_ids"] == [1, *expected], text
        # Where texts begin with a space, so does what is after a token that is cut out.
        assert prefix or tokenizer.decode(expected) == text
