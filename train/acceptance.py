"""Simulated acceptance: how often the draft would have been right, measured without decoding.

Cross-entropy does not say how fast a draft will be. What does is how often its best token (or one
of its best few) is the target's own choice, at each distance from the target's last key: shift 1
for the first drafted token, 2 for the second. A chain of drafted tokens stops at the first miss, so
that the agreements ``a_1, a_2, ...`` imply ``tau = 1 + a_1 + a_1 a_2 + ...`` tokens per target pass
(the bonus token included), if misses are independent.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longspec_jax.axes import Array
from longspec_jax.config import DraftConfig, TargetConfig
from longspec_jax.models.target import head_logits, head_of

from .losses import chunk_length, whole_chunks
from .passes import Draws, TargetView, run_draft, run_target
from .transforms import plain_positions

TOP = 4
"""The first level of the paper's tree proposes this many tokens."""


@dataclass(frozen=True)
class Pair:
    """A target and a draft, and how they are measured; static."""

    target: TargetConfig
    draft: DraftConfig
    max_shift: int
    chunk: int
    """Most tokens whose logits exist at once."""


def simulated_acceptance(
    pair: Pair, params: Any, frozen: Any, tokens: Array, weights: Array
) -> dict[str, float]:
    """Agreement by shift and the implied chain length, over rows ``[B, T]`` at plain positions.

    ``_far`` repeats the top-1 figures for the last quarter of the rows, where long context shows.
    """
    hits, counts = _hits(pair, params, frozen, tokens, weights)
    hits, counts = np.asarray(hits, np.float64), np.maximum(np.asarray(counts, np.float64), 1)
    rates = hits / counts  # [shift, (top-1, top-k), (all, far)]
    report = {}
    for index, rate in enumerate(rates):
        report[f"agree_top1_shift{index + 1}"] = float(rate[0, 0])
        report[f"agree_top{TOP}_shift{index + 1}"] = float(rate[1, 0])
    report["tau_chain"] = implied_length(rates[:, 0, 0])
    report["tau_chain_far"] = implied_length(rates[:, 0, 1])
    report[f"tau_top{TOP}"] = implied_length(rates[:, 1, 0])
    return {name: round(value, 4) for name, value in report.items()}


def implied_length(agreements: np.ndarray) -> float:
    """``1 + a_1 + a_1 a_2 + ...``."""
    return float(1.0 + np.sum(np.cumprod(agreements)))


@partial(jax.jit, static_argnums=0)
def _hits(
    pair: Pair, params: Any, frozen: Any, tokens: Array, weights: Array
) -> tuple[Array, Array]:
    """Weighted hits ``[shift, 2, 2]`` and weights ``[2]``: (top-1, top-k) x (all, last quarter)."""
    rows, length = tokens.shape
    positions = plain_positions((1, rows), length)[0]
    view = run_target(pair.target, frozen, tokens, positions)
    far = (jnp.arange(length) >= 3 * length // 4).astype(jnp.float32)
    counted = jnp.stack([weights, weights * far])  # [2, B, T]

    def at_shift(shift: Array) -> Array:
        draws = Draws(positions, jnp.full((rows,), shift))
        hidden = run_draft(pair.draft, params, frozen, tokens, draws, view)
        return _count(pair, frozen, hidden, view, counted)

    shifts = jnp.arange(1, pair.max_shift + 1)
    return jax.lax.map(at_shift, shifts), jnp.sum(counted, (1, 2))


def _count(pair: Pair, frozen: Any, hidden: Array, view: TargetView, counted: Array) -> Array:
    """Hits ``[2, 2]`` of one shift, in chunks of tokens so that logits are never whole."""
    rows, length = hidden.shape[:2]
    size = chunk_length(rows, length, pair.chunk)
    head = head_of(frozen)

    def step(total: Array, start: Array) -> tuple[Array, None]:
        def cut(part: Array, axis: int = 1) -> Array:
            return jax.lax.dynamic_slice_in_dim(whole_chunks(part, size, axis), start, size, axis)

        choice = jnp.argmax(head_logits(head, cut(view.hidden)), axis=-1)
        scores = head_logits(head, cut(hidden))
        chosen = jnp.take_along_axis(scores, choice[..., None], axis=-1)
        rank = jnp.sum(scores > chosen, axis=-1)
        hit = jnp.stack([rank < 1, rank < TOP]).astype(jnp.float32)
        return total + jnp.einsum("kBT,cBT->kc", hit, cut(counted, 2)), None

    starts = jnp.arange(0, length, size)
    return jax.lax.scan(step, jnp.zeros((2, 2)), starts)[0]
