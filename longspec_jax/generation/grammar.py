"""What a row may emit, by a JSON schema, a regular expression or a Lark grammar.

The library llguidance says which tokens may follow a text. A round needs that at every node of its
tree: behind the node's own path. :class:`GrammarState` walks the tree with one matcher that steps
back at every branch. Nodes that the grammar has ruled out on the way are not looked at: no path
reaches them, because no draw of their parent can be their token.

Sampling sees the allowed tokens alone: forbidden logits become -inf before temperature and filters.
Plain decoding is masked alike, so trees change no token here either.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from longspec_jax.extras import missing_packages

LONGEST = 64 * 1024
"""Most characters of a grammar: compiling takes time and memory with its length."""
DEEPEST = 32
"""Most levels of a JSON schema."""
TOKENIZERS = 4
"""Vocabularies whose tables are kept: a table takes a second to make at 128k tokens."""

TokenBits: TypeAlias = np.ndarray
"""``[T, W]`` uint32: bit ``v % 32`` of word ``v // 32`` is set where token ``v`` is allowed."""


class Grammar:
    """A compiled grammar; requests share it, and each begins with a :meth:`state` of its own."""

    def __init__(self, matcher: Any, vocabulary: "Vocabulary") -> None:
        """Keep the matcher of a row without a token; made by :func:`compile_grammar`."""
        self._matcher, self._vocabulary = matcher, vocabulary

    @property
    def stop_tokens(self) -> frozenset[int]:
        """What ends a text that satisfies it."""
        return self._vocabulary.stop_tokens

    def state(self) -> "GrammarState":
        """The state of a row that has emitted nothing."""
        return GrammarState(self._matcher.deep_copy(), self._vocabulary)


def compile_grammar(
    vocabulary: "Vocabulary",
    *,
    json_schema: Mapping[str, Any] | None = None,
    regex: str | None = None,
    lark: str | None = None,
) -> Grammar:
    """A grammar from its source; arguments and errors as of ``LongSpec.grammar``."""
    library = _library()
    sources: list[tuple[Any, str]] = []
    if json_schema is not None:
        _check_depth(json_schema)
        sources.append((library.grammar_from_json_schema, json.dumps(json_schema)))
    if regex is not None:
        sources.append((library.grammar_from_regex, regex))
    if lark is not None:
        sources.append((library.grammar_from_lark, lark))
    if len(sources) != 1:
        raise ValueError("a grammar is one of json_schema=, regex= and lark=; pass one of them")
    [(read, source)] = sources
    if len(source) > LONGEST:
        raise ValueError(
            f"a grammar of {len(source)} characters is longer than {LONGEST}; shorten it"
        )
    matcher = library(vocabulary.table, read(source), log_level=0)
    if matcher.is_error():
        reason = matcher.get_error().strip().splitlines()[0]
        raise ValueError(f"the grammar cannot be used: {reason}")
    return Grammar(matcher, vocabulary)


class GrammarState:
    """Where a row stands in its grammar."""

    def __init__(self, matcher: Any, vocabulary: "Vocabulary") -> None:
        """Begin where the matcher stands."""
        self._matcher, self._words = matcher, -(-vocabulary.size // 32)
        self._stops, self._ended = vocabulary.stop_tokens, False

    def advance(self, tokens: Sequence[int]) -> None:
        """Take in tokens that the row has emitted.

        Raises:
          ValueError: if the grammar does not allow them.
        """
        for token in map(int, tokens):
            # The matcher is not told: it keeps no stop token that it could step back over.
            self._ended |= token in self._stops
            if not (self._ended or self._matcher.consume_token(token)):
                raise ValueError(f"token {token} does not satisfy the row's grammar")

    def allowed(self, tokens: Sequence[int], parents: Sequence[int]) -> TokenBits:
        """As of :class:`~longspec_jax.decoding.constrained.Constraint`.

        The root may also be the last token of the prompt. Behind nodes that no path reaches all
        tokens are allowed.
        """
        bits = np.full((len(tokens), self._words), -1, np.int32)
        if self._ended:
            return bits.view(np.uint32)
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents):
            children.setdefault(int(parent), []).append(node)
        self._fill(0, tokens, children, bits)
        return bits.view(np.uint32)

    def _fill(
        self, node: int, tokens: Sequence[int], children: Mapping[int, list[int]], bits: np.ndarray
    ) -> None:
        """Ask behind a node, and below it; the matcher stands behind the node."""
        line = bits[node]
        self._matcher.unsafe_compute_mask_ptr(line.ctypes.data, line.nbytes)
        for child in children.get(node, ()):
            token = int(tokens[child])
            allowed = line[token // 32] >> (token % 32) & 1
            if allowed and token not in self._stops and self._matcher.consume_token(token):
                self._fill(child, tokens, children, bits)
                self._matcher.rollback(1)


class Vocabulary:
    """A tokenizer's tokens as the library reads them."""

    def __init__(self, table: Any, size: int, stop_tokens: tuple[int, ...]) -> None:
        """Keep the table; made by :func:`vocabulary_of`."""
        self.table, self.size, self.stop_tokens = table, size, frozenset(stop_tokens)


class _FastTokenizer(Protocol):
    backend_tokenizer: Any


@functools.lru_cache(TOKENIZERS)
def vocabulary_of(
    tokenizer: _FastTokenizer, vocab_size: int, stop_tokens: tuple[int, ...]
) -> Vocabulary:
    """The tokens of a target.

    Args:
      stop_tokens: what ends a text, allowed where the grammar is satisfied.

    Raises:
      ValueError: for a tokenizer that is no fast one, or without a stop token.
      ModuleNotFoundError: without the extra ``grammar``.
    """
    _library()
    from llguidance.hf import from_tokenizer

    if not hasattr(tokenizer, "backend_tokenizer"):
        raise ValueError(
            "a grammar needs a fast tokenizer (tokenizer.json); this target has another kind"
        )
    if not stop_tokens:
        raise ValueError("a grammar needs a stop token, with which the text ends; name one")
    # The type names PreTrainedTokenizerFast.
    known: Any = tokenizer
    table = from_tokenizer(known, vocab_size, list(stop_tokens))
    return Vocabulary(table, vocab_size, stop_tokens)


def _check_depth(schema: Any, level: int = 1) -> None:
    if level > DEEPEST:
        raise ValueError(f"a schema of more than {DEEPEST} levels is not read; make it flatter")
    inner = schema.values() if isinstance(schema, Mapping) else schema
    if isinstance(inner, str) or not isinstance(schema, Mapping | Sequence):
        return
    for part in inner:
        _check_depth(part, level + 1)


def _library() -> Any:
    if (absent := missing_packages("grammar")) is not None:
        raise ModuleNotFoundError(absent)
    from llguidance import LLMatcher

    return LLMatcher
