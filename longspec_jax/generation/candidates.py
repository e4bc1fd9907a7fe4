"""Which trees a call chooses among: from the drafts' default trees to drafters with their trees.

The number of nodes that a round verifies is chosen in three steps. Here are the *candidates* of a
call: plain decoding and a few trees that may pay on such a machine. :mod:`~.speeds` says which of
them the call begins with, by what earlier calls have shown. The policy
(:mod:`longspec_jax.decoding.policy`) goes on choosing as the call runs. A call that names its tree
has one candidate.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh

from longspec_jax.config.tree import PLAIN, TreeConfig
from longspec_jax.decoding.batch_invariant import check_tree, serves_tree
from longspec_jax.drafters.base import Drafter, NoDraft
from longspec_jax.drafters.draft import DefaultTrees, with_tree
from longspec_jax.drafters.retrieval.hierarchy import PartialVerifier, on_one_level
from longspec_jax.generation.models import Models

SEVERAL = 4
"""Rows decoded together from which a large target has smaller trees to choose from: 64 nodes of
each are 256 in one pass."""
SPARSE_LEVELS = 4, 3, 5
"""Levels of the chains for a target of experts, the default one first."""
SMALL = 16
"""Nodes of the small tree among which an engine chooses by its load."""


def candidates(drafters: Sequence[Drafter]) -> tuple[Drafter, ...]:
    """What a run may choose among: no tree, and the drafters; a smaller tree too of a single one.

    Partial verification does not pay everywhere, so of a single hierarchy its draft's own tree is
    one as well, verified on one level.

    Args:
      drafters: each differs from the others in its tree.

    Returns:
      The candidates, the cheapest first.
    """
    own = list(drafters)
    if len(own) == 1:
        [alone] = own
        own.insert(0, with_tree(alone, smaller_tree(alone.tree)))
        if isinstance(alone, PartialVerifier) and alone.levels:
            own.append(with_tree(alone, on_one_level(alone.inner.tree)))
    own.sort(key=lambda drafter: drafter.tree.num_nodes)
    return tuple(dict.fromkeys([with_tree(own[0], PLAIN), *own]))


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


def candidates_by_load(drafters: Sequence[Drafter]) -> tuple[Drafter, ...]:
    """What an engine may choose among by its load: no tree, a small tree, and the default one.

    At eight rows 64 nodes of each cost two to three plain rounds, and 16 nodes less than two. A
    default tree that is small itself has no smaller one next to it, whose programs would take as
    long to compile.

    Args:
      drafters: as in :func:`candidates`; of each name the first one counts.

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
    return (
        smaller_tree(tree) if isinstance(drafter, PartialVerifier) else replace(tree, budget=SMALL)
    )


