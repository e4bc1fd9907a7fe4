"""The gated delta rule as its paper has it, which every form of the op must equal."""

from functools import partial

import jax
import jax.numpy as jnp

from longspec_jax.axes import Array
from longspec_jax.ops.recurrence.delta_rule import Memory, RecurrenceOperands

_einsum = partial(jnp.einsum, precision="highest")


def delta_rule_reference(memory: Memory, tokens: RecurrenceOperands) -> tuple[Memory, Array]:
    """The rule, token by token.

    Returns:
      The state after the tokens, and what they read, ``[B, T, J, P, Y]``.
    """

    def step(memory: Array, token: RecurrenceOperands) -> tuple[Array, Array]:
        q, k, v, log_decay, strength = token
        memory = memory * jnp.exp(log_decay)[..., None, None]
        known = _einsum("bjx,bjpxy->bjpy", k, memory)
        update = (v - known) * strength[..., None]
        memory = memory + _einsum("bjx,bjpy->bjpxy", k, update)
        return memory, _einsum("bjx,bjpxy->bjpy", q, memory)

    by_token = jax.tree.map(lambda part: jnp.moveaxis(part, 1, 0), tokens)
    memory, out = jax.lax.scan(step, memory, by_token)
    return memory, jnp.moveaxis(out, 0, 1)
