"""A tree in the JSON of the commands, beside whatever else describes a run."""

from collections.abc import Mapping
from typing import Any

from longspec_jax.config import TreeConfig


def tree_fields(tree: TreeConfig | None) -> dict[str, Any]:
    """The fields of a tree; of one that is not settled they are all null."""
    return {
        "tree": None if tree is None else list(tree.widths),
        "budget": None if tree is None else tree.budget,
        "threshold": None if tree is None else tree.threshold,
        "chain": None if tree is None else tree.chain,
    }


def tree_of(row: Mapping[str, Any]) -> TreeConfig:
    """The tree of such fields; files of earlier releases may lack the later ones."""
    return TreeConfig(tuple(row["tree"]), row["budget"], row.get("threshold"), row.get("chain"))
