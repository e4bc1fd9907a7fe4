"""Tiny parallel drafts with random weights."""

from dataclasses import replace
from typing import Any

from longspec_jax.config.target import TargetConfig
from longspec_jax.drafters.checkpoints.parallel import draft_table
from longspec_jax.drafters.longspec import DraftConfig
from longspec_jax.drafters.parallel import ParallelConfig
from tests.drafters import kit


def config_for(target: TargetConfig, window: int = 7, **fields: Any) -> ParallelConfig:
    """A draft of two layers for a target, of another MLP than the target's."""
    layer = replace(DraftConfig.for_target(target, window=window), mlp_width=29)
    given: dict[str, Any] = dict(num_layers=2, block=4, markov_rank=5)
    return ParallelConfig(layer, target.vocab_size, **given | fields)


def random_tree(config: ParallelConfig, seed: int = 3) -> Any:
    """Random parameters, as a folder holds them."""
    return kit.random_tree(draft_table(config), config.layer.dtype, seed)
