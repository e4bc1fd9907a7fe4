"""The shape of a draft tree, and how it is written as text."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from longspec_jax.checks import is_number, is_whole, shown

SMALLEST_GAIN = 0.001
"""Least threshold of a tree; below it no level is left out."""
MAX_TREE_NODES = 256
"""Most query tokens of one verification."""
MAX_TREE_LEVELS = 32
"""Most levels: 200 of them compile for minutes."""
_WIDTH = "-?[0-9]{1,9}(x[1-9][0-9]{0,2})?"
_TREE_TEXT = re.compile(
    r"(chain:(?P<chain>0|[1-9][0-9]{0,3})/)?"
    r"(none|chain:(?P<links>[1-9][0-9]{0,3})|(?P<widths>{W}(,{W})*))"
    r"(@(?P<budget>[0-9]{1,9}))?"
    r"(\+(?P<threshold>[0-9]{1,3}(\.[0-9]{1,6})?))?"
    r"(~(?P<lookup>[0-9]{1,9}))?".replace("{W}", _WIDTH)
)
PLACES = 8
"""Earlier places of a text whose continuations are joined to a tree."""
MOST_LOOKUP = (MAX_TREE_NODES - 1) // PLACES
"""Most levels of what is looked up."""


@dataclass(frozen=True)
class TreeConfig:
    """Widths of the draft tree by level; a level's nodes are the last one's best continuations.

    ``(4, 16, 16, 16, 16)`` is the paper's tree, ``(1, 1, 1, 1)`` a chain of four, and ``()`` the
    empty tree: plain decoding. :meth:`parse` reads what ``str`` writes, such as
    ``4,16,16,16,16@64``. OPT-Tree (arXiv:2406.17276) is a budget with a threshold:
    ``16x10@50+0.7``. Lookup joins the tree ``4,16x4@64~8`` with continuations of eight tokens.
    """

    widths: tuple[int, ...] = (4, 16, 16, 16, 16)
    budget: int | None = None
    """Nodes that are verified, the root included: the best of those grown by the draft's cumulative
    log-probability, chosen in every row and round. All of them if absent."""
    threshold: float | None = None
    """Growth ends, in every row and round for itself, with the level that raises the expected
    number of accepted tokens by no more than this; what is not grown costs no draft pass where no
    row grows it. All levels are grown if absent."""
    chain: int | None = None
    """How many of the first levels are a chain with the tree of the others at its end, as partial
    verification proposes it (``chain:16/4,8``, :mod:`longspec_jax.drafters.retrieval.hierarchy`).
    Where a row's chain is shorter, its tree begins higher. None for a tree that is grown as one."""
    lookup: int | None = None
    """Levels to which continuations that lookup finds join the tree, where drafts that look up are
    loaded (:mod:`longspec_jax.drafters.joined`). They compete with the model's nodes for the
    budget, which is the number of the model's nodes if absent. None for a tree without them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "widths", tree_widths(self.widths))
        if self.chain is not None:
            self._check_chain(self.chain)
            if self.chain == self.num_levels:
                object.__setattr__(self, "chain", None)  # A chain with nothing at its end.
        if self.lookup is not None:
            self._check_lookup(self.lookup)
        if self.num_grown > MAX_TREE_NODES:
            raise ValueError(
                f"tree {shown(self.widths)} has {self.num_grown} nodes with its root; the "
                f"attention kernels take at most {MAX_TREE_NODES}"
            )
        if self.num_levels > MAX_TREE_LEVELS:
            raise ValueError(
                f"a tree of {self.num_levels} levels is too deep: every level is compiled and run "
                f"on its own, and the largest number that is taken is {MAX_TREE_LEVELS}"
            )
        if self.budget is not None and not (is_whole(self.budget) and self.budget >= 1):
            raise ValueError(
                "a tree budget counts the root and must be whole and at least 1 node, got "
                f"{shown(self.budget)}; leave it out to verify all {self.num_grown} nodes"
            )
        if self.threshold is not None and not (
            is_number(self.threshold) and SMALLEST_GAIN <= self.threshold <= 1
        ):
            raise ValueError(
                "a tree threshold is the gain in expected tokens that a further level must be "
                f"worth, from {SMALLEST_GAIN} to 1, got {shown(self.threshold)}; leave it out to "
                f"grow all {self.num_levels} levels"
            )
        if self.num_levels and self.num_nodes == 1:
            raise ValueError(
                f"the tree {self} verifies only the root, which the target knows already; use "
                "the tree none for plain decoding, or a budget of at least 2"
            )

    def _check_chain(self, chain: object) -> None:
        """Refuse a chain that the widths or the budget do not hold."""
        if not is_whole(chain) or not 0 <= chain <= self.num_levels or {*self.widths[:chain]} - {1}:
            raise ValueError(
                f"chain={shown(chain)} must be a number of first levels of width 1 in the tree "
                f"{shown(self.widths)}; chain:4/2,3 has four of them before its 2,3"
            )
        least = min(chain + 2, self.num_grown)
        if self.budget is not None and is_whole(self.budget) and self.budget < least:
            raise ValueError(
                f"a tree budget of {self.budget} leaves no node for the tree at the end of a chain "
                f"of {chain}: the root and the chain are always verified; allow at least "
                f"{least}"
            )

    def _check_lookup(self, lookup: object) -> None:
        """Refuse a bad number of levels, lookup with a chain, and lookup alone without a budget."""
        if not is_whole(lookup) or not 1 <= lookup <= MOST_LOOKUP:
            raise ValueError(
                f"lookup={shown(lookup)} must be the levels of what is looked up, from 1 to "
                f"{MOST_LOOKUP}, as in 4,16x4@64~8; leave it out for a tree without lookup"
            )
        if self.chain is not None:
            raise ValueError(
                f"~{lookup} does not join a tree at the end of a chain: partial verification "
                "proposes one path; join lookup inside it, retrieve_tree=4,8~8"
            )
        if not self.widths and self.budget is None:
            raise ValueError(
                f"none~{lookup} is lookup alone and needs its number of nodes, as in "
                f"none@16~{lookup}"
            )

    @classmethod
    def parse(cls, text: str) -> "TreeConfig":
        """The tree of a text: ``none``, ``chain:4`` or ``4,16,16``, which is ``4,16x2``.

        ``@24`` after it adds a budget, ``+0.7`` a threshold and ``~8`` lookup; ``chain:16/``
        before it puts it at the end of a chain.

        Raises:
          ValueError: for a text that names no tree, or one that there cannot be.
        """
        found = _TREE_TEXT.fullmatch(text)
        if found is None:
            raise ValueError(
                f"{shown(text)} must be the widths of a tree such as 4,16,16,16,16, or chain:4 for "
                "a single branch, or none; after it, @64 verifies only the best 64 nodes, +0.7 "
                "stops growing when a level adds at most 0.7 expected tokens, ~8 adds prompt "
                "lookup to eight levels; chain:16/ before it puts it at the end of a chain"
            )
        chain = int(found["chain"]) if found["chain"] else None
        widths = [1] * ((chain or 0) + int(found["links"] or 0))
        for piece in (found["widths"] or "").split(",") if found["widths"] else ():
            width, _, times = piece.partition("x")
            widths += [int(width)] * int(times or 1)
        return cls(
            tuple(widths),
            int(found["budget"]) if found["budget"] else None,
            float(found["threshold"]) if found["threshold"] else None,
            chain,
            int(found["lookup"]) if found["lookup"] else None,
        )

    def __str__(self) -> str:
        """The tree as :meth:`parse` reads it."""
        widths = self.widths[self.chain or 0 :]
        shape = ",".join(map(str, widths)) or "none"
        if set(widths) == {1}:
            shape = f"chain:{len(widths)}"
        if self.chain is not None:
            shape = f"chain:{self.chain}/{shape}"
        budget = "" if self.budget is None else f"@{self.budget}"
        threshold = "" if self.threshold is None else f"+{self.threshold:g}"
        lookup = "" if self.lookup is None else f"~{self.lookup}"
        return shape + budget + threshold + lookup

    @cached_property
    def num_levels(self) -> int:
        """Draft levels, the root not counted: the most tokens one round can accept."""
        return max(len(self.widths), self.lookup or 0)

    @cached_property
    def num_grown(self) -> int:
        """Nodes that a drafter with a model grows, the root included."""
        return 1 + sum(self.widths)

    @cached_property
    def num_proposed(self) -> int:
        """Nodes with those of lookup; ``budget`` of them are verified."""
        return self.num_grown + PLACES * (self.lookup or 0)

    @cached_property
    def num_nodes(self) -> int:
        """Nodes with the root: the query tokens of one verification."""
        return self.num_grown if self.budget is None else min(self.budget, self.num_proposed)

    @property
    def selective(self) -> bool:
        """Whether the budget leaves out nodes."""
        return self.num_nodes < self.num_proposed

    @property
    def varies(self) -> bool:
        """Whether depths differ from row to row: nodes are left out, or a chain is shorter."""
        return self.selective or bool(self.chain)

    @property
    def own(self) -> "TreeConfig":
        """What a drafter with a model grows of it: all levels, before a budget chooses."""
        return TreeConfig(self.widths, threshold=self.threshold)

    @property
    def looked_up(self) -> "TreeConfig":
        """What lookup proposes to it."""
        return TreeConfig((PLACES,) * (self.lookup or 0))

    @property
    def end(self) -> "TreeConfig":
        """The tree at the end of the chain, whose last token is its root."""
        chain = self.chain or 0
        budget = None if self.budget is None else self.budget - chain
        return TreeConfig(self.widths[chain:], budget, self.threshold)

    @property
    def depths(self) -> tuple[int, ...]:
        """Depth of every grown node, where it does not vary; the root has depth 0."""
        return (0, *(level + 1 for level, width in enumerate(self.widths) for _ in range(width)))


def tree_widths(widths: object) -> tuple[int, ...]:
    """The widths as a tuple, from any sequence of whole numbers.

    Raises:
      ValueError: for anything else, and for widths below 1.
    """
    if (
        not isinstance(widths, Sequence)
        or isinstance(widths, str | bytes)
        or not all(is_whole(width) for width in widths)
    ):
        raise ValueError(
            "tree widths must be whole numbers, one per level, such as (4, 16, 16), got "
            f"{shown(widths)}"
        )
    found = tuple(int(width) for width in widths)
    if any(width < 1 for width in found):
        raise ValueError(
            f"tree widths must be positive, got {shown(found)}; use fewer levels for a shallower "
            "tree"
        )
    return found


PLAIN = TreeConfig(())
DEFAULT_TREE = TreeConfig(budget=64)
"""The usual tree of a large target on a GPU, where :mod:`longspec_jax.generation.speeds` chooses
for calls that name none: the paper's, with the best 64 of 69 nodes verified. They fill
whole tiles of query rows, so that a round takes 4 to 9 % less time on a GPU (Vicuna-7B at 32k and
4k), for at most 1 % fewer tokens (README)."""
