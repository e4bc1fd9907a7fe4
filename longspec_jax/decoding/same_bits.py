"""Whether text is the same with and without speculation: the one place that knows.

In float32 it is: rounding is so fine that no draw of any test has hung on it. In 16 bits a token's
logits must have the same bits in every pass over it: alone, beside other rows, as a node of a tree,
and whether the tokens before it are cached or in the tree. That takes kernels whose sums have one
order, which depends neither on the rows beside a row nor on the size of the cache. Prompts are
then prefilled one by one, in steps that follow from their own length
(:func:`longspec_jax.decoding.chunks.chunk_sizes`).
"""

import jax.numpy as jnp

from longspec_jax.decoding.target import CachedTarget
from longspec_jax.ops.attention import path


def is_identical(target: CachedTarget) -> bool:
    """Whether text is promised to be the same, token for token, with and without speculation.

    That includes every drafter that is lossless, every tree, and every number of rows and slots.

    Args:
      target: the static part of the target, on the device of this process.
    """
    return target.config.dtype == "float32" or has_same_bits(target)


def has_same_bits(target: CachedTarget) -> bool:
    """Whether a token's logits have the same bits in every pass over it."""
    return target.same_bits


def require_same_bits(target: CachedTarget) -> None:
    """Refuse a target in 16 bits for which there are no kernels of one order.

    Raises:
      NotImplementedError: says why.
    """
    config = target.config
    if target.mesh is not None or target.offload or target.attention is not None:
        raise NotImplementedError(
            "same_bits needs one device, a cache on it, and the automatic attention; leave out "
            "mesh, offload and attention"
        )
    path.require_target(config.num_groups, config.head_width, jnp.dtype(config.dtype))
