"""What of a draft's acceptance is left where only the best of its nodes are verified.

Random weights earn nothing, so a benchmark draws how many tokens a round accepts
(``infer.bench.simulated``), and fewer verified nodes would seem to cost nothing. Here they cost
what was recorded: tau of the demo's draft with the paper's tree and budgets of 64 to 16 nodes,
all held-out prompts, temperature 1 (docs/results.md, "The demo's acceptance"). What scales is
tau - 1, the accepted tokens: the bonus needs no node.

Between two recorded numbers of nodes the share is interpolated in their logarithm. The share is
concave in it where it was recorded, and a budget of one node, the root, keeps nothing: what lies
between is promised rather too little. For trees of other widths this is assumed: one that grows
fewer nodes keeps what the paper's tree keeps with that budget, over what the paper's keeps with as
many nodes as this one grows; one that grows more is the paper's stretched, the logarithms of all
its nodes in the place of those of all of the paper's. Depth does not enter, nor the kind of draft.
"""

import math

import numpy as np

from longspec_jax.config import TreeConfig

from .simulated import AcceptanceLengths

RECORDED = {16: 2.8814, 32: 3.1975, 48: 3.3553, 64: 3.4872, 69: 3.5112}
"""Tau by verified nodes of the paper's tree, which grows 69: docs/results/
demo_trees_temperature1_h200.json."""
GROWN = max(RECORDED)
PLACES = [0.0, *map(math.log, RECORDED)]
"""Logarithms of the numbers of nodes, the root alone being the first."""
SHARES = [0.0, *((tau - 1) / (RECORDED[GROWN] - 1) for tau in RECORDED.values())]
"""Of the accepted tokens."""


def kept_share(tree: TreeConfig) -> float:
    """The share of accepted tokens that a tree's budget keeps, 1 where all nodes are verified."""
    if not tree.selective:
        return 1.0
    stretch = min(1.0, math.log(GROWN) / math.log(tree.num_grown))
    verified, grown = (
        float(np.interp(stretch * math.log(nodes), PLACES, SHARES))
        for nodes in (tree.num_nodes, tree.num_grown)
    )
    return verified / grown


def kept_lengths(acceptance: float, tree: TreeConfig) -> AcceptanceLengths:
    """How often rounds emit 1 to ``num_levels + 1`` tokens, no more than nodes are verified.

    Args:
      acceptance: tau with all nodes of the tree verified.
      tree: with the budget that is measured.

    Raises:
      ValueError: if the whole tree cannot emit as much.
    """
    whole = AcceptanceLengths.geometric(acceptance, tree.num_levels)
    if not tree.selective:
        return whole
    deepest = min(tree.num_levels, tree.num_nodes - 1)
    mean = 1 + min(kept_share(tree) * (acceptance - 1), float(deepest))
    kept = AcceptanceLengths.geometric(mean, deepest).probabilities
    return AcceptanceLengths((*kept, *(0.0,) * (tree.num_levels - deepest)))
