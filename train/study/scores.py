"""Loss and agreement of a draft, token by token, at every distance from the target's last key."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from longspec_jax.axes import Array
from longspec_jax.config import TargetConfig
from longspec_jax.drafters.draft import Target
from longspec_jax.drafters.longspec.config import DraftConfig
from longspec_jax.drafters.longspec.load import LongSpecDraft
from longspec_jax.models.target import head_of

from ..losses import TokenScores, token_scores
from ..passes import Draws, TargetView, run_draft, run_target


class DraftScores(NamedTuple):
    """Of the last tokens of some rows, by shift 1, 2, ... from the target's last key."""

    loss: Float[np.ndarray, "S B T"]
    """The draft's."""
    agrees: Bool[np.ndarray, "S B T"]
    """Whether its first choice is the target's own."""
    target_loss: Float[np.ndarray, "B T"]


def score_draft(
    target: Target,
    draft: LongSpecDraft,
    rows: Int[np.ndarray, "R T"],
    *,
    last: int,
    shifts: int,
) -> DraftScores:
    """Scores of a draft on the last tokens of rows, one row at a time.

    Args:
      target: what it drafts for.
      draft: the draft.
      rows: of one length, positions plain.
      last: tokens at the end of a row that are scored; each is predicted by the one before it.
      shifts: how many distances are scored, from 1 on.
    """
    frozen, layer = target.params, draft.params.layer
    found = []
    for row in rows:
        tokens = jnp.asarray(row[None])
        view, own = _target_scores(target.config, last, frozen, tokens)
        scores = _draft_scores(draft.config, last, shifts, layer, frozen, tokens, view)
        found.append(jax.device_get((scores.loss, scores.choice == own.choice, own.loss)))
    return DraftScores(*(np.concatenate(each, axis=-2) for each in zip(*found, strict=True)))


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
    layer: Any,
    frozen: Any,
    tokens: Array,
    view: TargetView,
) -> TokenScores:
    """Scores ``[S, B, T]``."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

    def at(shift: Array) -> TokenScores:
        draws = Draws(positions, jnp.full(tokens.shape[:1], shift))
        hidden = run_draft(config, layer, frozen, tokens, draws, view)
        return _last_scores(hidden, frozen, tokens, last)

    return jax.lax.map(at, jnp.arange(1, shifts + 1))


def _last_scores(hidden: Array, frozen: Any, tokens: Array, last: int) -> TokenScores:
    return token_scores(hidden[:, -last - 1 : -1], head_of(frozen), tokens[:, -last:])
