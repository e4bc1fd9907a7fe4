"""Matrices that stay in a file's bits have the weights of those that are dequantised."""

from itertools import cycle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.ops.matmul.quantised_weights import QuantisedMatrix
from longspec_jax.weights import hf
from longspec_jax.weights.hf import load_target, target_bytes
from tests.models.families import make_model
from tests.weights.gguf.files import write_model
from tests.weights.gguf.test_load import OVERRIDES

MIXED = "Q4_K", "Q6_K", "Q4_1", "Q8_0", "Q5_0", "IQ4_NL", "Q4_0", "Q5_K", "F16"


@pytest.mark.parametrize(
    ("case", "family"),
    [("llama3", "Llama"), ("qwen2-yarn", "Qwen2"), ("phi3", "Phi3"), ("gemma3", "Gemma3Text")],
)
def test_packed_weights_are_the_dequantised_ones(tmp_path, monkeypatch, case, family):
    """Bit for bit in float32: rows of llama's pairs, mixed types that are multiplied together."""
    wide = dict(hidden_size=256, intermediate_size=256, head_dim=64)
    model = make_model(case, **{**OVERRIDES.get(case, {}), **wide})
    kinds = cycle(MIXED)

    def types(name, weights):
        return next(kinds) if weights.ndim > 1 else "F32"

    path = tmp_path / "model.gguf"
    write_model(path, model, family, types)
    _, whole = load_target(path, dtype="float32")
    monkeypatch.setattr(hf, "reads_packed", lambda dtype: True)
    config, packed = load_target(path, dtype="float32")
    matrices = []

    def dequantised(leaf):
        if not isinstance(leaf, QuantisedMatrix):
            return leaf
        matrices.append(leaf)
        return leaf.kernel(jnp.float32)

    is_matrix = lambda leaf: isinstance(leaf, QuantisedMatrix)  # noqa: E731
    unpacked = jax.tree.map(dequantised, packed, is_leaf=is_matrix)
    jax.tree.map(
        lambda one, other: np.testing.assert_array_equal(one.reshape(other.shape), other),
        unpacked,
        whole,
    )
    assert len(matrices) >= 4
    assert any(matrix.offset is not None for matrix in matrices)
    stored = sum(leaf.nbytes for leaf in jax.tree.leaves(packed))
    assert target_bytes(path, dtype="float32") == stored < sum(map(nbytes, jax.tree.leaves(whole)))


def nbytes(leaf):
    return leaf.nbytes
