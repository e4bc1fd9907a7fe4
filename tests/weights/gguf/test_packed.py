"""Matrices that stay in a file's bits have the weights of those that are dequantised."""

from functools import partial
from itertools import cycle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax import LongSpec, loading, make_mesh
from longspec_jax.ops.matmul.quantised_weights import QuantisedMatrix
from longspec_jax.weights.hf import load_target, target_bytes
from tests.models.families import make_model
from tests.weights.gguf.files import write_model
from tests.weights.gguf.test_load import OVERRIDES

MIXED = "Q4_K", "Q6_K", "Q4_1", "Q8_0", "Q5_0", "IQ4_NL", "Q4_0", "Q5_K", "F16"
WIDE = dict(hidden_size=256, intermediate_size=256, head_dim=64, vocab_size=128)
_FULL = dict(global_head_dim=128)  # Of Gemma 4.


def written(path, case, family, **overrides):
    """A file of a model whose matrices are of all types in turn, and its LM head of Q6_K."""
    kinds = cycle(MIXED)

    def types(name, weights):
        if weights.ndim < 2:
            return "F32"
        return "Q6_K" if name == "output.weight" else next(kinds)

    own = _FULL if family == "Gemma4Text" else {}
    model = make_model(case, **{**OVERRIDES.get(case, {}), **WIDE, **own, **overrides})
    write_model(path, model, family, types)
    return path


def is_matrix(leaf):
    return isinstance(leaf, QuantisedMatrix)


@pytest.mark.parametrize(
    ("case", "family"),
    [
        ("llama3", "Llama"),
        ("qwen2-yarn", "Qwen2"),
        ("phi3", "Phi3"),
        ("gemma3", "Gemma3Text"),
        ("gemma4", "Gemma4Text"),
    ],
)
def test_packed_weights_are_the_dequantised_ones(tmp_path, case, family):
    """Bit for bit in float32: rows of llama's pairs, mixed types that are multiplied together."""
    path = written(tmp_path / "model.gguf", case, family)
    _, whole = load_target(path, dtype="float32")
    assert not any(map(is_matrix, jax.tree.leaves(whole, is_leaf=is_matrix)))
    config, packed = load_target(path, dtype="float32", packed=True)
    assert config.tied_embeddings or is_matrix(packed["head"])
    matrices = [leaf for leaf in jax.tree.leaves(packed, is_leaf=is_matrix) if is_matrix(leaf)]
    assert len(matrices) >= 4
    assert any(matrix.offset is not None for matrix in matrices)

    def dequantised(leaf):
        return leaf.kernel(jnp.float32) if is_matrix(leaf) else leaf

    unpacked = jax.tree.map(dequantised, packed, is_leaf=is_matrix)
    if not config.tied_embeddings:
        unpacked["head"] = unpacked["head"].T
    jax.tree.map(
        lambda one, other: np.testing.assert_array_equal(one.reshape(other.shape), other),
        unpacked,
        whole,
    )
    stored, loaded = (
        sum(leaf.nbytes for leaf in jax.tree.leaves(params)) for params in (packed, whole)
    )
    assert target_bytes(path, dtype="float32", packed=True) == stored < loaded
    assert target_bytes(path, dtype="float32") == loaded


def test_a_mesh_cuts_them_as_other_quantised_weights(tmp_path):
    """Heads, the width of an MLP and the vocabulary, and the inputs after them."""
    path = written(tmp_path / "model.gguf", "llama3", "Llama")
    _, alone = load_target(path, dtype="float32", packed=True)
    _, cut = load_target(path, dtype="float32", packed=True, mesh=make_mesh(tp=2))
    jax.tree.map(np.testing.assert_array_equal, cut, alone)
    layer = cut["layers_0"]
    for matrix, axis in (
        (cut["head"], 0),
        (layer["attention"]["qkv"]["fused"]["kernel"], 0),
        (layer["attention"]["out"]["kernel"], 1),
        (layer["mlp"]["gate_up"]["kernel"], 1),
        (layer["mlp"]["down"]["kernel"], 1),
    ):
        assert matrix.codes.sharding.spec[axis] == "tp"


def test_what_no_kernel_reads_is_dequantised(tmp_path):
    """Outputs in no multiple of 64; a step would dequantise them every time."""
    path = written(tmp_path / "model.gguf", "llama3", "Llama", head_dim=32, vocab_size=97)
    _, params = load_target(path, dtype="float32", packed=True)
    assert not is_matrix(params["head"])
    layer = params["layers_0"]
    assert not is_matrix(layer["attention"]["qkv"]["fused"]["kernel"])
    assert is_matrix(layer["mlp"]["down"]["kernel"])


@pytest.mark.full
def test_text_is_that_of_the_dequantised_model(tmp_path, monkeypatch):
    path = written(tmp_path / "model.gguf", "llama3", "Llama")
    prompts = [[3, 5, 7, 11, 3, 5], [2, 4, 6]]
    options = dict(max_new_tokens=12, temperature=0, eos_token_id=[])

    def decoded():
        spec = LongSpec.from_pretrained(path, "ngram", dtype="float32")
        return spec.precision, spec.generate(prompts, tree="2,1", **options).sequences

    precision, expected = decoded()
    assert precision.startswith("float32, dequantised from ")
    own = loading.load_target
    monkeypatch.setattr(loading, "load_target", partial(own, packed=True))
    precision, found = decoded()
    assert precision.startswith("weights Q")
    assert precision.endswith(", activations float32")
    assert found == expected


def test_a_gpu_keeps_them_only_in_16_bits(tmp_path, monkeypatch):
    path = written(tmp_path / "model.gguf", "llama3", "Llama")
    whole = {dtype: target_bytes(path, dtype=dtype) for dtype in ("bfloat16", "float32")}
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert target_bytes(path, dtype="bfloat16") < whole["bfloat16"]
    assert target_bytes(path, dtype="float32") == whole["float32"]
