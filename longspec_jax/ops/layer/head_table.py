"""Tables of heads: what a product makes of every token of a vocabulary, in 8 bits.

The first layer of a model that sees nothing but a token's embedding need not multiply when it
decodes: a row of a table is read where its product would read all of its weights (Graef,
arXiv:2402.13388).
"""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Float, Int, Int8

from longspec_jax.axes import Array, Leaf
from longspec_jax.ops.products.int8 import round_rows


@struct.dataclass
class HeadTable:
    """Heads of every token, the first axis, as ``steps * scale``."""

    steps: Leaf[Int8[Array, "*heads H"]]
    scale: Leaf[Float[Array, "*heads"]]

    @classmethod
    def rounded(cls, heads: Float[Array, "*heads H"]) -> "HeadTable":
        """A table of these heads; one of zeros stays zero."""
        return cls(*round_rows(heads))

    def take(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T *heads H"]:
        """The heads of some tokens in float32."""
        steps = jnp.take(self.steps, tokens, axis=0, mode="clip")
        scale = jnp.take(self.scale, tokens, axis=0, mode="clip")
        return steps.astype(jnp.float32) * scale[..., None]


@struct.dataclass
class Angles:
    """Cosines and sines of rotary angles at some positions of every row, float32."""

    cos: Leaf[Float[Array, "B L half"]]
    sin: Leaf[Float[Array, "B L half"]]

    def at(self, place: int | None) -> tuple[Array, Array]:
        """Those of one of the positions, ``[B, 1, half]``; of all if None."""
        some = slice(None) if place is None else slice(place, place + 1)
        return self.cos[:, some], self.sin[:, some]
