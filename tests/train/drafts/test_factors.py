"""A target's factors on embeddings and logits, in the training of drafts that read its tables."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.sharding import make_mesh
from tests.kit import in_tiers, random_target, relative_error, tiny_target_config
from train.config import StageConfig
from train.drafts import dflash, eagle3
from train.drafts.base import TrainContext
from train.drafts.kinds import DFlashSettings, Eagle3Settings
from train.step import Batch

PLAIN = tiny_target_config(vocab_size=48, model_width=16, mlp_width=20, num_heads=4, head_width=8)
FACTORS: dict[str, Any] = dict(embedding_factor=3.0, logits_divisor=4.0)
STAGE = StageConfig("short", 11, 2, 1, 1e-2, 2, 0, 0.0, 0)
KINDS: dict[str, tuple[Any, Any]] = {
    "dflash": (dflash.begin, DFlashSettings("dflash", "", 2, "0,1", 4, -1, 3, 2.0)),
    "eagle3": (eagle3.begin, Eagle3Settings("eagle3", "", "0,1", 48, 2, 0.5)),
}


@pytest.mark.parametrize("kind", in_tiers(KINDS, "eagle3"))
def test_factors_are_those_of_tables_multiplied(kind: str) -> None:
    """A table times the factor, without it, has the same loss and gradient; so has the head."""
    begin, settings = KINDS[kind]
    random = np.random.default_rng(0)
    tokens = jnp.asarray(random.integers(0, PLAIN.vocab_size, (2, STAGE.seq_len)), jnp.int32)
    batch, weights = Batch(tokens, jnp.ones(tokens.shape)), random_target(PLAIN)
    multiplied = {**weights, "embedding": 3 * weights["embedding"], "head": weights["head"] / 4}

    def of(target: Any, params: Any) -> tuple[Any, Any]:
        counts = lambda: np.arange(PLAIN.vocab_size)  # noqa: E731
        given = TrainContext(target, params, (STAGE,), 3, "float32", make_mesh(), counts)
        begun = begin(settings, given)
        objective = begun.trainer.objective(STAGE, 30, 0)
        draft = jax.jit(objective.initialize)(jax.random.key(1))
        draw = jax.jit(objective.draw, static_argnums=(1, 2))
        draws = jax.tree.map(lambda leaf: leaf[0], draw(jax.random.key(2), (1, 2), STAGE.seq_len))

        def loss(draft: Any) -> Any:
            return objective.sums(draft, begun.frozen, batch, draws)["loss"]

        return jax.jit(jax.value_and_grad(loss))(draft)

    found, expected = of(replace(PLAIN, **FACTORS), weights), of(PLAIN, multiplied)
    unscaled = of(PLAIN, weights)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), found, expected)
    assert relative_error(found[0], expected[0]) < 1e-5
    assert relative_error(unscaled[0], expected[0]) > 1e-4
