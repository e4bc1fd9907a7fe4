"""Matmuls of one order on a mesh: shares in the order of their shape, added up by the devices'."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from longspec_jax.ops import hardware, layer
from longspec_jax.ops.matmul import ordered, ordered_mosaic
from longspec_jax.ops.partitioned import use_mesh
from longspec_jax.sharding import BATCH, make_mesh
from tests.kit import ALL_PASSES, TOLERANCE, normal, relative_error
from tests.ops.matmul.test_few_rows import exact, silu
from tests.ops.test_partitioned import collectives

WIDTH, HEADS, INNER, VOCABULARY = 128, (4, 3, 64), 256, 64
WEIGHTS = {
    "heads": ((WIDTH, *HEADS), P("fsdp", "tp")),
    "bias": (HEADS, P("tp")),
    "gate_up": ((WIDTH, 2, INNER), P("fsdp", None, "tp")),
    "down": ((INNER, WIDTH), P("tp", "fsdp")),
    "table": ((VOCABULARY, WIDTH), P("tp", "fsdp")),
}
"""Shapes, and where they lie."""
MESHES = [{"data": 2}, {"tp": 2}, {"tp": 4}, {"data": 2, "tp": 2}]


def weights(mesh: Mesh) -> list[jax.Array]:
    """Random ones, on a mesh."""
    return [
        jax.device_put(normal(i, *shape, dtype="bfloat16"), NamedSharding(mesh, where))
        for i, (shape, where) in enumerate(WEIGHTS.values())
    ]


def rows(*shape: int) -> tuple[jax.Array, jax.Array]:
    """The first rows of a model's width, and of an MLP's, of one set of 64."""
    count = int(np.prod(shape))
    return tuple(
        normal(seed, 64, width, dtype="bfloat16")[:count].reshape(*shape, width)
        for seed, width in ((8, WIDTH), (9, INNER))
    )


def every_op(x: jax.Array, inner: jax.Array, *weights: jax.Array) -> tuple[jax.Array, ...]:
    heads, bias, gate_up, down, table = weights
    return (
        ordered.matmul(x, heads, bias),
        ordered.gated_matmul(x, gate_up),
        ordered.matmul(x, gate_up),
        layer.add(x, ordered.matmul_partials(inner, down)),
        ordered.head_matmul(x, table),
    )


def computed(mesh: Mesh, *shape: int) -> list[np.ndarray]:
    """Results of the first rows, in one axis."""
    x, inner = (jax.device_put(each, NamedSharding(mesh, P())) for each in rows(*shape))
    with use_mesh(mesh.abstract_mesh):
        found = jax.jit(lambda *operands: every_op(*operands))(x, inner, *weights(mesh))
    return [np.float64(each).reshape(-1, *each.shape[2:]) for each in found]


def expected() -> Sequence[np.ndarray]:
    """Of all rows, in float64."""
    x, inner = rows(64)
    heads, bias, gate_up, down, table = (
        normal(i, *shape, dtype="bfloat16") for i, (shape, _) in enumerate(WEIGHTS.values())
    )
    both = exact(x, gate_up)
    return (
        exact(x, heads) + np.float64(bias),
        silu(both[:, 0]) * both[:, 1],
        both,
        np.float64(x) + exact(inner, down),
        exact(x, table.T),
    )


@pytest.mark.parametrize("axes", [*MESHES, {"fsdp": 2, "tp": 2}], ids=str)
def test_shares_make_the_whole(axes: dict[str, int]) -> None:
    for ours, right in zip(computed(make_mesh(**axes), 4, 16), expected(), strict=True):
        assert relative_error(ours, right) <= TOLERANCE["bfloat16"]


def test_nothing_is_reduced_between_devices() -> None:
    """An all-reduce adds up in an order that its library chooses. Partials alone are gathered."""
    mesh = make_mesh(data=2, tp=4)
    x, inner = rows(4, 16)
    x = jax.device_put(x, NamedSharding(mesh, P(BATCH[0])))
    inner = jax.device_put(inner, NamedSharding(mesh, P(BATCH[0], None, "tp")))

    def program(op, *operands: jax.Array) -> set[str]:
        with use_mesh(mesh.abstract_mesh):
            return collectives(jax.jit(op).lower(*operands).compile(ALL_PASSES).as_text())

    heads, bias, gate_up, down, table = weights(mesh)
    assert program(ordered.matmul, x, heads, bias) == set()
    assert program(ordered.gated_matmul, x, gate_up) == set()
    assert program(ordered.head_matmul, x, table) == set()

    def added(x: jax.Array, inner: jax.Array, down: jax.Array) -> jax.Array:
        return layer.add(x, ordered.matmul_partials(inner, down))

    assert program(added, x, inner, down) == {"all-gather"}
    assert program(lambda inner, down: inner @ down, inner, down) == {"all-reduce"}


@pytest.mark.skipif(not hardware.mosaic_is_supported(), reason="needs jax 0.11 or newer")
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_interpreted_kernels_keep_a_row_s_bits(
    axes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone on every device, as one of eight of a row of the batch, and beside 63 others."""
    interpret_matmuls(monkeypatch)
    mesh = make_mesh(**axes)
    whole = computed(mesh, 8, 8)
    for ours, right in zip(whole, expected(), strict=True):
        assert relative_error(ours, right) <= TOLERANCE["bfloat16"]
    for shape in ((1, 1), (1, 8)):
        for few, many in zip(computed(mesh, *shape), whole, strict=True):
            np.testing.assert_array_equal(few, many[: len(few)])


def interpret_matmuls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the kernels for Hopper GPUs in Pallas' interpreter, on several devices."""
    from jax._src.pallas.mosaic_gpu.interpret.shared_memory import GPUSharedMemory
    from jax.experimental.pallas.mosaic_gpu import InterpretGPUParams

    monkeypatch.setattr(hardware, "require_hopper", lambda kernel: None)
    # It asks when one device is done, of the barriers of all.
    monkeypatch.setattr(GPUSharedMemory, "assert_no_barriers_allocated", lambda memory: None)
    for name in ("matmul", "head_matmul"):
        interpreted = partial(getattr(ordered_mosaic, name), interpret=InterpretGPUParams())
        monkeypatch.setattr(ordered_mosaic, name, interpreted)
