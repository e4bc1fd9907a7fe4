"""What a row may emit, by a JSON schema, a regular expression or a Lark grammar.

The library llguidance says which tokens may follow a text. A round needs that at every node of its
tree: after the node's own path. Sampling sees only the allowed tokens: forbidden logits become
-inf before temperature and filters.

The library bounds the work of a step and the size of what it builds. A grammar may meet a bound in
the midst of a text, and its matcher is of no use from then on. Whether it does depends on all that
the matcher, or a copy of it, was ever asked. So a row has two that were compiled apart:

* The row's own is asked what plain decoding asks, however the tokens were found: what may come
  first, and after every token of the text what may follow. Where it fails the row ends, after
  that token, with the library's reason. No tree moves that end.
* The other one follows the trees, and steps back at every branch. Where it fails the nodes that it
  has not judged have no path, and the row goes on without a draft. Nodes that the grammar has ruled
  out on the way have none either.
"""

import functools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from longspec_jax.checks import shown
from longspec_jax.extras import missing_packages

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer
    from transformers import PreTrainedTokenizerFast
else:  # The library comes with an extra, and transformers is slow to import.
    LLMatcher = LLParserLimits = LLTokenizer = PreTrainedTokenizerFast = Any

LONGEST = 64 * 1024
"""Most characters of a grammar: compiling takes time and memory with its length."""
DEEPEST = 32
"""Most levels of a JSON schema."""
MOST_DEFINITIONS = 512
"""Of a JSON schema."""
LARGEST_MULTIPLE = 1000
"""Least common multiple of what a JSON schema calls ``multipleOf``, without factors of 2 and 5: the
automaton has a state for each remainder, and no bound of the library ends its building."""
TOKENIZERS = 4
"""Vocabularies whose tables are kept: a table takes a second to make at 128k tokens."""
MOST_STATES = 50_000
"""States of the automaton of a grammar's tokens that a matcher builds; each takes 1 to 2 kB."""
COMPILE_FUEL = 50_000
"""Expressions that compiling may create: seconds of work at most. The library's own million were 20
s for 20 characters of nested counts. A list of 2,000 words takes fewer than 50,000."""

TokenBits: TypeAlias = np.ndarray
"""``[T, W]`` uint32: bit ``v % 32`` of word ``v // 32`` is set where token ``v`` is allowed."""


class Grammar:
    """A grammar that can be used; requests share it, and each has a :meth:`state` of its own."""

    def __init__(self, vocabulary: "Vocabulary", source: str, limits: LLParserLimits) -> None:
        """Compile nothing; made by :func:`compile_grammar`."""
        self._vocabulary, self._source, self._limits = vocabulary, source, limits

    @property
    def stop_tokens(self) -> frozenset[int]:
        """What ends a text that satisfies it."""
        return self._vocabulary.stop_tokens

    def state(self) -> "GrammarState":
        """The state of a row that has emitted nothing; compiles, for a millisecond or many.

        Raises:
          ValueError: if the grammar is wrong, too large, or no text of the vocabulary's.
        """
        return GrammarState(self.matcher(), self.matcher(), self._vocabulary)

    def matcher(self) -> LLMatcher:
        """A matcher that has met no token, and shares nothing with others as its copies would."""
        library, table = _library(), self._vocabulary.table
        return library.LLMatcher(table, self._source, log_level=0, limits=self._limits)


def compile_grammar(
    vocabulary: "Vocabulary",
    *,
    json_schema: Mapping[str, Any] | None = None,
    regex: str | None = None,
    lark: str | None = None,
    limits: LLParserLimits | None = None,
) -> Grammar:
    """A grammar from its source; arguments and errors as of ``LongSpec.grammar``.

    Args:
      vocabulary: of the target.
      limits: the library's ``LLParserLimits``; its defaults, :data:`MOST_STATES` and
        :data:`COMPILE_FUEL` if absent.
    """
    library = _library()
    sources: list[tuple[Any, str]] = []
    if json_schema is not None:
        check_schema(json_schema)
        sources.append((library.LLMatcher.grammar_from_json_schema, json.dumps(json_schema)))
    if regex is not None:
        sources.append((library.LLMatcher.grammar_from_regex, regex))
    if lark is not None:
        sources.append((library.LLMatcher.grammar_from_lark, lark))
    if len(sources) != 1:
        raise ValueError("a grammar is one of json_schema=, regex= and lark=; pass one of them")
    [(read, source)] = sources
    _check_length(source)
    usual = library.LLParserLimits(
        initial_lexer_fuel=COMPILE_FUEL, max_lexer_states=MOST_STATES, verbose_errors=False
    )
    grammar = Grammar(vocabulary, read(source), usual if limits is None else limits)
    _first_tokens(grammar.matcher(), vocabulary)
    return grammar


