"""The target as the decode loop sees it: prefill a chunk, verify a tree, run a partial forward.

:class:`TargetModel` binds :class:`longspec_jax.models.target.Target` to a cache and the attention
ops. In tests a lookup table takes its place.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jaxtyping import Float, Int, PyTree

from longspec_jax.axes import Array, Lengths, TreeMask
from longspec_jax.config.target import TargetConfig
from longspec_jax.decoding import cache as cache_lib
from longspec_jax.decoding import offloaded
from longspec_jax.decoding.cache import CacheBytes, KVCache
from longspec_jax.drafters.base import (
    NOTHING,
    Features,
    Needs,
    PartialForward,
    Selection,
    Uncommitted,
)
from longspec_jax.models.layers import applied
from longspec_jax.models.recurrence import Recur
from longspec_jax.models.target import Attend, Target, TargetOutput, sinks_of
from longspec_jax.ops.attention import float8, path
from longspec_jax.ops.attention.dispatch import (
    path_attention,
    prefix_attention,
    speculative_attention,
    tree_attention,
)
from longspec_jax.ops.attention.operands import Fresh, merge, with_sinks
from longspec_jax.ops.hardware import DECODE_ROWS
from longspec_jax.ops.recurrence.operands import RecurrentRows, RecurrentTokens
from longspec_jax.ops.recurrence.recurrence import (
    chunk_recurrence,
    continued_recurrence,
    tree_recurrence,
)

GROUP = 8
"""Rows that Hopper's copy engine takes together."""
ORDERED_CHUNK = 1024
"""Tokens of the largest chunk of prompts whose matmuls are those of a round."""


F = TypeVar("F")


class Verification(NamedTuple):
    """What one target pass over a tree yields."""

    logits: Float[Array, "B T V"]
    """Next-token logits at every node, float32."""
    keys: tuple[Array | None, ...]
    """Keys of the tree's nodes, ``L x [B, T, K, H]``: the rows to commit; None of a recurrent
    layer."""
    values: tuple[Array | None, ...]
    """Values of the tree's nodes, ``L x [B, T, K, H]``."""
    features: Features = Features()
    """The needed features of the nodes."""
    rows: Mapping[int, RecurrentRows] = {}
    """What the nodes write to the states of recurrent layers."""


class Prefilled(NamedTuple):
    """What one target pass over a chunk of a prompt yields."""

    logits: Float[Array, "B V"]
    """After one token of the chunk in each row, float32."""
    cache: KVCache
    features: Features = Features()
    """The needed features of the chunk's tokens."""
    hidden: Float[Array, "B C D"] | None = None
    """What :meth:`TargetModel.unembed` makes the logits after each of them of."""


