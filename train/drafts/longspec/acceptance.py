"""Simulated acceptance of a LongSpec draft, for every number of tokens behind the target's keys."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from longspec_jax.axes import Array
from longspec_jax.config.target import TargetConfig
from longspec_jax.drafters.longspec.config import DraftConfig
from longspec_jax.models.target import head_of

from ...acceptance import agreement_report, count_hits, counted_tokens
from ...target import plain_positions, run_target
from .passes import Draws, run_draft


@dataclass(frozen=True)
class Pair:
    """A target and a draft, and how they are measured; static."""

    target: TargetConfig
    draft: DraftConfig
    max_shift: int
    chunk: int
    """Most tokens whose logits exist at once."""
    mlp_chunk: int = 0
    """Most tokens of a device whose MLP activations exist at once; 0: all."""


def simulated_acceptance(
    pair: Pair, params: Any, frozen: Any, tokens: Array, weights: Array
) -> dict[str, float]:
    """As of :func:`train.acceptance.agreement_report`, over rows ``[B, T]`` at plain positions."""
    return agreement_report(*_hits(pair, params, frozen, tokens, weights))


@partial(jax.jit, static_argnums=0)
def _hits(
    pair: Pair, params: Any, frozen: Any, tokens: Array, weights: Array
) -> tuple[Array, Array, Array]:
    """What :func:`train.acceptance.agreement_report` reads."""
    rows, length = tokens.shape
    positions = plain_positions((1, rows), length)[0]
    view = run_target(pair.target, frozen, tokens, positions, pair.mlp_chunk)
    counted, head = counted_tokens(weights), head_of(frozen)

    def at_shift(shift: Array) -> tuple[Array, Array]:
        draws = Draws(positions, jnp.full((rows,), shift))
        hidden = run_draft(pair.draft, params, frozen, tokens, draws, view, pair.mlp_chunk)
        return count_hits(hidden, head, view.hidden, head, counted, chunk=pair.chunk)

    shifts = jnp.arange(1, pair.max_shift + 1)
    return *jax.lax.map(at_shift, shifts), jnp.sum(counted, (1, 2))
