"""One pass of target and draft over whole training rows, and what passes between them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from longspec_jax.axes import Array
from longspec_jax.config import TargetConfig
from longspec_jax.drafters.longspec.config import DraftConfig
from longspec_jax.drafters.longspec.model import LongSpecLayer
from longspec_jax.models.target import Target
from longspec_jax.ops.attention.dispatch import causal_attention
from longspec_jax.ops.partitioned import row_shares, with_sharding

from .transforms import shifted_attention

LONG = 16384
"""Up to so many tokens of a device an MLP's activations are small beside a 7B target's weights."""


def mlp_tokens_at_once(tokens: int) -> int:
    """Tokens whose MLP activations exist at once, of so many of a device; 0: all of them.

    A chunk's products are large enough for the matrix units.
    """
    return 8192 if tokens > LONG else 0


class TargetView(NamedTuple):
    """What the draft and its measures need of one target pass."""

    hidden: Array
    """Final hidden states ``[B, T, D]``."""
    keys: Array
    """Last-layer keys ``[B, T, K, H]``; the only layer that outlives the pass."""
    values: Array
    """Last-layer values ``[B, T, K, H]``."""


class Draws(NamedTuple):
    """A draft step's randomness."""

    positions: Array
    """``[A, B, T]``."""
    shift: Array
    """``[A, B]``."""


class TrainedTarget(Target):
    """The target with a gradient for its embedding table that a bfloat16 sum would lose.

    Frequent tokens receive thousands of contributions in a step; they are summed in float32.
    """

    def embed(self, tokens: Array) -> Array:
        """Embeddings ``[B, T, D]`` of tokens ``[B, T]``."""
        [embedded] = with_sharding("b t d", _lookup(self.embedding, tokens))
        return embedded


@jax.custom_vjp
def _lookup(table: Array, tokens: Array) -> Array:
    return jnp.take(table, tokens, axis=0)


def _lookup_forward(table: Array, tokens: Array) -> tuple[Array, tuple[Array, Array]]:
    return _lookup(table, tokens), (table, tokens)


def _lookup_backward(saved: tuple[Array, Array], cotangent: Array) -> tuple[Array, None]:
    table, tokens = saved
    total = jnp.zeros(table.shape, jnp.float32).at[tokens].add(cotangent.astype(jnp.float32))
    return total.astype(table.dtype), None


_lookup.defvjp(_lookup_forward, _lookup_backward)


def run_target(
    config: TargetConfig, params: Any, tokens: Array, positions: Array, mlp_chunk: int = 0
) -> TargetView:
    """One causal pass of the target over whole rows ``[B, T]``.

    Args:
      config: the target's shape.
      params: its parameters.
      tokens: token ids.
      positions: their rotary positions.
      mlp_chunk: most tokens of a device whose MLP activations exist at once; 0: all.
    """
    with jax.named_scope("target"):
        output: Any = TrainedTarget(config, mlp_chunk).apply(
            {"params": params}, tokens, positions, lambda layer, q, k, v: causal_attention(q, k, v)
        )
    return TargetView(output.hidden, output.keys[-1], output.values[-1])


def run_draft(
    config: DraftConfig,
    params: Any,
    frozen: Any,
    tokens: Array,
    draws: Draws,
    view: TargetView,
    mlp_chunk: int = 0,
) -> Array:
    """Hidden states ``[B, T, D]`` of the draft over whole rows, given the target's last layer.

    Its MLP goes in chunks of half of ``mlp_chunk``, because the backward pass has twice as much
    inside. Where it does, all that is no product and no attention is made again there, too.
    """
    mlp_chunk = -(-mlp_chunk // 2)

    def layer(params: Any, embedded: Array, draws: Draws, keys: Array, values: Array) -> Array:
        output: Any = LongSpecLayer(config, mlp_chunk=mlp_chunk).apply(
            {"params": cast(params, config.dtype)},
            embedded,
            draws.positions,
            lambda q, k, v: causal_attention(q, k, v, window=config.window),
            lambda q: shifted_attention(q, keys, values, draws.shift),
        )
        return output.hidden

    rows, length = tokens.shape
    if mlp_chunk and rows * length > mlp_chunk * row_shares(rows):
        layer = jax.checkpoint(layer, policy=_is_costly)
    with jax.named_scope("draft"):
        embedded = jax.lax.stop_gradient(jnp.take(frozen["embedding"], tokens, axis=0))
        [embedded] = with_sharding("b t d", embedded)
        return layer(params, embedded, draws, view.keys, view.values)


_CHEAP = frozenset(
    "add add_any broadcast_in_dim concatenate convert_element_type cos div dynamic_slice exp "
    "gather integer_pow iota log logistic max mul neg pad reduce_sum reshape rsqrt select_n "
    "sharding_constraint sin slice split square squeeze sub transpose".split()
)
"""Elementwise primitives, and those that move and sum."""


def _is_costly(primitive: Any, *_: Any, **__: Any) -> bool:
    """Whether a result is kept for the backward pass: of products and attention, known or not."""
    return primitive.name not in _CHEAP


def cast(params: Any, dtype: str) -> Any:
    """All leaves in a dtype."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.dtype(dtype)), params)
