"""How long the parts of a round take, in a run that waits for each of them.

Waiting keeps the device from beginning one part while another ends, and every part is a program of
its own, so that the parts together take longer than the round does as one program. They say where
the time goes, not how much there is of it.
"""

import time
from dataclasses import dataclass

import jax

from longspec_jax.decoding import round as round_lib
from longspec_jax.decoding.programs import program
from longspec_jax.decoding.round import Emitted
from longspec_jax.decoding.round_noise import RoundNoise
from longspec_jax.decoding.rows import Rows
from longspec_jax.decoding.sampling import NO_TOKEN
from longspec_jax.decoding.target import CachedTarget, Verification
from longspec_jax.drafters.base import Drafter, Params
from longspec_jax.drafters.tree import Tree
from longspec_jax.generation.run import Begin
from longspec_jax.ops.partitioned import use_mesh


@dataclass(frozen=True)
class RoundParts:
    """Seconds of the parts of so many rounds, all rows of the call together."""

    rounds: int
    draft: float
    """The drafter looks at the cache and grows its tree."""
    verify: float
    """The target's pass over the tree, its LM head and the draws."""
    commit: float
    """Accepting a path, appending it to the cache, and the drafter's update."""


def timed(begin: Begin, limit: int) -> RoundParts:
    """Time the parts of a call's first rounds but one, whose programs may have to be compiled.

    Args:
      begin: makes the call ready; it has settled on one tree, and every row has a slot.
      limit: most rounds to time.

    Raises:
      ValueError: if rows would wait for slots.
    """
    run = begin(False)
    call, rows = run.call, run.engine.rows
    if call.waits:
        raise ValueError("rounds are timed where every row has a slot; leave row_slots out")
    models = call.target, call.drafter, call.params
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


@program(static_argnames=("target", "drafter"), donate_argnames=("rows",))
def _draft(
    target: CachedTarget, drafter: Drafter, params: Params, rows: Rows
) -> tuple[Rows, Tree, RoundNoise]:
    """The tree of a round, and the rows whose drafter has looked at the cache."""
    with use_mesh(target.mesh):
        noise = round_lib.sampling_noise(target, drafter, rows)
        rows = round_lib.look_at_cache(target, drafter, params, rows)
        return rows, round_lib.propose_tree(target, drafter, params, rows, noise), noise


@program(static_argnames=("target", "drafter"))
def _verify(
    target: CachedTarget,
    drafter: Drafter,
    params: Params,
    rows: Rows,
    tree: Tree,
    noise: RoundNoise,
) -> tuple[Verification, jax.Array]:
    """The target's pass and its draws."""
    with use_mesh(target.mesh):
        return round_lib.verify_tree(target, drafter, params, rows, tree, noise)


@program(static_argnames=("target", "drafter"), donate_argnames=("rows",))
def _commit(
    target: CachedTarget,
    drafter: Drafter,
    params: Params,
    rows: Rows,
    tree: Tree,
    verified: Verification,
    draws: jax.Array,
) -> tuple[Rows, Emitted]:
    """The rows after the round."""
    with use_mesh(target.mesh):
        accepted_path = round_lib.accept_rule(drafter)(tree, draws, drafter.tree.num_levels)
        return round_lib.commit_accepted(drafter, params, rows, verified, accepted_path)
