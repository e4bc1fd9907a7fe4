"""The methods that a run compares.

A method is a way to decode with a kind of draft, or without one. ``NAME=TREE`` runs it with another
tree, and is then its name in records and reports.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from longspec_jax.config.tree import DEFAULT_TREE, PLAIN, TreeConfig
from longspec_jax.drafters.registry import is_name

if TYPE_CHECKING:  # Imports jax, which --help does without.
    from longspec_jax.drafters.draft import Draft

JOINED = "joined"
"""In place of a kind: all drafts of the run together."""
GAMMA = TreeConfig((1, 1, 1, 1))
"""The chain of the LongSpec release, for its own draft and for MagicDec."""


@dataclass(frozen=True)
class Method:
    """A way to decode."""

    kind: str | None
    """Of the draft it needs; None for none."""
    about: str
    trees: tuple[TreeConfig, TreeConfig] | None = None
    """On accelerators and on a CPU; the default trees of the draft if absent."""
    attention: str | None = None
    """Attention implementation instead of the run's."""
    adaptive: bool = False
    default: bool = True
    """Whether it runs with its draft if no methods are named."""


METHODS = {
    "plain": Method(None, "the target alone, with this library's attention", (PLAIN, PLAIN)),
    "plain-eager": Method(
        None,
        "the target alone, with attention that writes out all scores (the papers' Vanilla HF)",
        (PLAIN, PLAIN),
        attention="reference",
        default=False,
    ),
    "longspec-tree": Method(
        "longspec", "a LongSpec draft and a tree", (DEFAULT_TREE, TreeConfig((2, 2)))
    ),
    "longspec-chain": Method("longspec", "a LongSpec draft and a chain of four", (GAMMA, GAMMA)),
    "magicdec": Method(
        "streaming",
        "the target over 32 first and 1024 last tokens of its own cache, and a chain of four",
        (GAMMA, GAMMA),
    ),
    "ngram": Method("ngram", "the tokens that followed the last ones before (prompt lookup)"),
    "suffix": Method("suffix", "the continuations of the best match, here or in other rows"),
    "small_lm": Method("small_lm", "a small language model"),
    "eagle3": Method("eagle3", "an EAGLE-3 draft"),
    "peagle": Method("peagle", "a P-EAGLE draft"),
    "eagle": Method("eagle", "an EAGLE-1 or 2 draft"),
    "mtp": Method("mtp", "a layer of multi-token prediction"),
    "assistant": Method("assistant", "an assistant of Gemma 4"),
    "medusa": Method("medusa", "Medusa heads"),
    "tokenswift": Method("tokenswift", "the target over a part of its cache, and heads after it"),
    "dflash": Method("dflash", "a DFlash or DSpark draft"),
    "parallel": Method("parallel", "a parallel LongSpec draft"),
    "joined": Method(JOINED, "all drafts of the run and prompt lookup, in one tree", default=False),
    "adaptive": Method(
        "longspec",
        "a LongSpec draft; each round takes a tree or none, by measured tokens per second",
        adaptive=True,
        default=False,
    ),
}
"""All methods, in the order in which they run."""
ALL = "all"
"""Stands for every method whose draft is loaded."""


@dataclass(frozen=True)
class Chosen:
    """A method of a run."""

    name: str
    """In records and reports."""
    base: str
    """Key of :data:`METHODS`, or a kind that has none."""
    named_tree: TreeConfig | None = None

    @property
    def method(self) -> Method:
        """Its entry in the table; of a kind that has none, its draft and that draft's trees."""
        return METHODS.get(self.base, Method(self.base, ""))

    def tree(self, draft: "Draft | None", cpu: bool) -> TreeConfig | None:
        """The tree it runs with this draft; None if every call chooses."""
        if self.named_tree is not None:
            return self.named_tree
        if self.method.adaptive:
            return None
        if self.method.trees is not None:
            return self.method.trees[cpu]
        if draft is None:
            return PLAIN
        return (draft.default_trees.cpu if cpu else draft.default_trees.large)[0]


def with_drafts(
    named: Sequence[Chosen], drafts: "Sequence[Draft]"
) -> "list[tuple[Chosen, Draft | None]]":
    """The methods of a run with their drafts, plain decoding among them, in the order of the table.

    Raises:
      ValueError: for a method without its draft, naming the remedy.
    """
    from longspec_jax.drafters.joined import JoinedDraft
    from longspec_jax.loading import with_lookup

    kinds = by_kind(drafts)
    order = [*METHODS, *sorted(kinds.keys() - {method.kind for method in METHODS.values()})]
    if len(together := with_lookup(tuple(drafts))) > 1:
        kinds[JOINED] = JoinedDraft(together)
    every = (Chosen(name, name) for name in order)
    possible = [each for each in every if each.method.kind in (None, *kinds)]
    if not named:
        chosen = [each for each in possible if each.method.default]
    elif any(each.base == ALL for each in named):
        chosen = [*possible, *(each for each in named if each.name not in {ALL, *METHODS})]
    else:
        chosen = list(named)
    if not any(each.name == "plain" for each in chosen):
        chosen = [Chosen("plain", "plain"), *chosen]  # All others are compared with it.
    found = []
    for each in sorted(chosen, key=lambda each: order.index(each.base)):
        kind = each.method.kind
        if kind is not None and kind not in kinds:
            needed = f"--draft={kind}" if is_name(kind) else f"a {kind} draft: --draft=FOLDER"
            raise ValueError(
                f"--method={each.name} needs {needed}; the run has {', '.join(kinds) or 'no draft'}"
            )
        found.append((each, None if kind is None else kinds[kind]))
    return found


def by_kind(drafts: "Sequence[Draft]") -> "dict[str, Draft]":
    """The drafts by their kinds, in order.

    Raises:
      ValueError: for two of one kind: a method names a kind.
    """
    from longspec_jax.drafters.retrieval.hierarchy import RetrievalDraft

    found: dict[str, Draft] = {}
    for draft in drafts:
        # Partial verification over retrieved context wraps a draft of another kind.
        kind = draft.inner.name if isinstance(draft, RetrievalDraft) else draft.name
        if kind in found:
            raise ValueError(
                f"two drafts are of the kind {kind}, and a method has one; measure each in a run "
                "of its own: --draft once for each kind"
            )
        found[kind] = draft
    return found
