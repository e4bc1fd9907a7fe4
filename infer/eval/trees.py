"""Rounds as trees, for whoever wants to see what was proposed and why the walk stopped."""

from collections.abc import Iterable, Sequence
from typing import Any

from longspec_jax.generation.inspection import RoundView

from .records import RoundTree, Stop


def round_trees(
    views: Iterable[RoundView], tokenizer: Any, emitted: Sequence[int]
) -> tuple[RoundTree, ...]:
    """The first rounds of a row.

    Args:
      views: of its rounds.
      tokenizer: a transformers tokenizer.
      emitted: tokens of each of these rounds; a walk may have gone beyond the end of the text.
    """
    return tuple(
        _round_tree(view, tokenizer, count) for count, view in zip(emitted, views, strict=False)
    )


def _round_tree(view: RoundView, tokenizer: Any, emitted: int) -> RoundTree:
    tree = view.tree
    path = tree.path[:emitted]
    below = any(parent == path[-1] for parent in tree.parents[1:])
    stop: Stop = "not proposed" if below else "nothing below"
    return RoundTree(
        position=view.position,
        tokens=tree.tokens,
        texts=_texts(tokenizer, tree.tokens),
        parents=tree.parents,
        drawn=tree.draws,
        drawn_texts=_texts(tokenizer, tree.draws),
        path=path,
        stop="ended" if emitted < len(tree.path) else stop,
    )


def _texts(tokenizer: Any, tokens: Sequence[int]) -> tuple[str, ...]:
    """What tokens read on their own."""
    return tuple(tokenizer.decode([token]) for token in tokens)
