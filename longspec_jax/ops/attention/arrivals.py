"""Which of several programs is the last: the one that may read what all of them wrote.

Programs of one launch start in any order and none can wait for another. Each counts itself as
arrived when it has written; who finds all others counted is the last.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as pltriton


def last_to_arrive(
    arrived_ref: Any, place: tuple[jax.Array, ...], count: jax.Array | int, interpret: bool
) -> jax.Array:
    """Count this program as arrived, and say whether all ``count`` are now.

    Args:
      arrived_ref: how many programs have arrived, 0 before the launch.
      place: which of these numbers.
      count: how many programs arrive there.
      interpret: whether this is no GPU.
    """
    if not interpret:
        pltriton.debug_barrier()  # One thread speaks for all: they must have written by then.
    # At the scope of the GPU, releasing what was written before and acquiring what others released.
    return pltriton.atomic_add(arrived_ref, place, jnp.int32(1)) == count - 1
