"""A tree as the commands take it: in the library's words, and nothing of it without effect."""

import argparse

from longspec_jax.config import TreeConfig

GRAMMAR = (
    "chain:4 for a single branch of four tokens, or the widths of the tree's levels such as "
    "4,16,16,16,16; @64 behind it verifies only the best 64 nodes by the draft's own score, the "
    "root included"
)
"""How a tree is written, for ``--help``."""


def tree_argument(text: str) -> TreeConfig:
    """The tree of an argument's text, for ``argparse``."""
    try:
        tree = TreeConfig.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if tree.budget is not None and tree.budget > tree.num_grown:
        shape = TreeConfig(tree.widths)
        raise argparse.ArgumentTypeError(
            f"@{tree.budget} is more nodes than the tree {shape} has: {tree.num_grown} with its "
            f"root; write {shape} to verify all of them, or a larger tree"
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
