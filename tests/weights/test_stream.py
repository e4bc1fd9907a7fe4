"""Slices of files into arrays of any sharding: the same values, little memory, every byte once."""

import tracemalloc
from contextlib import ExitStack

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.drafters.checkpoints.longspec import load_draft, save_draft
from longspec_jax.drafters.longspec import DraftConfig
from longspec_jax.sharding import make_mesh, param_shardings
from longspec_jax.weights import params as stream
from longspec_jax.weights.checkpoint import open_tensors
from longspec_jax.weights.hf import load_target, save_target
from longspec_jax.weights.params import assemble, load_params
from longspec_jax.weights.tables import target_table
from tests.kit import each_row, random_draft, random_target, tiny_target_config

# Divisible by every mesh below, and otherwise unlike each other.
SIZES = dict(
    vocab_size=88, model_width=40, mlp_width=56, num_heads=12, num_kv_heads=4, head_width=6
)
FAMILIES = {
    "Llama": dict(),
    "Qwen2": dict(qkv_bias=True),
    "Qwen3": dict(qk_norm=True, head_width=10, tied_embeddings=True),
}
MESHES = {
    "tp": dict(tp=4),
    "fsdp": dict(fsdp=8),
    "fsdp x tp": dict(fsdp=4, tp=2),
    "data x fsdp x tp": dict(data=2, fsdp=2, tp=2),
}


def _config(family="Llama", **overrides):
    fields = SIZES | dict(architecture=f"{family}ForCausalLM") | FAMILIES[family] | overrides
    return tiny_target_config(**fields)


def _assert_equal(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.fixture
def counted(monkeypatch):
    """Records the bytes of every read."""
    reads: list[int] = []
    original = stream._read

    def record(part, ranges, tensor):
        def read(index):
            values = tensor.read(index)
            reads.append(values.nbytes)
            return values

        return original(part, ranges, tensor._replace(read=read))

    monkeypatch.setattr(stream, "_read", record)
    return reads


@each_row(
    ("family", "mesh"),
    [*(("Llama", mesh) for mesh in MESHES), ("Qwen2", "tp"), ("Qwen3", "fsdp x tp")],
)
def test_sharded_equals_whole(tmp_path, family, mesh):
    config, mesh = _config(family), MESHES[mesh]
    save_target(tmp_path, config, random_target(config))
    _, whole = load_target(tmp_path)
    mesh = make_mesh(**mesh)
    loaded, sharded = load_target(tmp_path, mesh=mesh)
    assert loaded == config
    _assert_equal(sharded, whole)
    expected = param_shardings(mesh, sharded)
    assert jax.tree.map(lambda x: x.sharding, sharded) == expected
    assert len(sharded["embedding"].addressable_shards) == mesh.size


def test_sharded_draft_equals_whole(tmp_path):
    config = _config()
    draft = DraftConfig.for_target(config)
    save_draft(tmp_path, draft, random_draft(draft))
    _, whole = load_draft(tmp_path, config)
    _, sharded = load_draft(tmp_path, config, mesh=make_mesh(data=2, fsdp=2, tp=2))
    _assert_equal(sharded, whole)


def test_any_slice_of_a_fused_parameter(tmp_path, monkeypatch):
    """Also cuts through groups, heads and the borders between query, key and value."""
    monkeypatch.setattr(stream, "PIECE_BYTES", 100)
    config = _config("Qwen2")
    params = random_target(config)
    save_target(tmp_path, config, params)
    leaves = {leaf.path: leaf for leaf in target_table(config).leaves}
    attention = params["layers_0"]["attention"]
    rng = np.random.default_rng(0)
    with ExitStack() as stack:
        tensors = open_tensors(tmp_path, stack)
        for path, whole in (
            ("layers_0/attention/qkv/fused/kernel", attention["qkv"]["fused"]["kernel"]),
            ("layers_0/attention/qkv/fused/bias", attention["qkv"]["fused"]["bias"]),
            ("layers_0/attention/out/kernel", attention["out"]["kernel"]),
            ("layers_0/mlp/gate_up/kernel", params["layers_0"]["mlp"]["gate_up"]["kernel"]),
        ):
            for _ in range(20):
                edges = [sorted(rng.choice(size + 1, 2, replace=False)) for size in whole.shape]
                ranges = tuple((int(start), int(stop)) for start, stop in edges)
                actual = assemble(leaves[path], ranges, tensors, "float32")
                expected = np.asarray(whole)[tuple(slice(*edge) for edge in ranges)]
                np.testing.assert_array_equal(actual, expected)


def test_reads_are_small_and_every_byte_is_read_once(tmp_path, counted, monkeypatch):
    monkeypatch.setattr(stream, "PIECE_BYTES", 2000)
    config = _config()
    save_target(tmp_path, config, random_target(config))
    _, params = load_target(tmp_path)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert sum(counted) == total
    # One key/value head's queries are the smallest slice of a query projection.
    assert max(counted) <= max(2000, config.num_groups * config.head_width * config.model_width * 4)
    assert max(counted) < total / 50


def test_a_sharded_load_reads_every_byte_once(tmp_path, counted):
    """Replicated devices share a read; only norms, on every device, are read whole."""
    config = _config()
    save_target(tmp_path, config, random_target(config))
    _, params = load_target(tmp_path, mesh=make_mesh(data=2, fsdp=2, tp=2))
    assert sum(counted) == sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    embedding = params["embedding"]
    assert max(counted) <= embedding.nbytes // 4


def test_host_memory_holds_no_second_model(tmp_path):
    """Besides the arrays themselves, only the parameters being assembled."""
    config = tiny_target_config(
        vocab_size=512, model_width=256, mlp_width=512, head_width=64, num_layers=8
    )
    save_target(tmp_path, config, random_target(config))
    table = target_table(config)
    sizes = [4 * int(np.prod(leaf.shape)) for leaf in table.leaves]
    with ExitStack() as stack:
        tensors = open_tensors(tmp_path, stack)
        tracemalloc.start()
        params = load_params(table, tensors, "float32", mesh=None)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(params)) == sum(sizes)
    # The processor's "device" memory may be these very blocks: one model is allowed for.
    pieces = stream.READERS * 4 * stream.PIECE_BYTES
    assert peak <= sum(sizes) + stream.READERS * max(sizes) + pieces
    assert peak < 1.9 * sum(sizes)


@each_row(
    ("stored", "loaded"),
    [("bfloat16", "float32"), ("float32", "bfloat16"), ("float32", "float16"), ("float16",) * 2],
)
def test_casts_on_request(tmp_path, stored, loaded):
    config = _config(dtype=stored)
    params = random_target(config)
    save_target(tmp_path, config, params)
    read, actual = load_target(tmp_path, dtype=loaded)
    assert read.dtype == loaded
    _assert_equal(actual, jax.tree.map(lambda x: np.asarray(x).astype(jnp.dtype(loaded)), params))


def test_a_mesh_that_does_not_divide_is_refused(tmp_path):
    config = _config()
    save_target(tmp_path, config, random_target(config))
    with pytest.raises(ValueError, match="does not divide over mesh axis tp=8"):
        load_target(tmp_path, mesh=make_mesh(tp=8))


@each_row("dtype", ["bfloat16", "float16", "float32"])
def test_is_finite(dtype):
    values = np.ones((3, 5), jnp.dtype(dtype))
    values[0, 0] = jnp.finfo(dtype).max
    assert stream.is_finite(values) and stream.is_finite(values[:0])
    for value in (np.nan, np.inf, -np.inf):
        values[2, 3] = value
        assert not stream.is_finite(values)
