"""Prefill: prompts go through the target in chunks, and the first token of each is drawn.

One compiled shape serves prompts of any length. :func:`prefill_chunks` launches one chunk a step,
so that other work can be launched in between.

The compiler chooses its matmuls by the shape of a chunk, and with them the order of their sums.
Where a prompt must have the same bits in every call
(:mod:`longspec_jax.decoding.batch_invariant`), it is a batch of its own, and the size of its chunks
follows from its own length (:func:`longspec_jax.decoding.runner.chunk_of`).
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Bool, Float, Int, PyTree, UInt

from longspec_jax.axes import Array, Lengths
from longspec_jax.decoding.adjustments import Adjustments
from longspec_jax.decoding.cache import KVCache
from longspec_jax.decoding.cache_transfer import write_chunk
from longspec_jax.decoding.jit_cache import PROGRAMS, program
from longspec_jax.decoding.logprobs import prompt_logprobs
from longspec_jax.decoding.round_noise import RoundNoise
from longspec_jax.decoding.rows import Request, Rows, RowShardings, insert
from longspec_jax.decoding.sampling import NO_TOKEN, Sampling, SamplingKind, masked
from longspec_jax.decoding.target import TargetModel
from longspec_jax.drafters.base import Committed, Drafter, Features, Needs, Params
from longspec_jax.ops.partitioned import use_mesh


class KnownChunks(NamedTuple):
    """First chunks of a prompt whose keys and values need not be computed."""

    cache: KVCache | None = None
    """A batch of one row that holds the first :attr:`copied` chunks; DONATED. None without any."""
    copied: int = 0
    """Chunks in that cache."""
    moved: Sequence[KVCache] = ()
    """The chunks after these, in the host's memory, as
    :func:`longspec_jax.decoding.cache_transfer.read_chunk` cut them out."""

    @property
    def total(self) -> int:
        """All known chunks."""
        return self.copied + len(self.moved)


NONE_KNOWN = KnownChunks()


class ChunkLaunch(NamedTuple):
    """A chunk that was launched."""

    tokens: int
    """Of the longest prompt, launched so far."""
    ready: Array
    """Ready when they have been run."""
    cache: KVCache
    """The cache after it; donated by the next chunk."""
    logits: Float[Array, "B V"]
    """After the last token of the prompts that have ended so far."""
    logprobs: Int[Array, "B C m"] | None = None
    """Of the tokens that follow the chunk's, packed; None if they were not wanted."""