class GrammarState:
    """Where a row stands in its grammar."""

    def __init__(self, own: LLMatcher, of_trees: LLMatcher, vocabulary: "Vocabulary") -> None:
        """Begin before the first token, with two matchers that share nothing.

        Raises:
          ValueError: if nothing can come first.
        """
        self._own, self._words = own, vocabulary.words
        self._next: np.ndarray | None = _first_tokens(own, vocabulary)
        """What may follow the row's last token; None once the row's own matcher has failed."""
        self._of_trees: LLMatcher | None = of_trees
        """After the row's last token; None once it has failed."""
        self._stops, self._ended = vocabulary.stop_tokens, False

    @property
    def stop_tokens(self) -> frozenset[int]:
        """What ends a text that satisfies the grammar."""
        return self._stops

    def advance(self, tokens: Sequence[int]) -> None:
        """Take in tokens that the row has emitted.

        Raises:
          ValueError: if the grammar does not allow them, or meets a bound of the library.
        """
        for token in map(int, tokens):
            # The matchers are not told: they keep no stop token that they could step back over.
            self._ended |= token in self._stops
            if self._ended:
                return
            if self._next is None or not _holds(self._next, token):
                raise ValueError(f"token {token} does not satisfy the row's grammar")
            self._next = None
            if self._own.consume_token(token):
                self._next = _tokens_after(self._own, self._words)
            if self._next is None:
                raise ValueError(
                    f"the grammar cannot be followed any further: {_reason(self._own)}"
                )
            if self._of_trees is not None and not self._of_trees.consume_token(token):
                self._of_trees = None

    def allowed(self, tokens: Sequence[int], parents: Sequence[int]) -> TokenBits:
        """See :class:`~longspec_jax.decoding.constrained.Constraint`.

        The root may also be the last token of the prompt. After a stop token all is allowed.
        """
        bits = np.full((len(tokens), self._words), -1 if self._ended else 0, np.int32)
        if self._ended:
            return bits.view(np.uint32)
        if self._next is not None:
            bits[0] = self._next
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents):
            children.setdefault(int(parent), []).append(node)
        if self._of_trees is not None and not self._fill(self._of_trees, 0, tokens, children, bits):
            self._of_trees = None
        return bits.view(np.uint32)

    def _fill(
        self,
        of_trees: LLMatcher,
        node: int,
        tokens: Sequence[int],
        children: Mapping[int, list[int]],
        bits: np.ndarray,
    ) -> bool:
        """Ask the matcher below a node, after which it stands; whether it could answer all."""
        for child in children.get(node, ()):
            token = int(tokens[child])
            if not _holds(bits[node], token):
                continue
            if token in self._stops:
                bits[child] = -1
                continue
            if not of_trees.consume_token(token):
                return False
            found = _tokens_after(of_trees, self._words)
            if found is None:
                return False
            bits[child] = found
            if not (self._fill(of_trees, child, tokens, children, bits) and of_trees.rollback(1)):
                return False
        return True


def _first_tokens(matcher: LLMatcher, vocabulary: "Vocabulary") -> np.ndarray:
    """``[W]`` int32, what may come first.

    Raises:
      ValueError: if the matcher has failed, or does so now.
    """
    line = _tokens_after(matcher, vocabulary.words)
    if line is None:
        raise ValueError(f"the grammar cannot be used: {_reason(matcher)}")
    return line


def _tokens_after(matcher: LLMatcher, words: int) -> np.ndarray | None:
    """``[W]`` int32, what may follow; None if the matcher has failed, which it then stays."""
    line = np.zeros(words, np.int32)
    if not matcher.is_error():
        matcher.unsafe_compute_mask_ptr(line.ctypes.data, line.nbytes)
    return None if matcher.is_error() else line


