"""Prefill: prompts go through the target in chunks, and the first token of each is drawn.

One compiled shape serves prompts of any length. A chunk is launched when the one before it is
asked for no more: whoever follows :func:`prefill_chunks` may launch other work in between.
"""

from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Float, Int

from longspec_jax.axes import Array, Lengths
from longspec_jax.decoding.cache import KVCache
from longspec_jax.decoding.home import Home
from longspec_jax.decoding.programs import RECENT, program
from longspec_jax.decoding.record import Record, SpecState
from longspec_jax.decoding.rows import Request, Rows
from longspec_jax.decoding.sampling import NO_TOKEN, Sampling, draw, noise
from longspec_jax.decoding.target import TargetModel
from longspec_jax.drafters.base import Committed, Drafter, Features, Needs, Params
from longspec_jax.ops.partitioned import use_mesh


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
    """Run the prompts through the target, and begin the record of what follows.

    Args:
      target: the target's static part.
      drafter: the drafter's static part; its tree is the tallest that may run.
      params: parameters of both.
      tokens: prompts, right-padded with any token.
      length: tokens of each prompt, at least 1.
      request: what each row asks for.
      capacity: cache slots of a row; at least prompt + new tokens + the
        :func:`~longspec_jax.decoding.engine.slack_slots` of a round.
      max_emitted: the largest ``max_new_tokens`` that the record can hold; static.
      chunk: tokens of one prefill chunk.
      on_chunk: called as the prefill gets on, with the tokens of the longest prompt that have been
        run.
    """
    chunks = prefill_chunks(
        target, drafter, params, tokens, length, request, capacity=capacity, chunk=chunk
    )
    run, behind = 0, None
    while True:
        try:
            launched, after = next(chunks)
        except StopIteration as end:
            rows: Rows = end.value
            break
        if on_chunk is not None:
            # One chunk late, so that the device always has the next one to go on with.
            jax.block_until_ready(behind)
            on_chunk(run)
        run, behind = launched, after
    return SpecState(rows, _begin_record(max_emitted, drafter.tree.num_levels + 1, rows.pending))


