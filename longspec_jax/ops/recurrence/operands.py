"""What a recurrent layer keeps of a row, what it makes of fresh tokens, and what they write.

Axes besides those of :mod:`longspec_jax.axes`: key heads ``J``, the value heads ``P`` of each of
them, the widths ``X`` of a key and ``Y`` of a value, and the width ``W = 2 X + P Y`` of what the
convolution sees for a key head: its query, its key and its values.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Float, Int

from longspec_jax.axes import Array, Leaf, Lengths
from longspec_jax.config.layers import RecurrenceConfig
from longspec_jax.ops.slicing import along, last_along


@struct.dataclass
class RecurrentState:
    """One layer's memory of the committed tokens, whatever their number."""

    memory: Leaf[Float[Array, "rows J P X Y"]]
    """The state of every value head, float32."""
    inputs: Leaf[Float[Array, "rows J _ W"]]
    """What the convolution saw of the last tokens, the newest last; zeros before the first one."""

    def of_batch(self, cache_rows: Lengths | None) -> "RecurrentState":
        """The states of a batch's rows, which may be some of the arrays' rows."""
        if cache_rows is None:
            return self
        return RecurrentState(self.memory[cache_rows], self.inputs[cache_rows])

    def put(self, cache_rows: Lengths | None, own: "RecurrentState") -> "RecurrentState":
        """The states of all rows with those of the batch's rows, no two alike, replaced."""
        if cache_rows is None:
            return own

        def written(all_rows: Array, of_batch: Array) -> Array:
            at = all_rows.at[cache_rows]
            return at.set(of_batch, mode="promise_in_bounds", unique_indices=True)

        return jax.tree.map(written, self, own)


def empty_state(config: RecurrenceConfig, rows: int, dtype: str) -> RecurrentState:
    """The state of rows without a token."""
    c = config
    memory = jnp.zeros((rows, c.key_heads, c.shared, c.key_width, c.value_width), jnp.float32)
    inputs = jnp.zeros((rows, c.key_heads, c.taps - 1, c.inputs_width), jnp.dtype(dtype))
    return RecurrentState(memory, inputs)


def state_bytes(config: RecurrenceConfig, dtype: str) -> int:
    """Bytes of :func:`empty_state`'s result for one row."""
    c = config
    memory = 4 * c.value_heads * c.key_width * c.value_width
    return memory + c.key_heads * (c.taps - 1) * c.inputs_width * jnp.dtype(dtype).itemsize


@struct.dataclass
class RecurrentTokens:
    """What a layer makes of its fresh tokens, before they see each other."""

    inputs: Leaf[Float[Array, "B T J _"]]
    """Of the convolution, ``W`` numbers: a query, a key and values for each key head. What stands
    after them is not read."""
    log_decay: Leaf[Float[Array, "B T J P"]]
    """Logarithm of the factor on the state before a token writes, at most 0; float32."""
    strength: Leaf[Float[Array, "B T J P"]]
    """Share of the difference to its value that a token writes (beta), float32."""


@struct.dataclass
class RecurrentRows:
    """What fresh tokens write to the state of a layer, if they are committed.

    After a path of tokens the state ``S`` is ``exp(total) S + sum_j exp(total - total_j) k_j
    u_j``, the total of the path's last token.
    """

    inputs: Leaf[Float[Array, "B U J _"]]
    """Of the convolution, as in :class:`RecurrentTokens`."""
    keys: Leaf[Float[Array, "B U J X"]]
    """Normalised, float32."""
    updates: Leaf[Float[Array, "B U J P Y"]]
    """What every token adds under its key (``u``), float32."""
    log_decay: Leaf[Float[Array, "B U J P"]]
    total: Leaf[Float[Array, "B U J P"]]
    """Sum of the logarithms along the token's own path, itself included."""
    depth: Leaf[Int[Array, "B U"]]
    """Tokens between the token and the committed ones."""


def empty_rows(state: RecurrentState, batch: int, tokens: int) -> RecurrentRows:
    """Zeros for tokens outside the state."""
    _, heads, shared, key, value = state.memory.shape

    def zeros(*shape: int) -> Array:
        return jnp.zeros((batch, tokens, heads, *shape), jnp.float32)

    inputs = zeros(state.inputs.shape[3]).astype(state.inputs.dtype)
    depth = jnp.zeros((batch, tokens), jnp.int32)
    updates, sums = zeros(shared, value), zeros(shared)
    return RecurrentRows(inputs, zeros(key), updates, sums, sums, depth)


def commit_path(
    state: RecurrentState, rows: RecurrentRows, path: Int[Array, "B h"], count: Lengths
) -> RecurrentState:
    """The state after the first ``count[b]`` nodes of a path; the same state where it is 0.

    Args:
      state: of the batch's rows.
      rows: what the nodes write.
      path: nodes from the root on; what stands after the count may be any node.
      count: how many of them are committed.
    """
    keys, updates, total = (along(path, part) for part in (rows.keys, rows.updates, rows.total))
    live = (jnp.arange(path.shape[1]) < count[:, None])[:, :, None, None]
    end = jnp.where(count[:, None, None] > 0, last_along(total, count), 0.0)
    faded = jnp.exp(jnp.where(live, end[:, None] - total, -jnp.inf))
    written = jnp.where(live[..., None], updates * faded[..., None], 0.0)
    memory = jnp.exp(end)[..., None, None] * state.memory + jnp.einsum(
        "bhjx,bhjpy->bjpxy", keys, written, precision="highest"
    )
    inputs = along(path, rows.inputs)[..., : state.inputs.shape[3]]
    return RecurrentState(memory, last_inputs(state, inputs, count))


def last_inputs(
    state: RecurrentState, fresh: Float[Array, "B T J W"], count: Lengths
) -> Float[Array, "B J _ W"]:
    """The inputs to keep after the first ``count[b]`` of some consecutive tokens."""
    kept = state.inputs.shape[2]
    joined = jnp.concatenate([state.inputs.swapaxes(1, 2), fresh], axis=1)
    return along(count[:, None] + jnp.arange(kept), joined).swapaxes(1, 2)
