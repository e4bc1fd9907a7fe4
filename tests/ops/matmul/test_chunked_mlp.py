"""An MLP in chunks of tokens against the same one in one piece."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from longspec_jax.config.names import BATCH_AXES
from longspec_jax.ops.matmul.chunked_mlp import chunked_mlp
from longspec_jax.ops.matmul.few_rows import matmul_xla
from longspec_jax.ops.partitioned import use_mesh
from longspec_jax.sharding import make_mesh
from tests.kit import ALL_PASSES, each_row, relative_error

WIDTH, INNER = 24, 40


def inputs(rows: int, length: int, dtype: Any = jnp.float32) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(5), 4)
    shapes = (rows, length, WIDTH), (WIDTH, 2, INNER), (INNER, WIDTH), (rows, length, WIDTH)
    arrays = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    return tuple(array.astype(dtype) for array in arrays)


def plain(x: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    return matmul_xla(matmul_xla(x, gate_up, gated=True), down)


def plain_gelu(x: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    """By the tanh formula, written out."""
    gate, up = (matmul_xla(x, gate_up[:, half]) for half in (0, 1))
    cubic = (2 / jnp.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    return matmul_xla(0.5 * gate * (1 + jnp.tanh(cubic)) * up, down)


def value_and_gradients(function: Any, *arrays: jax.Array) -> Any:
    def loss(x: jax.Array, gate_up: jax.Array, down: jax.Array, to: jax.Array) -> Any:
        out = function(x, gate_up, down)
        return jnp.sum((out * to).astype(jnp.float32)), out

    return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*arrays)


@each_row("gelu", [False, True])
@each_row(
    ("rows", "length", "chunk", "dtype"),
    [(1, 24, 8, "float32"), (3, 13, 12, "float32"), (2, 5, 99, "float32"), (2, 8, 1, "bfloat16")],
)
def test_value_and_gradients_are_those_of_one_piece(
    rows: int, length: int, chunk: int, dtype: str, gelu: bool
) -> None:
    bound = {"float32": 1e-5, "bfloat16": 2e-2}[dtype]
    arrays = inputs(rows, length, dtype)
    ours = value_and_gradients(lambda *a: chunked_mlp(*a, chunk=chunk, gelu=gelu), *arrays)
    definition = plain_gelu if gelu else plain
    wide = (array.astype(jnp.float32) for array in arrays)
    for actual, wanted in zip(
        *map(jax.tree.leaves, (ours, value_and_gradients(definition, *wide))), strict=True
    ):
        assert actual.dtype == dtype
        assert relative_error(actual.astype(jnp.float32), wanted) < bound


def test_what_is_inside_exists_for_one_chunk_only() -> None:
    arrays = inputs(1, 4096)
    whole = 4096 * INNER * 4

    def temporary_bytes(chunk: int) -> int:
        loss = jax.grad(lambda *a: jnp.sum(chunked_mlp(*a, chunk=chunk)), (0, 1, 2))
        return (
            jax.jit(loss)
            .lower(*arrays[:3])
            .compile(ALL_PASSES)
            .memory_analysis()
            .temp_size_in_bytes
        )

    assert temporary_bytes(4096) - temporary_bytes(256) > 3 * whole


@pytest.mark.full
@pytest.mark.parametrize("axes", [{"fsdp": 4}, {"data": 2, "tp": 2}], ids=str)
def test_devices_change_nothing_and_add_up_their_gradients_once(axes: dict[str, int]) -> None:
    mesh, arrays = make_mesh(**axes), inputs(4, 12)
    batch = P(BATCH_AXES, None, None)
    specs = batch, P("fsdp", None, "tp"), P("tp", "fsdp"), batch

    def loss(x: jax.Array, gate_up: jax.Array, down: jax.Array, to: jax.Array) -> jax.Array:
        with use_mesh(mesh.abstract_mesh):
            return jnp.sum(chunked_mlp(x, gate_up, down, chunk=3) * to)

    places = [NamedSharding(mesh, spec) for spec in specs]
    gradients = jax.jit(
        jax.grad(loss, (0, 1, 2)), in_shardings=places, out_shardings=tuple(places[:3])
    )
    compiled = gradients.lower(*arrays).compile(ALL_PASSES)
    expected, _ = value_and_gradients(plain, *arrays)
    placed = [jax.device_put(array, place) for array, place in zip(arrays, places, strict=True)]
    for actual, wanted in zip(compiled(*placed), expected, strict=True):
        assert relative_error(actual, wanted) < 1e-5
    # Within the loop only tp adds up, over tokens: no array there is as wide as the weights.
    loops = compiled.as_text().split("ENTRY")[0]
    inside = [
        line
        for line in loops.splitlines()
        if any(f" {name}(" in line for name in ("all-reduce", "all-gather", "reduce-scatter"))
    ]
    assert ("tp" in axes) == bool(inside)
    assert not any(f"{INNER // axes.get('tp', 1)}" in line.split("(")[0] for line in inside)
