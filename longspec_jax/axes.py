"""The axis legend: one letter for one meaning, everywhere in the project.

Einsum strings, shape annotations, comments and the README use these letters.

    B  batch rows                 S  cache slots (capacity of the prefix)
    T  query tokens (tree nodes)  U  keys of the tree part (nodes a query may see)
    N  query heads                K  key/value heads
    G  N / K, query heads that share one key/value head
    H  head width                 D  model width
    F  MLP width                  V  vocabulary
    W  draft window               L  layers
    C  tokens of one prefill chunk
    rows  of a cache: one for each batch row, or more, the batch's among them

Query heads are ordered key/value-head-major: head ``n`` reads key/value head ``n // G``.
"""

from typing import TYPE_CHECKING, Any, Never, TypeAlias, TypeVar

import jax
from jaxtyping import Bool, Float, Int, Num

if TYPE_CHECKING:
    Placeholder: TypeAlias = Never
else:

    class _NoArray(type):
        def __instancecheck__(cls, value: object) -> bool:
            return not isinstance(value, jax.Array)

    class Placeholder(metaclass=_NoArray):
        """What jax puts in the place of a pytree's arrays: a shape, a sharding, an axis."""


Array: TypeAlias = jax.Array
Ref: TypeAlias = Any
"""Memory that a kernel reads and writes where it lies: an operand on the device, shared memory, or
a barrier in it. Pallas has a class of its own for each, and for each way of running a kernel."""
T = TypeVar("T")
Leaf: TypeAlias = T | Placeholder
"""A field of a pytree, ``Leaf[Lengths]``: an array of this shape, or what jax puts in its place."""

Queries: TypeAlias = Float[Array, "B T N H"]
CacheSlots: TypeAlias = Num[Array, "rows K S H"]
"""Keys or values of committed tokens, head-major so that one head's slots are contiguous.

Of activations' dtype, or the codes of 8-bit floats (:mod:`longspec_jax.ops.attention.float8`).
"""
LayerSlots: TypeAlias = Num[Array, "rows _ _ _"]
"""The same of one layer of several, which may have different numbers of slots and heads."""
TreeRows: TypeAlias = Float[Array, "B U K H"]
"""Keys or values of fresh tokens, token-major as the projection produces them."""
LayerRows: TypeAlias = Float[Array, "B U _ _"]
"""The same of one layer of several, which may have different heads."""
CachedRows: TypeAlias = Num[Array, "B U K H"]
"""The same in the dtype of their cache."""
Sinks: TypeAlias = Float[Array, " N"]
"""Attention sinks: a learnt score of every head, which takes part only in its softmax."""
TreeMask: TypeAlias = Bool[Array, "B T U"]
Lengths: TypeAlias = Int[Array, " B"]
Tokens: TypeAlias = Int[Array, "B T"]
