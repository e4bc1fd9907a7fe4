"""The tasks: where their samples come from, how they ask, and how long the answers may be.

Wordings and numbers of new tokens are published: by LongBench (github.com/THUDM/LongBench,
``dataset2prompt.json`` and ``dataset2maxlen.json``) and by the LongSpec release, whose evaluation
script uses LongBench's questions except for the two tasks about code.

The demo tasks need no data. They are made of the documents that come with the package, source code
that was held out from the demo's training: ``demo_code`` continues a file after another one of its
project, ``demo_docs`` a docstring, ``demo_copy`` a passage from far back that has begun again, and
``demo_needle`` gives the code that a line far back hides. A prompt has at most ``--context``
tokens.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from longspec_jax import demo_prompts
from longspec_jax.checks import Tokenizer

from ..prompts import Item

RELEASE_TOKENS = 1024
"""New tokens of every task in the LongSpec release."""
AIME_TOKENS = 32768
"""New tokens of a problem in the LongSpec paper."""
EXTENDED_TOKENS = 256
"""New tokens on books in SpecExtend (arXiv:2505.20776, appendix D)."""


@dataclass(frozen=True)
class Wording:
    """How a task asks."""

    question: str
    """With fields in braces."""
    answer: str = ""
    """Beginning of the answer."""
    between: str = "\n\n"
    """Between the two, if both are one text."""

    def filled(self, fields: Mapping[str, str]) -> str:
        """The question with its fields filled in."""
        return self.question.format_map(fields)

    def whole(self, fields: Mapping[str, str]) -> str:
        """Question and beginning of the answer as one text."""
        return self.filled(fields) + (self.between + self.answer if self.answer else "")


@dataclass(frozen=True)
class Sample:
    """One question: fields for its task's wording, or a finished prompt."""

    name: str
    references: tuple[str, ...] = ()
    fields: Mapping[str, str] = field(default_factory=dict)
    prompt: Item | None = None
    """Text, chat messages or token ids, instead of fields."""


@dataclass(frozen=True)
class Hub:
    """Where a task's data are on the hub."""

    dataset: str
    split: str = "test"
    archive: str | None = None
    """A zip file in the dataset that holds ``TASK.jsonl``, for data behind a dataset script."""


LONGBENCH = Hub("THUDM/LongBench", archive="data.zip")


@dataclass(frozen=True)
class Task:
    """A task whose samples are rows of a file."""

    fields: tuple[str, ...]
    """Fields of a row that fill the wordings."""
    wording: Wording
    metric: str | None
    """Key of :data:`infer.eval.scores.METRICS`."""
    answers: str = "answers"
    """Field of a row that holds the references."""
    hub: Hub = LONGBENCH
    new_tokens: int = RELEASE_TOKENS
    long: bool = True
    """Whether the release's least length of prompts holds."""
    books: bool = False
    """Whether a text is cut to ``--context`` tokens, as in papers that report by input length."""


COMPLETE = "Please complete the code given below. \n{context}"
SUMMARY = Wording(
    "You are given a report by a government agency. Write a one-page summary of the report.\n\n"
    "Report:\n{context}\n\nNow, write a one-page summary of the report.",
    "Summary:",
)
ANSWER = Wording(
    "You are given a meeting transcript and a query containing a question or instruction. Answer "
    "the query in one or more sentences.\n\nTranscript:\n{context}\n\nNow, answer the query based "
    "on the above meeting transcript in one or more sentences.\n\nQuery: {input}",
    "Answer:",
    between="\n",
)
NEWS = Wording(
    "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n"
    "{context}\n\nNow, write a one-page summary of all the news.",
    "Summary:",
)
RELEASE_CODE = Wording(COMPLETE + "Now, complete the code given.")
"""Without the input of repobench-p, the beginning of the file to complete."""
PROBLEM = Wording("{problem}")
BOOK = Wording("{text}")
CODE = Task(("context",), RELEASE_CODE, "edit_similarity")

