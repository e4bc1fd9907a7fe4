"""Whether a target leans on its first positions: what anchor-offset can matter for.

Rotary attention sees differences of positions only. Moving all tokens by one offset changes
nothing; moving all but the first few changes the distance to those few, which a target notices as
far as it attends to them. So two things are measured: the share of attention that goes to the first
positions, and the target's loss where they stay (``sinks``) while all others move.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from longspec_jax.axes import Array
from longspec_jax.config import TargetConfig
from longspec_jax.models.target import head_of
from longspec_jax.ops.attention.dispatch import causal_attention

from ..losses import next_token_labels, token_scores
from ..passes import TrainedTarget, run_target

ANCHORS = 4
"""Positions that the paper's anchor-offset leaves in place (LongSpec, section 3.2)."""
QUERIES = 64
"""Per row, evenly spread over its last three quarters."""


def attention_to_anchors(config: TargetConfig, params: Any, rows: np.ndarray) -> list[float]:
    """The share of every layer's attention that goes to the first four positions of a row."""
    shares = [np.asarray(_shares(config, params, row[None])) for row in rows]
    return np.mean(shares, axis=0).tolist()


@partial(jax.jit, static_argnums=0)
def _shares(config: TargetConfig, params: Any, tokens: Array) -> Float[Array, " L"]:
    found = []

    def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
        found.append(_share(q, k))
        return causal_attention(q, k, v)

    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    TrainedTarget(config).apply({"params": params}, tokens, positions, attend)
    return jnp.stack(found)


def _share(q: Float[Array, "B T N H"], k: Float[Array, "B T K H"]) -> Float[Array, ""]:
    """The mean over heads and some queries of what goes to the first keys."""
    length, heads = q.shape[1], q.shape[2] // k.shape[2]
    at = jnp.linspace(length // 4, length - 1, min(QUERIES, length)).astype(jnp.int32)
    picked = q[:, at].reshape(q.shape[0], len(at), k.shape[2], heads, -1)
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", picked, k, preferred_element_type=jnp.float32)
    seen = jnp.arange(length) <= at[:, None]
    weights = jax.nn.softmax(jnp.where(seen, scores * q.shape[-1] ** -0.5, -jnp.inf), axis=-1)
    return jnp.mean(jnp.sum(weights[..., :ANCHORS], axis=-1))


def losses_at_offset(
    config: TargetConfig, params: Any, rows: np.ndarray, offset: int
) -> dict[str, list[float]]:
    """The target's loss of every row at plain positions, and offset behind 4 sinks and behind 0."""
    index = np.arange(rows.shape[1])
    positions = {
        "plain": index,
        "offset_4_sinks": index + np.where(index >= ANCHORS, offset, 0),
        "offset_0_sinks": index + offset,
    }
    return {
        name: [float(_loss(config, params, row[None], each[None])) for row in rows]
        for name, each in positions.items()
    }


@partial(jax.jit, static_argnums=0)
def _loss(config: TargetConfig, params: Any, tokens: Array, positions: Array) -> Array:
    hidden = run_target(config, params, tokens, positions).hidden
    labels, weights = next_token_labels(tokens, jnp.ones(tokens.shape))
    loss = token_scores(hidden, head_of(params), labels).loss
    return jnp.sum(loss * weights) / jnp.sum(weights)
