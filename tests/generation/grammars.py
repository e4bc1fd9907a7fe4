"""Random grammars that meet the library's bounds, decoded with and without speculation.

::

    python -m tests.generation.grammars 1000
"""

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from typing import Any, NamedTuple

import llguidance
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from longspec_jax.config.tree import PLAIN, TreeConfig
from longspec_jax.decoding.constrained import Anything
from longspec_jax.decoding.engine import Engine
from longspec_jax.decoding.rows import Request
from longspec_jax.decoding.runner import ModelRunner
from longspec_jax.decoding.sampling import Sampling
from longspec_jax.drafters.base import Params
from longspec_jax.generation.grammar import (
    Grammar,
    GrammarState,
    Vocabulary,
    compile_grammar,
    vocabulary_of,
)
from tests.lookup import LookupDrafter, LookupTarget, random_table

STOP = 0
LETTERS = "abcdefgqx"
SYMBOLS = LETTERS + '0123{}[]":, '
MERGES = ["ab", "aa", '":', '",', '{"', "bc"]
TREES = PLAIN, TreeConfig((1, 1)), TreeConfig((4, 4)), TreeConfig((2,))
"""Candidates of an engine, of which a request names one."""
HISTORIES = 97
"""Rows of a lookup table."""
NEW = 20
SLOTS = 5
LONGEST = 100


@cache
def tokenizer() -> Any:
    """Single characters and a few pairs; id 0 ends a text."""
    written = {symbol: symbol.replace(" ", "Ġ") for symbol in SYMBOLS}
    names = ["<end>", *written.values(), *MERGES]
    merges = [(merge[0], merge[1]) for merge in MERGES]
    model = models.BPE(vocab={name: id for id, name in enumerate(names)}, merges=merges)
    made = Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")


SIZE = 1 + len(SYMBOLS) + len(MERGES)


@cache
def vocabulary() -> Vocabulary:
    return vocabulary_of(tokenizer(), SIZE, (STOP,))