def drafters_for(
    models: Models,
    tree: TreeConfig | None,
    rows: int,
    *,
    adaptive: bool,
    choices: Callable[[Sequence[Drafter]], tuple[Drafter, ...]] = candidates,
) -> tuple[tuple[Drafter, ...], Any]:
    """The drafters that a call may run, and their parameters, which they share.

    Args:
      tree: the tree that the call names, if it names one.
      adaptive: whether the run itself chooses, by the clock.
      choices: what it then chooses among, of the drafters.

    Raises:
      ValueError: for a tree without a draft, one that is too large for the same bits, and for a
        choice among nothing.
      NotImplementedError: for more nodes of all rows than have the same bits.
    """
    chosen = models.tree if tree is None else tree
    draft = models.proposer
    if draft is None and tree is None:
        chosen = PLAIN
    if chosen == PLAIN:
        if adaptive:
            raise ValueError(
                "adaptive=True has nothing to choose: this call decodes plainly; load a draft "
                "and leave its tree in place, or drop adaptive"
            )
        return (NoDraft(),), None
    if draft is None:
        raise ValueError(
            f"tree {chosen} needs a draft and none is loaded; pass draft= to from_pretrained, "
            "or tree=PLAIN"
        )
    if chosen is not None and chosen.lookup and not any(each.looks_up for each in models.drafts):
        raise ValueError(
            f"tree {chosen} asks for prompt lookup, and no draft that looks up is loaded; load "
            f"ngram next to the draft, or leave ~{chosen.lookup} out"
        )
    if chosen is not None and chosen.lookup and all(each.looks_up for each in models.drafts):
        if chosen.widths:
            raise ValueError(
                f"tree {chosen} has nodes for a model's draft next to lookup, and only drafts that "
                f"look up are loaded; write none@{chosen.num_nodes}~{chosen.lookup}"
            )
        # The tree is only theirs, and lookup its levels.
        chosen = replace(chosen.looked_up, budget=chosen.budget)
    together = rows if models.max_num_seqs is None else min(rows, models.max_num_seqs)
    target = models.target
    if chosen is not None:
        check_tree(target, chosen)
        trees = (chosen,)
    else:
        trees = likely_trees(
            draft.default_trees,
            models.large,
            models.mesh,
            rows=together,
            sparse=target.config.is_sparse,
            serves=partial(serves_tree, target),
        )
        if adaptive:  # Its candidates have plain decoding of their own.
            trees = tuple(each for each in trees if each.num_levels)
        elif models.offload:  # Moving the cache takes the same time under every tree.
            trees = trees[:1]
    target.check_rows(together, max((tree.num_nodes for tree in trees), default=1))
    drafters = tuple(draft.drafter(tree, models.attention) for tree in trees)
    return choices(drafters) if adaptive else drafters, draft.params


def likely_trees(
    defaults: DefaultTrees,
    large: bool,
    mesh: Mesh | None,
    *,
    rows: int = 1,
    sparse: bool = False,
    serves: Callable[[TreeConfig], bool] = bool,
) -> tuple[TreeConfig, ...]:
    """What a call without a tree may run: the usual tree first, plain decoding last.

    Only the first where it is settled, and where no clock may choose.

    Args:
      mesh: what its parameters are spread over; None for one device.
      sparse: whether the target has experts. Then its trees are chains of several lengths.
      serves: whether the target's kernels can verify a tree.
    """
    settled = large and defaults.settled
    small = _few(defaults.cpu) if jax.default_backend() == "cpu" else defaults.gpu
    trees = defaults.large if large else small
    if large and rows >= SEVERAL and defaults.together:
        trees, settled = defaults.together, False
    if sparse:
        trees, settled = _chains(trees), False
    trees = tuple(filter(serves, trees))
    return (*trees, PLAIN) if may_choose(mesh) and not settled else trees[:1]


def _few(trees: Sequence[TreeConfig]) -> tuple[TreeConfig, ...]:
    """On a CPU, where a program takes seconds to compile: the first tree, and lookup alone.

    Of trees after chains, which pay at long contexts, the one on one level too.
    """
    chained = trees[0].chain is not None
    return tuple(
        tree
        for index, tree in enumerate(trees)
        if not index or not tree.widths or (chained and tree.chain is None)
    )


def _chains(trees: Sequence[TreeConfig]) -> tuple[TreeConfig, ...]:
    """For a target of experts: chains no longer than the trees.

    64 nodes choose nearly all experts of a layer, and a plain step reads only those of one token.
    Trees after a chain stay: they verify the chain in partial forwards.
    """
    if any(tree.chain is not None for tree in trees):
        return tuple(trees)
    levels, lookup = max(len(tree.widths) for tree in trees), trees[0].lookup
    chains = (TreeConfig((1,) * min(each, levels), lookup=lookup) for each in SPARSE_LEVELS)
    return tuple(dict.fromkeys(chains))


def may_choose(mesh: Mesh | None) -> bool:
    """Whether a clock may choose what calls run."""
    # Several processes would choose by their own clocks and run different programs.
    return mesh is None and jax.process_count() == 1
