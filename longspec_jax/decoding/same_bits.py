"""Whether text is the same with and without speculation: the one place that knows.

In float32 it is: rounding is so fine that no draw of any test has hung on it. In 16 bits a token's
logits must have the same bits in every pass over it: alone, beside other rows, as a node of a tree,
and whether the tokens before it are cached or in the tree. That takes kernels whose sums have one
order, which depends neither on the rows beside a row nor on the size of the cache. Prompts are
then prefilled one by one, in steps that follow from their own length
(:func:`longspec_jax.decoding.prefill.chunk_sizes`).
"""

from longspec_jax.decoding.target import CachedTarget
from longspec_jax.ops import hardware


def is_identical(target: CachedTarget) -> bool:
    """Whether text is promised to be the same, token for token, with and without speculation.

    That includes every drafter that is lossless, every tree, and every number of rows and slots.

    Args:
      target: the static part of the target, on the device of this process.
    """
    return target.config.dtype == "float32" or has_same_bits(target)


def has_same_bits(target: CachedTarget) -> bool:
    """Whether a token's logits have the same bits in every pass over it."""
    if target.config.dtype == "float32" or target.mesh is not None or target.offload:
        return False
    try:
        hardware.require_hopper("a pass whose bits do not depend on its rows")
    except NotImplementedError:
        return False
    return _attention_has_same_bits(target)


def _attention_has_same_bits(target: CachedTarget) -> bool:
    """Whether attention to a token's past is added up in one order, wherever the past lies."""
    return False  # The kernels choose their tiles by the number of nodes and by the capacity.
