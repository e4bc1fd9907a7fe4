"""Quest's summary of a block of keys: the largest and the smallest value of each of their numbers.

No key of the block has a larger product with a query than the sum, over the width, of the larger of
the two products: an upper bound on what attention could find there (Tang et al., arXiv:2406.10774,
section 3.3; SpecPV, arXiv:2512.02337, section 3.2). As the largest value is never below the
smallest, the bound takes it where the query is positive and the other one where it is negative: two
products, which are linear, so that queries may be averaged before them.

Blocks lead, layers follow: what is read and written of a block is then one piece of memory, for all
layers at once.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Bool, Float

from longspec_jax.axes import Array, Leaf, Lengths
from longspec_jax.ops.along import along


@struct.dataclass
class Extremes:
    """Of every block of every layer's keys. DONATED by what returns new ones."""

    highest: Leaf[Float[Array, "B n L K H"]]
    """-inf for a block without keys."""
    lowest: Leaf[Float[Array, "B n L K H"]]
    """+inf for a block without keys."""


@struct.dataclass
class Probe:
    """What queries ask of the blocks: their positive and their negative numbers, reduced."""

    positive: Leaf[Float[Array, "B L K R H"]]
    negative: Leaf[Float[Array, "B L K R H"]]


def no_extremes(
    batch: int, blocks: int, layers: int, heads: int, width: int, dtype: Any
) -> Extremes:
    """Of caches without a key; ``dtype`` is the keys'."""
    shape = (batch, blocks, layers, heads, width)
    return Extremes(jnp.full(shape, -jnp.inf, dtype), jnp.full(shape, jnp.inf, dtype))


def extend_extremes(
    extremes: Extremes,
    keys: Float[Array, "B n L K H"],
    start: Lengths,
    count: Lengths,
    block: int,
) -> Extremes:
    """The summaries after ``count[b]`` more keys from slot ``start[b]`` on.

    A block that was not full goes on from what it was. Nothing but the blocks in question is read
    or written.
    """
    given = keys.shape[1]
    touched = (given + block - 2) // block + 1
    places = (start // block)[:, None] + jnp.arange(touched)
    slots = places[:, :, None] * block + jnp.arange(block)
    offsets = (slots - start[:, None, None]).reshape(slots.shape[0], -1)
    joined = (offsets >= 0) & (offsets < count[:, None])
    found = along(jnp.clip(offsets, 0, given - 1), keys)
    shape = (*places.shape, block, *keys.shape[2:])
    joined = joined[:, :, None, None, None]
    above = jnp.where(joined, found, -jnp.inf).reshape(shape).max(axis=2)
    below = jnp.where(joined, found, jnp.inf).reshape(shape).min(axis=2)
    # Blocks behind the last one do not exist, and are dropped.
    rows = jnp.arange(keys.shape[0])[:, None]
    high, low = extremes.highest.at[rows, places], extremes.lowest.at[rows, places]
    return Extremes(
        high.max(above, mode="drop", unique_indices=True),
        low.min(below, mode="drop", unique_indices=True),
    )


def mean(queries: Float[Array, "B Q L N H"], counts: Bool[Array, "B Q"], kv_heads: int) -> Probe:
    """The mean of the queries that count, as SpecPV has it; zeros where none counts.

    Query heads that share keys are averaged first.
    """
    asked = jnp.where(counts[:, None, None, :, None], 1.0, 0.0)
    total = jnp.maximum(asked.sum(axis=3, keepdims=True), 1)
    probe = _signs(queries, kv_heads)
    return jax.tree.map(lambda part: (part * asked).sum(axis=3, keepdims=True) / total, probe)


def bound_scores(probe: Probe, extremes: Extremes) -> Float[Array, "B L K n"]:
    """The upper bound of every block; of one without keys it may be anything.

    Products and sums in float32, written so that the summaries are read once and in their dtype.
    """
    highest, lowest = (part[:, :, :, :, None] for part in (extremes.highest, extremes.lowest))
    bounds = (probe.positive[:, None] * highest + probe.negative[:, None] * lowest).sum(axis=-1)
    return bounds.max(axis=-1).transpose(0, 2, 3, 1)


def _signs(queries: Float[Array, "B Q L N H"], kv_heads: int) -> Probe:
    """Positive and negative numbers, each on average over the query heads of a key/value head."""
    grouped = queries.reshape(*queries.shape[:3], kv_heads, -1, queries.shape[4])
    grouped = grouped.astype(jnp.float32).transpose(0, 2, 3, 1, 4, 5)
    return Probe(jnp.maximum(grouped, 0).mean(axis=4), jnp.minimum(grouped, 0).mean(axis=4))
