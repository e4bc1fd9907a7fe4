"""Tiny parallel drafts with random weights."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from longspec_jax.config.target import TargetConfig
from longspec_jax.drafters.longspec.config import DraftConfig
from longspec_jax.drafters.parallel.checkpoint import draft_table
from longspec_jax.drafters.parallel.config import ParallelConfig


def config_for(target: TargetConfig, window: int = 7, **fields: Any) -> ParallelConfig:
    """A draft of two layers for a target, of another MLP than the target's."""
    layer = replace(DraftConfig.for_target(target, window=window), mlp_width=29)
    given: dict[str, Any] = dict(num_layers=2, block=4, markov_rank=5)
    return ParallelConfig(layer, target.vocab_size, **given | fields)


def random_tree(config: ParallelConfig, seed: int = 3) -> Any:
    """Random parameters, as a folder holds them."""
    random = np.random.default_rng(seed)
    drawn = {}
    for leaf in draft_table(config).leaves:
        normal = random.normal(size=leaf.shape)
        scaled = 1 + 0.3 * normal if leaf.path.endswith("scale") else 0.2 * normal
        drawn[leaf.path] = jnp.asarray(scaled, config.layer.dtype)
    return unflatten_dict(drawn, sep="/")