def _holds(line: np.ndarray, token: int) -> bool:
    return bool(line[token // 32] >> (token % 32) & 1)


def _reason(matcher: LLMatcher) -> str:
    """Why a matcher has failed."""
    first, *others = matcher.get_error().strip().splitlines()
    if first.startswith("NoExtension"):
        return "no token of the vocabulary may follow"
    if "initial_lexer_fuel" in first or "(grammar) too big" in first:
        return "it takes too long to compile; use smaller counts, and fewer or shorter patterns"
    # What a regular expression lacks stands below a drawing of the place.
    return " ".join([first, *(line for line in others if line.startswith("error: "))])


class Vocabulary:
    """A tokenizer's tokens as the library reads them."""

    def __init__(self, table: LLTokenizer, size: int, stop_tokens: tuple[int, ...]) -> None:
        """Keep the table; made by :func:`vocabulary_of`."""
        self.table, self.size, self.stop_tokens = table, size, frozenset(stop_tokens)

    @property
    def words(self) -> int:
        """32-bit words that a row of the mask takes."""
        return -(-self.size // 32)


@functools.lru_cache(TOKENIZERS)
def vocabulary_of(
    tokenizer: PreTrainedTokenizerFast, vocab_size: int, stop_tokens: tuple[int, ...]
) -> Vocabulary:
    """The tokens of a target.

    Args:
      stop_tokens: what ends a text, allowed where the grammar is satisfied.

    Raises:
      ValueError: for a tokenizer that is not a fast one, or without a stop token.
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
    table = from_tokenizer(tokenizer, vocab_size, list(stop_tokens))
    return Vocabulary(table, vocab_size, stop_tokens)


def check_schema(schema: object) -> None:
    """Refuse a JSON schema that the library cannot follow to the end of a text.

    Raises:
      ValueError: for one of too many levels, for a ``multipleOf`` of too many remainders, and for
        one that no finite text satisfies, as where a reference leads to itself: the library would
        find that out in the midst of a text.
    """
    _check_depth(schema)
    _check_multiples(schema)
    _check_length(json.dumps(schema))
    if not isinstance(schema, Mapping):
        return
    ends, news = {"#": False}, True
    for place in ("$defs", "definitions"):
        if isinstance(shared := schema.get(place), Mapping):
            ends |= {f"#/{place}/{name}": False for name in shared}
    if len(ends) > MOST_DEFINITIONS:
        raise ValueError(f"a schema of more than {MOST_DEFINITIONS} definitions is not read")
    while news:
        news = False
        for reference in [one for one, has in ends.items() if not has]:
            ends[reference] = _ends(referred(schema, reference), ends)
            news |= ends[reference]
    if not ends["#"]:
        endless = next((one for one, has in ends.items() if not has and one != "#"), "#")
        raise ValueError(
            f"no finite text satisfies the schema: {endless} needs itself; make a property "
            "optional, or let anyOf have another choice"
        )


def _check_length(source: str) -> None:
    if len(source) > LONGEST:
        raise ValueError(
            f"a grammar of {len(source)} characters is longer than {LONGEST}; shorten it"
        )


def referred(schema: Mapping[str, Any], reference: str) -> object:
    """What a ``$ref`` within a JSON schema names; None if there is nothing of this name."""
    if reference == "#":
        return schema
    place, _, name = reference.removeprefix("#/").partition("/")
    shared = schema.get(place)
    return shared.get(name) if isinstance(shared, Mapping) else None


def _ends(schema: object, ends: Mapping[str, bool]) -> bool:
    """Whether a finite text satisfies a schema, given which references are known to have one."""
    if not isinstance(schema, Mapping):
        return True
    reference = schema.get("$ref")
    if isinstance(reference, str) and not ends.get(reference, True):
        return False
    for name, enough in (("anyOf", any), ("oneOf", any), ("allOf", all)):
        choices = schema.get(name)
        if isinstance(choices, list) and not enough(_ends(one, ends) for one in choices):
            return False
    fields, required = schema.get("properties"), schema.get("required")
    if isinstance(fields, Mapping) and isinstance(required, list):
        needed = [fields[name] for name in required if isinstance(name, str) and name in fields]
        if not all(_ends(one, ends) for one in needed):
            return False
    return not schema.get("minItems") or _ends(schema.get("items"), ends)


def _check_depth(schema: object, level: int = 1) -> None:
    """Refuse a schema of more than :data:`DEEPEST` levels: the library reads them by recursion."""
    if level > DEEPEST:
        raise ValueError(f"a schema of more than {DEEPEST} levels is not read; make it flatter")
    if isinstance(schema, str) or not isinstance(schema, Mapping | Sequence):
        return
    for part in schema.values() if isinstance(schema, Mapping) else schema:
        _check_depth(part, level + 1)


def _check_multiples(schema: object) -> None:
    """Refuse numbers with too many remainders: of ``allOf`` a text has the remainders of all."""
    common = 1
    for number in _multiples(schema):
        # Decimal digits decide what 2 and 5 divide, so those factors have few remainders.
        odd = int("".join(map(str, Decimal(repr(number)).as_tuple().digits)))
        for factor in (2, 5):
            while odd and odd % factor == 0:
                odd //= factor
        common = math.lcm(common, odd or 1)
        if common > LARGEST_MULTIPLE:
            raise ValueError(
                f"multipleOf={shown(number)}: the numbers of a schema, without factors of 2 and 5, "
                f"may have a least common multiple of {LARGEST_MULTIPLE}; leave this one out"
            )


def _multiples(schema: object) -> Iterator[int | float]:
    """Every ``multipleOf`` of a JSON schema that is a finite number."""
    if isinstance(schema, str) or not isinstance(schema, Mapping | Sequence):
        return
    number = schema.get("multipleOf") if isinstance(schema, Mapping) else None
    if isinstance(number, int | float) and math.isfinite(number):
        yield int(number) if isinstance(number, bool) else number
    for part in schema.values() if isinstance(schema, Mapping) else schema:
        yield from _multiples(part)


def _library() -> Any:
    if (absent := missing_packages("grammar")) is not None:
        raise ModuleNotFoundError(absent)
    import llguidance

    return llguidance
