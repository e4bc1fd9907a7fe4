"""Tiny DFlash and DSpark drafts with random weights."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from longspec_jax.config.target import TargetConfig
from longspec_jax.drafters.dflash.checkpoint import Format
from longspec_jax.drafters.dflash.config import DFlashConfig
from longspec_jax.drafters.dflash.dialects import ZLAB, Dialect
from longspec_jax.drafters.dflash.model import DFlashParams


def config_for(target: TargetConfig, trunk: dict[str, Any] | None = None, **fields: Any) -> Any:
    """A draft for a target, of other heads and another MLP than the target's."""
    sizes = dict(mlp_width=29, num_layers=2, num_heads=4, num_kv_heads=2, head_width=8)
    qwen3: dict[str, Any] = dict(architecture="Qwen3ForCausalLM", qk_norm=True, qkv_bias=False)
    layers = replace(target, **qwen3 | sizes | (trunk or {}))
    given: dict[str, Any] = dict(
        trunk=layers,
        target_width=target.model_width,
        proposable=target.vocab_size,
        features=(-1, 0, target.num_layers - 1),
        block=4,
        mask_token=target.vocab_size - 1,
    )
    return DFlashConfig(**given | fields)


def random_params(
    config: DFlashConfig, tokens: Any = None, dialect: Dialect = ZLAB, seed: int = 3
) -> DFlashParams:
    """Random parameters with tables of their own; ``tokens`` are those that can be proposed."""
    random = np.random.default_rng(seed)
    drawn = {}
    for leaf in Format(dialect, True, True).table(config).leaves:
        normal = random.normal(size=leaf.shape)
        scaled = 1 + 0.3 * normal if leaf.path.endswith("scale") else 0.2 * normal
        drawn[leaf.path] = jnp.asarray(scaled, config.trunk.dtype)
    layer = unflatten_dict(drawn, sep="/")
    tables = layer.pop("embedding"), layer.pop("head")
    heads = {name: layer.pop(name, None) for name in ("markov", "confidence")}
    known = None if tokens is None else jnp.asarray(tokens, jnp.int32)
    return DFlashParams(layer, *tables, known, **heads)
