"""What a run may choose among: no tree, a smaller tree, and the drafters' own trees."""

from collections.abc import Sequence
from dataclasses import replace

from longspec_jax.config.tree import PLAIN, TreeConfig
from longspec_jax.drafters.base import Drafter
from longspec_jax.drafters.draft import with_tree
from longspec_jax.drafters.retrieval.hierarchy import Hierarchy, on_one_level

SMALL = 16
"""Nodes of the small tree among which an engine chooses by its load."""


def smaller_tree(tree: TreeConfig) -> TreeConfig:
    """A chain of half a tree's levels: most of what is accepted, where every node costs.

    ``(4, 16, 16, 16, 16)`` becomes ``(1, 1, 1)``. Lookup keeps its levels. Of a chain with a tree
    at its end it is half the chain with the same tree.
    """
    if tree.lookup:
        widths = (1,) * -(-len(tree.widths) // 2)
        return TreeConfig(widths, min(tree.num_nodes, SMALL), lookup=tree.lookup)
    if tree.chain:
        half, end = -(-tree.chain // 2), tree.end
        budget = None if end.budget is None else half + end.budget
        return TreeConfig((1,) * half + end.widths, budget, tree.threshold, half)
    return TreeConfig((1,) * -(-tree.num_levels // 2), chain=tree.chain)


def candidates(drafters: Sequence[Drafter]) -> tuple[Drafter, ...]:
    """What a run may choose among: no tree, and the drafters; a smaller tree too of a single one.

    Partial verification does not pay everywhere, so of a single hierarchy its draft's own tree is
    one as well, verified on one level.

    Args:
      drafters: of which each differs from the others in its tree.

    Returns:
      The candidates, the cheapest first.
    """
    own = list(drafters)
    if len(own) == 1:
        [alone] = own
        own.insert(0, with_tree(alone, smaller_tree(alone.tree)))
        if isinstance(alone, Hierarchy) and alone.levels:
            own.append(with_tree(alone, on_one_level(alone.inner.tree)))
    own.sort(key=lambda drafter: drafter.tree.num_nodes)
    return tuple(dict.fromkeys([with_tree(own[0], PLAIN), *own]))


def candidates_by_load(drafters: Sequence[Drafter]) -> tuple[Drafter, ...]:
    """What an engine may choose among by its load: no tree, a small tree, and the default one.

    At eight rows 64 nodes of each cost two to three plain rounds, and 16 nodes less than two. A
    default tree that is small itself has no smaller one beside it, whose programs would take as
    long to compile.

    Args:
      drafters: as of :func:`candidates`; of each name the first one counts.

    Returns:
      The candidates, the cheapest first.
    """
    default = {drafter.name: drafter for drafter in reversed(drafters)}
    own = [default[name] for name in dict.fromkeys(drafter.name for drafter in drafters)]
    both = [*own, *(with_tree(one, smaller) for one in own if (smaller := _small_tree(one)))]
    both.sort(key=lambda drafter: drafter.tree.num_nodes)
    return tuple(dict.fromkeys([with_tree(own[0], PLAIN), *both]))


def _small_tree(drafter: Drafter) -> TreeConfig | None:
    tree = drafter.tree
    if tree.num_nodes <= SMALL:
        return None
    return smaller_tree(tree) if isinstance(drafter, Hierarchy) else replace(tree, budget=SMALL)


def tallest(drafters: Sequence[Drafter]) -> Drafter:
    """The drafter with the tallest tree, whose rounds need the most slack slots."""
    return max(drafters, key=lambda drafter: drafter.tree.num_levels)
