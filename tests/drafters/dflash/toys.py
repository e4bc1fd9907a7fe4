"""Tiny DFlash and DSpark drafts with random weights."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from longspec_jax.config.target import TargetConfig
from longspec_jax.drafters.checkpoints.dflash import draft_table
from longspec_jax.drafters.dflash import DFlashConfig, DFlashParams
from tests.drafters.kit import random_tree


def config_for(target: TargetConfig, trunk: dict[str, Any] | None = None, **fields: Any) -> Any:
    """A draft for a target, of other heads and another MLP than the target's."""
    sizes = dict(mlp_width=29, num_layers=2, num_heads=4, num_kv_heads=2, head_width=8)
    qwen3: dict[str, Any] = dict(architecture="Qwen3ForCausalLM", qk_norm=True, qkv_bias=False)
    layers = replace(target, **qwen3 | sizes | (trunk or {}))
    given: dict[str, Any] = dict(
        trunk=layers,
        target_width=target.model_width,
        target_layers=target.num_layers,
        proposable=target.vocab_size,
        features=(-1, 0, target.num_layers - 1),
        block=4,
        mask_token=target.vocab_size - 1,
    )
    return DFlashConfig(**given | fields)


def random_params(config: DFlashConfig, tokens: Any = None, seed: int = 3) -> DFlashParams:
    """Random parameters with tables of their own; ``tokens`` are those that can be proposed."""
    table = draft_table(config, embedding=True, head=True)
    layer = random_tree(table, config.trunk.dtype, seed)
    tables = layer.pop("embedding"), layer.pop("head")
    heads = {name: layer.pop(name, None) for name in ("markov", "confidence", "selector")}
    known = None if tokens is None else jnp.asarray(tokens, jnp.int32)
    return DFlashParams(layer, *tables, known, **heads)
