"""Look inside a round: the draft's candidates next to the target's draws, and what its parts take.

For every depth of the accepted path :func:`round_views` shows what the draft proposed there, how
likely the target finds each proposal, what the target drew, and hence why the path went on or
stopped.

:func:`time_parts` waits for each part of a round. Waiting keeps the device from beginning one part
while another ends, and every part is a program of its own. So the parts together take longer than
the round as one program: they show where the time goes, not how long a round is.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longspec_jax.axes import Array
from longspec_jax.decoding import round as round_lib
from longspec_jax.decoding.jit_cache import program
from longspec_jax.decoding.report import Emitted
from longspec_jax.decoding.round_noise import RoundNoise
from longspec_jax.decoding.rows import Rows
from longspec_jax.decoding.sampling import NO_TOKEN
from longspec_jax.decoding.target import TargetModel, Verification
from longspec_jax.drafters.base import Drafter, Params
from longspec_jax.drafters.tree import Tree
from longspec_jax.generation.call import CallPlan
from longspec_jax.generation.run import Run
from longspec_jax.ops.partitioned import use_mesh


@dataclass(frozen=True)
class DepthView:
    """One node of the accepted path and what lay below it."""

    position: int
    """Index of the drawn token in its row."""
    drawn: int
    """What the target drew here."""
    drawn_probability: float
    """The target's probability of it, before noise, temperature, filters, biases and penalties."""
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
class RoundView:
    """One round of a single row."""

    number: int
    position: int
    """Index of the root in its row."""
    pending: int
    """The token at the root of the tree."""
    depths: tuple[DepthView, ...]
    """The accepted path; the last entry is the bonus token."""


def round_views(start: Callable[[], Run]) -> Iterator[RoundView]:
    """Yield a view of every round of a call of one row.

    Args:
      start: makes the call ready, with one drafter and followed round by round.
    """
    run = start()
    # A round is launched when the rows before it were seen.
    run.engine.ahead = False
    for number, _ in enumerate(run.rounds()):
        if not run.rows[0].done:
            seen = jax.device_get(_seen(run.plan, run.engine.rows))
            position = len(run.batch.prompts[0]) + len(run.rows[0].tokens)
            yield _view(number, position, seen)


@dataclass(frozen=True)
class RoundParts:
    """Seconds of the parts of some rounds, all rows of the call together."""

    rounds: int
    draft: float
    """The drafter looks at the cache and grows its tree."""
    verify: float
    """The target's forward over the tree, its LM head and the draws."""
    commit: float
    """Accepting a path, appending it to the cache, and the drafter's update."""


def time_parts(run: Run, limit: int) -> RoundParts:
    """Time the parts of a call's rounds; the first round, which may compile, does not count.

    Args:
      run: the call, ready to decode with one drafter; every row has a slot.

    Raises:
      ValueError: if rows would wait for slots.
    """
    plan, rows = run.plan, run.engine.rows
    if plan.waits:
        raise ValueError("rounds are timed where every row has a slot; leave max_num_seqs out")
    models = plan.target, plan.drafter, plan.params
    parts: list[tuple[float, float, float]] = []
    while len(parts) <= limit and not rows.done.all():
        clock = [time.perf_counter()]
        rows, tree, noise = _draft(*models, rows)
        _wait(clock, tree.tokens)
        verified, draws = _verify(*models, rows, tree, noise)
        _wait(clock, (verified, draws))
        rows, emitted = _commit(*models, rows, tree, verified, draws)
        _wait(clock, (rows, emitted))
        if (emitted.tokens == NO_TOKEN).any():
            break  # The target's logits are not finite; decoding itself says so.
        parts.append((clock[1] - clock[0], clock[2] - clock[1], clock[3] - clock[2]))
    run.engine.finish()
    counted = parts[1:]
    sums = map(sum, zip(*counted, strict=True)) if counted else (0.0,) * 3
    return RoundParts(len(counted), *sums)


def _wait(clock: list[float], result: object) -> None:
    jax.block_until_ready(result)
    clock.append(time.perf_counter())


@program(static_argnames=("target", "drafter"))
def _draft(
    target: TargetModel, drafter: Drafter, params: Params, rows: Rows
) -> tuple[Rows, Tree, RoundNoise]:
    """The tree of a round, and the rows whose drafter has looked at the cache."""
    with use_mesh(target.mesh):
        noise = round_lib.sampling_noise(target, drafter, rows)
        rows = round_lib.refresh_selection(target, drafter, params, rows)
        return rows, round_lib.propose_tree(target, drafter, params, rows, noise), noise


@program(static_argnames=("target", "drafter"))
def _verify(
    target: TargetModel, drafter: Drafter, params: Params, rows: Rows, tree: Tree, noise: RoundNoise
) -> tuple[Verification, Array]:
    """The target's forward and its draws."""
    with use_mesh(target.mesh):
        return round_lib.verify_tree(target, drafter, params, rows, tree, noise)


@program(static_argnames=("target", "drafter"), donate_argnames=("rows",))
def _commit(
    target: TargetModel,
    drafter: Drafter,
    params: Params,
    rows: Rows,
    tree: Tree,
    verified: Verification,
    draws: Array,
) -> tuple[Rows, Emitted]:
    """The rows after the round."""
    with use_mesh(target.mesh):
        return round_lib.accept_and_commit(target, drafter, params, rows, tree, verified, draws)


def _seen(plan: CallPlan, rows: Rows) -> dict[str, Array]:
    """A round without its commit: the same tree, draws and path as in the round that follows."""
    models = plan.target, plan.drafter, plan.params
    rows, tree, noise = _draft(*models, rows)
    return _probabilities(plan.drafter, tree, *_verify(*models, rows, tree, noise))


@program(static_argnames=("drafter",))
def _probabilities(
    drafter: Drafter, tree: Tree, verified: Verification, draws: Array
) -> dict[str, Array]:
    """The tree, its accepted path, and the target's probabilities of draws and candidates."""
    path = round_lib.accept_rule(drafter)(tree, draws, drafter.tree.num_levels)
    probabilities = jax.nn.softmax(verified.logits, axis=-1)
    parents = jnp.maximum(tree.parents, 0)
    return {
        "tokens": tree.tokens,
        "parents": tree.parents,
        "draws": draws,
        "path": path.path,
        "count": path.count,
        # At node i the probability of what was drawn there; at node j that of j under its parent.
        "drawn": jnp.take_along_axis(probabilities, draws[..., None], axis=-1)[..., 0],
        "proposed": probabilities[jnp.arange(draws.shape[0])[:, None], parents, tree.tokens],
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
    return RoundView(number, position - 1, int(row["tokens"][0]), tuple(depths))
