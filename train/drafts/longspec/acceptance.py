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
from longspec_jax.config import TargetConfig
from longspec_jax.drafters.longspec.config import DraftConfig
from longspec_jax.models.target import head_logits, head_of
from longspec_jax.ops.slicing import chunk_length, whole_chunks

from ...target import TargetView, plain_positions, run_target
from .passes import Draws, run_draft

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
    mlp_chunk: int = 0
    """Most tokens of a device whose MLP activations exist at once; 0: all."""


def simulated_acceptance(
    pair: Pair, params: Any, frozen: Any, tokens: Array, weights: Array
) -> dict[str, float]:
    """Agreement by shift and the implied chain length, over rows ``[B, T]`` at plain positions.

    ``_far`` repeats the top-1 figures for the last quarter of the rows, where long context shows.
    A figure without any counted token is left out.

    Raises:
      FloatingPointError: if scores of target or draft are not finite; every comparison with them is
        false, which would look like agreement.
    """
    hits, not_finite, counts = jax.device_get(_hits(pair, params, frozen, tokens, weights))
    for who, lost in zip(("target", "draft"), np.max(not_finite, axis=0), strict=True):
        if lost:
            raise FloatingPointError(
                f"the {who}'s scores are not finite for {lost:.0f} held-out tokens, so that no "
                "acceptance can be measured"
            )
    report = {}
    everywhere, far = (
        hits[..., part] / count if count else None for part, count in enumerate(counts)
    )
    if everywhere is not None:  # [shift, (top-1, top-k)]
        for index, (top1, top) in enumerate(everywhere):
            report[f"agree_top1_shift{index + 1}"] = top1
            report[f"agree_top{TOP}_shift{index + 1}"] = top
        report["tau_chain"] = implied_length(everywhere[:, 0])
    if far is not None:
        report["tau_chain_far"] = implied_length(far[:, 0])
    if everywhere is not None:
        report[f"tau_top{TOP}"] = implied_length(everywhere[:, 1])
    return {name: round(float(value), 4) for name, value in report.items()}


def implied_length(agreements: np.ndarray) -> float:
    """``1 + a_1 + a_1 a_2 + ...``."""
    return float(1.0 + np.sum(np.cumprod(agreements)))


@partial(jax.jit, static_argnums=0)
def _hits(
    pair: Pair, params: Any, frozen: Any, tokens: Array, weights: Array
) -> tuple[Array, Array, Array]:
    """Weighted hits, tokens without finite scores, and weights.

    ``[shift, 2, 2]``: (top-1, top-k) x (all, last quarter), ``[shift, 2]``: (target, draft), and
    ``[2]``: (all, last quarter).
    """
    rows, length = tokens.shape
    positions = plain_positions((1, rows), length)[0]
    view = run_target(pair.target, frozen, tokens, positions, pair.mlp_chunk)
    far = (jnp.arange(length) >= 3 * length // 4).astype(jnp.float32)
    counted = jnp.stack([weights, weights * far])  # [2, B, T]

    def at_shift(shift: Array) -> tuple[Array, Array]:
        draws = Draws(positions, jnp.full((rows,), shift))
        hidden = run_draft(pair.draft, params, frozen, tokens, draws, view, pair.mlp_chunk)
        return _count(pair, frozen, hidden, view, counted)

    shifts = jnp.arange(1, pair.max_shift + 1)
    return *jax.lax.map(at_shift, shifts), jnp.sum(counted, (1, 2))


def _count(
    pair: Pair, frozen: Any, hidden: Array, view: TargetView, counted: Array
) -> tuple[Array, Array]:
    """Hits and what is lost of one shift, in chunks of tokens so that logits are never whole."""
    rows, length = hidden.shape[:2]
    size = chunk_length(rows, length, pair.chunk)
    head = head_of(frozen)

    def step(total: tuple[Array, Array], start: Array) -> tuple[tuple[Array, Array], None]:
        def cut(part: Array, axis: int = 1) -> Array:
            return jax.lax.dynamic_slice_in_dim(whole_chunks(part, size, axis), start, size, axis)

        wanted, scores = (head_logits(head, cut(states)) for states in (view.hidden, hidden))
        choice = jnp.argmax(wanted, axis=-1)
        chosen = jnp.take_along_axis(scores, choice[..., None], axis=-1)
        rank = jnp.sum(scores > chosen, axis=-1)
        hit = jnp.stack([rank < 1, rank < TOP]).astype(jnp.float32)
        weights = cut(counted, 2)
        finite = jnp.stack([jnp.isfinite(each).all(axis=-1) for each in (wanted, scores)])
        lost = jnp.sum(~finite & (weights[0] > 0), axis=(1, 2), dtype=jnp.float32)
        found = jnp.einsum("kBT,cBT->kc", hit, weights)
        return jax.tree.map(jnp.add, total, (found, lost)), None

    starts = jnp.arange(0, length, size)
    return jax.lax.scan(step, (jnp.zeros((2, 2)), jnp.zeros(2)), starts)[0]