def ids(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


def open_engine(table: Any, draft: Any, trees: Sequence[TreeConfig] = TREES) -> Engine:
    """A lookup table as target, another as draft."""
    drafters = tuple(LookupDrafter(tree) for tree in trees)
    models = LookupTarget(SIZE), drafters, Params(table, draft)
    runner = ModelRunner(*models, slots=SLOTS, capacity=128, stop_width=1)
    return Engine(runner, chunks=(8,), readmits=True)


def request(seed: int, temperature: float = 1.0, new: int = NEW) -> Request:
    """The options of a row."""
    sampling = Sampling(
        np.asarray([temperature], np.float32),
        np.asarray([0], np.int32),
        np.asarray([1.0], np.float32),
        np.asarray([seed], np.uint32),
        np.asarray([-np.inf], np.float32),
    )
    return Request(sampling, np.asarray([[STOP]], np.int32), np.asarray([new], np.int32))


class Row(NamedTuple):
    """A row to decode."""

    prompt: Sequence[int]
    request: Request
    grammar: Grammar | None = None


class Text(NamedTuple):
    """What a row has emitted, and how it ended."""

    tokens: tuple[int, ...]
    finish: str | None
    reason: str | None


def decoded(
    engine: Engine, rows: Sequence[Row], candidate: int
) -> tuple[list[Text], list[GrammarState | None]]:
    """The rows side by side with one of the trees, and what their states have become.

    One more has a constraint that allows all, and runs as long as they do. So all launches are of
    one kind, and half as many programs are compiled.
    """
    pace = engine.submit(
        np.zeros(1, np.int32),
        replace(request(7, new=LONGEST), stop_tokens=-np.ones((1, 1), np.int32)),
        constraint=Anything(),
        candidate=candidate,
    )
    states = [row.grammar and row.grammar.state() for row in rows]
    texts = {
        engine.submit(
            np.asarray(row.prompt, np.int32),
            row.request,
            constraint=state,
            candidate=candidate,
        ): Text((), None, None)
        for row, state in zip(rows, states, strict=True)
    }
    while not all(text.finish for text in texts.values()):
        for output in engine.step():
            if output.id == pace:
                continue
            before = texts[output.id]
            assert before.finish is None, "nothing comes behind an end"
            texts[output.id] = Text((*before.tokens, *output.tokens), output.finish, output.reason)
    engine.cancel(pace)
    return list(texts.values()), states


def random_regex(draw: random.Random, depth: int = 3) -> str:
    """One that has a text of the vocabulary's; about half grow when a text is followed."""
    kind = draw.randrange(9 if depth else 2)
    inner = partial(random_regex, draw, depth - 1)
    if kind == 0:
        return draw.choice(LETTERS)
    if kind == 1:
        return f"[{''.join(draw.sample(LETTERS, 3))}]"
    if kind == 2:
        return f"({inner()}|{inner()})"
    if kind == 3:
        return f"({inner()}){draw.choice('*+?')}"
    if kind == 4:
        return f"({inner()}){{{draw.randrange(1, 4)},{draw.randrange(4, 30)}}}"
    if kind == 5:
        count, letter = draw.randrange(20, 400), draw.choice(LETTERS)
        return f"({letter}?){{{count}}}{letter}{{{count}}}"
    if kind == 6:
        first, second = draw.sample(LETTERS, 2)
        return f"[a-x]*{first}[a-x]{{{draw.randrange(2, 12)}}}{second}"
    return inner() + inner()


def forked_regex(draw: random.Random) -> str:
    """A choice at every few letters, one branch of which grows at once: drafts go there, too."""
    first = draw.sample(LETTERS[:-1], draw.randrange(3, 7))
    branches = [f"{letter}[{''.join(first)}]{{0,3}}" for letter in first]
    return f"({'|'.join(branches)}|{LETTERS[-1]}(a?){{300}}a{{300}}){{1,30}}"


def random_schema(draw: random.Random, depth: int = 2) -> dict[str, Any]:
    """A JSON schema, with many optional properties now and then."""
    kind = draw.randrange(7 if depth else 4)
    if kind == 0:
        return {"type": "integer"}
    if kind == 1:
        return {"enum": draw.sample([*LETTERS, "ab", "abc", 1, 2, None, True], 4)}
    if kind == 2:
        return {"type": "string", "pattern": f"^{random_regex(draw, 2)}$"}
    if kind == 3:
        return {"type": "string", "maxLength": draw.randrange(1, 60)}
    inner = partial(random_schema, draw, depth - 1)
    if kind == 4:
        return {"type": "array", "items": inner(), "maxItems": draw.randrange(1, 40)}
    if kind == 5:
        return {"anyOf": [inner() for _ in range(draw.randrange(2, 6))]}
    names = [f"{draw.choice(LETTERS)}{index}" for index in range(draw.choice((2, 5, 40, 300)))]
    leaf = inner()
    return {
        "type": "object",
        "properties": {name: leaf for name in names},
        "required": names[: draw.randrange(3)],
        "additionalProperties": draw.random() < 0.3,
    }


def random_grammar(draw: random.Random) -> Grammar:
    """A grammar, most of the time with lower bounds than the library's.

    Raises:
      ValueError: if it meets them at once.
    """
    kind = draw.random()
    if kind < 0.4:
        return compile_grammar(vocabulary(), regex=forked_regex(draw))
    limits = llguidance.LLParserLimits(
        max_items_in_row=draw.choice((15, 100, 2000, 2000)),
        step_lexer_fuel=draw.choice((300, 1000, 5000, 200_000, 200_000)),
        step_max_items=draw.choice((60, 300, 50_000, 50_000)),
        max_lexer_states=draw.choice((25, 60, 50_000, 50_000, 50_000)),
        verbose_errors=False,
    )
    if kind < 0.7:
        return compile_grammar(vocabulary(), regex=random_regex(draw), limits=limits)
    return compile_grammar(vocabulary(), json_schema=random_schema(draw), limits=limits)


@dataclass
class Counts:
    """What came of some grammars."""

    grammars: int = 0
    refused: int = 0
    """At once, in a sentence."""
    rows: int = 0
    """With a grammar; every one is decoded with every tree."""
    failed_rows: int = 0
    """That met a bound in the midst of their text."""
    failed_drafts: int = 0
    """Rows and trees in which a draft token met one, and the row did not."""
    different: int = 0
    """Rows and trees whose text, end or reason is not that of plain decoding."""
    different_alone: int = 0
    """Rows whose text is not that which they have without the others."""
    different_neighbours: int = 0
    """Rows without a grammar whose text differs from the one that they have alone."""
    restarts: int = 0
    """Of the engine."""


def _likely(letters: str) -> np.ndarray:
    """What makes these letters likelier, the last one less so, and the end rare."""
    bias = np.zeros(SIZE, np.float32)
    for letter in letters:
        bias[ids(letter)] = 2.0
    bias[ids(letters[-1])], bias[STOP] = 1.0, -2.0
    return bias


def fuzz(count: int, seed: int = 0, trees: Sequence[TreeConfig] = TREES) -> Counts:
    """Decode random grammars: two at once, one of them for two rows, next to a row without."""
    table = random_table(seed, HISTORIES, SIZE) + _likely(LETTERS)
    engine = open_engine(table, table + random_table(seed + 1, HISTORIES, SIZE, 0.7), trees)
    draw, found = random.Random(seed), Counts()
    prompts = [ids("ab"), ids("q"), ids('{"a": 1}, [0, 1]')]
    free = [Row(prompts[index % 3], request(index)) for index in range(6)]
    alone = [decoded(engine, [row], 0)[0][0] for row in free]
    while found.grammars < count:
        made: list[Grammar] = []
        while len(made) < 2 and found.grammars < count:
            found.grammars += 1
            try:
                made.append(random_grammar(draw))
            except ValueError:
                found.refused += 1
        if not made:
            break
        rows = [
            Row(draw.choice(prompts), request(draw.randrange(99), draw.choice((0.0, 1.0))), grammar)
            for grammar in (made[0], *made)
        ]
        index = draw.randrange(len(free))
        expected: list[Text] = []
        for candidate in range(len(trees)):
            (*texts, neighbour), states = decoded(engine, [*rows, free[index]], candidate)
            found.different_neighbours += neighbour != alone[index]
            expected = expected or texts
            for text, plain, state in zip(texts, expected, states[:-1], strict=True):
                found.different += text != plain
                assert state is not None
                found.failed_drafts += state._of_trees is None and text.finish != "error"
        found.rows += len(rows)
        found.failed_rows += sum(text.finish == "error" for text in expected)
        which = draw.randrange(len(rows))
        found.different_alone += decoded(engine, [rows[which]], 0)[0][0] != expected[which]
    found.restarts = engine.status.recoveries
    engine.close()
    return found


if __name__ == "__main__":
    counts = fuzz(int(sys.argv[1]), int((*sys.argv[2:], "0")[0]))
    print(json.dumps({field.name: getattr(counts, field.name) for field in fields(counts)}))
