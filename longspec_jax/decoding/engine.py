"""The decode loop: prefill, then rounds of propose, verify, walk, commit.

One step function has several drivers: :func:`decode` runs it under ``lax.while_loop`` on the
device, ``longspec_jax.decoding.adaptive`` in bursts, between which the host looks and may choose
another tree, ``longspec_jax.decoding.ahead`` streams. Target and drafter are callables over arrays;
the loop knows no tokenizer, no checkpoint and no model family.

Rows are independent: each has its own length, seed, sampling parameters, stop tokens and budget,
and a row that is done neither advances nor affects the others.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int

from longspec_jax.axes import Array, Leaf, Lengths
from longspec_jax.decoding import cache as cache_lib
from longspec_jax.decoding.beliefs import RoundBeliefs
from longspec_jax.decoding.cache import KVCache
from longspec_jax.decoding.programs import RECENT, program
from longspec_jax.decoding.sampling import NO_TOKEN, Sampling, draw, noise
from longspec_jax.decoding.target import TargetModel, Verification
from longspec_jax.decoding.view import CacheView
from longspec_jax.decoding.walk import Walk, walk
from longspec_jax.drafters.base import Committed, Drafter, Features, Needs, Params
from longspec_jax.drafters.tree import Tree, along, node_depths
from longspec_jax.ops.partitioned import spread_over

Walker: TypeAlias = Callable[[Tree, Array, int], Walk]
"""``(tree, draws[B, T], levels) -> walk``: what :func:`longspec_jax.decoding.walk.walk` is."""


@struct.dataclass
class Request:
    """What each row of a batch asks for."""

    sampling: Sampling
    stop_tokens: Leaf
    """``[B, n]`` int32 tokens that end a row, itself emitted; pad with -1."""
    max_new_tokens: Leaf
    """``[B]`` int32 most tokens to emit."""


@struct.dataclass
class SpecState:
    """Everything that changes from round to round. DONATED by every step."""

    cache: KVCache
    """K/V of the committed tokens."""
    draft: Any
    """The drafter's own state."""
    length: Leaf
    """``[B]`` committed tokens: prompt and emitted tokens, the pending one not included."""
    pending: Leaf
    """``[B]`` the last emitted token, not in the cache yet."""
    output: Leaf
    """``[B, E]`` emitted tokens; garbage from ``emitted[b]`` on."""
    drafted: Leaf
    """``[B, E]`` whether an emitted token was an accepted draft token."""
    emitted: Leaf
    """``[B]`` tokens emitted so far, the first one (drawn from the prefill) included."""
    done: Leaf
    """``[B]`` whether the row has met a stop token or its budget."""
    rounds: Leaf
    """``[B]`` target passes this row took part in while it was not done, prefill excluded."""
    histogram: Leaf
    """``[B, h]`` rounds by the accepted draft tokens they emitted: column 0 is the bonus alone; as
    wide as the tallest tree that may run is high."""


def room(levels: int) -> int:
    """Slots a cache needs beyond prompt and new tokens: a round writes a static height."""
    return levels + 1


