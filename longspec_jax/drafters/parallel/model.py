"""The layers of the parallel LongSpec draft, and its parameters.

A block is the pending token and learnt vectors in the slots behind it. Its layers are those of the
LongSpec draft (:class:`~longspec_jax.drafters.longspec.LongSpecLayer`): self-attention,
cross-attention to the target's last-layer keys and values, MLP. The slots see each other in every
layer. Only the first layer sees the tokens before the block, by self-attention keys and values of
their embeddings: these depend on (token, position) alone, so one ring serves any number of layers
and no committed token passes through a layer. A final norm precedes the target's LM head, because
learnt vectors need not be of the size of embeddings.

A Markov head of low rank adds to a slot's logits what the token before it makes likely (DSpark,
section 3.2).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from flax import struct
from jaxtyping import Float, Int

from longspec_jax.axes import Array
from longspec_jax.drafters.longspec import LongSpecLayer
from longspec_jax.drafters.parallel.config import ParallelConfig
from longspec_jax.drafters.tables import BlockParams
from longspec_jax.drafters.window import Rows
from longspec_jax.models.layers import INITIAL_SCALE, RMSNorm
from longspec_jax.models.target import scaled, stored_logits
from longspec_jax.ops.embedding import look_up
from longspec_jax.ops.partitioned import with_sharding


class ParallelLayers(nn.Module):
    """The draft as pure functions of embeddings; attention patterns are the caller's."""

    config: ParallelConfig
    mlp_chunk: int = 0
    """Most tokens of a device whose MLP activations exist at once; 0 for all."""

    def setup(self) -> None:
        """Declare the submodules."""
        c, layer = self.config, self.config.layer
        dtype, slots = jnp.dtype(layer.dtype), (c.block - 1, layer.model_width)
        # A target's factors are of what enters the first layer, and of what leaves the last norm.
        first = dataclasses.replace(layer, logits_divisor=1.0)
        behind = dataclasses.replace(first, embedding_factor=1.0)
        self.layers = [
            LongSpecLayer(each, self.mlp_chunk) for each in (first, *(behind,) * (c.num_layers - 1))
        ]
        self.final_norm = RMSNorm(layer.norm_eps, dtype)
        self.slots = self.param("slots", nn.initializers.normal(INITIAL_SCALE), slots, dtype)

    def __call__(
        self,
        pending: Array,
        positions: Array,
        attend_self: Callable[[int, Array, Array, Array], Array],
        attend_cross: Callable[[Array], Array],
    ) -> Array:
        """Run the layers over ``M`` blocks of every row, one behind the other.

        Args:
          pending: embeddings of the blocks' first tokens ``[B, M, D]``.
          positions: rotary positions ``[B, M * block]``, the target's own.
          attend_self: ``(layer, q, k, v) -> out`` over what the slots see of block and window.
          attend_cross: ``q -> out`` over the target's last-layer keys and values.

        Returns:
          What the LM head reads of every slot, ``[B, M * block, D]``.
        """
        rows, blocks, width = pending.shape
        shape = rows, blocks, self.config.block - 1, width
        learnt = jnp.broadcast_to(self.slots.astype(pending.dtype), shape)
        x = jnp.concatenate([pending[:, :, None], learnt], axis=2).reshape(rows, -1, width)
        for index, layer in enumerate(self.layers):
            attend = lambda q, k, v, index=index: attend_self(index, q, k, v)  # noqa: E731
            [x] = with_sharding("b t d", x)
            x = layer(x, positions, attend, attend_cross).hidden
        return scaled(self.final_norm(x), 1 / self.config.layer.logits_divisor)

    def keys_values(self, embedded: Array, positions: Array) -> Rows:
        """What the first layer's window holds of tokens ``[B, T]``, by their embeddings."""
        return self.layers[0].keys_values(embedded, positions)


@struct.dataclass
class ParallelParams(BlockParams):
    """The draft's own parameters and the two tables it shares with the target."""

    module = ParallelLayers

    @classmethod
    def beside(cls, target_params: Any, layer: Any) -> "ParallelParams":
        """Loaded or trained parameters with the tables of their target."""
        layer = {**layer}
        markov = layer.pop("markov", None)
        return dataclasses.replace(super().beside(target_params, layer), markov=markov)

    def keys_values(self, config: ParallelConfig, tokens: Array, positions: Array) -> Rows:
        """As of :meth:`ParallelLayers.keys_values`, of tokens ``[B, T]``."""
        arguments = self.embedded(tokens), positions
        return self._apply(config, *arguments, method=ParallelLayers.keys_values)

    def block(
        self,
        config: ParallelConfig,
        pending: Int[Array, " B"],
        positions: Int[Array, "B slots"],
        attend_self: Callable[[int, Array, Array, Array], Array],
        attend_cross: Callable[[Array], Array],
    ) -> Float[Array, "B slots D"]:
        """The layers over a block of every row; arguments as of :class:`ParallelLayers`."""
        first = self.embedded(pending[:, None])
        return self._apply(config, first, positions, attend_self, attend_cross)

    def correction(self, tokens: Int[Array, "B w"]) -> Float[Array, "B w V"]:
        """What the Markov head adds to the logits behind these tokens, float32."""
        before = look_up(self.markov["embedding"], tokens)
        return stored_logits(self.markov["head"], before)
