"""The testing kit: tiny models with prime sizes, a lookup-table language model, tolerances."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longspec_jax.config import DraftConfig, TargetConfig
from longspec_jax.decoding.beliefs import RoundBeliefs
from longspec_jax.decoding.cache import KVCache
from longspec_jax.decoding.sampling import Sampling
from longspec_jax.decoding.target import CachedTarget
from longspec_jax.decoding.view import CacheView
from longspec_jax.drafters.base import Committed, Drafter, Params
from longspec_jax.drafters.longspec.model import LongSpecLayer, LongSpecParams
from longspec_jax.models.target import Target

TOLERANCE = {"float32": 1e-5, "bfloat16": 5e-3, "float16": 2e-3}
"""Largest relative error against float64, by dtype; never loosened quietly."""


def tiny_target_config(**overrides: Any) -> TargetConfig:
    """A two-layer target with grouped heads and sizes that are unlikely to hide a transposition."""
    fields: dict[str, Any] = dict(
        architecture="LlamaForCausalLM",
        vocab_size=101,
        model_width=36,
        mlp_width=53,
        num_layers=2,
        num_heads=6,
        num_kv_heads=2,
        head_width=6,
        max_positions=1024,
        dtype="float32",
    )
    return TargetConfig(**{**fields, **overrides})


def random_target(config: TargetConfig, seed: int = 0, scale: float = 4.0) -> Any:
    """Random target parameters, scaled up so that the output distribution is far from uniform."""
    return _drawn_once(_random_target, config, seed, scale)


@partial(jax.jit, static_argnums=0)
def _random_target(config: TargetConfig, scale: float, key: jax.Array, spread: jax.Array) -> Any:
    tokens = jnp.zeros((1, 2), jnp.int32)
    return _spread(Target(config).init(key, tokens, method="initialize")["params"], scale, spread)


def random_draft(config: DraftConfig, seed: int = 1, scale: float = 4.0) -> Any:
    """Random draft parameters; norms and biases are random too."""
    return _drawn_once(_random_draft, config, seed, scale)


@partial(jax.jit, static_argnums=0)
def _random_draft(config: DraftConfig, scale: float, key: jax.Array, spread: jax.Array) -> Any:
    params = LongSpecLayer(config).init(
        key,
        jnp.zeros((1, 2, config.model_width), jnp.dtype(config.dtype)),
        jnp.zeros((1, 2), jnp.int32),
        lambda q, k, v: q,
        lambda q: q,
    )["params"]
    return _spread(params, scale, spread)


def draft_params(layer: Any, target: Any) -> LongSpecParams:
    """A draft layer bound to its target's tables."""
    return LongSpecParams.beside(target, layer)


@partial(jax.jit, static_argnums=0)
def after_prompts(drafter: Drafter, params: Params, tokens: Any, lengths: Any) -> Any:
    """A drafter's state after prompts ``tokens[b, :lengths[b]]`` that arrive as one chunk."""
    tokens, lengths = jnp.asarray(tokens, jnp.int32), jnp.asarray(lengths, jnp.int32)
    state = drafter.begin(params, *tokens.shape)
    return drafter.extend(params, state, Committed(tokens, jnp.zeros_like(lengths), lengths))


def view_of(pending: jax.Array, length: jax.Array, keys: jax.Array, values: jax.Array) -> CacheView:
    """What a drafter sees of a cache of one layer; there is nothing to run the target with."""
    cache, target = KVCache((keys,), (values,)), CachedTarget(tiny_target_config())
    return CacheView(target, None, cache, pending, length, length, jnp.zeros(len(pending), bool))


def greedy_beliefs(rows: int, levels: int) -> RoundBeliefs:
    """Beliefs about draws at temperature 0: the log-softmax of a draft's logits."""
    return RoundBeliefs(jnp.zeros((rows, levels + 1, 1)), Sampling.greedy(rows))


def _drawn_once(draw: Any, config: Any, seed: int, scale: float) -> Any:
    """A copy of what is drawn once a process: a test may change it, or give it to a program."""
    return jax.tree.map(jnp.array, _kept(draw, config, seed, scale))


@cache
def _kept(draw: Any, config: Any, seed: int, scale: float) -> Any:
    return jax.device_get(draw(config, scale, jax.random.key(seed), jax.random.key(seed + 1000)))


def _spread(params: Any, scale: float, key: jax.Array) -> Any:
    """Scale the matrices and make norms and biases random, so that every parameter matters."""
    leaves, tree = jax.tree.flatten(params)

    def spread(leaf: jax.Array, key: jax.Array) -> jax.Array:
        noise = 0.3 * jax.random.normal(key, leaf.shape, jnp.float32)
        wide = leaf.astype(jnp.float32)
        wide = jnp.where(jnp.ptp(wide) > 0, wide * scale, wide + noise)
        return wide.astype(leaf.dtype)

    return jax.tree.unflatten(tree, map(spread, leaves, jax.random.split(key, len(leaves))))


def relative_error(actual: Any, expected: Any) -> float:
    """``||actual - expected|| / ||expected||`` in float64; NaN never passes a comparison."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return float(np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), 1e-30))
