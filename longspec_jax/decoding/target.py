"""The target as the decode loop sees it: prefill a chunk, verify a tree.

:class:`TargetModel` is the protocol, which a lookup table can satisfy in tests;
:class:`CachedTarget` binds :class:`longspec_jax.models.target.Target` to a cache and the attention
ops.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from longspec_jax.axes import Array, Lengths, TreeMask
from longspec_jax.config import TargetConfig
from longspec_jax.decoding import cache as cache_lib
from longspec_jax.decoding.cache import KVCache
from longspec_jax.models.target import Attend, Target, TargetOutput
from longspec_jax.ops.attention.dispatch import chunk_attention, speculative_attention
from longspec_jax.ops.attention.operands import Fresh, Prefix


class Verification(NamedTuple):
    """What one target pass over a tree yields."""

    logits: Float[Array, "B T V"]
    """Next-token logits at every node, float32."""
    keys: tuple[Array, ...]
    """Keys of the tree's nodes, ``L x [B, T, K, H]``: the rows to commit."""
    values: tuple[Array, ...]
    """Values of the tree's nodes, ``L x [B, T, K, H]``."""


@runtime_checkable
class TargetModel(Protocol):
    """Pure functions of parameters and cache; the object itself is static and hashable."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        ...

    @property
    def devices(self) -> int | None:
        """How many the parameters are spread over; None if it is not said."""
        ...

    def allocate(self, batch: int, capacity: int) -> KVCache:
        """An empty cache."""
        ...

    def prefill_chunk(
        self, params: Any, cache: KVCache, tokens: Int[Array, "B C"], offset: Array, last: Lengths
    ) -> tuple[Float[Array, "B V"], KVCache]:
        """Append a chunk at ``offset``; logits after the chunk's token ``last[b]`` of each row."""
        ...

    def verify(
        self,
        params: Any,
        cache: KVCache,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        mask: TreeMask,
        length: Lengths,
    ) -> Verification:
        """Logits at every node of a tree below ``length[b]`` committed tokens."""
        ...


@dataclass(frozen=True)
class CachedTarget:
    """A transformer target over a :class:`KVCache`."""

    config: TargetConfig
    attention: str | None = None
    """Attention implementation; chosen automatically if absent."""
    devices: int | None = None
    """How many the parameters are spread over; if absent all that are visible, which serves one."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.config.vocab_size

    def allocate(self, batch: int, capacity: int) -> KVCache:
        """An empty cache for this target."""
        return cache_lib.allocate(self.config, batch, capacity)

    def prefill_chunk(
        self, params: Any, cache: KVCache, tokens: Int[Array, "B C"], offset: Array, last: Lengths
    ) -> tuple[Float[Array, "B V"], KVCache]:
        """Append a chunk at ``offset``; logits after the chunk's token ``last[b]`` of each row."""
        batch, chunk = tokens.shape
        positions = jnp.broadcast_to(offset + jnp.arange(chunk), tokens.shape)
        length = jnp.full((batch,), offset, jnp.int32)

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            prefix = Prefix(cache.keys[layer], cache.values[layer], length)
            return chunk_attention(q, prefix, k, v, implementation=self.attention)

        output = self._forward(params, tokens, positions, attend)
        hidden = jnp.take_along_axis(output.hidden, last[:, None, None], axis=1)[:, 0]
        logits = self._unembed(params, hidden)
        return logits, cache_lib.append_chunk(cache, output.keys, output.values, offset)

    def verify(
        self,
        params: Any,
        cache: KVCache,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        mask: TreeMask,
        length: Lengths,
    ) -> Verification:
        """Logits at every node of a tree below ``length[b]`` committed tokens."""

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            prefix = Prefix(cache.keys[layer], cache.values[layer], length)
            return speculative_attention(
                q, prefix, Fresh(k, v, mask), implementation=self.attention
            )

        with jax.named_scope("verify"):
            output = self._forward(params, tokens, positions, attend)
            logits = self._unembed(params, output.hidden)
        return Verification(logits, output.keys, output.values)

    def _forward(
        self, params: Any, tokens: Array, positions: Array, attend: Attend
    ) -> TargetOutput:
        output: Any = Target(self.config).apply({"params": params}, tokens, positions, attend)
        return output

    def _unembed(self, params: Any, hidden: Array) -> Array:
        logits: Any = Target(self.config).apply({"params": params}, hidden, method="unembed")
        return logits
