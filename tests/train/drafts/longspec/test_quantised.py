"""A draft learns of a quantised target what it learns of the dequantised weights."""

from pathlib import Path

import jax
import pytest

from contrib.quantise import quantise
from longspec_jax.sharding import make_mesh
from longspec_jax.weights.hf import load_target, save_target
from tests.kit import random_target, relative_error, tiny_target_config
from tests.weights.quantised.test_load import dequantised, matrices
from train.config import StageConfig
from train.drafts.base import Given
from train.drafts.kinds import LongSpecSettings

from .. import steps as tiny

STAGE = StageConfig("short", 13, 4, 2, tiny.RATE, 4, 0, 0.0, 0)
SETTINGS = LongSpecSettings("longspec", "", 5, True, 4, 3, distillation=0.7)
WHOLE = tiny_target_config(
    vocab_size=48, model_width=128, mlp_width=128, num_layers=2, num_heads=4, num_kv_heads=2,
    head_width=32, max_positions=64,
)  # fmt: skip


@pytest.mark.parametrize("form", ["fp8", "w4a16"])
def test_the_steps_are_those_of_the_dequantised_weights(form: str, tmp_path: Path) -> None:
    """On one device and, with the codes spread, on two."""
    original = random_target(WHOLE)
    save_target(tmp_path / "whole", WHOLE, original)
    quantise(tmp_path / "whole", form, tmp_path / form)
    data = tiny.random_batch((2, 2), STAGE.seq_len)

    def trained(params: object = None, **axes: int) -> tiny.Trained:
        mesh = make_mesh(**axes)
        config, stored = load_target(tmp_path / form, dtype="float32", mesh=mesh)
        assert len(matrices(stored)) == 4 * WHOLE.num_layers
        params = stored if params is None else params
        given = Given(config, params, (STAGE,), 3, "float32", mesh, pytest.fail)
        return tiny.four_steps(SETTINGS, given, data, 90)

    quantised = trained()
    exact = dequantised(load_target(tmp_path / form, dtype="float32")[1])
    exact = jax.tree.map(lambda leaf, like: leaf.reshape(like.shape), exact, original)
    tiny.assert_same_steps(quantised, trained(exact))
    tiny.assert_same_steps(quantised, trained(fsdp=2))
    losses = [each.metrics[-1]["loss"] for each in (quantised, trained(original))]
    assert relative_error(*losses) > 1e-4
