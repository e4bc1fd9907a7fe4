"""An LM head of 8 bits for the draft: half the bytes of the table it reads at every level.

Every row of the table is rounded to 127 steps of its largest element, its own scale beside it in
float32. The draft's beliefs move a little by this; the target draws from its own table as before.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int8

from longspec_jax.axes import Array
from longspec_jax.models.target import head_logits


@jax.jit  # As one program it holds no float32 copy of the table.
def round_rows(table: Float[Array, "v D"]) -> tuple[Int8[Array, "v D"], Float[Array, " v"]]:
    """The table in 8 bits and the scale of each row; a row of zeros stays zero."""
    wide = table.astype(jnp.float32)
    scale = jnp.abs(wide).max(axis=1) / 127
    steps = jnp.round(wide / jnp.where(scale > 0, scale, 1)[:, None])
    return steps.astype(jnp.int8), scale


def int8_logits(
    rows: Int8[Array, "v D"], scale: Float[Array, " v"], hidden: Float[Array, "... D"]
) -> Float[Array, "... v"]:
    """Logits in float32; each of the 255 steps is exact in the dtype of ``hidden``.

    The rows are widened inside the product, which reads them as they are stored.
    """
    return head_logits(rows.astype(hidden.dtype), hidden) * scale
