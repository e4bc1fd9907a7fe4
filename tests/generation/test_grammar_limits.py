"""Grammars that meet a bound of their library in the midst of a text, which no tree may change."""

import os
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.decoding.constrained import Anything
from longspec_jax.decoding.engine import Engine
from longspec_jax.generation.grammar import compile_grammar
from tests.generation.grammars import (
    HISTORIES,
    NEW,
    SIZE,
    TREES,
    Row,
    decoded,
    fuzz,
    ids,
    open_engine,
    request,
    vocabulary,
)
from tests.kit import each_row

SOME = TREES[:3]
"""Plain decoding, a chain and a tree."""
GROWS = "(a?){500}a{500}"
"""Too large after its first letter."""


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """A target that would write x, or else a, or else b: the draft proposes the first ones."""
    logits = np.zeros(SIZE, np.float32)
    logits[[*ids("x"), *ids("a"), *ids("b"), *ids("q")]] = 30, 29, 20, 10
    table = jnp.tile(logits, (HISTORIES, 1))
    with open_engine(table, table, SOME) as made:
        yield made


@pytest.mark.parametrize("candidate", range(len(SOME)), ids=map(str, SOME))
def test_a_draft_token_that_meets_a_bound_changes_no_text(engine, candidate) -> None:
    """Twice one grammar: what the drafts of one row build is nothing to the other."""
    grammar = compile_grammar(vocabulary(), regex="q(x[bc]+|(a?){300}a{300})")
    rows = [Row(ids("q"), request(seed, 0.0), grammar) for seed in range(2)]
    texts, states = decoded(engine, rows, candidate)
    for text in texts:
        assert text.tokens == tuple(ids("qx" + "b" * (NEW - 2))) and text.finish == "length"
    is_tree = len(SOME[candidate].widths) > 0 and SOME[candidate].widths[0] > 1
    assert [state._of_trees is None for state in states] == [is_tree] * 2  # type: ignore[union-attr]


@pytest.mark.parametrize("candidate", range(len(SOME)), ids=map(str, SOME))
def test_a_row_whose_grammar_meets_a_bound_ends_alone(engine, candidate) -> None:
    """After the same token with every tree, with the library's reason; the others go on."""
    wide = {f"p{index}": {"type": "integer"} for index in range(600)}
    schema = {"type": "object", "properties": wide, "additionalProperties": False}
    grammars = [
        compile_grammar(vocabulary(), regex=GROWS),
        compile_grammar(vocabulary(), regex=f"b{GROWS}|x+"),
        compile_grammar(vocabulary(), json_schema=schema),
        None,
    ]
    rows = [Row(ids("q"), request(0, 0.0), grammar) for grammar in grammars]
    for _ in range(2):  # Two faults within a minute would have ended the engine.
        grown, other, listed, free = decoded(engine, rows, candidate)[0]
        assert grown.tokens == tuple(ids("aa")) and grown.finish == "error"
        assert "too many expressions" in str(grown.reason) and "\n" not in str(grown.reason)
        assert listed.finish == "error" and "items; max is 2000" in str(listed.reason)
        assert listed.tokens == tuple(ids("{"))
        assert other.tokens == free.tokens == tuple(ids("x" * NEW))
        assert other.finish == free.finish == "length" and free.reason is None
    assert engine.status.recoveries == 0


class Broken(Anything):
    """A constraint that raises when it is asked for the third time."""

    def __init__(self, method: str) -> None:
        self.method, self.left = method, 3

    def _count(self, method: str) -> None:
        self.left -= method == self.method
        if self.left == 0:
            raise IndexError("out of its own bounds")

    def advance(self, tokens: Sequence[int]) -> None:
        assert len(tokens) == 1 and tokens[0] >= 0
        self._count("advance")

    def allowed(self, tokens: Sequence[int], parents: Sequence[int]) -> np.ndarray:
        self._count("allowed")
        return super().allowed(tokens, parents)


@each_row("method", ["advance", "allowed"])
def test_a_constraint_that_raises_ends_its_row_alone(engine, method) -> None:
    grammar: Any = SimpleNamespace(state=lambda: Broken(method))
    rows = [Row(ids("q"), request(0, 0.0), each) for each in (None, grammar, None)]
    for candidate in range(len(SOME)):
        (before, failed, behind), _ = decoded(engine, rows, candidate)
        assert before.tokens == behind.tokens == tuple(ids("x" * NEW))
        assert failed.finish == "error" and failed.reason == "IndexError: out of its own bounds"
        assert set(failed.tokens) == {*ids("x")}, "a draw that found no token is none"
        assert method == "allowed" or len(failed.tokens) == 3
    assert engine.status.recoveries == 0


@pytest.mark.full
def test_random_grammars_change_no_text_with_any_tree() -> None:
    """``python -m tests.generation.grammars 1000`` is the same at length."""
    found = fuzz(int(os.environ.get("LONGSPEC_GRAMMARS", "40")), seed=3, trees=SOME)
    assert found.failed_rows > found.rows / 10 and found.failed_drafts > found.rows / 30
    assert found.failed_rows < found.rows * 0.9 and found.refused < found.grammars / 3
    assert found.different == found.different_alone == found.different_neighbours == 0
    assert found.restarts == 0
