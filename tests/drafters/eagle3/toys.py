"""Tiny EAGLE-3 drafts with random weights."""

from typing import Any

import jax.numpy as jnp

from longspec_jax.config.target import TargetConfig
from longspec_jax.drafters.checkpoints.eagle3 import draft_table
from longspec_jax.drafters.eagle3 import Eagle3Config, Eagle3Params
from tests.drafters.kit import random_tree


def sizes_for(target: TargetConfig) -> dict[str, Any]:
    """Of a draft for a target: other heads and another MLP than the target's."""
    return dict(
        model_width=target.model_width,
        target_width=target.model_width,
        mlp_width=29,
        num_heads=4,
        num_kv_heads=2,
        head_width=8,
        vocab_size=target.vocab_size,
        proposable=target.vocab_size,
        max_positions=target.max_positions,
        dtype=target.dtype,
    )


def config_for(target: TargetConfig, **fields: Any) -> Eagle3Config:
    """A draft for a target."""
    features = {"features": (-1, 0, target.num_layers - 1)}
    return Eagle3Config(**sizes_for(target) | features | fields)


def random_params(config: Eagle3Config, tokens: Any = None, seed: int = 3) -> Eagle3Params:
    """Random parameters with tables of their own; ``tokens`` are those that can be proposed."""
    table = draft_table(config, embedding=True, head=True)
    layer = random_tree(table, config.dtype, seed, width=0.15)
    tables = layer.pop("embedding"), layer.pop("head")
    return Eagle3Params(layer, *tables, None if tokens is None else jnp.asarray(tokens, jnp.int32))
