"""Rounds of rows whose next tokens depend on what only the host can tell, such as a grammar.

What may follow a node of a tree is known once the tree is. So a round is three launches: propose,
the target's pass, and the rest. The tree leaves the device after the first one. The host computes
what is allowed while the target's pass runs, and hands it to the third.

Forbidden logits become -inf before everything that sampling does to them. Plain decoding passes
through the same functions, so that a tree changes no token here either. A node after which no
token is allowed has no path: its parent's draw is emitted, and the round ends there.

A constraint may come from a client, and may fail in any way. :class:`Guarded` keeps that to its
row.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, PyTree, UInt

from longspec_jax.axes import Array, Lengths
from longspec_jax.decoding.jit_cache import program
from longspec_jax.decoding.report import TOKENS, Contents, packed
from longspec_jax.decoding.round import (
    accept_and_commit,
    draw_at_nodes,
    propose_tree,
    refresh_selection,
    run_tree,
    sampling_noise,
)
from longspec_jax.decoding.rows import Rows
from longspec_jax.decoding.sampling import NO_TOKEN, SamplingKind, masked
from longspec_jax.decoding.target import TargetModel, Verification
from longspec_jax.drafters.base import Drafter, Params
from longspec_jax.drafters.tree import Tree
from longspec_jax.ops.partitioned import use_mesh

LOG = logging.getLogger(__name__)

ALL = np.uint32(2**32 - 1)
"""32 tokens, all allowed."""


@runtime_checkable
class Constraint(Protocol):
    """What a row may emit; its state follows what was read of the row.

    An exception ends the row, after the token that was taken in last, with the exception's words
    as the reason. Whether a token ends the row must not depend on the trees, or they change a text.
    """

    def advance(self, tokens: Sequence[int]) -> None:
        """Take in tokens that the row has emitted, one a call."""
        ...

    def allowed(self, tokens: Sequence[int], parents: Sequence[int]) -> np.ndarray:
        """``[T, W]`` uint32, the tokens that may follow every node of a tree; none for no path.

        Args:
          tokens: of the nodes; that of the root was taken in by :meth:`advance`.
          parents: index of every node's parent, below the node's own; -1 for the root and for
            nodes without a path.
        """
        ...


def reason_of(error: Exception) -> str:
    """Why a row ended by itself, in one line; what no rule foresees goes to the log."""
    words = next(iter(str(error).splitlines()), "")
    if isinstance(error, ValueError) and words:
        return words
    LOG.error("a row has failed; the others go on", exc_info=error)
    return f"{type(error).__name__}: {words}"


class Guarded:
    """The constraint of a row, whose failure ends the row and nothing else."""

    def __init__(self, constraint: Constraint) -> None:
        """Bind a constraint that has met no token of the row."""
        self._constraint = constraint
        self.failure: str | None = None
        """Why the row cannot go on; None while it can."""

    def take(self, tokens: Sequence[int]) -> int:
        """Take in what the row has emitted.

        Returns:
          How many of the tokens are the row's: all, or those up to the one after which the
          constraint has failed. A draw that found no token is not, if it had failed before.
        """
        for index, token in enumerate(tokens):
            if token == NO_TOKEN:
                return index + (self.failure is None)
            try:
                self._constraint.advance((token,))
            except Exception as error:
                self.failure = reason_of(error)
                return index + 1
        return len(tokens)

    def allowed(self, tokens: Sequence[int], parents: Sequence[int]) -> np.ndarray:
        """The constraint's own answer; no token after any node once it has failed."""
        if self.failure is None:
            try:
                return self._constraint.allowed(tokens, parents)
            except Exception as error:
                self.failure = reason_of(error)
        return np.zeros((len(tokens), 1), np.uint32)


FREE: Mapping[int, Guarded] = {}
"""Of rows that may all emit anything."""


class Anything:
    """The constraint of a row that may emit anything; compiles what others run."""

    def advance(self, tokens: Sequence[int]) -> None:
        """Every token is as good as any."""

    def allowed(self, tokens: Sequence[int], parents: Sequence[int]) -> np.ndarray:
        """All tokens: one word stands for all."""
        return np.full((len(tokens), 1), ALL)