@dataclass(frozen=True)
class TargetModel:
    """A transformer target over a :class:`KVCache`.

    Pure functions of parameters and cache; the object itself is static and hashable.
    """

    config: TargetConfig
    attention: str | None = None
    """Attention implementation; chosen automatically if absent."""
    mesh: AbstractMesh | None = None
    """The mesh over which the parameters are spread; None on one device."""
    offload: bool = False
    """Whether the cache lies in the host's memory, all of it but the layer that drafts read."""
    batch_invariant: bool = False
    """Whether a token's logits have the same bits in every pass over it, where kernels can."""

    @cached_property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.config.vocab_size

    @property
    def width_shares(self) -> int:
        """Devices that share heads, the MLP's width and the vocabulary."""
        return 1 if self.mesh is None else self.mesh.shape["tp"]

    @cached_property
    def has_bounded_layers(self) -> bool:
        """Whether some layers keep only the end of a row: with windows, or recurrent."""
        return len(self.config.full_layers) < self.config.num_layers

    @property
    def ring_step(self) -> int:
        """Slots by which rings grow: the kernels of one order read whole steps."""
        return path.SLOTS if self.batch_invariant else cache_lib.RING_STEP

    @property
    def dtype(self) -> str:
        """The dtype of activations."""
        return self.config.dtype

    def allocate(self, batch: int, capacity: int) -> KVCache:
        """An empty cache for this target."""
        if self.offload:
            return offloaded.allocate(self.config, batch, capacity)
        return cache_lib.allocate(self.config, batch, capacity, self.ring_step)

    def cache_bytes(self, batch: int, capacity: int) -> CacheBytes:
        """What :meth:`allocate`'s result will take, known before allocation."""
        if self.offload:
            return offloaded.cache_bytes(self.config, batch, capacity)
        return CacheBytes(cache_lib.cache_bytes(self.config, batch, capacity, self.ring_step), 0)

    def prefill_chunk(
        self,
        params: PyTree,
        cache: KVCache,
        tokens: Int[Array, "B C"],
        start: Lengths,
        last: Lengths,
        needs: Needs = NOTHING,
    ) -> Prefilled:
        """Append a chunk after ``start[b]`` tokens; logits after its token ``last[b]``.

        What stands after that token is not the row's own. It may lie before the chunk or after
        it: the logits then are of no use.
        """
        chunk = tokens.shape[1]
        positions, read = start[:, None] + jnp.arange(chunk), cache.reading(start)
        attention = self._with_scores(speculative_attention)

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            q, prefix = read(self.config.source(layer), q)
            prefix = prefix.within(self.config.layer(layer).window, positions)
            return attention(q, prefix, Fresh(k, v), sinks_of(params, layer))

        count, states = jnp.clip(last + 1, 0, chunk), {}

        def recur(layer: int, tokens: RecurrentTokens, taps: Array) -> Array:
            states[layer], out = chunk_recurrence(tokens, taps, cache.state(layer), count)
            return out

        # Of larger chunks XLA's matmuls are as good: the tensor cores are the limit.
        ordered = self.batch_invariant and tokens.size <= ORDERED_CHUNK
        run = params, tokens, positions, attend, recur, needs
        output, features = self._forward(*run, ordered)
        at = jnp.clip(last, 0, chunk - 1)[:, None, None]
        logits = self.unembed(params, jnp.take_along_axis(output.hidden, at, axis=1)[:, 0])
        cache = cache.append(output.keys, output.values, start, count, states)
        return Prefilled(logits, cache, features, output.hidden)

    def verify(
        self,
        params: PyTree,
        cache: KVCache,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        mask: TreeMask,
        length: Lengths,
        levels: int,
        needs: Needs = NOTHING,
    ) -> Verification:
        """Logits at every node of a tree of ``levels`` below ``length[b]`` committed tokens.

        Raises:
          NotImplementedError: for more nodes of all rows than have the same bits.
        """
        nodes = tokens.shape[1]
        self.check_rows(*tokens.shape)
        tokens, positions, mask = self._whole_groups(tokens, positions, mask)
        read, depth = cache.reading(length), positions - positions[:, :1]
        attention = self._with_scores(speculative_attention)
        scale, cap = self.config.attention_scale, self.config.attention_cap
        along_paths = partial(path_attention, levels=levels, scale=scale, cap=cap)

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            q, prefix = read(self.config.source(layer), q)
            seen, window = mask, self.config.layer(layer).window
            if window is not None and window <= levels:
                seen = mask & (depth[:, :, None] - depth[:, None, :] < window)
            fresh, sinks = Fresh(k, v, seen), sinks_of(params, layer)
            if self.batch_invariant:
                return along_paths(q, prefix, fresh, depth, sinks, window=window)
            return attention(q, prefix.within(window, positions), fresh, sinks)

        rows = {}

        def recur(layer: int, tokens: RecurrentTokens, taps: Array) -> Array:
            state = cache.state(layer)
            rows[layer], out = tree_recurrence(tokens, taps, state, mask, depth, levels)
            return out

        with jax.named_scope("verify"):
            output, features = self._forward(params, tokens, positions, attend, recur, needs)
            logits = self.unembed(params, output.hidden[:, :nodes])
        features = jax.tree.map(lambda each: each[:, :nodes], features)
        return Verification(logits, output.keys, output.values, features, rows)

    def check_rows(self, rows: int, nodes: int) -> None:
        """Refuse rounds of more nodes than have the same bits.

        Args:
          rows: that are decoded at once.
          nodes: of the tree of each.

        Raises:
          NotImplementedError: says how many nodes there may be, and the remedies.
        """
        if self.batch_invariant and rows * nodes > DECODE_ROWS:
            raise NotImplementedError(
                f"a round over {rows} rows of {nodes} nodes has more than {DECODE_ROWS} nodes; "
                f"take a smaller tree, at most max_num_seqs={DECODE_ROWS // nodes} rows at once, "
                "or batch_invariant=False"
            )

    def _whole_groups(self, tokens: Array, positions: Array, mask: Array) -> tuple[Array, ...]:
        """The nodes, and some that see only themselves: Hopper's copy engine takes whole groups.

        Or a single one that is not whole, as in plain decoding.
        """
        missing = -tokens.shape[1] % GROUP
        if not self.batch_invariant or not missing or tokens.shape[1] < GROUP:
            return tokens, positions, mask
        wider = ((0, 0), (0, missing))
        mask = jnp.pad(mask, (*wider, (0, missing)))
        mask |= jnp.eye(mask.shape[1], dtype=bool)  # A softmax needs at least one key.
        return jnp.pad(tokens, wider), jnp.pad(positions, wider, mode="edge"), mask

    def reach(self, length: Lengths) -> Lengths | None:
        """The position at which a round after ``length[b]`` tokens must end; None if anywhere.

        There is one where attention is added up in the order of positions.
        """
        return path.reach(length) if self.batch_invariant else None

    def partial_forward(
        self,
        params: PyTree,
        cache: KVCache,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        selection: Selection,
        fresh: Uncommitted,
        mask: TreeMask,
        at: int,
        length: Lengths,
        needs: Needs = NOTHING,
    ) -> PartialForward:
        """As :meth:`longspec_jax.drafters.base.View.partial_forward`.

        Layers with a window read all that it holds of the ``length[b]`` tokens in the cache,
        whatever the selection, and recurrent ones their state. Fresh tokens see each other through
        no window.
        """
        keys: list[Any] = list(fresh.keys)
        values: list[Any] = list(fresh.values)
        read = selection.reading(cache)
        states, depth = dict(fresh.rows), positions - length[:, None]
        own, past = self._with_scores(tree_attention), self._with_scores(prefix_attention)

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            window, source = self.config.layer(layer).window, self.config.source(layer)
            if window is None:
                q, prefixes = read(source, q)
            else:
                prefixes = [cache.layer(source, length).within(window, positions)]
            if source == layer:
                write = partial(jax.lax.dynamic_update_slice_in_dim, start_index=at, axis=1)
                keys[layer], values[layer] = write(keys[layer], k), write(values[layer], v)
            rows = Fresh(keys[source], values[source], mask)
            seen = own(q, rows)
            for prefix in prefixes:
                seen = merge(seen, past(q, prefix))
            return with_sinks(seen, sinks_of(params, layer)).out.astype(q.dtype)

        def recur(layer: int, tokens: RecurrentTokens, taps: Array) -> Array:
            rest = states[layer], mask, at, depth
            states[layer], out = continued_recurrence(tokens, taps, cache.state(layer), *rest)
            return out

        with jax.named_scope("partial_forward"):
            output, features = self._forward(params, tokens, positions, attend, recur, needs)
            logits = self.unembed(params, output.hidden)
        return PartialForward(logits, Uncommitted(tuple(keys), tuple(values), states), features)

    def _forward(
        self,
        params: PyTree,
        tokens: Array,
        positions: Array,
        attend: Attend,
        recur: Recur,
        needs: Needs,
        ordered: bool | None = None,
    ) -> tuple[TargetOutput, Features]:
        """All layers, and the features that are needed of them.

        Keys, values and queries are in the cache's units from here on, rounded as it rounds them.
        """
        queries, keys = {}, {}
        cached: dict[int, tuple[Array, Array]] = {}

        def noted(layer: int, q: Array, k: Array, v: Array) -> Array:
            source = self.config.source(layer)
            scales = self.config.scales(source)
            if source != layer:
                k, v = cached.get(source, (k, v))
            elif self.config.kv_dtype is not None:
                k, v = cached[layer] = float8.stored(scales, k, v)
            if scales is not None:
                q = float8.scaled(q, scales.keys)
            if layer in needs.queries:
                queries[layer] = q
            if layer in needs.keys:
                keys[layer] = k
            out = attend(layer, q, k, v)
            return out if scales is None else float8.scaled(out, scales.values)

        model = self._model if ordered is None else Target(self.config, ordered=ordered)
        given = tokens, positions, noted
        output = applied(Target.__call__, model, params, *given, keep=needs.hidden, recur=recur)
        if cached:
            layers = range(self.config.num_layers)
            rows = [cached.get(layer, (None, None)) for layer in layers]
            output = output._replace(
                keys=tuple(keys for keys, _ in rows), values=tuple(values for _, values in rows)
            )
        return output, Features(output.kept, queries, keys)

    def unembed(self, params: PyTree, hidden: Array) -> Array:
        """Logits of hidden states after the last norm, float32; of any number of leading axes."""
        return applied(Target.unembed, self._model, params, hidden)

    def _with_scores(self, attention: Callable[..., F]) -> Callable[..., F]:
        """An attention op with what this target does to scores."""
        scale, cap = self.config.attention_scale, self.config.attention_cap
        return partial(attention, scale=scale, cap=cap, implementation=self.attention)

    @property
    def _model(self) -> Target:
        return Target(self.config, ordered=self.batch_invariant)
