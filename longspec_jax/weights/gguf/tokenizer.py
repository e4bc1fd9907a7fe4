"""The tokenizer in a GGUF file, as the one that the model was published with.

A file has the tokens and the order of their merges. What happens to a text before is implied by
two names: ``tokenizer.ggml.model``, and for byte-level vocabularies ``tokenizer.ggml.pre``. The
converter of transformers knows too few of the latter: SmolLM2's digits, Qwen's NFC, Llama 3's whole
words and Gemma's long runs of spaces come out otherwise (docs/guides/gguf.md). So the pipelines are
built here, of the library that runs the published ones. A name without a pipeline is refused.

Source: the published ``tokenizer.json`` of the families, and llama.cpp's ``src/llama-vocab.cpp``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from longspec_jax.checks import shown
from longspec_jax.weights.gguf.file import GgufFile
from longspec_jax.weights.gguf.tokens import (
    CONTROL,
    PREFIX,
    UNUSED,
    USER_DEFINED,
    Vocabulary,
    scores,
    vocabulary,
)
from longspec_jax.weights.json_files import JsonObject

if TYPE_CHECKING:
    from tokenizers import Tokenizer, models

SPACE = "▁"
"""What sentencepiece writes for a space."""
_BYTE_LEVEL, _SENTENCEPIECE, _LISTED = "gpt2", "llama", "gemma4"
"""The last one is the second whose merges are listed, as those of the first are."""
_CHAT = "tokenizer.chat_template"
_KNOWN = (
    *("model", "pre", "tokens", "scores", "token_type", "merges"),
    *("add_bos_token", "add_eos_token", "add_sep_token", "add_space_prefix"),
    "remove_extra_whitespaces",
)
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(digits: str) -> str:
    """Words with the character before them, numbers of some digits, and the rest."""
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}|{_REST}"


def _cased_words(contractions: str, digits: str) -> str:
    """The same, where a word ends before a capital letter within it."""
    before, upper, lower = (
        r"[^\r\n\p{L}\p{N}]?",
        r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}",
        (r"\p{Ll}\p{Lm}\p{Lo}\p{M}"),
    )
    rest = _REST.replace(r"[\r\n]*", r"[\r\n/]*", 1)
    return (
        rf"{before}[{upper}]*[{lower}]+{contractions}|{before}[{upper}]+[{lower}]*{contractions}"
        rf"|{digits}|{rest}"
    )


_MARKED = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Qwen3.5's, whose words hold marks."""


@dataclass(frozen=True)
class Split:
    """What a byte-level vocabulary does to a text before merges."""

    pattern: str | None
    """Pieces that are merged apart; GPT-2's own if absent."""
    digits: bool = False
    """Whether digits are split one by one before that."""
    composed: bool = False
    """Whether the text is brought into NFC."""
    whole: bool = False
    """Whether a piece that is a token is not taken apart (``ignore_merges``)."""
    begins: bool = False
    """Whether a text begins with the first token where the file does not say."""


_THREE, _ONE = r"\p{N}{1,3}", r"\p{N}"
_GPT4O = _cased_words(f"{_CONTRACTIONS}?", _THREE)
SPLITS: Mapping[str, Split] = {
    "gpt-2": Split(None),
    "olmo": Split(None),
    "smollm": Split(None, digits=True),
    "llama-bpe": Split(_words(_THREE), whole=True, begins=True),
    "dbrx": Split(_words(_THREE)),
    "qwen2": Split(_words(_ONE), composed=True),
    "qwen35": Split(_MARKED, composed=True),
    "tekken": Split(_cased_words("", _ONE), whole=True, begins=True),
    "gpt-4o": Split(_GPT4O),
}
"""The values of ``tokenizer.ggml.pre`` that are read."""


