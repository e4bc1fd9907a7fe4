"""Rotary angles at some positions of every row, for ops that turn heads."""

from flax import struct
from jaxtyping import Float

from longspec_jax.axes import Array, Leaf


@struct.dataclass
class Angles:
    """Their cosines and sines, float32."""

    cos: Leaf[Float[Array, "B L half"]]
    sin: Leaf[Float[Array, "B L half"]]

    def at(self, place: int | None) -> tuple[Array, Array]:
        """Those of one of the positions, ``[B, 1, half]``; of all if None."""
        some = slice(None) if place is None else slice(place, place + 1)
        return self.cos[:, some], self.sin[:, some]