def prefill(
    target: TargetModel,
    drafter: Drafter,
    params: Params,
    tokens: Int[Any, "B P"],
    length: Int[Any, " B"],
    request: Request,
    *,
    capacity: int,
    max_emitted: int,
    chunk: int,
    on_chunk: Callable[[int], None] | None = None,
) -> SpecState:
    """Run the prompts through the target in chunks and draw each row's first token.

    Args:
      target: the target's static part.
      drafter: the drafter's static part.
      params: parameters of both.
      tokens: prompts, right-padded with any token.
      length: tokens of each prompt, at least 1.
      request: what each row asks for.
      capacity: cache slots of a row; at least prompt + new tokens + :func:`room`.
      max_emitted: the largest ``max_new_tokens`` the state can serve; static.
      chunk: tokens of one prefill chunk; one compiled shape serves prompts of any length.
      on_chunk: called as the prefill gets on, with the tokens of the longest prompt that have been
        run.
    """
    batch, prompt = tokens.shape
    chunks = -(-prompt // chunk)
    capacity = max(capacity, chunks * chunk)
    home = _home(params.target)
    # Padded on the host: on the device every number of chunks would be a program of its own.
    host, held = np.zeros((batch, capacity), np.int32), np.asarray(length, np.int32)
    host[:, :prompt] = tokens
    padded, length = jax.device_put((host, held), home.rows)
    cache, logits, draft = _allocate(target, drafter, batch, capacity, home)(params)
    for index in range(chunks):
        before, offset = logits, np.int32(index * chunk)
        logits, cache, features = _prefill_chunk(
            target,
            drafter.needs,
            chunk,
            home,
            params.target,
            cache,
            padded,
            length,
            offset,
            logits,
        )
        if _concerns(drafter.needs, held, index * chunk, chunk):
            draft = _extend(
                target, drafter, chunk, home, params, draft, padded, length, offset, features
            )
        if on_chunk is not None:
            # One chunk late, so that the device always has the next one to go on with.
            jax.block_until_ready(before)
            on_chunk(min(index * chunk, prompt))
    return _start(target, drafter, max_emitted, params, cache, draft, length, logits, request)


def _concerns(needs: Needs, length: np.ndarray, offset: int, chunk: int) -> bool:
    """Whether a chunk of the prompts holds a token that the drafter's state depends on."""
    recent = length if needs.recent is None else np.minimum(length, needs.recent)
    return bool(((length > offset) & (length - recent < offset + chunk) & (recent > 0)).any())


class Home(NamedTuple):
    """Where the arrays of a prefill live.

    The same before and after every chunk, so that all chunks, the first included, are one program.
    """

    cache: Sharding
    rows: Sharding


def _home(params: Any) -> Home:
    """Beside the parameters; key/value heads on the devices that hold their projections."""
    sharding = jax.tree.leaves(params)[0].sharding
    if not isinstance(sharding, NamedSharding):
        return Home(sharding, sharding)
    mesh = sharding.mesh
    return Home(NamedSharding(mesh, P(None, "tp")), NamedSharding(mesh, P()))


def _allocate(
    target: TargetModel, drafter: Drafter, batch: int, capacity: int, home: Home
) -> Callable[[Params], Any]:
    """A program that makes the state and logits of rows without a token, where they will stay."""

    def empty(params: Params) -> tuple[KVCache, Float[Array, "B V"], Any]:
        logits = jnp.zeros((batch, target.vocab_size), jnp.float32)
        return target.allocate(batch, capacity), logits, drafter.begin(params, batch, capacity)

    def make() -> tuple[Any, Any]:
        return _allocate, jax.jit(empty, out_shardings=(home.cache, home.rows, home.rows))

    return RECENT.get((_allocate, target, drafter, batch, capacity, home), make)[1]


@program(static_argnames=("target", "needs", "chunk", "home"), donate_argnames=("cache",))
def _prefill_chunk(
    target: TargetModel,
    needs: Needs,
    chunk: int,
    home: Home,
    params: Any,
    cache: KVCache,
    tokens: Int[Array, "B S"],
    length: Lengths,
    offset: Array,
    logits: Float[Array, "B V"],
) -> tuple[Float[Array, "B V"], KVCache, Features]:
    """One chunk; keeps the logits of the rows whose last prompt token it holds."""
    fresh = jax.lax.dynamic_slice_in_dim(tokens, offset, chunk, axis=1)
    last = length - 1 - offset
    at = jnp.clip(last, 0, chunk - 1)
    with spread_over(target.devices):
        new, cache, features = target.prefill_chunk(params, cache, fresh, offset, at, needs)
    here = (last >= 0) & (last < chunk)
    logits, cache = jax.lax.with_sharding_constraint(
        (jnp.where(here[:, None], new, logits), cache), (home.rows, home.cache)
    )
    return logits, cache, features


@program(static_argnames=("target", "drafter", "chunk", "home"), donate_argnames=("draft",))
def _extend(
    target: TargetModel,
    drafter: Drafter,
    chunk: int,
    home: Home,
    params: Params,
    draft: Any,
    tokens: Int[Array, "B S"],
    length: Lengths,
    offset: Array,
    features: Features,
) -> Any:
    """Let the drafter learn of one chunk."""
    fresh = jax.lax.dynamic_slice_in_dim(tokens, offset, chunk, axis=1)
    start = jnp.full_like(length, offset)
    committed = Committed(fresh, start, jnp.clip(length - offset, 0, chunk), features)
    with spread_over(target.devices):
        draft = drafter.extend(params, draft, committed)
    return jax.lax.with_sharding_constraint(draft, home.rows)


@program(static_argnames=("target", "drafter", "max_emitted"), donate_argnames=("cache", "draft"))
def _start(
    target: TargetModel,
    drafter: Drafter,
    max_emitted: int,
    params: Params,
    cache: KVCache,
    draft: Any,
    length: Lengths,
    logits: Float[Array, "B V"],
    request: Request,
) -> SpecState:
    """Draw the first token and set up the state of the first round."""
    batch, height = length.shape[0], drafter.tree.num_levels + 1
    gumbel = noise(request.sampling, length[:, None], target.vocab_size)
    first = draw(logits[:, None], gumbel, request.sampling)[:, 0]
    stopped = (request.stop_tokens == first[:, None]).any(axis=1) | (first == NO_TOKEN)
    output = jnp.zeros((batch, max_emitted + height), jnp.int32).at[:, 0].set(first)
    return SpecState(
        cache=cache,
        draft=draft,
        length=length,
        pending=first,
        output=output,
        drafted=jnp.zeros(output.shape, bool),
        emitted=jnp.ones((batch,), jnp.int32),
        done=stopped | (request.max_new_tokens <= 1),
        rounds=jnp.zeros((batch,), jnp.int32),
        histogram=jnp.zeros((batch, height), jnp.int32),
    )


def spec_step(
    target: TargetModel,
    drafter: Drafter,
    params: Params,
    request: Request,
    state: SpecState,
    walker: Walker = walk,
) -> SpecState:
    """One round for every row: propose a tree, verify it, walk it, commit the accepted path.

    Args:
      target: the target's static part.
      drafter: the drafter's static part.
      params: parameters of both.
      request: what each row asks for.
      state: the state before the round.
      walker: how the tree is walked. Only the default is lossless; another one serves to measure.
    """
    with spread_over(target.devices):
        beliefs = round_beliefs(target, drafter, request, state)
        tree = propose_tree(target, drafter, params, state, beliefs)
        verified, draws = verify_tree(target, drafter, params, state, tree, beliefs)
        walked = walker(tree, draws, drafter.tree.num_levels)
        return commit_walk(drafter, params, request, state, verified, walked)


def round_beliefs(
    target: TargetModel, drafter: Drafter, request: Request, state: SpecState
) -> RoundBeliefs:
    """What is known beforehand of the draws below every row's pending token."""
    levels = drafter.tree.num_levels
    return RoundBeliefs.of_round(request.sampling, state.length, levels, target.vocab_size)


def propose_tree(
    target: TargetModel, drafter: Drafter, params: Params, state: SpecState, beliefs: RoundBeliefs
) -> Tree:
    """The drafter's tree below every row's pending token."""
    rows = state.pending, state.length, state.length
    view = CacheView(target, params.target, state.cache, *rows)
    return drafter.propose(params, state.draft, view, beliefs)


def verify_tree(
    target: TargetModel,
    drafter: Drafter,
    params: Params,
    state: SpecState,
    tree: Tree,
    beliefs: RoundBeliefs,
) -> tuple[Verification, Int[Array, "B T"]]:
    """One target pass over the tree, and the target's draw at every node."""
    depths = node_depths(tree, drafter.tree)
    positions = state.length[:, None] + depths
    verified = target.verify(
        params.target,
        state.cache,
        tree.tokens,
        positions,
        tree.mask,
        state.length,
        drafter.needs,
    )
    return verified, beliefs.draw(verified.logits, depths)


def commit_walk(
    drafter: Drafter,
    params: Params,
    request: Request,
    state: SpecState,
    verified: Verification,
    walked: Walk,
) -> SpecState:
    """Append the walked path to cache, draft state and output."""
    height, length = drafter.tree.num_levels + 1, state.length
    count, stopped = _trim(walked.tokens, walked.count, state.emitted, request)
    count = jnp.where(state.done, 0, count)
    # A round that was cut may have emitted accepted draft tokens alone, and no bonus.
    accepted = jnp.minimum(count, walked.count - 1)
    block = jnp.concatenate([state.pending[:, None], walked.tokens[:, :-1]], axis=1)
    step, column = jnp.arange(height), jnp.arange(state.histogram.shape[1])
    # No token is below -1, so this is the length; but it waits for the draws. Where a row has one
    # fresh slot, the compiler would append before it has read, and copy whole caches to be able to.
    end = jnp.maximum(length, -2 - walked.tokens[:, 0])
    features = jax.tree.map(partial(along, walked.path), verified.features)
    committed = Committed(block, length, count, features)
    emit = jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice(row, new, (at,)))
    return SpecState(
        cache=cache_lib.commit(state.cache, verified.keys, verified.values, walked.path, end),
        draft=drafter.extend(params, state.draft, committed),
        length=length + count,
        pending=jnp.where(
            count > 0,
            jnp.take_along_axis(walked.tokens, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0],
            state.pending,
        ),
        output=emit(state.output, walked.tokens, state.emitted),
        drafted=emit(state.drafted, step < accepted[:, None], state.emitted),
        emitted=state.emitted + count,
        done=state.done | stopped,
        rounds=state.rounds + (count > 0),
        histogram=state.histogram + ((column == accepted[:, None]) & (count > 0)[:, None]),
    )


def _trim(
    tokens: Int[Array, "B h"], count: Lengths, emitted: Lengths, request: Request
) -> tuple[Lengths, Array]:
    """Cut a round's tokens after the first stop token or NO_TOKEN, and at the row's budget."""
    step = jnp.arange(tokens.shape[1])
    stops = (tokens[:, :, None] == request.stop_tokens[:, None, :]).any(axis=2)
    stops |= tokens == NO_TOKEN
    stops &= step < count[:, None]
    first_stop = jnp.where(stops.any(axis=1), jnp.argmax(stops, axis=1) + 1, tokens.shape[1] + 1)
    count = jnp.minimum(count, request.max_new_tokens - emitted)
    stopped = first_stop <= count
    count = jnp.minimum(count, first_stop)
    return count, stopped | (emitted + count >= request.max_new_tokens)


@program(static_argnames=("target", "drafter"), donate_argnames=("state",))
def decode(
    target: TargetModel, drafter: Drafter, params: Params, request: Request, state: SpecState
) -> SpecState:
    """Rounds until every row is done, in one executable; the state is donated."""
    return jax.lax.while_loop(
        lambda state: ~state.done.all(),
        lambda state: spec_step(target, drafter, params, request, state),
        state,
    )
