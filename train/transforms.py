"""The two random transforms of LongSpec training, as pure functions of a key.

*Anchor-offset positions* (LongSpec 3.2): the first few positions, the attention sinks, stay where
they are and all others move by one random offset, so that short sequences train the draft at large
positions. The target runs on the same positions.

*Flash noisy training* (LongSpec 3.2): the draft proposes several tokens past the last one the
target has seen, so in training query ``t`` sees the target's keys up to ``t - shift`` only. The
shift is a traced number and needs no mask: rolling the queries turns it into plain causal
attention.

Both know two variants: one draw for each row, or one for each micro-batch as the published code
does. Rows are arranged as ``[A, B]``, micro-batches by rows, so draws do not depend on how devices
share them.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from longspec_jax.axes import Array
from longspec_jax.ops.attention.dispatch import causal_attention


def plain_positions(rows: tuple[int, int], length: int) -> Int[Array, "A B T"]:
    """Positions ``0, 1, 2, ...`` for every row."""
    return jnp.broadcast_to(jnp.arange(length), (*rows, length))


def anchored_positions(
    key: Array,
    rows: tuple[int, int],
    length: int,
    *,
    max_offset: int,
    max_sinks: int = 4,
    per_row: bool = True,
) -> Int[Array, "A B T"]:
    """Positions whose first few stay and whose others move by a random offset.

    Args:
      key: randomness of this step.
      rows: micro-batches and rows of each.
      length: tokens of a row.
      max_offset: largest offset, itself included.
      max_sinks: most positions that stay; 0 to this many do, as in the published code.
      per_row: one draw for each row; otherwise one for each micro-batch.
    """
    sink_key, offset_key = jax.random.split(key)
    drawn = (rows[0], rows[1] if per_row else 1, 1)
    sinks = jax.random.randint(sink_key, drawn, 0, max_sinks + 1)
    offset = jax.random.randint(offset_key, drawn, 0, max_offset + 1)
    index = jnp.arange(length)
    positions = index + jnp.where(index >= sinks, offset, 0)
    return jnp.broadcast_to(positions, (*rows, length))


def noisy_shifts(
    key: Array, rows: tuple[int, int], *, max_shift: int = 4, per_row: bool = True
) -> Int[Array, "A B"]:
    """How far behind each row's queries the target's last visible key lies: 1 to ``max_shift``."""
    drawn = (rows[0], rows[1] if per_row else 1)
    return jnp.broadcast_to(jax.random.randint(key, drawn, 1, max_shift + 1), rows)


def shifted_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    shift: Int[Array, " B"],
    attend: Callable[[Array, Array, Array], Array] = causal_attention,
) -> Float[Array, "B T N H"]:
    """Causal attention that sees keys ``<= t - shift``; the first ``shift`` rows are 0.

    Query ``t`` is moved to row ``t - shift``, where plain causal attention shows it exactly those
    keys, and its result is moved back. One compiled program and one fused kernel serve all shifts.
    """
    out = _roll(attend(_roll(q, -shift), k, v), shift)
    visible = jnp.arange(q.shape[1]) >= shift[:, None]
    return jnp.where(visible[:, :, None, None], out, 0)


@jax.custom_vjp
def _roll(x: Float[Array, "B T ..."], by: Int[Array, " B"]) -> Float[Array, "B T ..."]:
    """Every row rolled along its tokens by its own distance.

    The gradient is the opposite roll; left to JAX it would be a scatter.
    """
    return jax.vmap(lambda row, distance: jnp.roll(row, distance, axis=0))(x, by)


def _roll_forward(x: Array, by: Array) -> tuple[Array, Array]:
    return _roll(x, by), by


def _roll_backward(by: Array, cotangent: Array) -> tuple[Array, None]:
    return _roll(cotangent, -by), None


_roll.defvjp(_roll_forward, _roll_backward)
