"""Texts that tokenizers disagree about, and two tokenizers in plain Python: the oracles."""

import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import regex

SENTENCES = [
    "the end of the thing and the other",
    "  two spaces, then    four\tand\ttabs\n\n\nand lines\r\n",
    "I'll say it's WE'RE they'Ve 'quoted' don't",
    "x = 12345 + 678.90  # 2024-11-27 at 10:30",
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n",
    "class A:\n\tdef __init__(self, *args, **kwargs):\n\t\tself.items = [i ** 2 for i in args]\n",
    "café café naïve Å Å ﬁne ① ½ ²",
    "日本語のテキスト。中文，标点！한국어 텍스트",
    "مرحبا بالعالم שלום नमस्ते दुनिया สวัสดี",
    "👩‍👩‍👧‍👦 🇩🇪 🎉🎉 ✌🏽",
    "<|im_end|> </s> <b>bold</b> [INST] <unk>",
    "CamelCaseWords and snake_case_words HTTPServer",
    "a" * 40 + " " * 37 + "b",
    "\n" * 12,
    "‘smart’ “quotes” — dash … ellipsis",
    "e=mc² ∑∫√ ≤≥ αβγ ЖЗИ ǅ",
    " ",
    "1",
    "\u200d\ufeff\u00a0nbsp\u2028sep",
    "İstanbul'da ŞIK ığdır TIẾNG VIỆT tiếng",
]


def pieces_of_code(count: int, size: int = 300) -> list[str]:
    """Pieces of this project's own source files."""
    text = "".join(
        path.read_text("utf-8") for path in sorted(Path(__file__).parents[3].glob("train/**/*.py"))
    )
    step = len(text) // count
    return [text[start : start + size] for start in range(0, step * count, step)]


def _pattern(apart: Mapping[str, int]) -> Any:
    return regex.compile("|".join(map(regex.escape, sorted(apart, key=len, reverse=True))))


def _cut(text: str, apart: Mapping[str, int], pattern: Any) -> Iterator[str | int]:
    """Tokens that are cut out of a text first, the longest first, and what is between them."""
    at = 0
    for match in pattern.finditer(text) if apart else ():
        if match.start() > at:
            yield text[at : match.start()]
        yield apart[match[0]]
        at = match.end()
    if at < len(text):
        yield text[at:]


def _apart(keys: Mapping[str, Any], kinds: tuple[int, ...]) -> dict[str, int]:
    tokens, types = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
    return {text: token for token, text in enumerate(tokens) if types[token] in kinds}


def joined_by_scores(keys: Mapping[str, Any], texts: Iterable[str]) -> Iterator[list[int]]:
    """llama.cpp's sentencepiece: neighbours that are a token together are joined by score."""
    tokens, scores = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.scores"]
    numbers = {text: token for token, text in enumerate(tokens)}
    joinable = _apart(keys, (1,))
    prefix = "▁" if keys.get("tokenizer.ggml.add_space_prefix", True) else ""
    apart = _apart(keys, (2, 3, 4))
    pattern = _pattern(apart)
    for text in texts:
        found: list[int] = []
        for part in _cut(text, apart, pattern):
            if isinstance(part, int):
                found.append(part)
                continue
            symbols = [*prefix, *part.replace(" ", "▁")]
            while True:
                pairs = [
                    (-scores[joinable[one + other]], at)
                    for at, (one, other) in enumerate(zip(symbols, symbols[1:], strict=False))
                    if one + other in joinable
                ]
                if not pairs:
                    break
                _, at = min(pairs)
                symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
            for symbol in symbols:
                whole = joinable.get(symbol)
                bytes_ = (numbers[f"<0x{byte:02X}>"] for byte in symbol.encode())
                found += bytes_ if whole is None else [whole]
        yield found


def _letters() -> dict[int, str]:
    """GPT-2's letter for every byte: itself where it can be seen, else one from 256 on."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in seen]
    return {byte: chr(byte) for byte in seen} | {
        byte: chr(256 + index) for index, byte in enumerate(hidden)
    }


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def joined_by_rank(keys: Mapping[str, Any], texts: Iterable[str]) -> Iterator[list[int]]:
    """Byte-level BPE of ``smollm`` and ``qwen2``: pairs are joined in the order of the merges."""
    tokens, smollm = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.pre"] == "smollm"
    numbers = {text: token for token, text in enumerate(tokens)}
    ranks = {tuple(merge.split(" ")): at for at, merge in enumerate(keys["tokenizer.ggml.merges"])}
    apart, letters = _apart(keys, (2, 3, 4)), _letters()
    pattern = _pattern(apart)
    for text in texts:
        found: list[int] = []
        for part in _cut(text, apart, pattern):
            if isinstance(part, int):
                found.append(part)
                continue
            if smollm:  # Every digit alone, then the rest by GPT-2's pattern.
                parts = regex.findall(r"\p{N}|[^\p{N}]+", part)
                words = [word for one in parts for word in regex.findall(GPT2, one)]
            else:
                words = regex.findall(QWEN2, unicodedata.normalize("NFC", part))
            for word in words:
                symbols = _joined([letters[byte] for byte in word.encode()], ranks)
                found += [numbers[symbol] for symbol in symbols]
        yield found


def _joined(symbols: list[str], ranks: Mapping[Any, int]) -> list[str]:
    """The pair that comes first among the merges, everywhere, until none is left."""
    while known := [pair for pair in zip(symbols, symbols[1:], strict=False) if pair in ranks]:
        best, joined, at = min(known, key=ranks.__getitem__), [], 0
        while at < len(symbols):
            both = tuple(symbols[at : at + 2]) == best
            joined.append("".join(symbols[at : at + 2]) if both else symbols[at])
            at += 1 + both
        symbols = joined
    return symbols
