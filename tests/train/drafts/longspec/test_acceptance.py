"""Simulated acceptance: what is no number and what was not counted gets no score."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.drafters.longspec import DraftConfig
from tests.kit import tiny_target_config
from train.drafts.kinds import LongSpecSettings
from train.drafts.longspec import LongSpecObjective
from train.step import Batch
from train.target import TargetObjective

TARGET = dataclasses.replace(
    tiny_target_config(
        vocab_size=13, model_width=8, mlp_width=6, num_layers=1, num_heads=2, head_width=4,
        max_positions=16,
    ),
    dtype="float32",
)  # fmt: skip
DRAFT = dataclasses.replace(DraftConfig.for_target(TARGET), window=5)
SETTINGS = LongSpecSettings("longspec", "", 5, False, 0, 2)
OBJECTIVE = LongSpecObjective(TARGET, DRAFT, SETTINGS, 0, 8)


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    """Parameters of draft and target."""
    both = OBJECTIVE, TargetObjective(TARGET, 8)
    return tuple(jax.jit(each.initialize)(jax.random.key(1)) for each in both)


def measured(models: tuple[Any, Any], weights: np.ndarray) -> dict[str, float]:
    tokens = jax.random.randint(jax.random.key(3), weights.shape, 0, TARGET.vocab_size)
    return OBJECTIVE.measure(*models, Batch(tokens, jnp.asarray(weights, jnp.float32)))


def spoiled(params: Any) -> Any:
    """Parameters of which one is no number."""
    leaves, tree = jax.tree.flatten(params)
    leaves[-1] = leaves[-1].at[(0,) * leaves[-1].ndim].set(jnp.nan)
    return jax.tree.unflatten(tree, leaves)


def test_scores_that_are_no_numbers_agree_with_nothing(models: tuple[Any, Any]) -> None:
    """They beat nothing and nothing beats them: five tokens per pass of five."""
    draft, target = models
    weights = np.ones((2, 8))
    with pytest.raises(FloatingPointError, match="the draft's scores are not finite for 1[0-6] "):
        measured((spoiled(draft), target), weights)
    table = {**target, "embedding": target["embedding"].at[0, 0].set(jnp.inf)}
    with pytest.raises(FloatingPointError, match="the target's scores are not finite for 14 held"):
        measured((draft, table), weights)


def test_the_targets_loss_is_that_of_the_target_alone(models: tuple[Any, Any]) -> None:
    weights = jnp.asarray([8 * [1.0], 4 * [1.0, 0.0]])
    tokens = jax.random.randint(jax.random.key(3), weights.shape, 0, TARGET.vocab_size)
    alone = TargetObjective(TARGET, 8).measure(models[1], (), Batch(tokens, weights))
    found = measured(models, np.asarray(weights))["target_loss"]
    assert found == pytest.approx(alone["heldout_loss"], rel=1e-5)


def test_the_token_that_is_predicted_counts_and_not_the_one_that_is_read(
    models: tuple[Any, Any],
) -> None:
    """At the borders of a masked prompt these differ: at the answer's first token and behind it."""
    weights, found = jnp.zeros((1, 8)).at[0, 4].set(1.0), set()
    tokens = jax.random.randint(jax.random.key(3), (1, 8), 0, TARGET.vocab_size)
    for token in range(TARGET.vocab_size):  # Nobody reads it to predict it.
        report = OBJECTIVE.measure(*models, Batch(tokens.at[0, 4].set(token), weights))
        del report["target_loss"]
        found.add(tuple(report.items()))
    assert len(found) == 1 and found != {()}
    nobody = jnp.zeros((1, 8)).at[0, 0].set(1.0)  # Of the first token nothing precedes.
    assert OBJECTIVE.measure(*models, Batch(tokens, nobody)) == {}


def test_what_no_token_counts_for_is_left_out(models: tuple[Any, Any]) -> None:
    full = measured(models, np.ones((2, 8)))
    assert list(full) == [
        "agree_top1_shift1", "agree_top4_shift1", "agree_top1_shift2", "agree_top4_shift2",
        "tau_chain", "tau_chain_far", "tau_top4", "target_loss",
    ]  # fmt: skip
    short = measured(models, np.repeat([[1.0, 0.0]], 4, 1).reshape(1, 8).repeat(2, 0))
    assert list(short) == [name for name in full if name != "tau_chain_far"]
    assert measured(models, np.zeros((2, 8))) == {}
