"""The draft's own chain, unrolled while it is trained.

The paper draws one shift per row: how many tokens the draft is ahead of the target's last key. In
decoding level ``j`` of a chain stands at shift ``j``, and only where the levels before it were
right, because the walk ends at the first miss. So all levels are learned in one step, each at its
shift, and at those positions alone that a greedy chain of the draft would have reached.

The draft's inputs are tokens, and where a chain is right its tokens are those of the text: no level
has to be fed with another one's output, and every level is a pass over the whole rows.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from longspec_jax.axes import Array

from .head_loop import HEAD_GRADIENT


class Rollout(NamedTuple):
    """What the levels of a chain come to, sums over weighted positions."""

    loss: Float[Array, ""]
    """Mean over levels by their decaying weights."""
    accepted: Float[Array, ""]
    """Drafted tokens that a walk would accept behind every position."""


def roll_out(
    levels: int,
    decay: float,
    hidden_at: Callable[[Array], Array],
    learn: Callable[[Array, Array], tuple[Array, Array]],
    labels: Int[Array, "B T"],
    weights: Float[Array, "B T"],
) -> Rollout:
    """Learn every level where the ones before it were right.

    Args:
      levels: of the chain, at least 1.
      decay: weight of a level over that of the one before.
      hidden_at: the draft's hidden states ``[B, T, D]`` at a shift, a scalar.
      learn: ``(hidden, weights) -> (sum of the loss, the draft's tokens [B, T])``.
      labels: the token that follows each position.
      weights: 0 where a position is not to be learned.
    """

    # A level is passed once more for its gradient, but not through the head.
    @partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(HEAD_GRADIENT))
    def level(carry: tuple[Array, Rollout], number: Array) -> tuple[tuple[Array, Rollout], None]:
        reached, sums = carry
        hidden = hidden_at(number)
        loss, tokens = learn(hidden, weights * reached)
        weight = jnp.float32(decay) ** (number - 1)
        right = reached * (tokens == labels)
        sums = Rollout(
            sums.loss + weight * loss,
            sums.accepted + jnp.sum(weights * right),
        )
        # The next level stands one token further on.
        return (jnp.roll(right, 1, axis=1).at[:, 0].set(0.0), sums), None

    nothing = Rollout(jnp.float32(0), jnp.float32(0))
    begin = jnp.ones(labels.shape, jnp.float32), nothing
    (_, sums), _ = jax.lax.scan(level, begin, jnp.arange(1, levels + 1))
    return sums._replace(loss=sums.loss / sum(decay**number for number in range(levels)))
