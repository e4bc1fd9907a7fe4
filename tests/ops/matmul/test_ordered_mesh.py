"""Matmuls of one order on a mesh: shares in the order of their shape, added up by the devices'."""

from collections.abc import Callable, Iterator, Sequence
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
from tests.ops.attention.interpreted import interpret_devices_apart
from tests.ops.matmul.test_few_rows import exact, silu
from tests.ops.test_partitioned import collectives

pytestmark = pytest.mark.full

WIDTH, HEADS, INNER, VOCABULARY = 64, (4, 1, 64), 256, 64
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


def calls(
    x: jax.Array, inner: jax.Array, weights: Sequence[jax.Array]
) -> Iterator[tuple[Callable[..., jax.Array], tuple[jax.Array, ...]]]:
    """The matmuls of a layer and of a head, with their operands."""
    heads, bias, gate_up, down, table = weights
    yield ordered.matmul, (x, heads, bias)
    yield partial(ordered.matmul, gated=True), (x, gate_up)
    yield ordered.matmul, (x, gate_up)
    yield added, (x, inner, down)
    yield ordered.head_matmul, (x, table)


def added(x: jax.Array, inner: jax.Array, down: jax.Array) -> jax.Array:
    """The partials of a matmul are of use with what reads them."""
    return layer.add(x, ordered.matmul(inner, down, split=True))


def computed(mesh: Mesh, *shape: int) -> list[np.ndarray]:
    """Results of the first rows, in one axis."""
    operands = rows(*shape)
    x, inner = (jax.device_put(each, NamedSharding(mesh, P())) for each in operands)
    results = []
    with use_mesh(mesh.abstract_mesh):
        for op, operands in calls(x, inner, weights(mesh)):
            # A function of its own: jax would keep what it traced with other kernels.
            found = jax.jit(lambda *operands, op=op: op(*operands))(*operands)
            results.append(np.float64(found).reshape(-1, *found.shape[len(shape) :]))
    return results


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


def test_partials_are_those_of_the_devices_in_their_order() -> None:
    """In 16 bits; where a mesh does not cut the contraction, the matmul itself."""
    inner, down = rows(1, 8)[1], normal(3, INNER, WIDTH, dtype="bfloat16")

    def partials(**axes: int) -> jax.Array:
        mesh = make_mesh(**axes)
        operands = jax.device_put((inner, down), NamedSharding(mesh, P()))
        with use_mesh(mesh.abstract_mesh):
            return jax.jit(lambda *each: ordered.matmul(*each, split=True))(*operands)

    found = partials(data=2, tp=4)
    assert found.shape == (4, 1, 8, WIDTH) and found.dtype == jnp.bfloat16
    for part, x, weights in zip(
        found, jnp.split(inner, 4, axis=-1), jnp.split(down, 4), strict=True
    ):
        assert relative_error(part, exact(x, weights)) <= TOLERANCE["bfloat16"]
    assert partials(data=2).shape == (1, 1, 8, WIDTH)


def test_nothing_is_reduced_between_devices() -> None:
    """An all-reduce adds up in an order that its library chooses. Only partials are gathered."""
    mesh = make_mesh(data=2, tp=4)
    x, inner = rows(4, 16)
    x = jax.device_put(x, NamedSharding(mesh, P(BATCH[0])))
    inner = jax.device_put(inner, NamedSharding(mesh, P(BATCH[0], None, "tp")))

    def kinds(op: Callable[..., jax.Array], *operands: jax.Array) -> set[str]:
        with use_mesh(mesh.abstract_mesh):
            return collectives(jax.jit(op).lower(*operands).compile(ALL_PASSES).as_text())

    held = weights(mesh)
    for op, operands in calls(x, inner, held):
        assert kinds(op, *operands) == ({"all-gather"} if op is added else set())
    assert kinds(jnp.matmul, inner, held[3]) == {"all-reduce"}


@pytest.mark.slow
@pytest.mark.skipif(not hardware.mosaic_is_supported(), reason="needs jax 0.11 or newer")
@pytest.mark.parametrize("axes", MESHES[2:], ids=str)
def test_interpreted_kernels_keep_a_row_s_bits(
    axes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone on every device, and next to 63 others that are shared out."""
    interpret_matmuls(monkeypatch)
    mesh = make_mesh(**axes)
    alone, whole = computed(mesh, 1, 1), computed(mesh, 8, 8)
    for ours, many, right in zip(alone, whole, expected(), strict=True):
        assert relative_error(many, right) <= TOLERANCE["bfloat16"]
        np.testing.assert_array_equal(ours, many[:1])


def interpret_matmuls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the kernels for Hopper GPUs in Pallas' interpreter, on several devices."""
    from jax.experimental.pallas.mosaic_gpu import InterpretGPUParams

    monkeypatch.setattr(hardware, "require_one_order", lambda kernel: True)
    interpret_devices_apart(monkeypatch)
    for name in ("matmul", "head_matmul"):
        interpreted = partial(getattr(ordered_mosaic, name), interpret=InterpretGPUParams())
        monkeypatch.setattr(ordered_mosaic, name, interpreted)
