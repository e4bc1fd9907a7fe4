"""Look inside a round: the draft's candidates beside the target's draws.

For every depth of the accepted path: what the draft proposed there, how likely the target finds
each proposal, what the target drew, and hence why the path went on or stopped.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longspec_jax.axes import Array
from longspec_jax.decoding import round as round_lib
from longspec_jax.decoding.programs import program
from longspec_jax.decoding.rows import Rows
from longspec_jax.decoding.target import CachedTarget
from longspec_jax.drafters.base import Drafter, Params
from longspec_jax.generation.run import Begin
from longspec_jax.ops.partitioned import use_mesh


@dataclass(frozen=True)
class DepthView:
    """One node of the accepted path and what lay below it."""

    position: int
    """Index of the drawn token in its row."""
    drawn: int
    """What the target drew here."""
    drawn_probability: float
    """The target's probability of it, before noise, temperature and filters."""
    candidates: tuple[int, ...]
    """The draft's proposals below this node, best first; empty at the tree's last level and at
    nodes outside the draft's beam. Proposals outside the tree's budget are not listed."""
    probabilities: tuple[float, ...]
    """The target's probabilities of the candidates."""

    @property
    def accepted(self) -> bool:
        """Whether a candidate carries the drawn token, so that the path goes on."""
        return self.drawn in self.candidates

    @property
    def verdict(self) -> str:
        """In words, how the path goes on."""
        if self.accepted:
            return f"accepted: candidate {self.candidates.index(self.drawn) + 1}"
        return (
            "rejected: not among the candidates" if self.candidates else "bonus: nothing proposed"
        )


@dataclass(frozen=True)
class TreeView:
    """All that the target verified in a round, one entry per node; node 0 is the root."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    """Index of every node's parent; -1 for the root."""
    draws: tuple[int, ...]
    """What the target drew behind every node."""
    path: tuple[int, ...]
    """The accepted nodes, the root first."""


@dataclass(frozen=True)
class RoundView:
    """One round of a single row."""

    number: int
    position: int
    """Index of the root in its row."""
    pending: int
    """The token at the root of the tree."""
    depths: tuple[DepthView, ...]
    """The accepted path; the last entry is the bonus token."""
    tree: TreeView


def rounds(begin: Begin, rows: int) -> Iterator[RoundView]:
    """Yield a view of every round of a call of one row, which has settled on one tree.

    Args:
      begin: makes the call ready to run.
      rows: of the call.
    """
    if rows > 1:
        raise ValueError(f"inspect() looks at one row and {rows} were given")
    return _views(begin)


def _views(begin: Begin) -> Iterator[RoundView]:
    run = begin(True)
    call, engine = run.call, run.engine
    # A round is launched when the rows before it were seen.
    engine.ahead = False
    for number, _ in enumerate(run.rounds()):
        if not run.progress.done[0]:
            seen = _examine(call.target, call.drafter, call.params, engine.rows)
            position = len(call.prompts[0]) + len(run.progress.tokens[0])
            yield _view(number, position, jax.device_get(seen))


@program(static_argnames=("target", "drafter"))
def _examine(
    target: CachedTarget, drafter: Drafter, params: Params, rows: Rows
) -> dict[str, Array]:
    """A round without its commit: the same tree, draws and path as in the round that follows."""
    with use_mesh(target.mesh):
        noise = round_lib.sampling_noise(target, drafter, rows)
        rows = round_lib.look_at_cache(target, drafter, params, rows)
        tree = round_lib.propose_tree(target, drafter, params, rows, noise)
        verified, draws = round_lib.verify_tree(target, drafter, params, rows, tree, noise)
    accepted_path = round_lib.accept_rule(drafter)(tree, draws, drafter.tree.num_levels)
    probabilities = jax.nn.softmax(verified.logits, axis=-1)
    # At node i: the probability of what was drawn there; at node j: that of j under its parent.
    drawn = jnp.take_along_axis(probabilities, draws[..., None], axis=-1)[..., 0]
    parents = jnp.maximum(tree.parents, 0)
    proposed = probabilities[jnp.arange(draws.shape[0])[:, None], parents, tree.tokens]
    return {
        **{
            "tokens": tree.tokens,
            "parents": tree.parents,
            "draws": draws,
            "path": accepted_path.path,
        },
        **{"count": accepted_path.count, "drawn": drawn, "proposed": proposed},
    }


def _view(number: int, position: int, seen: dict[str, Any]) -> RoundView:
    row = {name: value[0] for name, value in seen.items()}
    depths = []
    for depth, node in enumerate(row["path"][: row["count"]].tolist()):
        below = np.flatnonzero(row["parents"] == node)
        depths.append(
            DepthView(
                position=position + depth,
                drawn=int(row["draws"][node]),
                drawn_probability=float(row["drawn"][node]),
                candidates=tuple(row["tokens"][below].tolist()),
                probabilities=tuple(row["proposed"][below].tolist()),
            )
        )
    path = row["path"][: row["count"]]
    by_node = (tuple(row[name].tolist()) for name in ("tokens", "parents", "draws"))
    tree = TreeView(*by_node, path=tuple(path.tolist()))
    return RoundView(number, position - 1, int(row["tokens"][0]), tuple(depths), tree)
