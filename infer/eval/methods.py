"""The methods that are compared, and how a run of them is named.

A method is a way to decode with a kind of draft, or without one. Its name is what the report calls
it; ``NAME=TREE`` asks for another tree, and is then the name.
"""

from __future__ import annotations  # Drafts are named in types alone, and import jax.

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from longspec_jax.config import DEFAULT_TREE, PLAIN, TreeConfig

if TYPE_CHECKING:
    from longspec_jax.drafters.draft import DefaultTrees, Draft

GAMMA = TreeConfig((1, 1, 1, 1))
"""The chain of the LongSpec release, for its own draft and for MagicDec."""


@dataclass(frozen=True)
class Method:
    """A way to decode."""

    kind: str | None
    """Of the draft it needs; None for none."""
    tree: Callable[[DefaultTrees, bool], TreeConfig | None] | None
    """``(usual trees of the draft, on a CPU) -> tree`` where none is named; None for what a call
    chooses itself."""
    about: str
    attention: str | None = None
    """Attention implementation instead of the run's."""
    adaptive: bool = False
    outside: bool = False
    """Whether Hugging Face transformers decodes, with PyTorch."""
    usual: bool = True
    """Whether it runs where no methods are named and its draft is there."""


def _tree(usual: DefaultTrees, cpu: bool) -> TreeConfig:
    """The paper's where nodes are nearly free; on a CPU they are not."""
    return TreeConfig((2, 2)) if cpu else DEFAULT_TREE


def _gamma(usual: DefaultTrees, cpu: bool) -> TreeConfig:
    return GAMMA


def _usual(usual: DefaultTrees, cpu: bool) -> TreeConfig:
    return (usual.cpu if cpu else usual.large)[0]


def _none(usual: DefaultTrees, cpu: bool) -> TreeConfig:
    return PLAIN


METHODS = {
    "plain": Method(None, _none, "the target alone, with this library's attention"),
    "plain-eager": Method(
        None,
        _none,
        "the target alone, with attention that writes out all scores (the papers' Vanilla HF)",
        attention="reference",
        usual=False,
    ),
    "longspec-tree": Method("longspec", _tree, "a LongSpec draft and a tree"),
    "longspec-chain": Method("longspec", _gamma, "a LongSpec draft and a chain of four"),
    "magicdec": Method(
        "streaming",
        _gamma,
        "the target over 32 first and 1024 last tokens of its own cache, and a chain of four",
    ),
    "ngram": Method("ngram", _usual, "what followed the last tokens before (prompt lookup)"),
    "small_lm": Method("small_lm", _usual, "a small language model"),
    "adaptive": Method(
        "longspec",
        None,
        "a LongSpec draft; each round takes a tree or none, by what they turn out to yield",
        adaptive=True,
        usual=False,
    ),
    "hf-plain": Method(None, None, "transformers' generate", outside=True, usual=False),
    "hf-prompt-lookup": Method(
        None,
        None,
        "transformers' generate with prompt_lookup_num_tokens",
        outside=True,
        usual=False,
    ),
    "hf-assisted": Method(
        "small_lm",
        None,
        "transformers' generate with an assistant model",
        outside=True,
        usual=False,
    ),
}
"""All methods, in the order in which they run."""
ALL = "all"
"""Stands for every method whose draft is there."""


@dataclass(frozen=True)
class Chosen:
    """A method of a run."""

    name: str
    """In records and reports."""
    base: str
    """Key of :data:`METHODS`."""
    named_tree: TreeConfig | None = None

    @property
    def method(self) -> Method:
        """What it stands for."""
        return METHODS[self.base]

    def tree(self, draft: Draft | None, cpu: bool) -> TreeConfig | None:
        """The tree it runs with this draft; None where the call chooses."""
        if self.named_tree is not None:
            return self.named_tree
        if self.method.tree is None:
            return None
        return PLAIN if draft is None else self.method.tree(draft.default_trees, cpu)


def settled(
    named: Sequence[Chosen], drafts: Sequence[Draft], with_torch: bool
) -> list[tuple[Chosen, Draft | None]]:
    """The methods of a run with their drafts, plain decoding among them, in the order of the table.

    Args:
      named: on the command line; those whose draft is there if empty.
      drafts: what is loaded.
      with_torch: whether PyTorch is installed, for ``all``.

    Raises:
      ValueError: for a method without its draft, naming the remedy.
    """
    kinds = by_kind(drafts)
    if not named:
        chosen = [Chosen(name, name) for name, method in METHODS.items() if method.usual]
        chosen = [each for each in chosen if each.method.kind in (None, *kinds)]
    elif any(each.base == ALL for each in named):
        wanted = [
            Chosen(name, name)
            for name, method in METHODS.items()
            if method.kind in (None, *kinds) and (with_torch or not method.outside)
        ]
        chosen = [*wanted, *(each for each in named if each.name not in {ALL, *METHODS})]
    else:
        chosen = list(named)
    if not any(each.name == "plain" for each in chosen):
        chosen = [Chosen("plain", "plain"), *chosen]  # What all others are compared with.
    order = list(METHODS)
    found = []
    for each in sorted(chosen, key=lambda each: order.index(each.base)):
        kind = each.method.kind
        if kind is not None and kind not in kinds:
            raise ValueError(
                f"--method={each.name} needs {_NEEDED[kind]}; the run has "
                f"{', '.join(kinds) or 'no drafter'}"
            )
        found.append((each, None if kind is None else kinds[kind]))
    return found


def by_kind(drafts: Sequence[Draft]) -> dict[str, Draft]:
    """The drafts by their kinds, in order.

    Raises:
      ValueError: for two of one kind, which methods could not tell apart.
    """
    from longspec_jax.drafters.retrieval.draft import RetrievalDraft

    found: dict[str, Draft] = {}
    for draft in drafts:
        # One whose trees are checked over retrieved context first is of its own kind still.
        kind = draft.inner.name if isinstance(draft, RetrievalDraft) else draft.name
        if kind in found:
            raise ValueError(
                f"two drafters are of the kind {kind}, and a method has one; measure each in a run "
                "of its own: --draft once for each kind"
            )
        found[kind] = draft
    return found


_NEEDED = {
    "longspec": "a LongSpec draft: --draft=FOLDER",
    "streaming": "--draft=streaming",
    "ngram": "--draft=ngram",
    "small_lm": "a small language model: --draft=FOLDER",
}
"""What to type for a kind of draft."""
