"""The parallel draft's forward over the blocks of whole training rows.

A block sees the last ``W`` tokens before its anchor and the target's keys and values before it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from longspec_jax.axes import Array
from longspec_jax.drafters.parallel import ParallelConfig, ParallelLayers
from longspec_jax.ops.partitioned import with_sharding
from longspec_jax.ops.slicing import along

from ...step import cast
from ...target import TargetView, recomputing
from ..block_attention import block_attention
from ..blocks import places


class Draws(NamedTuple):
    """A draft step's randomness."""

    positions: Array
    """``[A, B, T]``."""
    anchors: Array
    """``[A, B, M]``, ascending: where blocks begin."""


def run_blocks(
    config: ParallelConfig,
    params: Any,
    frozen: Any,
    tokens: Int[Array, "B T"],
    draws: Draws,
    view: TargetView,
    every: int,
    mlp_chunk: int = 0,
) -> Float[Array, "B slots D"]:
    """What the LM head reads of every slot of every block.

    The MLP goes in chunks of half of ``mlp_chunk``, because the backward pass holds twice as much.
    Where there are several chunks, the backward pass also recomputes everything but matmuls and
    attention.

    Args:
      config: of the draft.
      params: its float32 parameters.
      frozen: the target's.
      tokens: of whole rows.
      draws: of these rows.
      view: of the target's forward over them.
      every: as of :func:`drawn_anchors`.
      mlp_chunk: most tokens of a device whose MLP activations exist at once; 0: all.
    """
    params = cast(
        {name: each for name, each in params.items() if name != "markov"}, config.layer.dtype
    )
    mlp_chunk = -(-mlp_chunk // 2)
    layers = ParallelLayers(config, mlp_chunk=mlp_chunk)
    window, last = config.layer.window, tokens.shape[1] - 1
    with jax.named_scope("draft"):
        embedded = jax.lax.stop_gradient(jnp.take(frozen["embedding"], tokens, axis=0))
        [embedded] = with_sharding("b t d", embedded)
        at = jnp.minimum(places(draws.anchors, config.block), last)

        def run(params: Any, embedded: Array, draws: Draws, keys: Array, values: Array) -> Array:
            bound: Any = layers.bind({"params": params})
            rows = bound.keys_values(embedded, draws.positions)

            def attend_self(layer: int, q: Array, k: Array, v: Array) -> Array:
                # Deeper layers see their block alone.
                past, reach = (rows, window) if layer == 0 else (None, 0)
                return block_attention(q, past, draws.anchors, every, window=reach, own=(k, v))

            def attend_cross(q: Array) -> Array:
                return block_attention(q, (keys, values), draws.anchors, every)

            pending, positions = along(draws.anchors, embedded), along(at, draws.positions)
            return bound(pending, positions, attend_self, attend_cross)

        run = recomputing(run, len(at), at.size, mlp_chunk)
        return run(params, embedded, draws, view.keys, view.values)