TASKS = {
    "gov_report": Task(("context",), SUMMARY, "rouge_l"),
    "qmsum": Task(("context", "input"), ANSWER, "rouge_l"),
    "multi_news": Task(("context",), NEWS, "rouge_l"),
    "lcc": CODE,
    "repobench-p": replace(CODE, fields=("context", "input")),
    "aime24": Task(
        ("problem",),
        PROBLEM,
        "exact_match",
        answers="answer",
        hub=Hub("AI-MO/aimo-validation-aime", split="train"),
        new_tokens=AIME_TOKENS,
        long=False,
    ),
    "pg19": Task(
        ("text",),
        BOOK,
        None,
        answers="",
        hub=Hub("emozilla/pg19-test"),
        new_tokens=EXTENDED_TOKENS,
        long=False,
        books=True,
    ),
}
"""Tasks of rows, by the names that papers give them."""
AIME24_ROWS = range(60, 90)
"""The problems of 2024 among those of three years, by their ``id``."""
FREE = "jsonl"
"""The task of prompts in a user's file."""
NEEDLE = "needle"
"""The task of a code hidden in a long document."""
DEMO_SUITE = "demo"

SENTENCE = "# The access code of the {adjective} {noun} is"
"""A comment in source code, a heading in prose."""
ADJECTIVES = "amber brave calm dusty early frozen gentle hollow iron jolly".split()
NOUNS = "harbour orchard lantern meadow castle river bakery library tower garden".split()
DIGITS = 8
"""Of the code: chance finds no such number."""

DEMO_TOKENS = 64
NEEDLE_TOKENS = 16
TOGETHER = (
    ("jinja2_lexer", "jinja2_compiler"),
    ("jinja2_environment", "jinja2_lexer"),
    ("networkx_classes_digraph", "networkx_algorithms_shortest_paths_weighted"),
    ("networkx_algorithms_shortest_paths_weighted", "networkx_classes_digraph"),
)
"""Files of one project: the prompt has the first, whole or in part, and begins the second."""
DOCUMENTED = (
    "networkx_algorithms_shortest_paths_weighted",
    "networkx_classes_digraph",
    "jinja2_environment",
    "attr__make",
)
QUOTES = '"""'
"""Around a docstring."""
RECALLED = 64
"""Tokens of a passage that are repeated before the answer continues it."""
DEPTHS = (0.1, 0.4, 0.7, 0.9)


