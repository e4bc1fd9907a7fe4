"""Simulated acceptance: how often a draft would have been right, measured without decoding.

Cross-entropy does not say how fast a draft will be. What does is how often its best token (or one
of its best few) is the target's own choice, at each distance from what it last read of the target:
shift 1 for the first drafted token, 2 for the second. A chain of drafted tokens stops at the first
miss, so that the agreements ``a_1, a_2, ...`` imply ``tau = 1 + a_1 + a_1 a_2 + ...`` tokens per
target pass (the bonus token included), if misses are independent.
"""

import jax
import jax.numpy as jnp
import numpy as np

from longspec_jax.axes import Array
from longspec_jax.models.target import head_logits
from longspec_jax.ops.slicing import chunk_length, whole_chunks

TOP = 4
"""The first level of the paper's tree proposes this many tokens."""


def counted_tokens(weights: Array) -> Array:
    """Weights ``[2, B, T]`` of all tokens and of the last quarter of the rows.

    The last quarter shows what long context does.

    Args:
      weights: ``[B, T]``, at each position that of the token that is predicted there.
    """
    length = weights.shape[1]
    far = (jnp.arange(length) >= 3 * length // 4).astype(jnp.float32)
    return jnp.stack([weights, weights * far])


def count_hits(
    hidden: Array,
    head: Array,
    wanted: Array,
    target_head: Array,
    counted: Array,
    *,
    chunk: int,
    places: Array | None = None,
) -> tuple[Array, Array]:
    """Hits of one shift, and tokens without finite scores.

    Args:
      hidden: the draft's hidden states ``[B, T, D]``; each predicts what ``wanted`` does there.
      head: the draft's LM head ``[v, D]``.
      wanted: the target's final hidden states ``[B, T, D]``.
      target_head: the target's LM head ``[V, D]``.
      counted: weights ``[2, B, T]`` of :func:`counted_tokens`.
      chunk: most tokens whose logits exist at once.
      places: row of ``head`` that stands for each token of the target, ``[V]``, -1 for none; the
        rows are the target's tokens if absent.

    Returns:
      Weighted hits ``[2, 2]``, (top-1, top-k) x (all, last quarter), and the numbers of tokens
      whose scores are not finite, ``[2]`` for (target, draft).
    """
    rows, length = hidden.shape[:2]
    size = chunk_length(rows, length, chunk)

    def step(total: tuple[Array, Array], start: Array) -> tuple[tuple[Array, Array], None]:
        def cut(part: Array, axis: int = 1) -> Array:
            return jax.lax.dynamic_slice_in_dim(whole_chunks(part, size, axis), start, size, axis)

        wanted_scores, scores = (
            head_logits(target_head, cut(wanted)),
            head_logits(head, cut(hidden)),
        )
        choice = jnp.argmax(wanted_scores, axis=-1)
        place = choice if places is None else places[choice]
        chosen = jnp.take_along_axis(scores, place[..., None], axis=-1)
        rank = jnp.sum(scores > chosen, axis=-1)
        hit = jnp.stack([rank < 1, rank < TOP]).astype(jnp.float32)
        if places is not None:
            hit = jnp.where(place >= 0, hit, 0.0)
        weights = cut(counted, 2)
        finite = jnp.stack([jnp.isfinite(each).all(axis=-1) for each in (wanted_scores, scores)])
        lost = jnp.sum(~finite & (weights[0] > 0), axis=(1, 2), dtype=jnp.float32)
        found = jnp.einsum("kBT,cBT->kc", hit, weights)
        return jax.tree.map(jnp.add, total, (found, lost)), None

    starts = jnp.arange(0, length, size)
    return jax.lax.scan(step, (jnp.zeros((2, 2)), jnp.zeros(2)), starts)[0]


def agreement_report(hits: Array, not_finite: Array, counts: Array) -> dict[str, float]:
    """Agreement by shift and the implied chain length, by the names of the metrics.

    ``_far`` repeats the top-1 figures for the last quarter of the rows. A figure without any
    counted token is left out.

    Args:
      hits: of :func:`count_hits` for every shift, ``[shifts, 2, 2]``.
      not_finite: likewise, ``[shifts, 2]``.
      counts: sums of the counted weights, ``[2]`` for (all, last quarter).

    Raises:
      FloatingPointError: if scores of target or draft are not finite; every comparison with them is
        false, which would look like agreement.
    """
    hits, not_finite, counts = jax.device_get((hits, not_finite, counts))
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
