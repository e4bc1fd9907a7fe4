"""The chain that is unrolled in training, against one that is walked position by position."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kit import relative_error
from tests.train.test_step import DRAFT, OBJECTIVES, SETTINGS, batch, frozen_params, trainer
from train.config import DraftSettings
from train.losses import cross_entropy_and_choice
from train.rollout import roll_out
from train.step import Batch

LEVELS, DECAY, VOCABULARY = 3, 0.5, 5


def test_a_level_is_learned_where_the_ones_before_it_were_right() -> None:
    """Chains begin behind every token; the level that first misses is the last that is learned."""
    rng = np.random.default_rng(0)
    logits = 2 * rng.normal(size=(LEVELS + 1, 2, 9, VOCABULARY)).astype(np.float32)
    labels = rng.integers(0, VOCABULARY, (2, 9))
    logits += 2 * np.eye(VOCABULARY, dtype=np.float32)[labels]
    weights = (rng.random((2, 9)) > 0.2).astype(np.float32)
    head = jnp.eye(VOCABULARY)
    found = jax.jit(
        lambda: roll_out(
            LEVELS,
            DECAY,
            lambda shift: jnp.asarray(logits)[shift],
            lambda hidden, w: cross_entropy_and_choice(hidden, head, jnp.asarray(labels), w),
            jnp.asarray(labels),
            jnp.asarray(weights),
        )
    )()
    loss, accepted = 0.0, 0.0
    normalised = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for row in range(2):
        for begin in range(9):
            for level in range(1, LEVELS + 1):
                at = begin + level - 1
                if at >= 9:
                    break
                weight = weights[row, at] * DECAY ** (level - 1)
                loss -= weight * normalised[level, row, at, labels[row, at]]
                if logits[level, row, at].argmax() != labels[row, at]:
                    break
                accepted += weights[row, at]
    assert accepted > 3
    assert relative_error(found.accepted, np.float32(accepted)) < 1e-6
    assert relative_error(found.loss, np.float32(loss / (1 + DECAY + DECAY**2))) < 1e-5


def settled(levels: int) -> Any:
    return replace(DRAFT, settings=replace(SETTINGS, rollout=levels, rollout_decay=DECAY))


def test_one_level_is_the_first_shift() -> None:
    micro = Batch(*(part[0] for part in batch()))
    params = jax.jit(DRAFT.initialize)(jax.random.key(0))
    draws = jax.tree.map(lambda leaf: leaf[0], DRAFT.draw(jax.random.key(1), (1, 8), 13))
    first, frozen = draws._replace(shift=jnp.ones_like(draws.shift)), frozen_params()

    def loss_and_gradient(objective: Any, draws: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            return objective.sums(params, frozen, micro, draws)["loss"]

        return jax.jit(jax.value_and_grad(loss))(params)

    one, plain = loss_and_gradient(settled(1), draws), loss_and_gradient(DRAFT, first)
    for actual, expected in zip(*map(jax.tree.leaves, (one, plain)), strict=True):
        assert relative_error(actual, expected) < 1e-5


def test_rollout_learns_and_says_what_it_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OBJECTIVES, "rollout", settled(3))
    step = trainer("rollout", (1, 2, 1))
    first, last = step.run(batch(), 1)[1], step.run(batch(), 60)[1]
    assert last["loss"] < 0.8 * first["loss"] and last["accepted"] > first["accepted"]


@pytest.mark.parametrize(
    "wrong", [dict(rollout=-1), dict(rollout_decay=0.0), dict(rollout=2, distillation=0.5)]
)
def test_settings_that_mean_nothing(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="--config.draft.rollout"):
        DraftSettings(5, "", True, 4, 4, True, **wrong)