def gguf_tokenizer(file: GgufFile) -> Any:
    """A transformers tokenizer; None if the file has no tokens.

    Raises:
      ValueError: for a tokenizer that is not read, by name, and for a damaged one.
    """
    vocab = vocabulary(file)
    if vocab is None:
        return None
    _check_keys(file)
    kind = file.metadata.text(f"{PREFIX}model", "")
    makers = {
        _BYTE_LEVEL: _byte_level,
        _SENTENCEPIECE: _sentencepiece,
        _LISTED: _sentencepiece,
    }
    if kind not in makers:
        raise file.metadata.error(
            f"{PREFIX}model",
            f"is a tokenizer that is not read from GGUF files, only {', '.join(makers)}",
            "load it yourself and pass tokenizer=",
        )
    tokenizer, begins = makers[kind](vocab, file.architecture)
    _add_special(tokenizer, vocab, strips=kind == _SENTENCEPIECE and file.architecture == "phi3")
    named = {name: vocab.named(key) for name, key in _NAMES.items()}
    _add_ends(tokenizer, vocab.raw, begins, named)
    from transformers import PreTrainedTokenizerFast  # Late: it is slow to import.

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        chat_template=_chat_template(file),
        **{name: token for name, token in named.items() if token is not None},
    )


_NAMES = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
}


def _check_keys(file: GgufFile) -> None:
    """Refuse a key about the tokenizer that no rule names, but for ids of tokens."""
    for key in file.metadata.values:
        name = key.removeprefix(PREFIX)
        if name != key and name not in _KNOWN and not name.endswith(("_token_id", "_token_ids")):
            raise file.metadata.error(
                key, "may change tokens, and is not read", "pass a tokenizer of your own"
            )


def _byte_level(vocab: Vocabulary, architecture: str) -> tuple[Any, bool]:
    """Byte-level BPE, and whether a text begins with the first token."""
    from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers

    key = f"{PREFIX}pre"
    pre = vocab.raw.text(key, "")
    if pre not in SPLITS:
        raise vocab.raw.error(
            key,
            f"names a way to split texts that is not read, only {', '.join(SPLITS)}; any other "
            "would give other tokens",
            "load the tokenizer yourself and pass tokenizer=",
        )
    split = SPLITS[pre]
    tokenizer = Tokenizer(_model(vocab, _merges(vocab), ignore_merges=split.whole))
    if split.composed:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] * split.digits
    if split.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(split.pattern), "isolated"))
    own = split.pattern is None
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=own))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, split.begins


def _merges(vocab: Vocabulary) -> list[tuple[str, str]]:
    """The pairs that are joined, the first first, as a file lists them."""
    return [_merge(vocab, text) for text in vocab.raw.texts(f"{PREFIX}merges")]


def _merge(vocab: Vocabulary, text: str) -> tuple[str, str]:
    left, space, right = text.partition(" ")
    if not (left and space and right) or " " in right:
        raise ValueError(
            f"{vocab.raw.origin}: {PREFIX}merges holds {shown(text)}, which is not a pair; "
            "download the file again"
        )
    return left, right


def _sentencepiece(vocab: Vocabulary, architecture: str) -> tuple[Any, bool]:
    """Sentencepiece's BPE, whose merges are listed, or follow from scores.

    A text begins with the first token.
    """
    from tokenizers import Tokenizer, decoders, normalizers

    if vocab.raw.text(f"{PREFIX}model", "") == _LISTED:
        merges = _merges(vocab)
    else:
        apart = {CONTROL, USER_DEFINED, UNUSED}
        whole = zip(vocab.tokens, vocab.types, scores(vocab), strict=True)
        pieces = {text: score for text, kind, score in whole if kind not in apart}
        merges = [*_merges_of_runs(vocab), *merges_of(pieces)]
    unknown = vocab.named("unknown")
    bpe = _model(vocab, merges, byte_fallback=True, unknown=unknown)
    tokenizer = Tokenizer(bpe)
    prefixed = vocab.raw.flag(f"{PREFIX}add_space_prefix", True)
    steps: list[Any] = [normalizers.Prepend(SPACE)] * prefixed
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    after: list[Any] = [decoders.Strip(" ", 1, 0)] * prefixed
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    )
    return tokenizer, True