def allowed_tokens(
    constraints: Mapping[int, Guarded], trees: np.ndarray, vocabulary: int
) -> np.ndarray:
    """What may follow every node of every row's tree.

    Args:
      constraints: by row; all is allowed in the others.
      trees: ``[B, 2, T]`` tokens and parents of the nodes.
      vocabulary: width of the target's logits.

    Returns:
      ``[B, T, W]`` uint32: bit ``v % 32`` of word ``v // 32`` is set where token ``v`` is allowed.
    """
    batch, _, nodes = trees.shape
    bits = np.full((batch, nodes, -(-vocabulary // 32)), ALL)
    for slot, constraint in constraints.items():
        tokens, parents = trees[slot].tolist()
        bits[slot] = constraint.allowed(tokens, parents)
    return bits


def first_tokens(constraints: Sequence[Guarded | None], vocabulary: int) -> np.ndarray:
    """``[B, 1, W]`` what may come first in every row; one has a constraint, at least."""
    given = {row: one for row, one in enumerate(constraints) if one is not None}
    # Nothing is asked about the last token of a prompt.
    roots = np.full((len(constraints), 2, 1), -1)
    return allowed_tokens(given, roots, vocabulary)


def constrained_round(
    target: TargetModel,
    drafter: Drafter,
    params: Params,
    rows: Rows,
    constraints: Mapping[int, Guarded],
    contents: Contents = TOKENS,
    slots: Int[Any, " B"] | None = None,
) -> tuple[Rows, Int[Array, "1 B n"]]:
    """Launch a round whose draws some rows' constraints limit; waits for its tree.

    All that was emitted before has been taken in by the constraints.

    Args:
      target: the target's static part.
      drafter: the drafter's static part; lossless.
      params: parameters of both.
      rows: the rows before the round; donated.
      constraints: of some of the rows, by their place in the launch.
      contents: of the report; static.
      slots: as in :func:`~longspec_jax.decoding.round.many_rounds`.

    Returns:
      The rows after the round, and its report.
    """
    models = target, drafter, params
    rows, tree, trees = _propose(*models, rows, slots)
    verified = _run(*models, rows, tree, slots)
    bits = allowed_tokens(constraints, np.asarray(trees), target.vocab_size)
    return _conclude(*models, rows, tree, verified, bits, contents, slots)


def constrained_programs(
    target: TargetModel,
    drafter: Drafter,
    params: Params,
    rows: Rows,
    contents: Contents,
    slots: Int[Any, " B"] | None = None,
) -> Iterator[jax.stages.Lowered]:
    """Lower the launches of :func:`constrained_round`; ``rows`` are shapes and shardings."""

    def placed(shapes: PyTree) -> PyTree:
        sharding = rows.length.sharding
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes
        )

    models = target, drafter, params
    yield (propose := _propose.lower(*models, rows, slots))
    _, tree, trees = propose.out_info
    yield (run := _run.lower(*models, rows, placed(tree), slots))
    batch, _, nodes = trees.shape
    bits = np.zeros((batch, nodes, -(-target.vocab_size // 32)), np.uint32)
    drawn = placed(tree), placed(run.out_info), bits
    yield _conclude.lower(*models, rows, *drawn, contents, slots)


@program(static_argnames=("target", "drafter"), donate_argnames=("rows",))
def _propose(
    target: TargetModel, drafter: Drafter, params: Params, rows: Rows, slots: Lengths | None
) -> tuple[Rows, Tree, Int[Array, "B 2 T"]]:
    """The trees, and their tokens and parents once more for the host."""
    some = rows.gather(slots)
    with use_mesh(target.mesh):
        ready = refresh_selection(target, drafter, params, some)
        noise = sampling_noise(target, drafter, ready)
        tree = propose_tree(target, drafter, params, ready, noise)
    return rows.scatter(slots, some, ready), tree, jnp.stack([tree.tokens, tree.parents], axis=1)


@program(static_argnames=("target", "drafter"))
def _run(
    target: TargetModel,
    drafter: Drafter,
    params: Params,
    rows: Rows,
    tree: Tree,
    slots: Lengths | None,
) -> Verification:
    with use_mesh(target.mesh):
        return run_tree(target, drafter, params, rows.gather(slots), tree)


@program(static_argnames=("target", "drafter", "contents"), donate_argnames=("rows",))
def _conclude(
    target: TargetModel,
    drafter: Drafter,
    params: Params,
    rows: Rows,
    tree: Tree,
    verified: Verification,
    bits: UInt[Array, "B T W"],
    contents: Contents,
    slots: Lengths | None,
) -> tuple[Rows, Int[Array, "1 B n"]]:
    """Draw, accept, commit, and report."""
    some = rows.gather(slots)
    with use_mesh(target.mesh):
        noise = sampling_noise(target, drafter, some)
        draws = draw_at_nodes(drafter, tree, masked(verified.logits, bits), noise)
        tree = replace(tree, parents=jnp.where((bits != 0).any(axis=2), tree.parents, -1))
        drawn, kind = (tree, verified, draws), SamplingKind.ANY
        after, emitted = accept_and_commit(
            target, drafter, params, some, *drawn, kind, contents=contents
        )
    return rows.scatter(slots, some, after), packed(emitted, after)[None]