def prefill_chunks(
    target: TargetModel,
    drafter: Drafter,
    params: Params,
    tokens: Int[Any, "B P"],
    length: Int[Any, " B"],
    request: Request,
    *,
    capacity: int,
    chunk: int,
) -> Generator[tuple[int, Array], None, Rows]:
    """Launch a chunk of the prompts at every step; arguments as of :func:`prefill`.

    Yields:
      Behind every launch the tokens of the longest prompt that have been launched, and an array
      that is ready when they have been run.

    Returns:
      The rows, ready for their first round.
    """
    batch, prompt = tokens.shape
    chunks = -(-prompt // chunk)
    capacity = max(capacity, chunks * chunk)
    home = Home.beside(params.target, batch)
    # Padded on the host: on the device every number of chunks would be a program of its own.
    host, held = np.zeros((batch, capacity), np.int32), np.asarray(length, np.int32)
    host[:, :prompt] = tokens
    padded, length = jax.device_put((host, held), home.rows)
    cache, logits, draft = _allocate(target, drafter, batch, capacity, home)(params)
    for index in range(chunks):
        offset = np.int32(index * chunk)
        logits, cache, features = _prefill_chunk(
            target,
            drafter.needs.of_a_pass,
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
        yield min((index + 1) * chunk, prompt), logits
    return Rows(cache, draft, length, *_start(target.vocab_size, home, length, logits, request))


def rows_outline(
    target: TargetModel,
    drafter: Drafter,
    params: Params,
    request: Request,
    *,
    batch: int,
    capacity: int,
) -> Rows:
    """The rows of :func:`prefill`, as shapes and places: enough to compile the rounds behind it.

    Arguments as there.
    """
    home = Home.beside(params.target, batch)

    def begun(params: Params, request: Request) -> Rows:
        cache, _, draft = _empty(target, drafter, batch, capacity, params)
        none = jnp.zeros(batch, jnp.int32)
        return Rows(cache, draft, none, none, none, request.sampling, request.stop_tokens)

    rows = jax.eval_shape(begun, params, request)
    return _placed(rows, rows.places(home))


def record_outline(rows: Rows, max_emitted: int, height: int) -> Record:
    """The record that :func:`prefill` begins beside such rows, as shapes and places.

    Args:
      rows: their outline.
      max_emitted: as there.
      height: most tokens that a round emits in a row.
    """
    begin = partial(Record.begin, max_emitted=max_emitted, height=height)
    record, home = jax.eval_shape(begin, rows.pending), rows.pending.sharding
    return _placed(record, jax.tree.map(lambda _: home, record))


def prefill_programs(
    target: TargetModel,
    drafter: Drafter,
    params: Params,
    request: Request,
    *,
    batch: int,
    capacity: int,
    max_emitted: int,
    chunk: int,
) -> Iterator[jax.stages.Lowered]:
    """Lower everything that :func:`prefill` runs, the slowest to compile first.

    Arguments as there, but that ``capacity`` holds whole chunks.
    """
    home = Home.beside(params.target, batch)
    rows = rows_outline(target, drafter, params, request, batch=batch, capacity=capacity)
    tokens = jax.ShapeDtypeStruct((batch, capacity), jnp.int32, sharding=home.rows)
    logits = jax.ShapeDtypeStruct((batch, target.vocab_size), jnp.float32, sharding=home.rows)
    needs, at = drafter.needs.of_a_pass, (tokens, rows.length, np.int32(0))
    a_chunk = _prefill_chunk.lower(
        *(target, needs, chunk, home, params.target, rows.cache, *at, logits)
    )
    yield a_chunk
    if drafter.needs.recent != 0:  # Else no chunk is shown to it, whatever the prompt.
        _, _, found = a_chunk.out_info
        features = _placed(found, jax.tree.map(lambda _: home.rows, found))
        yield _extend.lower(target, drafter, chunk, home, params, rows.draft, *at, features)
    yield _allocate(target, drafter, batch, capacity, home).lower(params)
    yield _start.lower(target.vocab_size, home, rows.length, logits, request)
    yield _begin_record.lower(max_emitted, drafter.tree.num_levels + 1, rows.pending)


def _placed(shapes: Any, places: Any) -> Any:
    """The same shapes, each with the place of its array."""

    def place(leaf: Any, sharding: Sharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(place, shapes, places)


def _concerns(needs: Needs, length: np.ndarray, offset: int, chunk: int) -> bool:
    """Whether a chunk of the prompts holds a token that the drafter's state depends on."""
    recent = length if needs.recent is None else np.minimum(length, needs.recent)
    return bool(((length > offset) & (length - recent < offset + chunk) & (recent > 0)).any())


def _allocate(
    target: TargetModel, drafter: Drafter, batch: int, capacity: int, home: Home
) -> jax.stages.Wrapped:
    """A program that makes the state and logits of rows without a token, where they will stay."""

    def make() -> tuple[Any, Any]:
        cache = jax.eval_shape(partial(target.allocate, batch, capacity))
        places = cache.places(home.cache), home.rows, home.rows
        empty = partial(_empty, target, drafter, batch, capacity)
        return _allocate, jax.jit(empty, out_shardings=places)

    return RECENT.get((_allocate, target, drafter, batch, capacity, home), make)[1]


def _empty(
    target: TargetModel, drafter: Drafter, batch: int, capacity: int, params: Params
) -> tuple[KVCache, Float[Array, "B V"], Any]:
    logits = jnp.zeros((batch, target.vocab_size), jnp.float32)
    return target.allocate(batch, capacity), logits, drafter.begin(params, batch, capacity)


def vacant(
    target: TargetModel,
    drafter: Drafter,
    params: Params,
    request: Request,
    *,
    batch: int,
    capacity: int,
) -> Rows:
    """A batch of vacant slots.

    Args:
      target: the target's static part.
      drafter: the drafter's static part.
      params: parameters of both.
      request: of any row: which kinds of sampling there are, and how many stop tokens.
      batch: slots.
      capacity: cache slots of a row.
    """
    home = Home.beside(params.target, batch)
    cache, _, draft = _allocate(target, drafter, batch, capacity, home)(params)

    def zeros(leaf: Any) -> np.ndarray:
        return np.zeros((batch, *leaf.shape[1:]), leaf.dtype)

    none = np.zeros(batch, np.int32)
    asked = jax.tree.map(zeros, (request.sampling, request.stop_tokens))
    length, pending, remaining, (sampling, stops) = jax.device_put(
        (none, none, none, asked), home.rows
    )
    return Rows(cache, draft, length, pending, remaining, sampling, stops)


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
    with use_mesh(target.mesh):
        start = jnp.full_like(length, offset)
        new, cache, features = target.prefill_chunk(params, cache, fresh, start, at, needs)
    here = (last >= 0) & (last < chunk)
    logits, cache = jax.lax.with_sharding_constraint(
        (jnp.where(here[:, None], new, logits), cache), (home.rows, cache.places(home.cache))
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
    with use_mesh(target.mesh):
        draft = drafter.extend(params, draft, committed)
    return jax.lax.with_sharding_constraint(draft, home.rows)


class _Started(NamedTuple):
    """The part of :class:`Rows` behind the length: the same whatever proposes."""

    pending: Int[Array, " B"]
    remaining: Int[Array, " B"]
    sampling: Sampling
    stop_tokens: Int[Array, "B n"]


@program(static_argnames=("vocab_size", "home"))
def _start(
    vocab_size: int, home: Home, length: Lengths, logits: Float[Array, "B V"], request: Request
) -> _Started:
    """Draw the first token of every row."""
    gumbel = noise(request.sampling, length[:, None], vocab_size)
    first = draw(logits[:, None], gumbel, request.sampling)[:, 0]
    stopped = (request.stop_tokens == first[:, None]).any(axis=1) | (first == NO_TOKEN)
    remaining = jnp.where(stopped, 0, jnp.maximum(request.max_new_tokens - 1, 0))
    started = _Started(first, remaining, request.sampling, request.stop_tokens)
    return jax.lax.with_sharding_constraint(started, home.rows)


@program(static_argnames=("max_emitted", "height"))
def _begin_record(max_emitted: int, height: int, first: Int[Array, " B"]) -> Record:
    return Record.begin(first, max_emitted, height)
