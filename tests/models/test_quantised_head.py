"""A target whose LM head is quantised, and drafts that share it."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.decoding.target import TargetModel
from longspec_jax.drafters.longspec import LongSpecParams
from longspec_jax.models.target import head_of
from longspec_jax.ops import hardware
from longspec_jax.ops.matmul.packed_shares import PackedShares, packed_params
from longspec_jax.ops.matmul.quantised_weights import QuantisedMatrix
from longspec_jax.sharding import make_mesh, param_shardings
from tests.kit import normal, random_target, relative_error, tiny_target_config

CONFIG = tiny_target_config(vocab_size=128, model_width=32, tied_embeddings=False)


def quantised(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters with a head in 8 bits, in groups of 16."""
    table = params["head"].reshape(CONFIG.vocab_size, -1, 16)
    rounded = QuantisedMatrix.rounded(table)
    codes = rounded.codes.reshape(CONFIG.vocab_size, -1)
    return params | {"head": QuantisedMatrix(codes, rounded.scale[..., 0], group=16)}


def test_logits_are_those_of_the_dequantised_head() -> None:
    target, params = TargetModel(CONFIG), quantised(random_target(CONFIG))
    hidden = normal(0, 2, 3, CONFIG.model_width)
    whole = params | {"head": head_of(params)}
    assert whole["head"].shape == (CONFIG.vocab_size, CONFIG.model_width)
    found, expected = (target.unembed(each, hidden) for each in (params, whole))
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))
    assert relative_error(whole["head"], random_target(CONFIG)["head"]) < 0.01


def test_a_draft_takes_a_copy_of_it() -> None:
    params = random_target(CONFIG)
    assert not LongSpecParams.with_target_tables(params, {}).own_head
    shared = LongSpecParams.with_target_tables(quantised(params), {})
    assert shared.own_head and isinstance(shared.head, jax.Array)
    np.testing.assert_array_equal(shared.head, head_of(quantised(params)))


@pytest.mark.full
@pytest.mark.parametrize("axes", [{"tp": 2}, {"data": 2}], ids=str)
def test_a_mesh_shares_it_out(axes: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_target_config(
        vocab_size=128, model_width=32, tied_embeddings=False, dtype="bfloat16"
    )
    mesh, params = make_mesh(**axes), quantised(random_target(config))
    head = params["head"]
    fields = {"codes": head.codes, "scale": head.scale}
    placed = jax.device_put({"head": fields}, param_shardings(mesh, {"head": fields}))["head"]
    expected = np.float32(head.dequantised(jnp.bfloat16))
    monkeypatch.setattr(hardware, "require_hopper", lambda kernel: None)
    packed = packed_params({"head": head.replace(**placed)}, "bfloat16")["head"]
    assert isinstance(packed, PackedShares) and packed.out_axes == (128,)
    embedding = SimpleNamespace(dtype=jnp.bfloat16)
    found = head_of({"head": packed, "embedding": embedding})
    np.testing.assert_array_equal(np.float32(found), expected)
