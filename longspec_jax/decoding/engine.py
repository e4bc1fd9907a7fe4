"""The decode loop: rounds of propose, verify, walk, commit.

One step function has several drivers: :func:`decode` runs it under ``lax.while_loop`` on the
device, ``longspec_jax.decoding.adaptive`` in bursts, between which the host looks and may choose
another tree, ``longspec_jax.decoding.ahead`` streams. Target and drafter are callables over arrays;
the loop knows no tokenizer, no checkpoint and no model family.

Rows are independent: each has its own length, seed, sampling parameters, stop tokens and budget,
and a row that is done neither advances nor affects the others.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int

from longspec_jax.axes import Array, Lengths
from longspec_jax.decoding.programs import program
from longspec_jax.decoding.record import Emitted, SpecState
from longspec_jax.decoding.round_noise import RoundNoise
from longspec_jax.decoding.rows import Rows
from longspec_jax.decoding.sampling import NO_TOKEN
from longspec_jax.decoding.target import TargetModel, Verification
from longspec_jax.decoding.view import CacheView
from longspec_jax.drafters.base import Committed, Drafter, Params, SamplingNoise
from longspec_jax.drafters.tree import (
    AcceptedPath,
    AcceptRule,
    Tree,
    accept,
    accept_trusted,
    node_depths,
)
from longspec_jax.ops.along import along, last_along
from longspec_jax.ops.partitioned import use_mesh


def slack_slots(levels: int) -> int:
    """Slots a cache needs beyond prompt and new tokens: a round writes a static height."""
    return levels + 1


def spec_step(
    target: TargetModel,
    drafter: Drafter,
    params: Params,
    rows: Rows,
    walker: AcceptRule | None = None,
) -> tuple[Rows, Emitted]:
    """One round for every row: propose a tree, verify it, walk it, commit the accepted path.

    Args:
      target: the target's static part.
      drafter: the drafter's static part.
      params: parameters of both.
      rows: the rows before the round.
      walker: how the tree is walked; by the target's draws if absent, unless the drafter is a lossy
        one. Another one serves to measure.

    Returns:
      The rows after the round, and what it emitted.
    """
    with use_mesh(target.mesh):
        noise = sampling_noise(target, drafter, rows)
        rows = look_at_cache(target, drafter, params, rows)
        tree = propose_tree(target, drafter, params, rows, noise)
        verified, draws = verify_tree(target, drafter, params, rows, tree, noise)
        accepted_path = (walker or accept_rule(drafter))(tree, draws, drafter.tree.num_levels)
        return commit_accepted(drafter, params, rows, verified, accepted_path)


def accept_rule(drafter: Drafter) -> AcceptRule:
    """How a drafter's trees are accepted: by the target's draws, unless the drafter is lossy."""
    if drafter.trusted:
        return partial(accept_trusted, trusted=drafter.trusted)
    return accept


def recorded_step(
    target: TargetModel, drafter: Drafter, params: Params, state: SpecState
) -> SpecState:
    """One round that is recorded; arguments as of :func:`spec_step`."""
    rows, emitted = spec_step(target, drafter, params, state.rows)
    return SpecState(rows, state.record.add(emitted))


def sampling_noise(target: TargetModel, drafter: Drafter, rows: Rows) -> RoundNoise:
    """What is known beforehand of the draws below every row's pending token."""
    levels = drafter.tree.num_levels
    return RoundNoise.of_round(rows.sampling, rows.length, levels, target.vocab_size)


def look_at_cache(target: TargetModel, drafter: Drafter, params: Params, rows: Rows) -> Rows:
    """The rows after the drafter took from the target's cache what it needs for the round."""
    view = _view(target, params, rows)
    return replace(rows, draft=drafter.before_round(params, rows.draft, view))


def propose_tree(
    target: TargetModel, drafter: Drafter, params: Params, rows: Rows, noise: SamplingNoise
) -> Tree:
    """The drafter's tree below every row's pending token."""
    return drafter.propose(params, rows.draft, _view(target, params, rows), noise)


def _view(target: TargetModel, params: Params, rows: Rows) -> CacheView:
    at = rows.pending, rows.length, rows.length, rows.done
    return CacheView(target, params.target, rows.cache, *at)


def verify_tree(
    target: TargetModel,
    drafter: Drafter,
    params: Params,
    rows: Rows,
    tree: Tree,
    noise: RoundNoise,
) -> tuple[Verification, Int[Array, "B T"]]:
    """One target pass over the tree, and the target's draw at every node."""
    depths = node_depths(tree, drafter.tree)
    positions = rows.length[:, None] + depths
    verified = target.verify(
        params.target,
        rows.cache,
        tree.tokens,
        positions,
        tree.mask,
        rows.length,
        drafter.needs,
    )
    return verified, noise.draw(verified.logits, depths)


def commit_accepted(
    drafter: Drafter,
    params: Params,
    rows: Rows,
    verified: Verification,
    accepted_path: AcceptedPath,
) -> tuple[Rows, Emitted]:
    """Append the walked path to cache and draft state; what it emits in every row."""
    length = rows.length
    count, stopped = _trim(accepted_path.tokens, accepted_path.count, rows)
    # A round that was cut may have emitted accepted draft tokens alone, and no bonus.
    accepted = jnp.minimum(count, accepted_path.count - 1)
    block = jnp.concatenate([rows.pending[:, None], accepted_path.tokens[:, :-1]], axis=1)
    # No token is below -1, so this is the length; but it waits for the draws. Where a row has one
    # fresh slot, the compiler would append before it has read, and copy whole caches to be able to.
    end = jnp.maximum(length, -2 - accepted_path.tokens[:, 0])
    features = jax.tree.map(partial(along, accepted_path.path), verified.features)
    last = last_along(accepted_path.tokens, count)
    after = replace(
        rows,
        cache=rows.cache.commit(verified.keys, verified.values, accepted_path.path, end),
        draft=drafter.extend(params, rows.draft, Committed(block, length, count, features)),
        length=length + count,
        pending=jnp.where(count > 0, last, rows.pending),
        remaining=jnp.where(stopped, 0, rows.remaining - count),
    )
    return after, Emitted(accepted_path.tokens, count, accepted)


def _trim(
    tokens: Int[Array, "B h"], count: Lengths, rows: Rows
) -> tuple[Lengths, Bool[Array, " B"]]:
    """Cut a round's tokens after the first stop token or NO_TOKEN, and at the row's budget.

    Returns:
      How many remain, none where the row was done; and which rows met a stop token.
    """
    step = jnp.arange(tokens.shape[1])
    stops = (tokens[:, :, None] == rows.stop_tokens[:, None, :]).any(axis=2)
    stops |= tokens == NO_TOKEN
    stops &= step < count[:, None]
    first_stop = jnp.where(stops.any(axis=1), jnp.argmax(stops, axis=1) + 1, tokens.shape[1] + 1)
    count = jnp.minimum(count, rows.remaining)
    return jnp.minimum(count, first_stop), first_stop <= count


@program(static_argnames=("target", "drafter"), donate_argnames=("state",))
def decode(target: TargetModel, drafter: Drafter, params: Params, state: SpecState) -> SpecState:
    """Rounds until every row is done, in one executable; the state is donated."""
    return jax.lax.while_loop(
        lambda state: ~state.rows.done.all(),
        lambda state: recorded_step(target, drafter, params, state),
        state,
    )
