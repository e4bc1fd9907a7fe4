"""A small language model that drafts: beam search with a whole model and a cache of its own.

The classic of speculative decoding (Leviathan et al. 2023, Chen et al. 2023) with trees. The model
shares only the tokenizer with the target, so any published model of the same family serves. Its
cache grows with the context. Of a long cache it may read a part that the target's attention chooses
(SpecExtend), as fast as a short cache; the whole cache is kept to choose from.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.lax import dynamic_update_slice_in_dim
from jaxtyping import PyTree

from longspec_jax.axes import Array, Lengths
from longspec_jax.config.target import TargetConfig
from longspec_jax.config.tree import TreeConfig
from longspec_jax.drafters.base import (
    Committed,
    Drafter,
    Needs,
    Params,
    SamplingNoise,
    Uncommitted,
    View,
)
from longspec_jax.drafters.draft import DefaultTrees, Draft
from longspec_jax.drafters.retrieval.working_cache import (
    CachedSelection,
    WorkingCache,
    WorkingCacheOptions,
)
from longspec_jax.drafters.tree import Tree, beam_search, nodes_run
from longspec_jax.models.layers import applied
from longspec_jax.models.target import Attend, Target, TargetOutput
from longspec_jax.ops.attention.dispatch import speculative_attention
from longspec_jax.ops.attention.operands import Fresh, Prefix
from longspec_jax.ops.caches import Caches
from longspec_jax.ops.layer import append_rows

SPARE = 64
"""Slack slots after those of committed tokens, where short blocks that are not kept are written.
More than the longest accepted path, and a multiple of 8, as kernels need it."""


@struct.dataclass
class SmallLMState:
    """Keys and values of committed tokens. DONATED by what returns a new one.

    Which slots hold committed tokens follows only from the committed length, as in the target's
    cache. Memory beyond it may hold anything.
    """

    cache: Caches
    choice: CachedSelection | None = None
    """Which of them are read, if not all are."""


@dataclass(frozen=True)
class SmallLMDrafter(Drafter):
    """Proposes trees by beam search over the small model's cumulative log-probability.

    ``params.draft`` holds the parameters of its :class:`~longspec_jax.models.target.Target`.
    """

    config: TargetConfig
    """The small model's; it proposes the first ``vocab_size`` of the target's tokens."""
    tree: TreeConfig = TreeConfig()
    attention: str | None = None
    """Attention implementation; chosen automatically if absent."""
    narrower: bool = False
    """Whether the small model lacks tokens of the target."""
    working: WorkingCache | None = None
    """What is read of a long cache; all of it if absent."""
    name: str = field(default="small_lm", init=False)

    @cached_property
    def needs(self) -> Needs:
        """All tokens, and the queries that choose a working cache."""
        return Needs(queries=self.working.queries if self.working else ())

    def begin(self, params: Params, batch: int, capacity: int) -> SmallLMState:
        """An empty cache."""
        if self.working is None:
            return allocate(self.config, batch, capacity)
        state = allocate(self.config, batch, capacity, self.working.budget.block)
        return replace(state, choice=self.working.begin(batch))

    def extend(self, params: Params, state: SmallLMState, committed: Committed) -> SmallLMState:
        """Run the small model over the tokens, each row after its own past.

        Short blocks, as accepted paths are, see the working cache; chunks of a prompt see all.
        """
        tokens, start, count, _ = committed
        # A row without tokens has nothing to read either.
        seen = jnp.where(count > 0, start, 0)
        positions = start[:, None] + jnp.arange(tokens.shape[1])
        past = self._past(state, seen, whole=tokens.shape[1] > SPARE)

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            return speculative_attention(q, past[layer], Fresh(k, v), **self._options)

        output = self._run(params.draft, tokens, positions, attend)
        if self.working is not None:
            state = replace(state, choice=self.working.extend(state.choice, committed))
        return append(state, output.keys, output.values, start, count)

    def before_round(self, params: Params, state: SmallLMState, view: View) -> SmallLMState:
        """Choose what is read of the cache, in the rows that need it."""
        if self.working is None:
            return state
        return replace(state, choice=self.working.before_round(state.choice, view))

    def propose(
        self, params: Params, state: SmallLMState, view: View, noise: SamplingNoise
    ) -> Tree:
        """Grow the tree level by level; the last level's nodes are never run themselves."""
        if self.narrower:
            noise = noise.among(jnp.arange(self.config.vocab_size))
        batch, nodes_kept = view.pending.shape[0], nodes_run(self.tree)
        shape = (batch, nodes_kept, self.config.num_kv_heads, self.config.head_width)
        empty = jnp.zeros(shape, jnp.dtype(self.config.dtype))
        # The cache goes as far as the pending token, the target's may not.
        past = self._past(state, view.position)
        every = (empty,) * self.config.num_layers
        rows = Uncommitted(every, every)

        def score(
            rows: Uncommitted, tree: Tree, nodes: slice, depth: int
        ) -> tuple[Uncommitted, Array]:
            keys: list[Any] = list(rows.keys)
            values: list[Any] = list(rows.values)
            tokens, mask = tree.tokens[:, nodes], tree.mask[:, nodes, :nodes_kept]
            positions = jnp.broadcast_to(view.position[:, None] + depth, tokens.shape)

            def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
                write = partial(dynamic_update_slice_in_dim, start_index=nodes.start, axis=1)
                keys[layer], values[layer] = write(keys[layer], k), write(values[layer], v)
                fresh = Fresh(keys[layer], values[layer], mask)
                return speculative_attention(q, past[layer], fresh, **self._options)

            hidden = self._run(params.draft, tokens, positions, attend).hidden
            scores = noise.scores(self._unembed(params.draft, hidden), depth)
            return Uncommitted(tuple(keys), tuple(values)), scores

        return beam_search(view.pending, self.tree, score, rows, implementation=self.attention)

    @property
    def _options(self) -> Any:
        return dict(scale=self.config.attention_scale, implementation=self.attention)

    def _past(
        self, state: SmallLMState, length: Lengths, whole: bool = False
    ) -> tuple[Prefix, ...]:
        """What is read of every layer's cache that holds ``length[b]`` tokens."""
        layers = tuple(state.cache.layer(i, length) for i in range(self.config.num_layers))
        if self.working is None or whole:
            return layers
        table = self.working.table(state.choice, length, layers[0].keys.shape[2])
        return tuple(self.working.read(layer, table) for layer in layers)

    def _run(self, params: PyTree, tokens: Array, positions: Array, attend: Attend) -> TargetOutput:
        # A token that the small model lacks is read as its last one.
        known = jnp.minimum(tokens, self.config.vocab_size - 1)
        return applied(Target.__call__, Target(self.config), params, known, positions, attend)

    def _unembed(self, params: PyTree, hidden: Array) -> Array:
        return applied(Target.unembed, Target(self.config), params, hidden)


