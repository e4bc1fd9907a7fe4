"""Loss and agreement of drafts, token by token, at every distance from the target's last key."""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from longspec_jax.axes import Array
from longspec_jax.config import DraftConfig, TargetConfig
from longspec_jax.models.target import head_logits, head_of

from ..passes import Draws, TargetView, run_draft, run_target

CHUNK = 1024
"""Tokens whose logits exist at once."""


class TokenScores(NamedTuple):
    """How well each position predicts the next token."""

    loss: Float[Array, "B T"]
    choice: Int[Array, "B T"]
    """The most probable token."""


class DraftScores(NamedTuple):
    """Of the last tokens of some rows, by shift 1, 2, ... from the target's last key."""

    loss: Float[np.ndarray, "S B T"]
    """The draft's."""
    agrees: Bool[np.ndarray, "S B T"]
    """Whether its first choice is the target's own."""
    target_loss: Float[np.ndarray, "B T"]


def token_scores(
    hidden: Float[Array, "B T D"], head: Float[Array, "V D"], labels: Int[Array, "B T"]
) -> TokenScores:
    """Scores of every position, logits never whole."""
    rows, length = labels.shape
    size = max(each for each in range(1, min(CHUNK, length) + 1) if length % each == 0)

    def score(part: tuple[Array, Array]) -> TokenScores:
        states, wanted = part
        logits = head_logits(head, states)
        chosen = jnp.take_along_axis(logits, wanted[..., None], axis=-1)[..., 0]
        return TokenScores(jax.nn.logsumexp(logits, axis=-1) - chosen, jnp.argmax(logits, axis=-1))

    def parts(whole: Array) -> Array:
        return jnp.moveaxis(whole.reshape(rows, -1, size, *whole.shape[2:]), 1, 0)

    found = jax.lax.map(score, (parts(hidden), parts(labels)))
    loss, choice = (jnp.moveaxis(each, 0, 1).reshape(rows, length) for each in found)
    return TokenScores(loss, choice)


def score_drafts(
    target: TargetConfig,
    frozen: Any,
    draft: DraftConfig,
    drafts: Mapping[str, Any],
    rows: Int[np.ndarray, "R T"],
    *,
    last: int,
    shifts: int,
) -> dict[str, DraftScores]:
    """Scores of drafts on the last tokens of rows, one row at a time.

    Args:
      target: the target's configuration.
      frozen: its parameters.
      draft: the configuration that all drafts share.
      drafts: their parameters, by name.
      rows: of one length, positions plain.
      last: tokens at the end of a row that are scored; each is predicted by the one before it.
      shifts: how many distances are scored, from 1 on.
    """
    found: dict[str, list[Any]] = {name: [] for name in drafts}
    for row in rows:
        tokens = jnp.asarray(row[None])
        view, own = _target_scores(target, last, frozen, tokens)
        for name, params in drafts.items():
            scores = _draft_scores(draft, last, shifts, params, frozen, tokens, view)
            agrees = scores.choice == own.choice
            found[name].append(jax.device_get((scores.loss, agrees, own.loss)))
    return {
        name: DraftScores(*(np.concatenate(each, axis=-2) for each in zip(*rows, strict=True)))
        for name, rows in found.items()
    }


@partial(jax.jit, static_argnums=(0, 1))
def _target_scores(
    config: TargetConfig, last: int, frozen: Any, tokens: Array
) -> tuple[TargetView, TokenScores]:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    view = run_target(config, frozen, tokens, positions)
    return view, _last_scores(view.hidden, frozen, tokens, last)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _draft_scores(
    config: DraftConfig,
    last: int,
    shifts: int,
    params: Any,
    frozen: Any,
    tokens: Array,
    view: TargetView,
) -> TokenScores:
    """Scores ``[S, B, T]``."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

    def at(shift: Array) -> TokenScores:
        draws = Draws(positions, jnp.full(tokens.shape[:1], shift))
        hidden = run_draft(config, params, frozen, tokens, draws, view)
        return _last_scores(hidden, frozen, tokens, last)

    return jax.lax.map(at, jnp.arange(1, shifts + 1))


def _last_scores(hidden: Array, frozen: Any, tokens: Array, last: int) -> TokenScores:
    return token_scores(hidden[:, -last - 1 : -1], head_of(frozen), tokens[:, -last:])
