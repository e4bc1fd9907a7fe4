"""What DFlash 2 computes beyond DFlash: convolutions inside a block, and scores of edges.

Every sublayer of every layer is between two convolutions along the slots of a block. Their weights
are those of the file and, in groups of neighbouring channels, a projection of what enters the
sublayer. Nothing comes before the first slot. Context entries are made as in DFlash.

The selector scores what may follow a token at a slot: of the slot's few best tokens by their
logits, each gets the product of three vectors, the token before, the slot's hidden state and the
candidate. So the tokens after a node depend on the node's token, and on nothing else: sums of
their log-probabilities are those of a chain, and beam search finds the best paths of all.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Float, Int

from longspec_jax.axes import Array
from longspec_jax.checks import Whole
from longspec_jax.models.layers import Projection
from longspec_jax.models.target import Layer
from longspec_jax.ops.embedding import look_up
from longspec_jax.ops.layer import added
from longspec_jax.ops.partitioned import with_sharding
from longspec_jax.ops.selection.continuations import best_continuations
from longspec_jax.schema import Checked


@dataclass(frozen=True)
class Convolution(Checked):
    """The convolutions before and after a sublayer."""

    taps: Annotated[int, Whole()] = 2
    """Slots that it reads, the own one and those before it."""
    group: Annotated[int, Whole()] = 16
    """Neighbouring channels that share what the projection adds to their weights."""


@dataclass(frozen=True)
class Selector(Checked):
    """Scores of a slot's best tokens after the token before."""

    rank: Annotated[int, Whole()]
    candidates: Annotated[int, Whole()]
    """Tokens of a slot that are scored, the best by its logits."""


class BlockConvolution(nn.Module):
    """The two convolutions around a sublayer, whose weights follow from what enters it."""

    config: Convolution
    width: int
    dtype: jnp.dtype

    def setup(self) -> None:
        """Declare the weights of both sides ``[2, taps, D]`` and the projection."""
        c = self.config
        shape = 2, c.taps, self.width
        self.base = self.param("base", nn.initializers.zeros, shape, self.dtype)
        self.fuse = Projection((self.width,), (2 * c.taps * self.width // c.group,), self.dtype)

    def __call__(self, x: Float[Array, "B T D"]) -> tuple[Float[Array, "B T D"], Array]:
        """What the sublayer reads of one block's slots, and the weights of :meth:`convolve`."""
        c = self.config
        shape = *x.shape[:2], 2, c.taps, self.width // c.group, 1
        dynamic = self.fuse(x).reshape(shape).astype(jnp.float32)
        base = self.base.astype(jnp.float32).reshape(2, c.taps, self.width // c.group, c.group)
        weights = (base + dynamic).reshape(*x.shape[:2], 2, c.taps, self.width)
        return self.convolve(x, weights[:, :, 0]), weights[:, :, 1]

    def convolve(
        self, x: Float[Array, "B T D"], weights: Float[Array, "B T taps D"]
    ) -> Float[Array, "B T D"]:
        """The sum of a slot and those before it, each times its weight."""
        total = jnp.zeros(x.shape, jnp.float32)
        for tap in range(self.config.taps):
            earlier = jnp.pad(x, ((0, 0), (tap, 0), (0, 0)))[:, : x.shape[1]]
            total += weights[:, :, tap] * earlier.astype(jnp.float32)
        [total] = with_sharding("b t d", total.astype(self.dtype))
        return total


class ConvolvedLayer(Layer):
    """A layer whose sublayers are between convolutions."""

    convolution: Convolution = Convolution()

    def setup(self) -> None:
        """Declare the submodules."""
        super().setup()
        sizes = self.convolution, self.config.model_width, jnp.dtype(self.config.dtype)
        self.attention_conv = BlockConvolution(*sizes)
        self.mlp_conv = BlockConvolution(*sizes)

    def __call__(
        self,
        x: Array,
        delta: Array | None,
        angles: tuple[Array, Array],
        attend: Callable[..., Array],
        inputs: Array | None = None,
    ) -> tuple[Array, Array, Array, Array]:
        """As in :class:`~longspec_jax.models.target.Layer`, over the slots of one block.

        No draft of this kind has inputs of a layer's own.
        """
        x, normed = with_sharding("b t d, b t d", *self.attention_norm.add(x, delta))
        entering, weights = self.attention_conv(normed)
        attended, k, v = self.attention(entering, angles, attend)
        delta = self._convolved(self.attention_conv, attended, weights)
        x, normed = with_sharding("b t d, b t d", *self.mlp_norm.add(x, delta))
        entering, weights = self.mlp_conv(normed)
        return x, self._convolved(self.mlp_conv, self.mlp(entering), weights), k, v

    def _convolved(self, conv: BlockConvolution, partials: Array, weights: Array) -> Array:
        """What is added to the residual stream of a sublayer's partials, as partials."""
        total = added(partials).astype(jnp.dtype(self.config.dtype))
        return conv.convolve(total, weights)[None]


def edge_scores(
    params: Mapping[str, Any],
    count: int,
    logits: Float[Array, "B 1 V"],
    tokens: Int[Array, "B w"],
    hidden: Float[Array, "B 1 D"],
    implementation: str | None = None,
) -> Float[Array, "B w V"]:
    """A slot's logits after each of some tokens with the selector's scores, -inf but of the best.

    Args:
      params: ``embedding [V, r]`` of the token before, ``head [V, r]`` of the candidate, and the
        projection ``fuse`` of the hidden state.
      count: of candidates, the best by their logits.
      logits: the slot's.
      tokens: those before the slot.
      hidden: the slot's.
      implementation: of the choice, as in :func:`~longspec_jax.drafters.tree.beam_search`.
    """
    none = jnp.zeros((len(tokens), 1), jnp.float32)
    _, _, best = best_continuations(logits, none, count, implementation)
    before, after = look_up(params["embedding"], tokens), look_up(params["head"], best)
    context = before * (hidden @ params["fuse"]["kernel"]).astype(before.dtype)
    products = context[:, :, None].astype(jnp.float32) * after[:, None].astype(jnp.float32)
    scores = jnp.take_along_axis(logits[:, 0], best, axis=1)[:, None] + products.sum(axis=-1)
    row, node = jnp.arange(len(tokens))[:, None, None], jnp.arange(tokens.shape[1])[:, None]
    nothing = jnp.full((*tokens.shape, logits.shape[2]), -jnp.inf, jnp.float32)
    return nothing.at[row, node, best[:, None]].set(scores)
