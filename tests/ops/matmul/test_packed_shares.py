"""Quantised weights on a mesh, of which every device has packed its share."""

from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from longspec_jax.ops import hardware, layer
from longspec_jax.ops.matmul import packed_shares, quantised
from longspec_jax.ops.matmul.packed_shares import PackedShares, pack_shares, packed_params
from longspec_jax.ops.matmul.quantised_weights import QuantisedMatrix
from longspec_jax.ops.partitioned import use_mesh
from longspec_jax.sharding import make_mesh
from tests.kit import ALL_PASSES, TOLERANCE, each_row, normal, relative_error
from tests.ops.attention.interpreted import interpret_devices_apart
from tests.ops.matmul.test_packed import Case
from tests.ops.test_partitioned import collectives

pytestmark = pytest.mark.full


class Shared(NamedTuple):
    """Weights, and the axis of ``[*out, C]`` that ``tp`` cuts."""

    case: Case
    cut: int


CASES = {
    "heads": Shared(Case("float8_e4m3fn", 192, (4, 3, 64)), 0),
    "gate and up": Shared(Case("uint8", 256, (2, 128), group=128, zeros=True, gated=True), 1),
    "whole gate and up": Shared(Case("int8", 128, (2, 128)), 1),
    "sorted inputs": Shared(Case("uint8", 256, (128,), group=64, order=True), 0),
    "down": Shared(Case("float8_e4m3fn", 512, (64,), split=True), 1),
    "down with edges": Shared(Case("int8", 384, (64,), zeros=True, split=True), 1),
    "down in groups": Shared(Case("uint8", 512, (128,), group=128, zeros=True, split=True), 1),
    "down with offsets": Shared(Case("uint8", 320, (64,), group=32, offset=True, split=True), 1),
    "heads in small groups": Shared(Case("int8", 144, (2, 64), group=16), 0),
}
MESHES = [{"data": 2}, {"tp": 2}, {"data": 2, "tp": 2}]


def spread(shared: Shared, mesh: Any) -> QuantisedMatrix:
    """The weights as they are loaded on a mesh."""

    def place(leaf: jax.Array, axes: int) -> jax.Array:
        spec = P(*("tp" if axis == shared.cut else None for axis in range(axes)))
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    matrix = shared.case.drawn()
    outs = len(matrix.out_axes)
    return matrix.replace(
        codes=place(matrix.codes, outs + 1),
        scale=place(matrix.scale, outs),
        zero=None if matrix.zero is None else place(matrix.zero, outs),
        order=None if matrix.order is None else place(matrix.order, 0),
        offset=None if matrix.offset is None else place(matrix.offset, outs),
    )


def multiplied(shared: Shared, mesh: Any, *shape: int, **options: Any) -> np.ndarray:
    """The first rows by packed shares, in one axis."""
    case = shared.case
    x, _, bias = case.operands(int(np.prod(shape)))
    x, bias = (
        None if each is None else jax.device_put(each, NamedSharding(mesh, P()))
        for each in (x.reshape(*shape, -1), bias)
    )
    weights = pack_shares(spread(shared, mesh), jnp.dtype("bfloat16"))
    if case.gated:
        op = partial(quantised.quantised_matmul, gated=True, **options)
    elif case.split:

        def op(x: jax.Array, weights: Any) -> jax.Array:
            return layer.added(quantised.quantised_matmul(x, weights, split=True, **options))
    else:
        op = partial(quantised.quantised_matmul, bias=bias, **options)
    with use_mesh(mesh.abstract_mesh):
        found = jax.jit(lambda *each: op(*each))(x, weights)
    return np.float64(found).reshape(-1, *found.shape[len(shape) :])


@each_row("axes", MESHES)
@each_row("name", CASES)
def test_packing_loses_nothing(name: str, axes: dict[str, int]) -> None:
    mesh, shared = make_mesh(**axes), CASES[name]
    matrix, packed = shared.case.drawn(), pack_shares(spread(shared, mesh), jnp.dtype("bfloat16"))
    assert (packed.out_axes, packed.inputs) == (matrix.out_axes, matrix.inputs)
    for leaf in jax.tree.leaves(packed):
        assert len(leaf) == mesh.shape["tp"] and leaf.sharding.shard_shape(leaf.shape)[0] == 1
    with use_mesh(mesh.abstract_mesh):
        plain = jax.jit(lambda packed: packed.plain())(packed)
    for field in ("codes", "scale", "zero", "order", "offset"):
        one, other = getattr(plain, field), getattr(matrix, field)
        assert (one is None) == (other is None), field
        if one is not None:
            np.testing.assert_array_equal(np.asarray(one), np.asarray(other), err_msg=field)


