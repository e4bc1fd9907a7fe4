"""Partial softmax results and their merge, in float32.

Attention over a union of disjoint key sets is a weighted mean of the attention over each set,
the weights being the softmax of their log-sum-exps (LongSpec section 3.3, "Aggregation"). A row
that saw no key carries ``out = 0`` and ``lse = -inf``: the neutral element of the merge.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Float

from longspec_jax.axes import Array


class Partial(NamedTuple):
    """Softmax attention over one set of keys, ready to be merged with another set's."""

    out: Float[Array, "B T N H"]
    """The attention output normalised over this set alone; zero where no key was seen. float32,
    unless nothing is to be merged and another type was asked for."""
    lse: Float[Array, "B T N"]
    """Natural log of the sum of exponentiated scores, float32; -inf where no key was seen."""

    def in_dtype(self, dtype: DTypeLike) -> "Partial":
        """The same with an output of this type."""
        return self._replace(out=self.out.astype(dtype))


def merge(a: Partial, b: Partial) -> Partial:
    """Combine the partial results of two disjoint key sets; exact in real arithmetic."""
    top = jnp.maximum(a.lse, b.lse)
    # -inf - (-inf) is NaN; a row that neither side saw keeps weight zero on both.
    shift = jnp.where(jnp.isneginf(top), 0.0, top)
    weight_a = jnp.exp(a.lse - shift)
    weight_b = jnp.exp(b.lse - shift)
    total = weight_a + weight_b
    scale = jnp.where(total > 0, 1.0 / jnp.where(total > 0, total, 1.0), 0.0)
    out = a.out * (weight_a * scale)[..., None] + b.out * (weight_b * scale)[..., None]
    lse = jnp.where(total > 0, shift + jnp.log(jnp.where(total > 0, total, 1.0)), -jnp.inf)
    return Partial(out, lse)
