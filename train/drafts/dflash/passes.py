"""The DFlash draft's forward over the blocks of whole training rows.

A block is the text's token at its anchor and mask tokens behind it. Its slots see each other and,
in every layer, what is made of the target's features before the anchor.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from longspec_jax.axes import Array
from longspec_jax.drafters.dflash import DFlashConfig, DFlashLayers
from longspec_jax.models.target import scaled
from longspec_jax.ops.partitioned import with_sharding
from longspec_jax.ops.slicing import along

from ...step import cast
from ...target import TargetView, recomputing
from ..block_attention import block_attention
from ..blocks import places


def fresh_layers(config: DFlashConfig, key: Array) -> Any:
    """Fresh parameters, in the configuration's dtype."""
    dtype, positions = config.trunk.dtype, jnp.zeros((1, 2), jnp.int32)
    embedded = jnp.zeros((1, 2, config.model_width), dtype)
    hidden = [jnp.zeros((1, 2, config.target_width), dtype)] * len(config.features)

    def touch(layers: DFlashLayers) -> None:
        layers.keys_values(hidden, positions)
        layers(embedded, positions, lambda layer, q, k, v: q)

    layers: Any = DFlashLayers(config)
    return layers.init(key, method=touch)["params"]


def run_blocks(
    config: DFlashConfig,
    params: Any,
    embedding: Float[Array, "V D"],
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    anchors: Int[Array, "B M"],
    view: TargetView,
    every: int,
    mlp_chunk: int = 0,
    factor: float = 1.0,
) -> Float[Array, "B M slots D"]:
    """What the LM head reads of every slot of every block.

    Args:
      config: of the draft.
      params: its float32 parameters.
      embedding: the target's table.
      tokens: of whole rows.
      positions: theirs, ascending by 1.
      anchors: where blocks begin, one in every ``every`` tokens.
      view: the target's, with the residual streams of ``config.features``.
      every: as of :func:`train.drafts.blocks.drawn_anchors`.
      mlp_chunk: most tokens of a device whose MLP activations exist at once; 0: all. Half as many
        are taken, because the backward pass holds twice as much. Where there are several chunks,
        the backward pass also recomputes everything but matmuls and attention.
      factor: on embeddings, as of the target.
    """
    mlp_chunk = -(-mlp_chunk // 2)
    layers = DFlashLayers(config, mlp_chunk=mlp_chunk)
    rows, blocks = anchors.shape

    def run(params: Any, hidden: Any, embedded: Array, at: Array) -> Array:
        bound: Any = layers.bind({"params": params})
        context = bound.keys_values(hidden, positions)

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            return block_attention(q, context[layer], anchors, every, own=(k, v))

        return bound(embedded, at, attend)

    with jax.named_scope("draft"):
        pending = along(anchors, tokens)[:, :, None]
        masks = jnp.full((rows, blocks, config.block - 1), config.mask_token, tokens.dtype)
        block = jnp.concatenate([pending, masks], axis=2).reshape(rows, -1)
        [embedded] = with_sharding("b t d", jnp.take(embedding, block, axis=0))
        embedded = scaled(embedded, factor)
        # Positions go on behind the row's end.
        at = positions[:, :1] + places(anchors, config.block)
        run = recomputing(run, rows, at.size, mlp_chunk)
        hidden = [view.kept[each] for each in config.features]
        found = run(cast(params, config.trunk.dtype), hidden, embedded, at)
    return found.reshape(rows, blocks, config.block, -1)