def _merges_of_runs(vocab: Vocabulary) -> list[tuple[str, str]]:
    """What joins several spaces where runs of them are tokens, as Gemma's are: the longest first.

    The file has them with real spaces, as tokens of the user.
    """
    longest = max((len(text) for text in _runs(vocab)), default=1)
    lengths = range(longest - 1, 0, -1)
    return [
        (SPACE * left, SPACE * right)
        for left in lengths
        for right in lengths
        if right <= left and left + right <= longest
    ]


def _runs(vocab: Vocabulary) -> list[str]:
    return [text for text in vocab.of_type(USER_DEFINED) if len(text) > 1 and not text.strip(" ")]


def merges_of(pieces: Mapping[str, float]) -> list[tuple[str, str]]:
    """The pairs that are joined, the first first, of a vocabulary of pieces and their scores."""
    found = []
    for text, score in pieces.items():
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in pieces and right in pieces:
                found.append((-score, len(found), left, right))
    found.sort()
    return [(left, right) for _, _, left, right in found]


def _model(
    vocab: Vocabulary,
    merges: Sequence[tuple[str, str]],
    *,
    ignore_merges: bool = False,
    unknown: str | None = None,
    byte_fallback: bool = False,
) -> "models.BPE":
    """The library's BPE; unused tokens, which fill the embeddings up, are left out."""
    from tokenizers import models

    runs = {*_runs(vocab)}
    numbers = {
        SPACE * len(text) if text in runs else text: token
        for token, (text, kind) in enumerate(zip(vocab.tokens, vocab.types, strict=True))
        if kind != UNUSED
    }
    if len(numbers) + vocab.types.count(UNUSED) < len(vocab.tokens):
        raise ValueError(
            f"{vocab.raw.origin}: {PREFIX}tokens holds a text twice; download the file again"
        )
    try:
        return models.BPE(
            numbers,
            list(merges),
            ignore_merges=ignore_merges,
            unk_token=unknown,
            fuse_unk=byte_fallback,
            byte_fallback=byte_fallback,
        )
    except Exception as error:  # Bare Exceptions, for merges of pieces that are not tokens.
        raise ValueError(
            f"{vocab.raw.origin}: {PREFIX}merges do not fit the tokens ({error}); download the "
            "file again"
        ) from error


def _add_special(tokenizer: "Tokenizer", vocab: Vocabulary, strips: bool) -> None:
    """Control tokens, and those of the user, which are cut out of a text first, the longest first.

    Args:
      strips: whether control tokens take the spaces after them, as Phi-3's do.
    """
    from tokenizers import AddedToken

    keeps = {"<unk>", "<s>", "<|endoftext|>"}
    control = [
        AddedToken(text, normalized=False, special=True, rstrip=strips and text not in keeps)
        for text in vocab.of_type(CONTROL)
    ]
    tokenizer.add_special_tokens(control)
    runs = {*_runs(vocab)}
    own = (SPACE * len(text) if text in runs else text for text in vocab.of_type(USER_DEFINED))
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in own])


def _add_ends(
    tokenizer: "Tokenizer", raw: JsonObject, begins: bool, named: Mapping[str, str | None]
) -> None:
    """What is put around a text."""
    from tokenizers import processors

    first, last = named["bos_token"], named["eos_token"]
    begin = raw.flag(f"{PREFIX}add_bos_token", begins) and first is not None
    end = raw.flag(f"{PREFIX}add_eos_token", False) and last is not None
    pieces = [*[first] * begin, "$A", *[last] * end]
    pair = [piece if piece != "$A" else "$B:1" for piece in pieces]
    special = [
        (text, tokenizer.token_to_id(text)) for text in dict.fromkeys(pieces) if text != "$A"
    ]
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=" ".join(map(str, pieces)),
            pair=" ".join(map(str, [*pieces, *pair])),
            special_tokens=special,
        )


def _chat_template(file: GgufFile) -> Any:
    """The file's template; several by name, the first being the default."""
    raw = file.metadata
    default = raw.text(_CHAT, "") or None
    names = raw.texts("tokenizer.chat_templates")
    if not names:
        return default
    named = {name: raw.text(f"{_CHAT}.{name}", "") for name in names}
    return {**({"default": default} if default else {}), **named}
