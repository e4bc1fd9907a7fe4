"""What a call records of its rounds on the device, where nobody watches them one by one."""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Bool, Int

from longspec_jax.axes import Array, Leaf, Lengths
from longspec_jax.decoding.rows import Rows


@struct.dataclass
class Emitted:
    """What one round emitted."""

    tokens: Leaf[Int[Array, "B h"]]
    """Garbage from ``count[b]`` on."""
    count: Leaf[Lengths]
    """How many; 0 where the row was done."""
    accepted: Leaf[Lengths]
    """How many of them, the first ones, were accepted draft tokens."""


@struct.dataclass
class Record:
    """A call's output and counts so far. DONATED by every round."""

    output: Leaf[Int[Array, "B E"]]
    """Emitted tokens; garbage from ``emitted[b]`` on."""
    drafted: Leaf[Bool[Array, "B E"]]
    """Whether an emitted token was an accepted draft token."""
    emitted: Leaf[Lengths]
    """Tokens emitted so far, the first one (drawn from the prefill) included."""
    rounds: Leaf[Int[Array, " B"]]
    """Target passes a row took part in while it was not done, prefill excluded."""
    histogram: Leaf[Int[Array, "B h"]]
    """Rounds by the accepted draft tokens they emitted: column 0 is the bonus alone; as wide as the
    tallest tree that may run is high."""

    @classmethod
    def begin(cls, first: Int[Array, " B"], max_emitted: int, height: int) -> "Record":
        """The record after the prefill, which emits each row's first token.

        Args:
          first: these tokens.
          max_emitted: most tokens of a row.
          height: most tokens that a round emits in a row.
        """
        batch = first.shape[0]
        # A round writes a static height.
        output = jnp.zeros((batch, max_emitted + height), jnp.int32).at[:, 0].set(first)
        return cls(
            output=output,
            drafted=jnp.zeros(output.shape, bool),
            emitted=jnp.ones((batch,), jnp.int32),
            rounds=jnp.zeros((batch,), jnp.int32),
            histogram=jnp.zeros((batch, height), jnp.int32),
        )

    def add(self, new: Emitted) -> "Record":
        """The record one round later."""
        emit = jax.vmap(lambda row, fresh, at: jax.lax.dynamic_update_slice(row, fresh, (at,)))
        accepted, advanced = new.accepted[:, None], new.count > 0
        drafted = jnp.arange(new.tokens.shape[1]) < accepted
        column = jnp.arange(self.histogram.shape[1])
        return Record(
            output=emit(self.output, new.tokens, self.emitted),
            drafted=emit(self.drafted, drafted, self.emitted),
            emitted=self.emitted + new.count,
            rounds=self.rounds + advanced,
            histogram=self.histogram + ((column == accepted) & advanced[:, None]),
        )


@struct.dataclass
class SpecState:
    """Rows and what a call records of them. DONATED by every round."""

    rows: Rows
    record: Record
