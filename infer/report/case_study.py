"""Texts coloured by the origin of their tokens, and the trees of their rounds.

The first token of a text comes from the prefill. Every round then emits the draft tokens that the
target's own draws accept, at depth 1, 2, ..., and the bonus, the draw behind the last of them.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from longspec_jax.cli import counted

from ..eval.records import RoundTree, SampleRecord
from .blocks import Block

Origin = Literal["prefill", "draft", "bonus"]
DEEPEST_SHADE = 8
"""Deeper tokens share the colour of this depth."""
REASONS = {
    "not proposed": "the draft had not proposed what the target drew",
    "nothing below": "the tree has nothing below the last accepted node",
    "ended": "the text ended",
}
"""Why the accepted path ended, by the records' words."""


@dataclass(frozen=True)
class Token:
    """One token of a text."""

    text: str
    origin: Origin
    depth: int
    """In the draft's tree; 0 for the prefill's token and the bonus."""
    round: int
    """Number of its round, from 1; 0 for the prefill's."""

    @property
    def shown(self) -> str:
        """The text, with a sign for a line break and for an empty text."""
        return self.text.replace("\n", "↵\n") or "∅"

    @property
    def shade(self) -> str:
        """The style sheet's class of the origin."""
        return f"depth-{min(self.depth, DEEPEST_SHADE)}" if self.depth else self.origin


@dataclass(frozen=True)
class CaseStudy:
    """A text whose rounds were kept."""

    block: str
    record: SampleRecord
    tokens: tuple[Token, ...]
    trees: tuple[RoundTree, ...]
    """Of the first rounds."""

    @property
    def rounds(self) -> list[tuple[Token, ...]]:
        """The tokens of every round, the prefill's first."""
        groups: dict[int, list[Token]] = {}
        for token in self.tokens:
            groups.setdefault(token.round, []).append(token)
        return [tuple(group) for group in groups.values()]

    @property
    def data(self) -> list[dict[str, Any]]:
        """The trees as the page's script reads them."""
        return [_tree_data(tree) for tree in self.trees]


def case_studies(blocks: Iterable[Block]) -> Iterator[CaseStudy]:
    """All texts whose rounds were kept."""
    for block in blocks:
        for record in block.records:
            if record.rounds is not None and record.pieces is not None:
                yield CaseStudy(block.label, record, tokens(record), record.rounds)


def tokens(record: SampleRecord) -> tuple[Token, ...]:
    """The tokens of a text with their origins.

    Raises:
      ValueError: if its counts contradict each other.
    """
    pieces = record.pieces or ("",)
    if len(pieces) != 1 + sum(record.emitted_by_round):
        raise ValueError(
            f"{record.task}, sample {record.sample}, {record.method}: {len(pieces)} pieces of text "
            f"for {1 + sum(record.emitted_by_round)} tokens by round; remove the line, and the run "
            "measures it again"
        )
    found = [Token(pieces[0], "prefill", 0, 0)]
    counts = zip(record.emitted_by_round, record.accepted_by_round, strict=True)
    for number, (emitted, accepted) in enumerate(counts, start=1):
        for depth in range(1, emitted + 1):
            drafted = depth <= accepted
            origin: Origin = "draft" if drafted else "bonus"
            found.append(Token(pieces[len(found)], origin, depth if drafted else 0, number))
    return tuple(found)


def _tree_data(tree: RoundTree) -> dict[str, Any]:
    """A round, with short keys: the page has many."""
    why, below = REASONS[tree.stop], tree.parents.count(tree.path[-1])
    among = f"{why} (among {counted(below, 'candidate')})"
    return {
        "texts": tree.texts,
        "parents": tree.parents,
        "path": tree.path,
        "drawn": [tree.drawn_texts[node] for node in tree.path],
        "why": among if tree.stop == "not proposed" else why,
    }


def shades(cases: Sequence[CaseStudy]) -> list[int]:
    """Depths that the legend explains."""
    deepest = max((token.depth for case in cases for token in case.tokens), default=0)
    return list(range(1, min(deepest, DEEPEST_SHADE) + 1))