def allocate(config: TargetConfig, batch: int, capacity: int, block: int = 1) -> SmallLMState:
    """Zeros for rows of ``capacity`` tokens; uninitialised memory could hold NaNs.

    Args:
      block: the slots are a multiple of this.
    """
    slots = -(-(capacity + SPARE) // block) * block
    shape = (batch, config.num_kv_heads, slots, config.head_width)
    dtype = jnp.dtype(config.dtype)
    keys = tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers))
    values = tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers))
    return SmallLMState(Caches(keys, values))


def append(
    state: SmallLMState, keys: Sequence[Any], values: Sequence[Any], start: Lengths, count: Lengths
) -> SmallLMState:
    """Write ``count[b]`` of the rows ``L x [B, n, K, H]`` from slot ``start[b]`` on.

    A row without a count keeps all its slots whatever its start, and no token that a row has no
    slot for is written over another one.
    """
    layers, given, cache = len(keys), keys[0].shape[1], state.cache
    caches: tuple[Any, ...] = (*cache.keys, *cache.values)
    fresh = *keys, *values
    # Only the rounds of few rows have a cache of more, and they append no chunks.
    of_block = partial(_append_block, cache_rows=cache.cache_rows)
    write = of_block if given <= SPARE else _append_chunk
    # No layer's slots may be written before they were read, or the compiler copies whole caches.
    # The last layer's keys are the result of all that was read.
    known = jnp.isfinite(keys[-1][:, 0, 0, 0])
    written = write(caches, fresh, start, jnp.where(known, count, 0))
    return replace(state, cache=Caches(written[:layers], written[layers:], cache.cache_rows))


