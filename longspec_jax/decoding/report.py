"""The report of a launch: the one small array that the host reads of its rounds.

A round is a row of whole numbers in each row of the batch: how many tokens it emitted, whether the
row has ended, how many were accepted, the tokens, and who proposed each. Where it is wanted,
log-probabilities of the tokens follow (:mod:`longspec_jax.decoding.logprobs`), and then the tree
that was verified.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Int

from longspec_jax.axes import Array, Leaf, Lengths
from longspec_jax.config.tree import TreeConfig
from longspec_jax.decoding.logprobs import TokenLogprob, packed_width, unpacked_logprobs
from longspec_jax.decoding.rows import Rows
from longspec_jax.decoding.sampling import SamplingKind
from longspec_jax.drafters.base import Drafter
from longspec_jax.drafters.tree import AcceptedPath, Tree


class Contents(NamedTuple):
    """What a report holds beside tokens and counts; static."""

    logprobs: int | None = None
    """Alternatives of every token; None for no log-probabilities."""
    trees: bool = False
    """Whether it holds the tree of every round."""

    def of_kind(self, kind: SamplingKind) -> "Contents":
        """The same in launches of a kind: rows that ask for log-probabilities are of any kind."""
        return self if kind is SamplingKind.ANY else self._replace(logprobs=None)


TOKENS = Contents()
"""Tokens and counts alone."""


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
    """Who proposed each token, as of :attr:`longspec_jax.drafters.tree.Tree.sources`; 0 where
    nobody did."""
    more: tuple[Leaf[Int[Array, "B _"]], ...] = ()
    """Log-probabilities and tree, if the report holds them."""


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
    return 3 + 2 * height + logprobs + contents.trees * (1 + 3 * tree.num_nodes + height)


class RoundTree(NamedTuple):
    """All that the target verified in a round, one entry per node; node 0 is the root."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    """Index of every node's parent; -1 for the root and for nodes that no path reaches."""
    draws: tuple[int, ...]
    """What the target drew behind every node."""
    path: tuple[int, ...]
    """The accepted nodes, the root first."""


@dataclass(frozen=True)
class Report:
    """What a launch did, on the host: ``r`` rounds."""

    count: np.ndarray
    """``[r, B]`` tokens that each row emitted, 0 where it was done."""
    done: np.ndarray
    """``[r, B]`` whether the row has met a stop token or its budget."""
    accepted: np.ndarray
    """``[r, B]`` how many tokens, the first ones, were accepted draft tokens."""
    tokens: np.ndarray
    """``[r, B, h]`` the emitted tokens; garbage from the count on."""
    sources: np.ndarray
    """``[r, B, h]`` who proposed each, a bit for each member of joined drafters; 0 for nobody."""
    logprobs: np.ndarray | None = None
    """``[r, B, h, m]`` of the tokens, packed; None if they were not wanted."""
    trees: np.ndarray | None = None
    """``[r, B, t]`` of the rounds, packed; None if they were not wanted."""

    @classmethod
    def of(cls, packed: np.ndarray, tree: TreeConfig, contents: Contents = TOKENS) -> "Report":
        """Unpack the report of :func:`~longspec_jax.decoding.round.one_round` or ``many_rounds``.

        Args:
          packed: ``[r, B, n]`` on the host.
          tree: of the drafter.
          contents: of the report.
        """
        # A round in which no row emits ends the loop, or was launched behind the last one.
        packed = packed[(packed[:, :, 0] > 0).any(axis=1)]
        ends = packed[..., 0], packed[..., 1] != 0, packed[..., 2]
        height = tree.num_levels + 1
        tokens, sources, more = np.split(packed[..., 3:], [height, 2 * height], axis=2)
        logprobs = trees = None
        if contents.logprobs is not None:
            width = packed_width(contents.logprobs)
            size = height * width
            # There may be no round, so that NumPy could not find the width.
            logprobs = more[..., :size].reshape(*more.shape[:2], height, width)
            more = more[..., size:]
        if contents.trees:
            trees = more
        return cls(*ends, tokens, sources, logprobs, trees)

    def logprobs_of(self, row: int, rounds: np.ndarray, most: int) -> tuple[TokenLogprob, ...]:
        """Of the tokens that a row emitted in these rounds, with ``most`` alternatives at most."""
        if self.logprobs is None:
            return ()
        emitted = np.arange(self.tokens.shape[2]) < self.count[rounds, row][:, None]
        return unpacked_logprobs(self.logprobs[rounds, row][emitted], most)

    def trees_of(self, row: int, rounds: np.ndarray) -> tuple[RoundTree, ...]:
        """The trees of a row in these rounds."""
        if self.trees is None:
            return ()
        height, found = self.tokens.shape[2], []
        for count, *numbers in self.trees[rounds, row].tolist():
            nodes = (len(numbers) - height) // 3
            parts = (numbers[begin : begin + nodes] for begin in range(0, 3 * nodes, nodes))
            path = numbers[3 * nodes :][:count]
            found.append(RoundTree(*map(tuple, parts), path=tuple(path)))
        return tuple(found)


def foregone(ran: int, drafters: Sequence[Drafter], report: Report) -> dict[int, int]:
    """Tokens that other candidates would have emitted in some rounds, by their index.

    Drafters that propose into one tree leave their marks on its nodes. So the accepted path says
    how far each of them alone would have come: down to the first token that it did not propose. Of
    candidates whose trees are no part of the tree that ran the rounds say nothing.

    Args:
      ran: index of the candidate that ran the rounds.
      drafters: the candidates.
      report: of the rounds.
    """
    return {
        index: _emitted_by(drafter, report)
        for index, drafter in enumerate(drafters)
        if index != ran and _shows(drafters[ran], drafter)
    }


def _shows(ran: Drafter, other: Drafter) -> bool:
    """Whether a drafter's tree holds all that another one would propose.

    What proposes alone has the whole budget for itself, and would keep a few nodes more.
    """
    if ran.sources != other.sources or not other.tree.num_levels:
        return False
    parts = zip(ran.parts, other.parts, strict=True)
    held = all(own.widths[: theirs.num_levels] == theirs.widths for own, theirs in parts)
    fewer = other.tree.selective and other.tree.num_nodes < ran.tree.num_nodes
    return held and (other.proposes_freely or not fewer)


def _emitted_by(drafter: Drafter, report: Report) -> int:
    """Tokens of all rows: the first ones that it proposed, and the target's draw behind them."""
    depth = np.arange(report.sources.shape[2])
    proposed = np.zeros(report.sources.shape, bool)
    for bit, part in enumerate(drafter.parts):
        proposed |= (report.sources >> bit & 1 > 0) & (depth < part.num_levels)
    accepted = proposed & (depth < report.accepted[..., None])
    taken = np.logical_and.accumulate(accepted, axis=2).sum(axis=2)
    return int(np.minimum(taken + 1, report.count).sum())