def most_reusable(needs: Needs, length: int, chunk: int) -> int:
    """First chunks of a prompt that need not be run where their keys and values are known.

    The last token's chunk is always run, for its logits. So are the chunks that a drafter needs
    features of; one that needs none gets the others by their tokens. If it needs features of only
    first tokens, the count stays: their chunks are run again (:func:`run_again`).
    """
    most = (length - 1) // chunk
    if needs.hidden or needs.queries or needs.keys:
        recent = length if needs.recent is None else min(needs.recent, length)
        most = min(most, (length - recent) // chunk if recent else most)
    return most


def run_again(needs: Needs, chunk: int) -> int:
    """First chunks that a drafter needs features of: they are run whether they are known or not."""
    return -(-needs.first // chunk) if needs.hidden or needs.queries or needs.keys else 0


def concerns(needs: Needs, length: np.ndarray, offset: int, chunk: int) -> bool:
    """Whether a chunk of the prompts holds a token that the drafter's state depends on."""
    recent = length
    if needs.recent is not None and not needs.text:
        recent = np.minimum(length, needs.recent)
    last = (length - recent < offset + chunk) & (recent > 0)
    return bool(((length > offset) & (last | (offset < needs.first))).any())


def prefill_chunks(
    target: TargetModel,
    drafter: Drafter,
    params: Params,
    tokens: Int[Any, "B P"],
    length: Int[Any, " B"],
    request: Request,
    *,
    shardings: RowShardings,
    capacity: int,
    chunk: int,
    known: KnownChunks = NONE_KNOWN,
    emitted: Int[Any, " B"] | None = None,
    logprobs: int | None = None,
    allowed: UInt[Any, "B 1 W"] | None = None,
) -> Generator[ChunkLaunch, None, Rows]:
    """Launch a chunk of the prompts at every step.

    Args:
      target: the target's static part.
      drafter: the drafter's static part; its tree is the tallest that may run.
      tokens: prompts, right-padded with any token.
      length: tokens of each prompt, at least 1.
      shardings: of the rows.
      capacity: cache slots of a row; at least prompt + new tokens + the
        :func:`~longspec_jax.decoding.runner.slack_slots` of a round.
      known: of a single prompt, chunks that are not run, at most
        :func:`most_reusable`. The drafter learns of them by their
        tokens.
      emitted: how many of the last tokens of each prompt the row had emitted before, for penalties;
        none if absent.
      logprobs: alternatives of every token of the prompts, to report with its log-probability; None
        for neither. No chunk may be known then.
      allowed: the tokens that may come first, as in
        :func:`~longspec_jax.decoding.sampling.masked`; all if absent.

    Yields:
      Every launch: of a chunk that is run, and of one that comes from the host's memory.

    Returns:
      The rows, ready for their first round.
    """
    batch, prompt = tokens.shape
    chunks = -(-prompt // chunk)
    capacity = max(capacity, chunks * chunk)
    # Padded on the host: on the device every number of chunks would be a program of its own.
    host, held = np.zeros((batch, capacity), np.int32), np.asarray(length, np.int32)
    host[:, :prompt] = tokens
    padded, length = jax.device_put((host, held), shardings.rows)
    allocate = _allocate(target, drafter, batch, capacity, shardings, known.cache is None)
    fresh, logits, draft = allocate(params)
    cache: KVCache = known.cache or fresh
    again, needs = run_again(drafter.needs, chunk), drafter.needs.of_a_pass
    for index in range(chunks):
        at = padded, length, np.int32(index * chunk)
        features, ready, own = Features(), logits, None
        if index >= known.total or index < again:
            logits, cache, features, own = _prefill_chunk(
                target, needs, chunk, shardings, params.target, cache, *at, logits, logprobs
            )
            ready = logits
        elif index >= known.copied:
            moved = jax.device_put(known.moved[index - known.copied], shardings.cache)
            cache, ready = write_chunk(shardings, chunk, cache, moved, at[2])
        if concerns(drafter.needs, held, index * chunk, chunk):
            draft = _extend(target, drafter, chunk, shardings, params, draft, *at, features)
        if index >= known.copied:
            yield ChunkLaunch(min((index + 1) * chunk, prompt), ready, cache, logits, own)
    adjustments = None
    if request.adjustments is not None:
        counted = np.zeros(batch, int) if emitted is None else np.asarray(emitted)
        prompts = request.adjustments, tokens, held, target.vocab_size, counted
        adjustments = jax.device_put(Adjustments.of_prompts(*prompts), shardings.rows)
    if allowed is not None:
        allowed = jax.device_put(allowed, shardings.rows)
    given = length, logits, replace(request, adjustments=None), adjustments, allowed
    started = _start(target.vocab_size, shardings, *given)
    return Rows(cache, draft, length, *started)


def rows_outline(
    target: TargetModel,
    drafter: Drafter,
    params: Params,
    request: Request,
    *,
    batch: int,
    capacity: int,
) -> Rows:
    """The rows after a prefill, as shapes and shardings: enough to compile their rounds.

    Arguments as in :func:`prefill_chunks`.
    """
    shardings = RowShardings.for_params(params.target, batch)

    def begun(params: Params, request: Request) -> Rows:
        cache, _, draft = _empty(target, drafter, batch, capacity, params)
        none = jnp.zeros(batch, jnp.int32)
        sampling, speculate = request.sampling.of_kind(SamplingKind.ANY), jnp.ones(batch, bool)
        adjustments = _no_adjustments(target, batch, request.adjustments is not None)
        state = none, none, none, sampling, request.stop_tokens, speculate, adjustments
        return Rows(cache, draft, *state)

    rows = jax.eval_shape(begun, params, request)
    return _with_shardings(rows, rows.shardings(shardings))


def prefill_programs(
    target: TargetModel,
    drafter: Drafter,
    params: Params,
    request: Request,
    *,
    batch: int,
    capacity: int,
    chunks: Sequence[int],
    logprobs: int | None = None,
) -> Iterator[jax.stages.Lowered]:
    """Lower everything that a prefill runs with any of these chunks, the slowest first.

    Arguments as in :func:`prefill_chunks`, but that ``capacity`` holds whole chunks.
    """
    shardings = RowShardings.for_params(params.target, batch)
    rows = rows_outline(target, drafter, params, request, batch=batch, capacity=capacity)
    tokens = jax.ShapeDtypeStruct((batch, capacity), jnp.int32, sharding=shardings.rows)
    logits = jax.ShapeDtypeStruct((batch, target.vocab_size), jnp.float32, sharding=shardings.rows)
    needs, at = drafter.needs.of_a_pass, (tokens, rows.length, np.int32(0))
    for chunk in sorted(chunks, reverse=True):
        a_chunk = _prefill_chunk.lower(
            target, needs, chunk, shardings, params.target, rows.cache, *at, logits, logprobs
        )
        yield a_chunk
        # Else no chunk is shown to it, whatever the prompt.
        if drafter.needs.text or drafter.needs.recent != 0:
            _, _, found, _ = a_chunk.out_info
            features = _with_shardings(found, jax.tree.map(lambda _: shardings.rows, found))
            yield _extend.lower(
                target, drafter, chunk, shardings, params, rows.draft, *at, features
            )
    yield _allocate(target, drafter, batch, capacity, shardings).lower(params)
    first = rows.length, logits, replace(request, adjustments=None), rows.adjustments, None
    yield _start.lower(target.vocab_size, shardings, *first)


def slot_programs(
    target: TargetModel,
    drafter: Drafter,
    params: Params,
    request: Request,
    *,
    slots: int,
    capacity: int,
) -> Iterator[jax.stages.Lowered]:
    """Lower what moves prompts that were prefilled alone into the slots of a batch."""
    shardings, models = RowShardings.for_params(params.target, slots), (target, drafter, params)
    batch = rows_outline(*models, request, batch=slots, capacity=capacity)
    row = rows_outline(*models, request.row(0), batch=1, capacity=capacity)
    yield _allocate(target, drafter, slots, capacity, shardings).lower(params)
    yield insert.lower(shardings, batch, np.int32(0), row)


def _with_shardings(shapes: PyTree, shardings: PyTree) -> Any:
    """The same shapes, each with the sharding of its array."""

    def with_sharding(leaf: jax.ShapeDtypeStruct, sharding: Sharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(with_sharding, shapes, shardings)


def _allocate(
    target: TargetModel,
    drafter: Drafter,
    batch: int,
    capacity: int,
    shardings: RowShardings,
    cached: bool = True,
) -> jax.stages.Wrapped:
    """A program that makes the state and logits of rows without a token, where they will stay.

    And their cache, unless there is one.
    """

    def make() -> tuple[Any, Any]:
        cache = jax.eval_shape(partial(target.allocate, batch, capacity))
        out = cache.shardings(shardings.cache) if cached else None, shardings.rows, shardings.rows
        empty = partial(_empty, target, drafter, batch, capacity, cached=cached)
        return _allocate, jax.jit(empty, out_shardings=out)

    return PROGRAMS.get((_allocate, target, drafter, batch, capacity, shardings, cached), make)[1]


def _empty(
    target: TargetModel,
    drafter: Drafter,
    batch: int,
    capacity: int,
    params: Params,
    cached: bool = True,
) -> tuple[Any, Float[Array, "B V"], Any]:
    logits = jnp.zeros((batch, target.vocab_size), jnp.float32)
    cache = target.allocate(batch, capacity) if cached else None
    return cache, logits, drafter.begin(params, batch, capacity)


def vacant(
    target: TargetModel,
    drafter: Drafter,
    params: Params,
    batch: int,
    capacity: int,
    stop_width: int,
    adjusted: bool = False,
) -> Rows:
    """A batch of vacant slots.

    Args:
      adjusted: whether rows may have biases and penalties.
    """
    shardings = RowShardings.for_params(params.target, batch)
    cache, _, draft = _allocate(target, drafter, batch, capacity, shardings)(params)
    none, stops = np.zeros(batch, np.int32), np.full((batch, stop_width), -1, np.int32)
    sampling = Sampling.greedy(batch).of_kind(SamplingKind.ANY)
    adjustments = _no_adjustments(target, batch, adjusted)
    state = none, none, none, sampling, stops, np.ones(batch, bool), adjustments
    return Rows(cache, draft, *jax.device_put(state, shardings.rows))


def _no_adjustments(target: TargetModel, batch: int, adjusted: bool) -> Adjustments | None:
    return Adjustments.empty(batch, target.vocab_size) if adjusted else None


@program(
    static_argnames=("target", "needs", "chunk", "shardings", "logprobs"),
    donate_argnames=("cache",),
)
def _prefill_chunk(
    target: TargetModel,
    needs: Needs,
    chunk: int,
    shardings: RowShardings,
    params: PyTree,
    cache: KVCache,
    tokens: Int[Array, "B S"],
    length: Lengths,
    offset: Array,
    logits: Float[Array, "B V"],
    logprobs: int | None = None,
) -> tuple[Float[Array, "B V"], KVCache, Features, Array | None]:
    """One chunk; keeps the logits of the rows whose last prompt token it holds.

    With ``logprobs`` also the packed log-probabilities of the tokens that follow the chunk's.
    """
    fresh = jax.lax.dynamic_slice_in_dim(tokens, offset, chunk, axis=1)
    last = length - 1 - offset
    with use_mesh(target.mesh):
        start = jnp.full_like(length, offset)
        run = target.prefill_chunk(params, cache, fresh, start, last, needs)
        own = None
        if logprobs is not None:
            assert run.hidden is not None, "this target tells no hidden states"
            following = jnp.roll(tokens, -1, axis=1)
            following = jax.lax.dynamic_slice_in_dim(following, offset, chunk, axis=1)
            own = prompt_logprobs(partial(target.unembed, params), run.hidden, following, logprobs)
    here = (last >= 0) & (last < chunk)
    logits, cache = jax.lax.with_sharding_constraint(
        (jnp.where(here[:, None], run.logits, logits), run.cache),
        (shardings.rows, run.cache.shardings(shardings.cache)),
    )
    return logits, cache, run.features, own


@program(static_argnames=("target", "drafter", "chunk", "shardings"), donate_argnames=("draft",))
def _extend(
    target: TargetModel,
    drafter: Drafter,
    chunk: int,
    shardings: RowShardings,
    params: Params,
    draft: PyTree,
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
    return jax.lax.with_sharding_constraint(draft, shardings.rows)


class _Started(NamedTuple):
    """The part of :class:`Rows` after the length: the same whatever proposes."""

    pending: Int[Array, " B"]
    remaining: Int[Array, " B"]
    sampling: Sampling
    stop_tokens: Int[Array, "B n"]
    speculate: Bool[Array, " B"]
    adjustments: Adjustments | None


@program(static_argnames=("vocab_size", "shardings"))
def _start(
    vocab_size: int,
    shardings: RowShardings,
    length: Lengths,
    logits: Float[Array, "B V"],
    request: Request,
    adjustments: Adjustments | None,
    allowed: UInt[Array, "B 1 W"] | None,
) -> _Started:
    """Draw the first token of every row."""
    below = RoundNoise.of_round(request.sampling, length - 1, 0, vocab_size, adjustments)
    free = logits[:, None]
    given = free if allowed is None else masked(free, allowed)
    first = below.draw(given, jnp.zeros((1, 1), jnp.int32))
    if adjustments is not None:
        adjustments = adjustments.after(first, jnp.ones_like(length))
    first = first[:, 0]
    stopped = (request.stop_tokens == first[:, None]).any(axis=1) | (first == NO_TOKEN)
    remaining = jnp.where(stopped, 0, jnp.maximum(request.max_new_tokens - 1, 0))
    sampling = request.sampling.of_kind(SamplingKind.ANY)
    assert request.speculate is not None, "a request as its runner has it"
    state = request.stop_tokens, request.speculate, adjustments
    started = _Started(first, remaining, sampling, *state)
    return jax.lax.with_sharding_constraint(started, shardings.rows)
