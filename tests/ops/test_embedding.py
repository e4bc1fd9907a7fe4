"""Rows of tables that a mesh cuts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.ops.embedding import look_up
from longspec_jax.ops.partitioned import use_mesh
from longspec_jax.sharding import make_mesh, param_shardings
from tests.kit import each_row, normal

pytestmark = pytest.mark.full

MESHES = [{"tp": 2}, {"data": 2, "tp": 4}, {"data": 2}, {"fsdp": 2, "tp": 2}]


@each_row("axes", MESHES)
@each_row("vocabulary", [64, 66, 67])
def test_a_cut_table_has_the_rows_of_a_whole_one(axes: dict[str, int], vocabulary: int) -> None:
    """Rows and gradients, with tokens at both ends of every share."""
    mesh = make_mesh(**axes)
    table = jnp.asarray(normal(0, vocabulary, 8), jnp.bfloat16)
    ends = np.linspace(0, vocabulary, 9, dtype=int)
    tokens = jnp.asarray(np.stack([ends[:-1], ends[1:] - 1]))
    weights = jnp.asarray(normal(1, 2, 8, 8))

    def weighed(table: jax.Array) -> tuple[jax.Array, jax.Array]:
        with use_mesh(mesh.abstract_mesh):
            rows = look_up(table, tokens)
        return (rows * weights).sum(), rows

    both = jax.jit(jax.value_and_grad(weighed, has_aux=True))
    placed = table
    if vocabulary == 64:  # What loads a target leaves a table whole that has no equal shares.
        placed = jax.device_put(table, param_shardings(mesh, {"embedding": table})["embedding"])
    with jax.set_mesh(mesh):
        (_, rows), gradient = both(placed)
    np.testing.assert_array_equal(rows, table[tokens])
    expected = jax.grad(lambda table: (table[tokens] * weights).sum())(table)
    np.testing.assert_array_equal(gradient, expected)


@each_row("count", [1, 16])
def test_no_device_reads_more_than_its_share(count: int) -> None:
    """XLA for a GPU turned the lookup of one token into a slice of a gathered table."""
    mesh = make_mesh(tp=4)
    table = jax.ShapeDtypeStruct((64, 8), jnp.bfloat16)
    tokens = jax.ShapeDtypeStruct((1, count), jnp.int32)

    def rows(table: jax.Array, tokens: jax.Array) -> jax.Array:
        with use_mesh(mesh.abstract_mesh):
            return look_up(table, tokens)

    with jax.set_mesh(mesh):
        text = jax.jit(rows).lower(table, tokens).as_text()
    [gather] = [line for line in text.splitlines() if "stablehlo.gather" in line]
    assert "(tensor<16x8xbf16>" in gather
