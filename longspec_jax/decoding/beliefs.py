"""What drafters are told of a round's draws: the same noise that the target's draws will use."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Float, Int

from longspec_jax.axes import Array, Leaf, Lengths
from longspec_jax.decoding.sampling import Sampling, draw, log_probabilities, noise


@struct.dataclass
class RoundBeliefs:
    """A round's noise by depth; satisfies :class:`longspec_jax.drafters.base.Beliefs`."""

    noise: Leaf[Float[Array, "B h V"]]
    """Noise of the token below a node of each depth; one wide where no row
    samples."""
    sampling: Sampling

    @classmethod
    def of_round(
        cls, sampling: Sampling, position: Lengths, levels: int, vocabulary: int
    ) -> "RoundBeliefs":
        """Below the token at ``position[b]``, where depth ``d`` draws position + d + 1."""
        steps = 1 + jnp.arange(levels + 1)
        return cls(noise(sampling, position[:, None] + steps, vocabulary), sampling)

    def log_probabilities(self, logits: Float[Array, "B w V"], depth: int) -> Float[Array, "B w V"]:
        """How likely the target is to draw each token, for a draft whose logits these are."""
        return log_probabilities(logits, self.noise[:, depth : depth + 1], self.sampling)

    def draw(self, logits: Float[Array, "B T V"], depths: Int[Array, "#B T"]) -> Int[Array, "B T"]:
        """The draws from these logits at nodes of these depths."""
        noise = jnp.take_along_axis(self.noise, depths[:, :, None], axis=1)
        return draw(logits, noise, self.sampling)

    def among(self, tokens: Int[Array, " v"]) -> "RoundBeliefs":
        """The same for logits of these tokens alone."""
        if not self.sampling.stochastic:
            return self
        return dataclasses.replace(self, noise=jnp.take(self.noise, tokens, axis=2))

    def after(self, steps: Lengths, levels: int) -> "RoundBeliefs":
        """The same for nodes below ``steps[b]`` more tokens, down to so many levels."""
        cut = jax.vmap(lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, levels + 1, axis=0))
        return dataclasses.replace(self, noise=cut(self.noise, steps))
