"""The report of a launch: the one small array that the host reads of its rounds.

A round is a row of whole numbers in each row of the batch: how many tokens it emitted, whether the
row has ended, how many were accepted, the tokens, and who proposed each. Where it is wanted,
log-probabilities of the tokens follow (:mod:`longspec_jax.decoding.logprobs`), and then the tree
that was verified.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Bool, Int

from longspec_jax.axes import Array, Leaf, Lengths
from longspec_jax.config.tree import TreeConfig
from longspec_jax.decoding.logprobs import TokenLogprob, packed_width, unpacked_logprobs
from longspec_jax.decoding.rows import Rows
from longspec_jax.drafters.base import Drafter, Params
from longspec_jax.drafters.tree import AcceptedPath, Tree, node_depths
from longspec_jax.ops.slicing import along


class Contents(NamedTuple):
    """What a report holds besides tokens and counts; static."""

    logprobs: int | None = None
    """Alternatives of every token; None for no log-probabilities."""
    trees: bool = False
    """Whether it holds the tree of every round."""
    candidates: tuple[Drafter, ...] = ()
    """Drafters of which it says what they would have emitted."""


TOKENS = Contents()
"""Only tokens and counts."""


@struct.dataclass
class Emitted:
    """What one round emitted."""

    tokens: Leaf[Int[Array, "B h"]]
    """Garbage from ``count[b]`` on."""
    count: Leaf[Lengths]
    """How many; 0 where the row was done."""
    accepted: Leaf[Lengths]
    """How many of them, the first ones, were accepted draft tokens."""
    sources: Leaf[Int[Array, "B h"]]
    """Who proposed each token, as in :attr:`longspec_jax.drafters.tree.Tree.sources`; 0 where
    nobody did."""
    more: tuple[Leaf[Int[Array, "B _"]], ...] = ()
    """What other candidates would have emitted, log-probabilities and tree, if the report holds
    them."""


def packed(emitted: Emitted, after: Rows) -> Int[Array, "B n"]:
    """What a round did, as one array; see :class:`Report`."""
    ends = jnp.stack([emitted.count, after.done, emitted.accepted], axis=1)
    return jnp.concatenate([ends, emitted.tokens, emitted.sources, *emitted.more], axis=1)


def packed_tree(tree: Tree, draws: Int[Array, "B T"], path: AcceptedPath) -> Int[Array, "B _"]:
    """The tree of a round, the target's draws at its nodes, and the accepted path."""
    parts = (path.count[:, None], tree.tokens, tree.parents, draws, path.path)
    return jnp.concatenate(parts, axis=1)


def packed_columns(tree: TreeConfig, contents: Contents) -> int:
    """Numbers that a report holds of a round in each row."""
    height = tree.num_levels + 1
    logprobs = 0 if contents.logprobs is None else height * packed_width(contents.logprobs)
    trees = contents.trees * (1 + 3 * tree.num_nodes + height)
    return 3 + 2 * height + len(contents.candidates) + logprobs + trees


class RoundTree(NamedTuple):
    """All that the target verified in a round, one entry per node; node 0 is the root."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    """Index of every node's parent; -1 for the root and for nodes that no path reaches."""
    draws: tuple[int, ...]
    """What the target drew after every node."""
    path: tuple[int, ...]
    """The accepted nodes, the root first."""


@dataclass(frozen=True)
class Report:
    """What a launch did, on the host: ``r`` rounds, in each of which a row emitted.

    A streamed round is a handful of numbers. Lists take a fraction of NumPy's time for them.
    """

    count: list[list[int]]
    """``[r][B]`` tokens that each row emitted, 0 where it was done."""
    packed: np.ndarray
    """``[r, B, n]`` what :func:`packed` made of each round."""
    height: int
    """Most tokens that a round emits in a row."""
    contents: Contents = TOKENS

    @classmethod
    def of(cls, packed: np.ndarray, tree: TreeConfig, contents: Contents = TOKENS) -> "Report":
        """The report of :func:`~longspec_jax.decoding.round.one_round` or ``many_rounds``.

        Args:
          packed: ``[r, B, n]`` on the host.
          tree: of the drafter.
          contents: of the report.
        """
        count = packed[:, :, 0].tolist()
        # A round in which no row emits ends the loop, or was launched after the last one.
        rounds = sum(map(any, count))
        return cls(count[:rounds], packed[:rounds], tree.num_levels + 1, contents)

    @property
    def _ends(self) -> tuple[int, int, int]:
        """Columns up to which there are tokens and sources, other candidates, log-probabilities."""
        most, sources = self.contents.logprobs, 3 + 2 * self.height
        others = sources + len(self.contents.candidates)
        return sources, others, others + (0 if most is None else self.height * packed_width(most))

    @property
    def shown(self) -> np.ndarray | None:
        """``[r, K]`` tokens of a row by every candidate; NaN where a round does not say."""
        if not self.contents.candidates:
            return None
        begin, end, _ = self._ends
        shown = []
        for count, rows in zip(self.count, self.packed[:, :, begin:end].tolist(), strict=True):
            live, by_candidate = sum(map(bool, count)), zip(*rows, strict=True)
            shown.append([sum(own) / live if min(own) >= 0 else math.nan for own in by_candidate])
        return np.reshape(shown, (len(shown), end - begin))

    def of_row(self, row: int) -> tuple[list[int], list[int], list[int], bool]:
        """What a row did in the rounds in which it emitted.

        Returns:
          Its tokens; who proposed each, a bit for each member of joined drafters, 0 for nobody; how
          many of each round's tokens, the first ones, were accepted draft tokens; and whether the
          row has met a stop token or its budget.
        """
        tokens: list[int] = []
        sources: list[int] = []
        accepted: list[int] = []
        ended = False
        for count, done, drafted, *more in self.packed[:, row, : 3 + 2 * self.height].tolist():
            if count:
                tokens += more[:count]
                sources += more[self.height : self.height + count]
                accepted.append(drafted)
                ended = done != 0
        return tokens, sources, accepted, ended

    def logprobs_of(self, row: int, most: int) -> tuple[TokenLogprob, ...]:
        """Log-probabilities of a row's tokens, ``most`` alternatives at most."""
        if self.contents.logprobs is None:
            return ()
        _, begin, end = self._ends
        numbers = self.packed[:, row, begin:end]
        emitted = np.arange(self.height) < self.packed[:, row, :1]
        packed = numbers.reshape(*emitted.shape, packed_width(self.contents.logprobs))
        return unpacked_logprobs(packed[emitted], most)

    def trees_of(self, row: int) -> tuple[RoundTree, ...]:
        """The trees of the rounds in which a row emitted."""
        if not self.contents.trees:
            return ()
        found, emits = [], self.packed[:, row, 0] > 0
        for count, *numbers in self.packed[emits, row, self._ends[2] :].tolist():
            nodes = (len(numbers) - self.height) // 3
            parts = (numbers[begin : begin + nodes] for begin in range(0, 3 * nodes, nodes))
            path = numbers[3 * nodes :][:count]
            found.append(RoundTree(*map(tuple, parts), path=tuple(path)))
        return tuple(found)


