"""Make questions of text files, for a target to answer (``python -m train.regenerate``).

    python -m train.questions --files='docs/*.jsonl' --out=questions.jsonl --count=20000
    python -m train.regenerate --target=TARGET --files=questions.jsonl --prefix_tokens=1500 ...

A draft learns best from what its target says (EAGLE-3, arXiv 2503.01840, section 4), and needs
questions for that. Of every document a piece is taken at random. A bit more than half of the rows
are pieces themselves, which the target continues. Most others ask for something to be done with a
piece: explain, test, summarise, review, rename. A tenth ask only about a word of it.

Rows of plain text are read as for training. The same files, count and seed give the same questions.
The exit status is 0, or 2 for bad input.
"""

import argparse
import json
import random
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from longspec_jax import cli, files
from longspec_jax.checks import Whole

from .config import DataConfig
from .data.documents import BadRows
from .data.loading import Documents, check_no_input

TASKS = (
    "Explain what this does, step by step.",
    "Write unit tests for this.",
    "Summarise this in a few sentences.",
    "Continue this.",
    "Review this, and write it out with your improvements.",
    "Rename the main names in this to clearer ones, and write it out again.",
    "Add docstrings and type annotations to this.",
    "Find the mistakes in this and correct them.",
    "Which questions would a beginner ask about this? Answer them.",
    "Rewrite this so that it is shorter.",
)
ABOUT = (
    "What is {word} for? Explain it with an example.",
    "Write a Python function called {word}, and explain it.",
    "Write a short tutorial about {word}.",
    "Tell me about {word}.",
    "Write a story about {word}.",
)
CONTINUED, ASKED = 0.55, 0.35
"""Shares of rows that are continued, and that ask about a piece; the rest ask about a word."""
PIECE, SHORTEST = (800, 6000), 400
"""Characters of a piece, from and to; fewer are no question."""
BEGINNING = 0.3
"""Share of pieces that begin where their document does."""
WORD = re.compile(r"[A-Za-z_][A-Za-z_]{4,24}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status."""
    return cli.run(lambda: _command(argv), argv)


def _command(argv: Sequence[str] | None) -> int:
    arguments = parser().parse_args(argv)
    data = DataConfig.whole(arguments)
    out = files.writable(files.expanded(arguments.out), arguments.out, of_results=False)
    check_no_input(out, data.files)
    turns = Documents(data, BadRows(0, ""))
    texts = [turn.content for row in turns for turn in row if not turn.role]
    rows = questions(texts, arguments.count, arguments.seed)
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    files.replace(out, lines.encode())
    print(f"{out} has {arguments.count} questions of {len(texts)} documents")
    return cli.OK


def questions(texts: Sequence[str], count: int, seed: int) -> Iterator[Mapping[str, Any]]:
    """Rows of ``text`` or ``messages``, as :mod:`train.regenerate` reads them.

    Raises:
      ValueError: if no document is long enough to ask about.
    """
    usable = [text for text in texts if len(text) >= SHORTEST]
    if not usable:
        raise ValueError(f"no document has {SHORTEST} characters; give longer ones in --files")
    rng = random.Random(seed)
    order: list[str] = []
    for _ in range(count):
        if not order:
            order = rng.sample(usable, len(usable))
        yield _question(order.pop(), rng)


def _question(text: str, rng: random.Random) -> Mapping[str, Any]:
    """A question of one document."""
    first = 0 if rng.random() < BEGINNING else rng.randrange(len(text) - SHORTEST + 1)
    piece = text[first : first + rng.randrange(*PIECE)]
    share = rng.random()
    if share < CONTINUED:
        return {"text": piece}
    words = WORD.findall(piece)
    if share < CONTINUED + ASKED or not words:
        content = f"{rng.choice(TASKS)}\n\n```\n{piece}\n```"
    else:
        content = rng.choice(ABOUT).format(word=rng.choice(words).replace("_", " ").strip())
    return {"messages": [{"role": "user", "content": content}]}


def parser() -> argparse.ArgumentParser:
    """The command's parser."""
    result = cli.Parser(prog=cli.command_name(__package__, "questions"), description=__doc__)
    text = "comma-separated json, jsonl, text or parquet files with plain text"
    result.add_argument("--files", required=True, help=text)
    result.add_argument("--out", required=True, metavar="FILE.jsonl", help="where rows are written")
    result.add_argument("--count", type=cli.COUNT, default=20_000, help="rows")
    seed = cli.value(Whole(0))
    result.add_argument("--seed", type=seed, default=0, help="another one gives other questions")
    result.set_defaults(hub=None, split="train")
    return result


if __name__ == "__main__":
    sys.exit(main())
