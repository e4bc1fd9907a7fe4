"""Grammars: what may follow at every node of a tree, and what is refused."""

import random
import time
from typing import Any

import numpy as np
import pytest

from longspec_jax.generation.grammar import (
    DEEPEST,
    LONGEST,
    Grammar,
    Vocabulary,
    check_schema,
    compile_grammar,
    vocabulary_of,
)
from tests.infer.toys import STOP, toy_tokenizer
from tests.kit import each_row
from tests.serve import talker
from tests.serve.talker import talking_tokenizer

SIZE = 40
"""More than the tokenizer's tokens, and no whole number of words."""


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return vocabulary_of(toy_tokenizer(), SIZE, (STOP,))


def tokens_of(bits: np.ndarray) -> set[int]:
    """The tokens that one line allows."""
    return {token for token in range(32 * len(bits)) if bits[token // 32] >> (token % 32) & 1}


def ids(text: str) -> list[int]:
    return toy_tokenizer().encode(text, add_special_tokens=False)


def following(grammar: Grammar, tokens: list[int]) -> set[int]:
    """What may follow these tokens, asked of a state that has met nothing else."""
    state = grammar.state()
    state.advance(tokens)
    return tokens_of(state.allowed([0], [-1])[0])


def test_what_may_follow_a_text(vocabulary) -> None:
    grammar = compile_grammar(vocabulary, regex="ab(c|d)+")
    assert following(grammar, []) == {*ids("a")}
    assert following(grammar, ids("ab")) == {*ids("cd")}
    assert following(grammar, ids("abc")) == {*ids("cd"), STOP}
    assert following(compile_grammar(vocabulary, regex="ab"), ids("ab")) == {STOP}
    with pytest.raises(ValueError, match="does not satisfy"):
        grammar.state().advance(ids("b"))


def test_every_node_of_a_tree_has_the_tokens_behind_its_own_path(vocabulary) -> None:
    """Random trees, and a fresh state for every path; wrong tokens and stop tokens among them."""
    draw = random.Random(5)
    grammar = compile_grammar(vocabulary, regex="(a(b|cd)*€?|gh é)+")
    state, emitted, seen = grammar.state(), [], 0
    while len(emitted) < 40:
        tokens, parents = [0], [-1]
        paths: list[list[int] | None] = [[]]
        for node in range(1, 16):
            parent = draw.randrange(node)
            above = paths[parent]
            legal = following(grammar, emitted + above) if above is not None else set()
            token = draw.choice([*sorted(legal), draw.randrange(SIZE)])
            alive = above is not None and token in legal and token != STOP
            paths.append([*above, token] if above is not None and alive else None)
            tokens.append(token)
            parents.append(parent)
        bits = state.allowed(tokens, parents)
        for line, path in zip(bits, paths, strict=True):
            if path is not None:
                assert tokens_of(line) == following(grammar, emitted + path)
                seen += len(path)
        longest = max((path for path in paths if path is not None), key=len)
        state.advance(longest)
        emitted += longest
    assert seen > 60


def test_behind_a_stop_token_all_is_allowed(vocabulary) -> None:
    """What a row decodes there is not read."""
    state = compile_grammar(vocabulary, regex="a").state()
    state.advance([*ids("a"), STOP, *ids("gg")])
    assert (state.allowed([0, 3], [-1, 0]) == 2**32 - 1).all()


def test_what_a_row_has_built_is_nothing_to_the_others(vocabulary) -> None:
    """States of one grammar share no bound: the texts of one row cannot end another."""
    grammar = compile_grammar(vocabulary, regex="g(b[cd]+|(a?){500}a{500})")
    one, other = grammar.state(), grammar.state()
    one.advance(ids("g"))
    other.advance(ids("g"))
    with pytest.raises(ValueError, match="cannot be followed any further: .*too many expressions"):
        one.advance(ids("aa"))
    other.advance(ids("bc"))
    assert tokens_of(other.allowed([0], [-1])[0]) == {*ids("cd"), STOP}


def test_nodes_that_cannot_be_judged_have_no_path(vocabulary) -> None:
    """Nor any after them; the row goes on, and later trees have no path either."""
    state = compile_grammar(vocabulary, regex="g(b[cd]+|(a?){500}a{500})").state()
    state.advance(ids("g"))
    tree = ids("gbaac"), [-1, 0, 0, 2, 1]
    bits = state.allowed(*tree)
    assert [tokens_of(line) for line in bits] == [
        {*ids("ab")},
        {*ids("cd")},
        {*ids("a")},
        set(),
        {*ids("cd"), STOP},
    ]
    state.advance(ids("bd"))
    bits = state.allowed(ids("dc"), [-1, 0])
    assert [tokens_of(line) for line in bits] == [{*ids("cd"), STOP}, set()]


def _list(required: list[str]) -> dict:
    return {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": required}


def _nested(levels: int) -> dict:
    schema: dict = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


REFUSED: dict[str, dict[str, Any]] = {
    "regex.* error: unclosed character class": dict(regex="(["),
    "cannot be used: no token": dict(regex="z"),
    "is longer than": dict(regex="a" * (LONGEST + 1)),
    "Invalid type: objekt": dict(json_schema={"type": "objekt"}),
    "cannot be used": dict(json_schema={"$ref": "http://a/b"}),
    "levels": dict(json_schema=_nested(DEEPEST)),
    "multipleOf=1000000007: .* least common multiple of 1000;": dict(
        json_schema={"type": "integer", "multipleOf": 1_000_000_007}
    ),
    "multipleOf=8.9: ": dict(json_schema={"allOf": [{"multipleOf": 97}, {"multipleOf": 8.9}]}),
    "takes too long to compile; use smaller counts": dict(regex="(a*b)*" * 2700),
    "finite .* # needs itself": dict(json_schema=_list(["a"])),
    "no finite text satisfies the schema: #/.defs/a needs itself": dict(
        json_schema={"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
    ),
    "more than 512 definitions": dict(
        json_schema={"$defs": {f"{index}": {} for index in range(600)}}
    ),
    "cannot be used: .*unknown name": dict(lark="start: other"),
    "one of json_schema=, regex= and lark=": dict(),
}


@each_row("message", REFUSED)
def test_what_cannot_be_used_is_refused_in_a_sentence(vocabulary, message) -> None:
    with pytest.raises(ValueError, match=message) as refusal:
        compile_grammar(vocabulary, **REFUSED[message])
    assert "\n" not in str(refusal.value)


def test_compiling_is_bounded_work(vocabulary) -> None:
    """Each of these held a thread for minutes, or for ever, and is 20 characters long."""
    begun = time.process_time()
    for regex in ("(((((a{50}){50}){50}){50}){50})", "a{1000000}"):
        state = compile_grammar(vocabulary, regex=regex).state()
        with pytest.raises(ValueError, match="too many expressions"):
            state.advance(ids("aa"))
    assert time.process_time() - begun < 10


def test_usual_multiples_and_long_lists_are_followed() -> None:
    """Factors of 2 and 5 are free: prices, hours and powers of two."""
    words = [f"word {index}" for index in range(2000)]
    all_bytes = vocabulary_of(talking_tokenizer(), talker.SIZE, (talker.STOP,))
    for schema, text in [
        *(
            ({"type": "number", "multipleOf": one}, "0")
            for one in (0.01, 0.25, 86_400, 65_536, 999)
        ),
        ({"enum": words}, '"word 1999"'),
    ]:
        state = compile_grammar(all_bytes, json_schema=schema).state()
        state.advance(talking_tokenizer().encode(text))
        assert talker.STOP in tokens_of(state.allowed([0], [-1])[0]), schema


def test_a_schema_may_refer_to_itself_where_a_text_can_end() -> None:
    for schema in (
        _list([]),
        {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"$ref": "#"}, "minItems": 1}]},
    ):
        check_schema(schema)


def test_a_vocabulary_needs_a_fast_tokenizer_and_a_stop_token() -> None:
    with pytest.raises(ValueError, match="stop token"):
        vocabulary_of(toy_tokenizer(), SIZE, ())

    class Slow:
        pass

    with pytest.raises(ValueError, match="fast tokenizer"):
        vocabulary_of(Slow(), SIZE, (STOP,))
