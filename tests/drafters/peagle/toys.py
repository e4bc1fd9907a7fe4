"""Tiny P-EAGLE drafts with random weights."""

from typing import Any

import jax.numpy as jnp

from longspec_jax.config.target import TargetConfig
from longspec_jax.drafters.checkpoints.peagle import draft_table
from longspec_jax.drafters.peagle import PEagleConfig, PEagleParams
from tests.drafters.eagle3.toys import sizes_for
from tests.drafters.kit import random_tree


def config_for(target: TargetConfig, **fields: Any) -> PEagleConfig:
    """A draft for a target."""
    usual: dict[str, Any] = dict(num_layers=3, mask_token=target.vocab_size - 1)
    usual["features"] = -1, 0, target.num_layers - 1
    return PEagleConfig(**sizes_for(target) | usual | fields)


def random_params(config: PEagleConfig, tokens: Any = None) -> PEagleParams:
    """Random parameters with tables of their own; ``tokens`` are those that can be proposed."""
    table = draft_table(config, embedding=True, head=True)
    layer = random_tree(table, config.dtype, width=0.15)
    tables = layer.pop("embedding"), layer.pop("head")
    return PEagleParams(layer, *tables, None if tokens is None else jnp.asarray(tokens, jnp.int32))
