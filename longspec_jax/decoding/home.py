"""Where the arrays of a batch live: beside the parameters, shared out over their mesh."""

import math
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from longspec_jax.config import BATCH_AXES


class Home(NamedTuple):
    """The shardings of a batch's arrays.

    The same before and after every program, so that each of them is compiled once.
    """

    cache: Sharding
    """Of keys and values ``[B, K, S, H]``."""
    rows: Sharding
    """Of all arrays ``[B, ...]`` beside them."""

    @classmethod
    def beside(cls, params: Any, batch: int) -> "Home":
        """The home of a batch of this target.

        On a mesh, rows are shared out over the axes of the batch where these divide it, and
        key/value heads lie with the projections that make them.

        Args:
          params: the target's.
          batch: rows.
        """
        sharding = jax.tree.leaves(params)[0].sharding
        if not isinstance(sharding, NamedSharding):
            return cls(sharding, sharding)
        mesh = sharding.mesh
        shares = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
        rows = BATCH_AXES if batch % shares == 0 else None
        return cls(NamedSharding(mesh, P(rows, "tp")), NamedSharding(mesh, P(rows)))

    @property
    def row_shares(self) -> int:
        """Groups of devices among which the rows of a batch are shared out."""
        return _shares(self.rows)

    @property
    def cache_shares(self) -> int:
        """Groups of devices of which each holds another part of the cache."""
        return _shares(self.cache)


def _shares(sharding: Sharding) -> int:
    if not isinstance(sharding, NamedSharding):
        return 1
    axes = jax.tree.leaves(tuple(sharding.spec))
    return math.prod(sharding.mesh.shape[axis] for axis in axes)
