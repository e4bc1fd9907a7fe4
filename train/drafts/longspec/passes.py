"""The draft's pass over whole training rows, and the two random transforms of LongSpec training.

*Anchor-offset positions* (LongSpec 3.2, :func:`train.target.anchored_positions`): short sequences
train the draft at large positions. The target runs on the same positions.

*Flash noisy training* (LongSpec 3.2): the draft proposes several tokens past the last one the
target has seen, so in training query ``t`` sees the target's keys up to ``t - shift`` only. The
shift is a traced number and needs no mask: rolling the queries turns it into plain causal
attention.

Both transforms draw for every row by itself; the published code draws once for each micro-batch.
Rows are arranged as ``[A, B]``, micro-batches by rows, so draws do not depend on how devices share
them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from longspec_jax.axes import Array
from longspec_jax.drafters.longspec import DraftConfig, LongSpecLayer
from longspec_jax.ops.attention.dispatch import causal_attention
from longspec_jax.ops.partitioned import with_sharding

from ...step import cast
from ...target import TargetView, recomputing


class Draws(NamedTuple):
    """A draft step's randomness."""

    positions: Array
    """``[A, B, T]``."""
    shift: Array
    """``[A, B]``."""


def noisy_shifts(key: Array, rows: tuple[int, int], *, max_shift: int = 4) -> Int[Array, "A B"]:
    """How far behind each row's queries the target's last visible key lies: 1 to ``max_shift``."""
    return jax.random.randint(key, rows, 1, max_shift + 1)


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


def run_draft(
    config: DraftConfig,
    params: Any,
    frozen: Any,
    tokens: Array,
    draws: Draws,
    view: TargetView,
    mlp_chunk: int = 0,
) -> Array:
    """Hidden states ``[B, T, D]`` of the draft over whole rows, given the target's last layer.

    Its MLP goes in chunks of half of ``mlp_chunk``, because the backward pass holds twice as much.
    Where there are several chunks, the backward pass also recomputes everything but matmuls and
    attention.
    """
    mlp_chunk = -(-mlp_chunk // 2)

    def layer(params: Any, embedded: Array, draws: Draws, keys: Array, values: Array) -> Array:
        output: Any = LongSpecLayer(config, mlp_chunk=mlp_chunk).apply(
            {"params": cast(params, config.dtype)},
            embedded,
            draws.positions,
            lambda q, k, v: causal_attention(q, k, v, window=config.window),
            lambda q: shifted_attention(q, keys, values, draws.shift),
        )
        return output.hidden

    layer = recomputing(layer, len(tokens), tokens.size, mlp_chunk)
    with jax.named_scope("draft"):
        embedded = jax.lax.stop_gradient(jnp.take(frozen["embedding"], tokens, axis=0))
        [embedded] = with_sharding("b t d", embedded)
        return layer(params, embedded, draws, view.keys, view.values)
