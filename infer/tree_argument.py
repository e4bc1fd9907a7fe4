"""A tree as the commands take it: in the library's words, and nothing of it without effect."""

import argparse
import dataclasses

from longspec_jax.config import TreeConfig

GRAMMAR = (
    "chain:4 for a single branch of four tokens, or the widths of the tree's levels such as "
    "4,16,16,16,16, which is 4,16x4; @64 behind it verifies only the best 64 nodes by the draft's "
    "own score, the root included; +0.7 behind that ends a tree with the level that adds no more "
    "than 0.7 to the tokens that the draft expects to be accepted (OPT-Tree: 16x10@50+0.7); "
    "chain:16/4,8 is a tree at the end of a chain, as a draft with retrieve=N can hand up"
)
"""How a tree is written, for ``--help``."""


def tree_argument(text: str) -> TreeConfig:
    """The tree of an argument's text, for ``argparse``."""
    try:
        tree = TreeConfig.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if tree.budget is not None and tree.budget > tree.num_grown:
        shape = dataclasses.replace(tree, budget=None)
        raise argparse.ArgumentTypeError(
            f"@{tree.budget} is more nodes than the tree {shape} has: {tree.num_grown} with its "
            f"root; write {shape} to verify all of them, or a larger tree"
        )
    if tree.threshold is not None and tree.num_levels < 2:
        shape = dataclasses.replace(tree, threshold=None)
        raise argparse.ArgumentTypeError(
            f"+{tree.threshold:g} says which levels below the first are grown, and the tree "
            f"{shape} has none; write {shape}, or a deeper tree"
        )
    return tree


def drafting_tree(text: str) -> TreeConfig:
    """The same for what measures a draft, beside plain decoding."""
    tree = tree_argument(text)
    if not tree.widths:
        raise argparse.ArgumentTypeError(
            f"{text} drafts nothing, and plain decoding is measured beside every tree; name a tree "
            "with nodes, such as chain:4"
        )
    return tree
