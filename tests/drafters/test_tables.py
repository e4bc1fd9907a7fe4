"""Whose factors the tables of a draft over the target's features have."""

from typing import Any

import jax.numpy as jnp

from longspec_jax.config.target import TargetConfig
from longspec_jax.drafters.tables import TableParams
from longspec_jax.models.target import target_logits
from tests.drafters.eagle3.toys import config_for
from tests.kit import normal, random_target, relative_error, tiny_target_config

TARGET = tiny_target_config(embedding_factor=3.0, logits_divisor=4.0, logit_cap=0.5)
WEIGHTS = random_target(TARGET)
TOKENS, HIDDEN = jnp.asarray([[3, 50]]), 4 * normal(0, 1, 2, TARGET.model_width)


def bound(target: TargetConfig = TARGET, **tables: Any) -> TableParams:
    layer = {"kernel": normal(1, 4, 4), **tables}
    return TableParams.bound(layer, config_for(TARGET), target, WEIGHTS)


def products(table: Any) -> Any:
    return jnp.einsum("btd,vd->btv", HIDDEN, table, precision="highest")


def test_tables_of_the_target_have_its_factors() -> None:
    draft = bound()
    embedded = 3 * WEIGHTS["embedding"][TOKENS]
    assert relative_error(draft.embedded(TOKENS), embedded) < 1e-6
    expected = 0.5 * jnp.tanh(products(WEIGHTS["head"]) / 4 / 0.5)
    assert relative_error(draft.logits(HIDDEN), expected) < 1e-5
    found = target_logits(products(WEIGHTS["head"]), TARGET.logits_divisor, TARGET.logit_cap)
    assert relative_error(found, expected) < 1e-6
    small = draft.in_int8()
    assert small.own_head and relative_error(small.logits(HIDDEN), expected) < 0.02


def test_tables_that_are_stored_are_read_as_they_are() -> None:
    """An embedding that equals the target's is kept once, and was trained without the factor."""
    head = normal(2, *WEIGHTS["head"].shape)
    draft = bound(embedding=WEIGHTS["embedding"] + 0, head=head)
    assert not draft.own_embedding and draft.embedding is WEIGHTS["embedding"]
    assert relative_error(draft.embedded(TOKENS), WEIGHTS["embedding"][TOKENS]) == 0
    assert relative_error(draft.logits(HIDDEN), products(head)) < 1e-5
