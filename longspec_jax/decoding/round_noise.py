"""The noise of a round's draws for its drafter: the same that the target's draws will use."""

import dataclasses

import jax.numpy as jnp
from flax import struct
from jaxtyping import Float, Int

from longspec_jax.axes import Array, Leaf, Lengths
from longspec_jax.decoding.adjustments import Adjustments, adjust, among
from longspec_jax.decoding.sampling import TINY, Sampling, SamplingKind, draw, noise, perturb
from longspec_jax.ops.slicing import along


@struct.dataclass
class RoundNoise:
    """A round's noise by depth; satisfies :class:`longspec_jax.drafters.base.SamplingNoise`."""

    noise: Leaf[Float[Array, "B h V"]]
    """Noise of the token below a node of each depth; one wide where no row
    samples."""
    sampling: Sampling
    adjustments: Adjustments | None = None
    """Of the logits; None where no live row's are adjusted."""

    @classmethod
    def of_round(
        cls,
        sampling: Sampling,
        position: Lengths,
        levels: int,
        vocabulary: int,
        adjustments: Adjustments | None = None,
    ) -> "RoundNoise":
        """Below the token at ``position[b]``, where depth ``d`` draws position + d + 1."""
        steps = 1 + jnp.arange(levels + 1)
        if sampling.kind is not SamplingKind.ANY:
            adjustments = None
        gumbel = noise(sampling, position[:, None] + steps, vocabulary)
        return cls(gumbel, sampling, adjustments)

    def scores(self, logits: Float[Array, "B w V"], depth: int) -> Float[Array, "B w V"]:
        """How likely the target is to draw each token, for a draft whose logits these are.

        At temperature 0 the draft's logits. Above, its perturbed ones: the target's are these plus
        the draft's error, so the largest remain the likely draws. Any scores are lossless; these
        are accepted often. Penalties are those of the committed tokens.
        """
        gumbel = self.noise[:, depth : depth + 1]
        return perturb(self._adjusted(logits), gumbel, self.sampling, guessed=True)

    def chances(
        self, likely: Float[Array, "B w levels"], tokens: Int[Array, "B w levels"]
    ) -> Float[Array, "B w levels"]:
        """How likely the target is to draw tokens that follow nodes of depths 0, 1, ...

        A draw is the argmax of log-probabilities with Gumbel noise. The token's own noise is known.
        The best of all others is about the logarithm of their mass with a noise of its own, so that
        the token wins with the probability ``exp(-(1 - p) / p * exp(-noise))``, whose mean over the
        noise is p.

        Args:
          likely: how likely it draws them where the noise is not known, p.
          tokens: in which ``[b, i, d]`` follows a node of depth ``d``.
        """
        if self.sampling.kind is SamplingKind.GREEDY:
            return likely
        steps = self.noise[:, : tokens.shape[2]]
        gumbel = jnp.take_along_axis(steps, tokens.swapaxes(1, 2), axis=2).swapaxes(1, 2)
        tiny = jnp.finfo(jnp.float32).tiny
        known = jnp.exp(-(1 - likely) / jnp.maximum(likely, tiny) * jnp.exp(-gumbel))
        greedy = (self.sampling.temperature < TINY)[:, None, None]
        return jnp.where(greedy, likely, jnp.where(likely > 0, known, 0.0))

    def draw(
        self,
        logits: Float[Array, "B T V"],
        depths: Int[Array, "#B T"],
        paths: Int[Array, "B T levels"] | None = None,
    ) -> Int[Array, "B T"]:
        """The draws from these logits at nodes of these depths.

        Args:
          paths: the draft tokens on the path to each node, which penalties count as emitted, of
            :func:`~longspec_jax.drafters.tree.tree_paths`; none if absent.
        """
        return draw(self._adjusted(logits, paths), self._noise_at(depths), self.sampling)

    def _adjusted(self, logits: Array, paths: Array | None = None) -> Array:
        return logits if self.adjustments is None else adjust(logits, self.adjustments, paths)

    def among(self, tokens: Int[Array, "*B v"]) -> "RoundNoise":
        """The same for the logits of only these tokens, the same in all rows or each row's own."""
        if self.sampling.kind is SamplingKind.GREEDY:
            return self
        adjustments = self.adjustments and self.adjustments.among(tokens)
        gumbel = among(self.noise, tokens)
        return dataclasses.replace(self, noise=gumbel, adjustments=adjustments)

    def after(self, steps: Lengths, levels: int) -> "RoundNoise":
        """The same for nodes below ``steps[b]`` more tokens, down to ``levels`` levels."""
        # Beyond the last depth there is nothing to draw, and what is known before must stay.
        at = jnp.minimum(steps[:, None] + jnp.arange(levels + 1), self.noise.shape[1] - 1)
        return dataclasses.replace(self, noise=along(at, self.noise))

    def _noise_at(self, depths: Int[Array, "#B T"]) -> Float[Array, "B T V"]:
        return jnp.take_along_axis(self.noise, depths[:, :, None], axis=1)