def foregone(
    ran: Drafter,
    params: Params,
    tree: Tree,
    path: AcceptedPath,
    count: Lengths,
    drafters: Sequence[Drafter],
) -> Int[Array, "B K"]:
    """Tokens that each of some drafters would have emitted in a round that one of them ran.

    The accepted path says so of every tree that is a part of the one that ran: it would have come
    down to the first node that its own budget and levels leave out.

    Args:
      ran: the drafter of the round.
      params: of both models.
      tree: that was verified.
      path: that was accepted.
      count: tokens that were emitted; 0 where the row was done.
      drafters: the candidates, of which ``ran`` is one.

    Returns:
      The tokens; -1 by drafters of which such a round says nothing.
    """
    columns = []
    for other in drafters:
        if other == ran:
            columns.append(count)
        elif not other.tree.num_levels:
            columns.append(jnp.minimum(count, 1))
        elif shows(ran, other, params):
            kept = along(path.path[:, 1:], _kept(ran, other, tree))
            # To the first one left out or after the path; accumulating would be a loop on a GPU.
            ends = ~kept | (jnp.arange(kept.shape[1]) >= path.count[:, None] - 1)
            taken = jnp.argmax(jnp.pad(ends, ((0, 0), (0, 1)), constant_values=True), axis=1)
            columns.append(jnp.minimum(taken + 1, count))
        else:
            columns.append(jnp.full_like(count, -1))
    return jnp.stack(columns, axis=1)


def shown_by(drafters: Sequence[Drafter], params: Params) -> tuple[tuple[bool, ...], ...]:
    """For every candidate that ran: which others its rounds show the tokens of."""
    return tuple(tuple(shows(ran, other, params) for other in drafters) for ran in drafters)


def shows(ran: Drafter, other: Drafter, params: Params) -> bool:
    """Whether a drafter's rounds say what another one would have emitted.

    Its tree must hold all that the other one would propose. What proposes alone has the whole
    budget for itself, and would keep a few nodes more. Rounds say nothing of a tree whose
    nodes are weighed by cost.
    """
    if ran == other or not other.tree.num_levels:
        return True
    if ran.sources != other.sources or (params.costs is not None and other.proposes_freely):
        return False
    parts = zip(ran.parts, other.parts, strict=True)
    held = all(
        len(own.widths) >= len(theirs.widths)
        and all(theirs <= mine for mine, theirs in zip(own.widths, theirs.widths, strict=False))
        for own, theirs in parts
    )
    alike = (ran.tree.chain, ran.tree.threshold) == (other.tree.chain, other.tree.threshold)
    return held and alike and (other.proposes_freely or other.tree.num_nodes <= ran.tree.num_nodes)


def _kept(ran: Drafter, other: Drafter, tree: Tree) -> Bool[Array, "B T"]:
    """The nodes of a verified tree that another drafter's tree would hold."""
    depth = jnp.broadcast_to(node_depths(tree, ran.tree), tree.tokens.shape)
    kept = jnp.zeros(depth.shape, bool)
    for bit, (own, theirs) in enumerate(zip(ran.parts, other.parts, strict=True)):
        nodes = (depth > 0) & (depth <= len(theirs.widths))
        if tree.sources is not None:
            nodes &= tree.sources >> bit & 1 > 0
        if own.widths[: len(theirs.widths)] != theirs.widths:
            # Of a beam the best of every level are those of a narrower one.
            width = jnp.asarray((0, *theirs.widths))[jnp.minimum(depth, len(theirs.widths))]
            nodes &= _better(tree, nodes, depth) < width
        kept |= nodes
    if other.tree.num_nodes < ran.tree.num_nodes:
        kept &= _better(tree, kept, jnp.zeros_like(depth)) < other.tree.num_nodes - 1
    return kept


def _better(tree: Tree, nodes: Bool[Array, "B T"], among: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """How many of some nodes are likelier than each one, among those of its own class."""
    worth = jnp.zeros(nodes.shape) if tree.totals is None else tree.totals
    before = jnp.tri(nodes.shape[1], k=-1, dtype=bool)
    likelier = (worth[:, None] > worth[:, :, None]) | (
        (worth[:, None] == worth[:, :, None]) & before
    )
    return (likelier & nodes[:, None] & (among[:, None] == among[:, :, None])).sum(axis=2)
