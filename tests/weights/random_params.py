"""Random parameters straight from the name tables: no model is traced to make them."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from longspec_jax.config import TargetConfig
from longspec_jax.drafters.longspec.checkpoint import draft_table
from longspec_jax.drafters.longspec.config import DraftConfig
from longspec_jax.weights.tables import Table, target_table


def random_target(config: TargetConfig, seed: int = 0) -> Any:
    """Parameters of a target."""
    return _random(target_table(config), config.dtype, seed)


def random_draft(config: DraftConfig, seed: int = 1) -> Any:
    """Parameters of a draft."""
    return _random(draft_table(config), config.dtype, seed)


def _random(table: Table, dtype: str, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    flat = {leaf.path: jnp.asarray(rng.normal(size=leaf.shape), dtype) for leaf in table.leaves}
    return unflatten_dict(flat, sep="/")