def code(tokenizer: Tokenizer, context: int) -> Iterator[Sample]:
    """Code completion across files."""
    documents = demo_prompts()
    for first, second in TOGETHER:
        head = _tokens(tokenizer, f"# {first}.py\n{documents[first]}")[: context // 2]
        named = [*head, *_tokens(tokenizer, f"\n\n# {second}.py\n")]
        body = _tokens(tokenizer, documents[second])
        room = context - len(named)
        yield Sample(
            f"{second} after {first}",
            (tokenizer.decode(body[room : room + DEMO_TOKENS]),),
            prompt=[*named, *body[:room]],
        )


def documentation(tokenizer: Tokenizer, context: int) -> Iterator[Sample]:
    """Continuing documentation, from the first lines of the longest docstring."""
    documents = demo_prompts()
    for name in DOCUMENTED:
        text = documents[name]
        pieces = text.split(QUOTES)
        longest = max(range(1, len(pieces) - 1, 2), key=lambda index: len(pieces[index]))
        start = len(QUOTES.join(pieces[:longest])) + len(QUOTES)
        cut = text.index("\n", start + len(pieces[longest]) // 4) + 1
        rest = _tokens(tokenizer, text[cut:])[:DEMO_TOKENS]
        prompt = _tokens(tokenizer, text[:cut])[-context:]
        yield Sample(name, (tokenizer.decode(rest),), prompt=prompt)


def recall(tokenizer: Tokenizer, context: int) -> Iterator[Sample]:
    """Copying from far back: the end of the prompt begins an early passage again."""
    documents = demo_prompts()
    for name in DOCUMENTED:
        text = documents[name]
        # A token has about three letters. A context longer than the document takes its middle.
        start = text.index("\n\n", min(context // 4, len(text) // 2)) + 2
        passage = _tokens(tokenizer, text[start:])
        again = [*_tokens(tokenizer, "\n\n"), *passage[:RECALLED]]
        before = _tokens(tokenizer, text)[: context - len(again)]
        rest = passage[RECALLED : RECALLED + DEMO_TOKENS]
        yield Sample(name, (tokenizer.decode(rest),), prompt=[*before, *again])


def needles(
    tokenizer: Tokenizer, texts: Sequence[str], context: int, seed: int = 0
) -> Iterator[Sample]:
    """Codes hidden in documents of exactly ``context`` tokens, at several depths."""
    for index, depth in enumerate(DEPTHS):
        tokens, code = needle_document(tokenizer, texts, context, depth, seed + index)
        yield Sample(f"{depth:g} of {context}", (code,), prompt=tokens)


def hidden(tokenizer: Tokenizer, context: int) -> Iterator[Sample]:
    """Needles in the package's documents."""
    return needles(tokenizer, [*demo_prompts().values()], context)


SUITE: dict[str, Callable[[Tokenizer, int], Iterator[Sample]]] = {
    "demo_code": code,
    "demo_docs": documentation,
    "demo_copy": recall,
    "demo_needle": hidden,
}
"""The demo tasks: from a tokenizer and a number of tokens to samples."""


def _tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def needle_document(
    tokenizer: Tokenizer, texts: Sequence[str], length: int, depth: float, seed: int
) -> tuple[list[int], str]:
    """A document of exactly ``length`` tokens with a line that gives a code, and the code.

    The document ends with that line again, up to the code.

    Args:
      tokenizer: a transformers tokenizer.
      texts: what surrounds the needle, repeated as needed; the seed chooses the first.
      length: tokens, the needle and the question at the end included.
      depth: of the needle, at the nearest end of a line: 0 is the beginning, 1 the end.
      seed: of words, code and text.

    Raises:
      ValueError: if there is no room for text around the needle.
    """
    draw = np.random.default_rng(seed)
    sentence = SENTENCE.format(adjective=draw.choice(ADJECTIVES), noun=draw.choice(NOUNS))
    code = "".join(map(str, draw.integers(0, 10, DIGITS)))
    question, answer, end = (
        _tokens(tokenizer, text) for text in (f"\n{sentence}", f" {code}", "\n")
    )
    needle = [*question, *answer, *end]
    room = length - len(needle) - len(question)
    if room < 1:
        raise ValueError(
            f"{length} tokens leave no room around a needle of {len(needle)} tokens and its "
            f"question of {len(question)}; name a longer --context"
        )
    hay = _hay(tokenizer, texts, room, int(draw.integers(len(texts))))
    line_ends = {_tokens(tokenizer, text)[-1] for text in ("\n", "a\n", "a.\n", ":\n")}
    ends = [0, *(index + 1 for index, token in enumerate(hay) if token in line_ends)]
    place = min(ends, key=lambda end: abs(end - depth * room))
    return [*hay[:place], *needle, *hay[place:], *question], code


def _hay(tokenizer: Tokenizer, texts: Sequence[str], length: int, first: int) -> list[int]:
    """``length`` tokens of the texts, from one of them on."""
    hay: list[int] = []
    while len(hay) < length:
        before = len(hay)
        for index in range(len(texts)):
            hay += _tokens(tokenizer, texts[(first + index) % len(texts)])
            if len(hay) >= length:
                break
        if len(hay) == before:
            raise ValueError("the texts around the needle are empty; name files with text in them")
    return hay[:length]


def metric_of(task: str) -> str | None:
    """What scores a task's answers: a key of :data:`infer.eval.scores.METRICS`, or None."""
    if task in (NEEDLE, "demo_needle"):
        return "found"
    if task in SUITE:
        return "whole_similarity"
    return TASKS[task].metric if task in TASKS else None