def _append_block(
    caches: Sequence[Array],
    fresh: Sequence[Array],
    start: Lengths,
    count: Lengths,
    cache_rows: Lengths | None = None,
) -> tuple[Array, ...]:
    """All of a short block as one op; beyond the count it is garbage after the new length."""
    given, slots = fresh[0].shape[1], caches[0].shape[2]
    at = jnp.minimum(jnp.where(count > 0, start, slots), slots - given)
    path = jnp.broadcast_to(jnp.arange(given), (start.shape[0], given))
    return append_rows(caches, fresh, path, at, cache_rows)


def _append_chunk(
    caches: Sequence[Array], fresh: Sequence[Array], start: Lengths, count: Lengths
) -> tuple[Array, ...]:
    """A chunk of a prompt, of any size: exactly the tokens that joined."""
    offsets, slots = jnp.arange(fresh[0].shape[1]), caches[0].shape[2]
    # Slots that do not exist are dropped; they differ, so that all of them do.
    dropped = slots + offsets
    at = jnp.where(offsets < count[:, None], start[:, None] + offsets, dropped)

    def write_row(cache: Array, rows: Array, at: Array) -> Array:
        rows = rows.swapaxes(0, 1)
        return cache.at[:, at].set(rows, mode="drop", unique_indices=True)

    return tuple(
        jax.vmap(write_row)(cache, rows, at) for cache, rows in zip(caches, fresh, strict=True)
    )


@dataclass(frozen=True)
class SmallLMOptions(WorkingCacheOptions):
    """How a small model is loaded, and how much of its cache it reads."""

    dtype: str | None = None
    """Of its parameters, activations and cache; the target's if absent."""
    context: int | None = None
    """Tokens of the longest text it will draft for, prompt and new ones; the target's whole range
    if absent. A model that was made for fewer positions is refused."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.context is not None and self.context < 1:
            raise ValueError(
                f"context={self.context} must be at least 1: it is the length in tokens of the "
                "longest text that the small model drafts for; leave it out for the target's range"
            )


@dataclass(frozen=True, eq=False)
class SmallLM(Draft):
    """A small model and its parameters."""

    config: TargetConfig
    params: PyTree = field(repr=False)
    """Of its :class:`longspec_jax.models.target.Target`."""
    narrower: bool = False
    """Whether the small model lacks tokens of the target."""
    working: WorkingCache | None = None
    """What a proposal reads of its cache; all of it if absent."""
    name: str = field(default="small_lm", init=False)

    @property
    def default_trees(self) -> DefaultTrees:
        """Chains and narrow trees: a level costs a forward of all its layers."""
        chain, pair, tree = TreeConfig((1, 1, 1)), TreeConfig((1, 1)), TreeConfig((4, 4, 4))
        return DefaultTrees((chain, pair), (tree, chain), (TreeConfig((4, 8, 8, 8)), chain))

    def check_fits(self, target: TargetConfig) -> None:
        """Raise ValueError if it has more tokens than the target, or layers that do not draft."""
        own = self.config
        capped = own.attention_cap is not None or own.attention_sinks
        if len(own.full_layers) < own.num_layers or capped:
            raise ValueError(
                f"{own.architecture} has layers with a window or a state, a soft cap, or attention "
                "sinks, and "
                "cannot be a small_lm draft; load a small model without them"
            )
        if self.config.vocab_size > target.vocab_size:
            raise ValueError(
                f"the small model has vocab_size={self.config.vocab_size}, the target "
                f"{target.vocab_size}; load a small model of the target's own family"
            )

    def drafter(self, tree: TreeConfig, attention: str | None = None) -> SmallLMDrafter:
        """The drafter that grows this tree."""
        return SmallLMDrafter(self.config, tree, attention, self.narrower, self.working)
