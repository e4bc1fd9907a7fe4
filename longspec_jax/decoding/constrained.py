"""Rounds of rows whose next tokens depend on what only the host can tell, such as a grammar.

What may follow a node of a tree is known once the tree is. So a round is three launches: propose,
the target's pass, and the rest. The tree leaves the device after the first one. The host computes
what is allowed while the target's pass runs, and hands it to the third.

Forbidden logits become -inf before everything that sampling does to them. Plain decoding passes
through the same functions, so that a tree changes no token here either.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, UInt

from longspec_jax.axes import Array, Lengths
from longspec_jax.decoding.programs import program
from longspec_jax.decoding.report import TOKENS, Contents, packed
from longspec_jax.decoding.round import (
    conclude,
    draw_at_nodes,
    look_at_cache,
    propose_tree,
    run_tree,
    sampling_noise,
)
from longspec_jax.decoding.rows import Rows
from longspec_jax.decoding.sampling import SamplingKind, masked
from longspec_jax.decoding.target import TargetModel, Verification
from longspec_jax.drafters.base import Drafter, Params
from longspec_jax.drafters.tree import Tree
from longspec_jax.ops.partitioned import use_mesh

ALL = np.uint32(2**32 - 1)
"""32 tokens, all allowed."""


@runtime_checkable
class Constraint(Protocol):
    """What a row may emit; its state follows what was read of the row."""

    def advance(self, tokens: Sequence[int]) -> None:
        """Take in tokens that the row has emitted."""
        ...

    def allowed(self, tokens: Sequence[int], parents: Sequence[int]) -> np.ndarray:
        """``[T, W]`` uint32, the tokens that may follow every node of a tree.

        Args:
          tokens: of the nodes; that of the root was taken in by :meth:`advance`.
          parents: index of every node's parent, below the node's own; -1 for the root and for
            nodes without a path.
        """
        ...


FREE: Mapping[int, Constraint] = {}
"""Of rows that may all emit anything."""


class Anything:
    """The constraint of a row that may emit anything; compiles what others run."""

    def advance(self, tokens: Sequence[int]) -> None:
        """Every token is as good as any."""

    def allowed(self, tokens: Sequence[int], parents: Sequence[int]) -> np.ndarray:
        """All tokens: one word stands for all."""
        return np.full((len(tokens), 1), ALL)


def allowed_tokens(
    constraints: Mapping[int, Constraint], trees: np.ndarray, vocabulary: int
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


def first_tokens(constraints: Sequence[Constraint | None], vocabulary: int) -> np.ndarray | None:
    """``[B, 1, W]`` what may come first in every row; None if all may in all of them."""
    if not any(constraints):
        return None
    given = {row: one for row, one in enumerate(constraints) if one is not None}
    # Nothing is asked about the last token of a prompt.
    roots = np.full((len(constraints), 2, 1), -1)
    return allowed_tokens(given, roots, vocabulary)


def constrained_round(
    target: TargetModel,
    drafter: Drafter,
    params: Params,
    rows: Rows,
    constraints: Mapping[int, Constraint],
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
      slots: as of :func:`~longspec_jax.decoding.round.many_rounds`.

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

    def placed(shapes: Any) -> Any:
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
    some = rows.some(slots)
    with use_mesh(target.mesh):
        ready = look_at_cache(target, drafter, params, some)
        noise = sampling_noise(target, drafter, ready)
        tree = propose_tree(target, drafter, params, ready, noise)
    return rows.behind(slots, some, ready), tree, jnp.stack([tree.tokens, tree.parents], axis=1)


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
        return run_tree(target, drafter, params, rows.some(slots), tree)


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
    some = rows.some(slots)
    with use_mesh(target.mesh):
        noise = sampling_noise(target, drafter, some)
        draws = draw_at_nodes(drafter, tree, masked(verified.logits, bits), noise)
        drawn, kind = (tree, verified, draws), SamplingKind.ANY
        after, emitted = conclude(*(target, drafter, params, some, *drawn), kind, contents=contents)
    return rows.behind(slots, some, after), packed(emitted, after)[None]
