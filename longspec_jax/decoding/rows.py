"""Row slots on the device: the state of every row, where it lies, and how rows enter and leave.

A batch is a number of slots, each of them vacant or held by one request. Whatever a request may
choose (sampling, stop tokens, budget) is data of its row, so that requests with other options
compile nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Bool, Int, PyTree

from longspec_jax.axes import Array, Leaf, Lengths
from longspec_jax.config.names import BATCH_AXES
from longspec_jax.decoding.adjustments import AdjustmentOptions, Adjustments
from longspec_jax.decoding.cache import KVCache
from longspec_jax.decoding.jit_cache import program
from longspec_jax.decoding.sampling import Sampling
from longspec_jax.ops.caches import put_rows, take_rows


class RowShardings(NamedTuple):
    """The shardings of a batch's arrays, the same before and after every program."""

    cache: Sharding
    """Of keys and values ``[B, K, S, H]``."""
    rows: Sharding
    """Of all other arrays ``[B, ...]``."""

    @classmethod
    def for_params(cls, params: PyTree, batch: int) -> "RowShardings":
        """The shardings of a batch that is decoded with these target parameters.

        On a mesh, rows are spread over the batch axes where these divide the batch. Key/value
        heads are spread as the projections that make them.

        Args:
          params: the target's.
          batch: rows.
        """
        sharding = jax.tree.leaves(params)[0].sharding
        if not isinstance(sharding, NamedSharding):
            return cls(sharding, sharding)
        mesh = sharding.mesh
        shares = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
        rows = BATCH_AXES if batch % shares == 0 else None
        return cls(NamedSharding(mesh, P(rows, "tp")), NamedSharding(mesh, P(rows)))

    @property
    def row_shards(self) -> int:
        """How many groups of devices the rows are spread over."""
        return _shards(self.rows)

    @property
    def cache_shards(self) -> int:
        """How many groups of devices the cache is spread over."""
        return _shards(self.cache)


def _shards(sharding: Sharding) -> int:
    if not isinstance(sharding, NamedSharding):
        return 1
    axes = jax.tree.leaves(tuple(sharding.spec))
    return math.prod(sharding.mesh.shape[axis] for axis in axes)


@struct.dataclass
class Request:
    """The options of each row of a batch."""

    sampling: Sampling
    stop_tokens: Leaf[Int[Array, "B n"]]
    """Tokens that end a row, itself emitted; pad with -1."""
    max_new_tokens: Leaf[Int[Array, " B"]]
    """Most tokens to emit."""
    speculate: Leaf[Bool[Array, " B"]] | None = None
    """Whether the row accepts draft tokens; every row does if absent."""
    adjustments: AdjustmentOptions | None = None
    """Biases and penalties; none if absent."""
    logprobs: Leaf[Int[Array, " B"]] | None = None
    """How many alternatives of every emitted token to report besides its log-probability; -1 for
    neither, in every row if absent."""
    prompt_logprobs: Leaf[Int[Array, " B"]] | None = None
    """The same of the prompt's tokens."""

    def row(self, index: int) -> "Request":
        """The request of one row, as a batch of one."""
        return jax.tree.map(lambda leaf: leaf[index : index + 1], self)


def stack(requests: Sequence[Request]) -> Request:
    """Several requests on the host, as their runner has them, as those of one batch."""
    kind = max(one.sampling.kind for one in requests)
    alike = [replace(one, sampling=one.sampling.of_kind(kind)) for one in requests]
    given = [one.adjustments for one in requests if one.adjustments is not None]
    if given:  # By all of them, where an engine adjusts logits.
        width = max(one.bias.shape[1] for one in given)
        padded = zip(alike, (one.padded(width) for one in given), strict=True)
        alike = [replace(one, adjustments=options) for one, options in padded]
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *alike)


@struct.dataclass
class Rows:
    """A batch of row slots. DONATED by every launch."""

    cache: KVCache
    """K/V of the committed tokens."""
    draft: PyTree
    """The drafter's own state, every leaf ``[B, ...]``."""
    length: Leaf[Lengths]
    """Committed tokens: prompt and emitted tokens, the pending one not included."""
    pending: Leaf[Int[Array, " B"]]
    """The last emitted token, not in the cache yet."""
    remaining: Leaf[Int[Array, " B"]]
    """Tokens the row may still emit; 0 once it has met a stop token, and in a vacant slot."""
    sampling: Sampling
    stop_tokens: Leaf[Int[Array, "B n"]]
    """Tokens that end a row, itself emitted; padded with -1."""
    speculate: Leaf[Bool[Array, " B"]]
    """Whether the row accepts draft tokens. One that does not emits a token a round."""
    adjustments: Adjustments | None = None
    """What adjusts the rows' logits; None where no row's ever are."""

    @property
    def done(self) -> Bool[Array, " B"]:
        """Which rows neither advance nor emit: they have ended, or the slot is vacant."""
        return self.remaining <= 0

    @property
    def attended(self) -> Lengths:
        """Cache slots that attention reads in each row: none of a row that is done."""
        return jnp.where(self.done, 0, self.length)

    def gather(self, slots: Lengths | None) -> "Rows":
        """The rows of these slots, their keys and values where they lie; all rows if absent."""
        return self if slots is None else take_rows(self, slots)

    def scatter(self, slots: Lengths | None, before: "Rows", after: "Rows") -> "Rows":
        """All rows, once what :meth:`gather` took of them (``before``) has become ``after``."""
        return after if slots is None else put_rows(self, slots, before, after)

    def constrained(self, shardings: RowShardings) -> "Rows":
        """The same rows with their shardings pinned, inside a program."""
        return jax.lax.with_sharding_constraint(self, self.shardings(shardings))

    def shardings(self, shardings: RowShardings) -> Any:
        """The sharding of every array."""
        of_rows = jax.tree.map(lambda _: shardings.rows, self)
        return replace(of_rows, cache=self.cache.shardings(shardings.cache))


@program(static_argnames=("shardings",), donate_argnames=("rows",))
def insert(shardings: RowShardings, rows: Rows, slot: Array, prefilled: Rows) -> Rows:
    """Move a prefilled row into a slot, over the slot's last row.

    All of the slot's memory is written, so that nothing of its last row remains, NaN included.

    Args:
      shardings: of the batch.
      rows: the batch; donated.
      slot: which; traced, so that all slots share one program.
      prefilled: a batch of one row, of the same capacity and number of stop tokens.
    """

    def write(slots: Array, row: Array) -> Array:
        if shardings.row_shards == 1:
            return jax.lax.dynamic_update_slice_in_dim(slots, row, slot, axis=0)
        # A slice of rows that lie on several devices would bring them all to each.
        here = jnp.arange(slots.shape[0]) == slot
        return jnp.where(here.reshape(-1, *[1] * (slots.ndim - 1)), row, slots)

    return jax.tree.map(write, rows, prefilled).constrained(shardings)


def release(rows: Rows, slot: int) -> Rows:
    """End a slot's row before its time: the slot is vacant from the next launch on."""
    here = np.arange(rows.remaining.shape[0]) == slot
    return replace(rows, remaining=jnp.where(here, 0, rows.remaining))
