"""The suite that runs anywhere: four tasks over the documents that come with the package.

They were held out from the demo's training: source code with its documentation. ``demo_code`` goes
on with a file behind another one of the same project, ``demo_docs`` with a docstring,
``demo_copy`` with a passage from far back that has been begun once more, and ``demo_needle`` with
the code that a line far back gives. Every prompt has the same number of tokens, at most.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from longspec_jax import demo_prompts

from ..haystack import needle_document
from .samples import Sample

NEW_TOKENS = 64
"""Of every answer; needles are shorter."""
NEEDLE_TOKENS = 16
TOGETHER = (
    ("jinja2_lexer", "jinja2_compiler"),
    ("jinja2_environment", "jinja2_lexer"),
    ("networkx_classes_digraph", "networkx_algorithms_shortest_paths_weighted"),
    ("networkx_algorithms_shortest_paths_weighted", "networkx_classes_digraph"),
)
"""Files of one project: the first is seen whole or in part, the second is gone on with."""
DOCUMENTED = (
    "networkx_algorithms_shortest_paths_weighted",
    "networkx_classes_digraph",
    "jinja2_environment",
    "attr__make",
)
"""Files with long docstrings."""
QUOTES = '"""'
"""Of a docstring, at both of its ends."""
RECALLED = 64
"""Tokens of a passage that are said again before it is to be gone on with."""
DEPTHS = (0.1, 0.4, 0.7, 0.9)
"""Of the needles."""


def code(tokenizer: Any, context: int) -> Iterator[Sample]:
    """Code completion across files."""
    documents = demo_prompts()
    for first, second in TOGETHER:
        head = _tokens(tokenizer, f"# {first}.py\n{documents[first]}")[: context // 2]
        named = [*head, *_tokens(tokenizer, f"\n\n# {second}.py\n")]
        body = _tokens(tokenizer, documents[second])
        room = context - len(named)
        yield Sample(
            f"{second} behind {first}",
            (tokenizer.decode(body[room : room + NEW_TOKENS]),),
            prompt=[*named, *body[:room]],
        )


def documentation(tokenizer: Any, context: int) -> Iterator[Sample]:
    """Continuation of documentation, from the first lines of the longest docstring."""
    documents = demo_prompts()
    for name in DOCUMENTED:
        text = documents[name]
        pieces = text.split(QUOTES)
        longest = max(range(1, len(pieces) - 1, 2), key=lambda index: len(pieces[index]))
        start = len(QUOTES.join(pieces[:longest])) + len(QUOTES)
        cut = text.index("\n", start + len(pieces[longest]) // 4) + 1
        rest = _tokens(tokenizer, text[cut:])[:NEW_TOKENS]
        prompt = _tokens(tokenizer, text[:cut])[-context:]
        yield Sample(name, (tokenizer.decode(rest),), prompt=prompt)


def recall(tokenizer: Any, context: int) -> Iterator[Sample]:
    """Copying from far back: an early passage is begun once more at the end."""
    documents = demo_prompts()
    for name in DOCUMENTED:
        text = documents[name]
        # A token is about three letters; of a context longer than the document it is its middle.
        start = text.index("\n\n", min(context // 4, len(text) // 2)) + 2
        passage = _tokens(tokenizer, text[start:])
        again = [*_tokens(tokenizer, "\n\n"), *passage[:RECALLED]]
        before = _tokens(tokenizer, text)[: context - len(again)]
        rest = passage[RECALLED : RECALLED + NEW_TOKENS]
        yield Sample(name, (tokenizer.decode(rest),), prompt=[*before, *again])


def needles(tokenizer: Any, texts: Sequence[str], context: int, seed: int = 0) -> Iterator[Sample]:
    """Codes hidden in documents of exactly so many tokens, at several depths."""

    def tokenize(text: str) -> list[int]:
        return _tokens(tokenizer, text)

    for index, depth in enumerate(DEPTHS):
        found = needle_document(tokenize, texts, context, depth, seed + index)
        yield Sample(f"{depth:g} of {context}", (found.code,), prompt=found.tokens)


def hidden(tokenizer: Any, context: int) -> Iterator[Sample]:
    """Needles in the package's documents."""
    return needles(tokenizer, [*demo_prompts().values()], context)


SUITE: dict[str, Callable[[Any, int], Iterator[Sample]]] = {
    "demo_code": code,
    "demo_docs": documentation,
    "demo_copy": recall,
    "demo_needle": hidden,
}
"""Its tasks: what makes their samples of a tokenizer and a number of tokens."""


def _tokens(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]
