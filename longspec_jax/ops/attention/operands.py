"""What attention takes and gives: cached tokens, fresh tokens, and results that can be merged.

Attention over a union of disjoint key sets is a weighted mean of the attention over each set,
the weights being the softmax of their log-sum-exps (LongSpec section 3.3, "Aggregation"). A row
that saw no key carries ``out = 0`` and ``lse = -inf``: the neutral element of the merge.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from flax import struct
from jax import export
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from longspec_jax.axes import (
    Array,
    CacheSlots,
    Leaf,
    Lengths,
    Queries,
    Sinks,
    TreeMask,
    TreeRows,
)
from longspec_jax.config.layers import HeadScales


@struct.dataclass
class Prefix:
    """One layer's committed tokens; row ``b`` sees its slots ``start[b] <= s < length[b]``.

    In a layer with a window (``oldest``) the slots are a ring: position ``p`` lies in slot
    ``p % S``. Of each slot that is the last position below the length, which may exceed the slots.
    """

    keys: Leaf[CacheSlots]
    """Rotary applied."""
    values: Leaf[CacheSlots]
    length: Leaf[Lengths]
    """Slots that hold committed tokens; memory beyond may hold anything."""
    start: Leaf[Lengths] | None = None
    """The first slot each row sees; 0 if absent."""
    cache_rows: Leaf[Lengths] | None = None
    """Which row of keys and values each batch row reads; its own if absent."""
    oldest: Leaf[Int[Array, "B T"]] | None = None
    """The first position that each query sees, in a layer with a window; goes without ``start``."""
    scales: HeadScales | None = struct.field(pytree_node=False, default=None)
    """What stored keys and values are to be multiplied by, for queries that know nothing of it."""

    def within(self, window: int | None, positions: Int[Array, "B T"]) -> "Prefix":
        """The same seen through a window: queries at ``positions`` see ``p_q - p_k < window``."""
        return self if window is None else replace(self, oldest=positions - (window - 1))

    def positions(self) -> Int[Array, "B S"]:
        """The position in every slot of a ring; negative where the slot is empty."""
        newest = self.length[:, None] - 1
        return newest - (newest - jnp.arange(self.keys.shape[2])) % self.keys.shape[2]

    def of_batch(self) -> "Prefix":
        """The same with a copy of only the batch's rows, for what takes no ``cache_rows``."""
        if self.cache_rows is None:
            return self
        keys, values = (cache[self.cache_rows] for cache in (self.keys, self.values))
        return replace(self, keys=keys, values=values, cache_rows=None)


Reading: TypeAlias = Callable[[int, Queries], tuple[Queries, Prefix]]
"""``(layer, its queries) -> the queries, what they read``, called once for every layer in order.
Attention must use the returned queries: through them a cache in host memory orders its reads."""


@struct.dataclass
class Fresh:
    """One layer's tokens of this forward pass: a tree's nodes, or a chunk of a prompt."""

    keys: Leaf[TreeRows]
    """Rotary applied."""
    values: Leaf[TreeRows]
    mask: Leaf[TreeMask] | None = None
    """True where query ``t`` sees key ``u``. A chunk has none: every token sees itself and the ones
    before it, in a layer with a window only those in the window."""

    def seen(self, prefix: Prefix) -> TreeMask:
        """The mask, after this prefix."""
        if self.mask is not None:
            return self.mask
        batch, tokens = self.keys.shape[:2]
        mask = jnp.tril(jnp.ones((tokens, tokens), bool))
        if prefix.oldest is not None:
            first = prefix.oldest - prefix.length[:, None]
            mask = mask & (jnp.arange(tokens) >= first[:, :, None])
        return jnp.broadcast_to(mask, (batch, tokens, tokens))


PREFIX_AXES = "b t (k g) h, b k s h, b k s h, b, b, b, b t -> b t (k g) h, b t (k g)"
TREE_AXES = "b t (k g) h, b u k h, b u k h, b t u -> b t (k g) h, b t (k g)"
SPECULATIVE_AXES = (
    "b t (k g) h, b k s h, b k s h, b, b, b, b t, b u k h, b u k h, b t u, (k g) -> b t (k g) h"
)
PATH_AXES = (
    "b t (k g) h, b k s h, b k s h, b, b, b, b t, b u k h, b u k h, b t u, b t, (k g) "
    "-> b t (k g) h"
)
"""The axes of queries, of the fields above and of the results, for
:func:`longspec_jax.ops.partitioned.partitioned`."""


class Partial(NamedTuple):
    """Softmax attention over one set of keys, ready to be merged with another set's."""

    out: Float[Array, "B T N H"]
    """The attention output normalised only over this set; zero where no key was seen. float32 if
    it is to be merged."""
    lse: Float[Array, "B T N"]
    """Natural log of the sum of exponentiated scores, float32; -inf where no key was seen."""

    def in_dtype(self, dtype: DTypeLike) -> "Partial":
        """The same with an output of this type."""
        return self._replace(out=self.out.astype(dtype))


# What a kernel returns is named in the file that keeps it (longspec_jax.ops.launchers).
export.register_namedtuple_serialization(Partial, serialized_name="longspec_jax.Partial")


def merge(a: Partial, b: Partial) -> Partial:
    """Combine the partial results of two disjoint key sets; exact in real arithmetic."""
    top = jnp.maximum(a.lse, b.lse)
    # -inf - (-inf) is NaN; a row that neither side saw keeps weight zero on both.
    shift = jnp.where(jnp.isneginf(top), 0.0, top)
    weight_a = jnp.exp(a.lse - shift)
    weight_b = jnp.exp(b.lse - shift)
    total = weight_a + weight_b
    scale = jnp.where(total > 0, 1.0 / jnp.where(total > 0, total, 1.0), 0.0)
    out = a.out * (weight_a * scale)[..., None] + b.out * (weight_b * scale)[..., None]
    lse = jnp.where(total > 0, shift + jnp.log(jnp.where(total > 0, total, 1.0)), -jnp.inf)
    return Partial(out, lse)


def with_sinks(seen: Partial, sinks: Sinks | None) -> Partial:
    """The same where every head also saw its sink, a key of this score and of the value zero.

    A sink takes part only in the softmax's denominator (gpt-oss). It belongs to only one of several
    disjoint key sets, or to their merged result. None for attention without sinks.
    """
    if sinks is None:
        return seen
    sinks = sinks.astype(jnp.float32)
    share = jax.nn.sigmoid(seen.lse - sinks)
    return Partial(seen.out * share[..., None], jnp.logaddexp(seen.lse, sinks))
