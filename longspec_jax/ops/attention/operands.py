"""What queries attend to: tokens in a cache, and tokens that are not in it yet.

Every implementation of an op takes these two, so that another kind of cache is another type here.
"""

from collections.abc import Callable
from typing import TypeAlias

from flax import struct

from longspec_jax.axes import CacheSlots, Leaf, Lengths, Queries, TreeMask, TreeRows


@struct.dataclass
class Prefix:
    """One layer's committed tokens; row ``b`` sees its slots ``start[b] <= s < length[b]``."""

    keys: Leaf[CacheSlots]
    """Rotary applied."""
    values: Leaf[CacheSlots]
    length: Leaf[Lengths]
    """Slots that hold committed tokens; memory beyond may hold anything."""
    start: Leaf[Lengths] | None = None
    """The first slot each row sees; 0 if absent."""


Reading: TypeAlias = Callable[[int, Queries], tuple[Queries, Prefix]]
"""``(layer, its queries) -> the queries, what they read``, for every layer once, in their order.
Attention takes these queries, not its own: that is how a cache knows what has been read."""


@struct.dataclass
class Fresh:
    """One layer's tokens of this very pass: a tree's nodes, or a chunk of a prompt."""

    keys: Leaf[TreeRows]
    """Rotary applied."""
    values: Leaf[TreeRows]
    mask: Leaf[TreeMask]
    """True where query ``t`` sees key ``u``."""


PREFIX = "b t (k g) h, b k s h, b k s h, b, b -> b t (k g) h, b t (k g)"
TREE = "b t (k g) h, b u k h, b u k h, b t u -> b t (k g) h, b t (k g)"
SPECULATIVE = "b t (k g) h, b k s h, b k s h, b, b, b u k h, b u k h, b t u -> b t (k g) h"
CHUNK = "b t (k g) h, b k s h, b k s h, b, b, b t k h, b t k h -> b t (k g) h"
"""Which axes are the same in queries, the fields above and results, whatever implements the op; see
:func:`longspec_jax.ops.partitioned.partitioned`."""
