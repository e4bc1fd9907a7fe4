"""Stored parameters are taken as they are: no trace of a model traces how it would begin."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from longspec_jax.models.layers import parameter


class Scale(nn.Module):
    initial: Any

    @nn.compact
    def __call__(self) -> jax.Array:
        return parameter(self, "scale", self.initial, [3], jnp.float32)


def test_a_stored_parameter_needs_no_initialiser() -> None:
    stored = jnp.arange(3.0)
    model = Scale(lambda *_: pytest.fail("traced"))
    assert model.apply({"params": {"scale": stored}}) is stored
    with pytest.raises(ValueError, match=r"stored scale has the shape \(4,\), .* says \(3,\); use"):
        model.apply({"params": {"scale": jnp.zeros(4)}})


def test_a_model_that_is_initialised_has_its_initial_values() -> None:
    variables: Any = Scale(nn.initializers.ones).init(jax.random.key(0))
    assert variables["params"]["scale"].tolist() == [1, 1, 1]