@each_row("axes", MESHES)
@each_row("name", CASES)
def test_shares_make_the_whole(
    name: str, axes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few rows, of which parts are gathered, and more, of which they are added up."""
    monkeypatch.setattr(quantised, "MOST_ROWS", 8)
    mesh, shared = make_mesh(**axes), CASES[name]
    right = shared.case.expected()
    # XLA's gate rounds both of its halves to 16 bits first.
    most = TOLERANCE["bfloat16"] * (1.5 if shared.case.gated else 1)
    for shape in ((1, 1), (2, 3), (4, 50)):
        found = multiplied(shared, mesh, *shape)
        assert relative_error(found, right[: len(found)]) <= most


@each_row(
    ("name", "rows", "ordered", "kinds"),
    [
        ("heads", 4, False, set()),
        ("down", 4, False, {"all-gather"}),
        ("down", 16, False, {"all-reduce"}),
        # In an order of its own, which an all-reduce has not.
        ("down", 16, True, {"all-gather"}),
    ],
)
def test_what_travels_between_devices(
    name: str, rows: int, ordered: bool, kinds: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantised, "MOST_ROWS", 8)
    mesh, shared = make_mesh(data=2, tp=2), CASES[name]
    weights = pack_shares(spread(shared, mesh), jnp.dtype("bfloat16"))
    inner = P(("data", "fsdp"), None, "tp" if weights.cuts_inputs else None)
    x = shared.case.operands(rows)[0].reshape(2, rows // 2, -1)
    x = jax.device_put(x, NamedSharding(mesh, inner))

    def op(x: jax.Array, weights: PackedShares) -> jax.Array:
        if weights.cuts_inputs:
            parts = quantised.quantised_matmul(x, weights, ordered=ordered, split=True)
            return layer.added(parts)
        return quantised.quantised_matmul(x, weights, ordered=ordered)

    with use_mesh(mesh.abstract_mesh):
        text = jax.jit(op).lower(x, weights).compile(ALL_PASSES).as_text()
    assert collectives(text) == kinds


def test_a_whole_matmul_of_cut_inputs_has_a_bias_and_any_dtype() -> None:
    mesh, shared = make_mesh(tp=2), CASES["down"]
    x, matrix, _ = shared.case.operands(6)
    bias = normal(3, 64, dtype="bfloat16")
    weights = pack_shares(spread(shared, mesh), jnp.dtype("bfloat16"))
    operands = jax.device_put((x[None], bias), NamedSharding(mesh, P()))
    with use_mesh(mesh.abstract_mesh):
        found = jax.jit(
            lambda x, weights, bias: quantised.quantised_matmul(x, weights, bias, dtype=jnp.float32)
        )(operands[0], weights, operands[1])
    assert found.dtype == jnp.float32
    right = shared.case.expected()[:6] + np.float64(bias)
    assert relative_error(found[0], right) <= TOLERANCE["bfloat16"]


def test_weights_that_no_kernel_reads_in_shares_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(shared: Shared, **axes: int) -> str:
        with pytest.raises(NotImplementedError) as found:
            pack_shares(spread(shared, make_mesh(**axes)), jnp.dtype("bfloat16"))
        return str(found.value)

    assert "if tp cuts them, and no other axis" in refused(CASES["down"], fsdp=2, tp=2)
    for tp in (4, 8):
        assert "not several whole groups" in refused(CASES["down in groups"], tp=tp)
    assert "multiples of 64, not 32" in refused(CASES["sorted inputs"], tp=4)
    sorted_down = Case("uint8", 512, (64,), group=64, order=True, split=True)
    assert "belong to no share" in refused(Shared(sorted_down, 1), tp=2)
    one = pack_shares(spread(Shared(sorted_down, 1), make_mesh(data=2)), jnp.dtype("bfloat16"))
    assert one.out_axes == (64,) and not one.cuts_inputs
    monkeypatch.setattr(packed_shares, "hardware", SimpleNamespace(require_hopper=lambda _: None))
    mesh = make_mesh(tp=4)
    packed_shares._packing.cache_clear()
    some = [spread(CASES[name], mesh) for name in ("sorted inputs", "heads", "heads")]
    kept, *packed = packed_params(some, "bfloat16")
    assert isinstance(kept, QuantisedMatrix)
    assert all(isinstance(each, PackedShares) for each in packed)
    # One program for both, as for the layers of a model.
    assert packed_shares._packing.cache_info()[:2] == (1, 2)


@pytest.mark.slow
@pytest.mark.skipif(not hardware.mosaic_is_supported(), reason="needs jax 0.11 or newer")
@pytest.mark.parametrize("name", [name for name in CASES if name != "whole gate and up"])
def test_interpreted_kernels_keep_a_row_s_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In as many columns, as which the interpreter multiplies."""
    from jax.experimental.pallas.mosaic_gpu import InterpretGPUParams

    from longspec_jax.ops.matmul import ordered_tiles, quantised_mosaic

    monkeypatch.setattr(hardware, "require_hopper", lambda kernel: None)
    monkeypatch.setattr(ordered_tiles, "MULTIPROCESSORS", 2)
    interpret_devices_apart(monkeypatch)
    launched: list[int] = []
    kernel = quantised_mosaic.matmul

    def interpreted(x: jax.Array, *operands: Any, **options: Any) -> jax.Array:
        launched.append(len(x))
        return kernel(x, *operands, **options, interpret=InterpretGPUParams())

    monkeypatch.setattr(quantised_mosaic, "matmul", interpreted)
    mesh, shared = make_mesh(tp=2), CASES[name]
    few, many = (multiplied(shared, mesh, 1, count, ordered=True) for count in (19, 24))
    assert launched == [19, 24]
    assert relative_error(many, shared.case.expected()[:24]) <= TOLERANCE["bfloat16"]
    np.testing.assert_array_equal(few, many[:19])
