"""Row slots: what persists of a row from round to round, and how rows come and go.

A batch is a number of slots, each of them vacant or held by one request. A newcomer's prompt is
prefilled beside the others (:mod:`longspec_jax.decoding.prefill`), as the only row of a batch of
its own and, if need be, one chunk between two of their rounds; :func:`insert` then moves it into a
slot. What a row asks for is part of it, as arrays, so that requests with other options compile
nothing anew.

What one call records of its rounds is no part of this: see :mod:`longspec_jax.decoding.record`.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Bool, Int

from longspec_jax.axes import Array, Leaf, Lengths
from longspec_jax.decoding.cache import KVCache
from longspec_jax.decoding.home import Home
from longspec_jax.decoding.programs import program
from longspec_jax.decoding.sampling import Sampling


@struct.dataclass
class Request:
    """What each row of a batch asks for."""

    sampling: Sampling
    stop_tokens: Leaf[Int[Array, "B n"]]
    """Tokens that end a row, itself emitted; pad with -1."""
    max_new_tokens: Leaf[Int[Array, " B"]]
    """Most tokens to emit."""


@struct.dataclass
class Rows:
    """A batch of row slots. DONATED by every round."""

    cache: KVCache
    """K/V of the committed tokens."""
    draft: Any
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

    @property
    def done(self) -> Bool[Array, " B"]:
        """Which rows neither advance nor emit: they are at their end, or vacant."""
        return self.remaining <= 0

    def kept_in(self, home: Home) -> "Rows":
        """The same rows, their arrays held in their places inside a program."""
        return jax.lax.with_sharding_constraint(self, self.places(home))

    def places(self, home: Home) -> Any:
        """Where the arrays lie of rows that live there."""
        places = jax.tree.map(lambda _: home.rows, self)
        return replace(places, cache=self.cache.places(home.cache))


@program(static_argnames=("home",), donate_argnames=("rows",))
def insert(home: Home, rows: Rows, slot: Array, newcomer: Rows) -> Rows:
    """Move a prefilled row into a slot, over whatever was there.

    All of the slot's memory is written: nothing of its last row remains, not-a-number included.

    Args:
      home: where the rows' arrays live.
      rows: the batch; donated.
      slot: which; a traced number, so that all slots are one program.
      newcomer: a batch of one row, of the same capacity and number of stop tokens.
    """

    def write(slots: Array, row: Array) -> Array:
        if home.row_shares == 1:
            return jax.lax.dynamic_update_slice_in_dim(slots, row, slot, axis=0)
        # A slice of rows that lie on several devices would bring them all to each.
        here = jnp.arange(slots.shape[0]) == slot
        return jnp.where(here.reshape(-1, *[1] * (slots.ndim - 1)), row, slots)

    return jax.tree.map(write, rows, newcomer).kept_in(home)


def release(rows: Rows, slot: int) -> Rows:
    """End a slot's row before its time: the slot is vacant from the next round on."""
    here = np.arange(rows.remaining.shape[0]) == slot
    return replace(rows, remaining=jnp.where(here, 0, rows.remaining))
