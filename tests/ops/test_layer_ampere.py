"""The small ops of a layer without Triton: as Triton's kernels, and a row's bits are its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.ops import hardware, layer, layer_pallas
from tests.kit import TOLERANCE, each_row, normal, relative_error
from tests.ops.interpreted_ampere import interpret

pytestmark = pytest.mark.skipif(
    not hardware.mosaic_is_supported(), reason="needs jax 0.11 or newer"
)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch)


@pytest.mark.usefixtures("interpreted")
@each_row(("dtype", "width", "splits"), [("float32", 200, 3), ("bfloat16", 1032, 1)])
def test_norms(dtype: str, width: int, splits: int) -> None:
    from longspec_jax.ops import layer_ampere

    x, scale = normal(0, 1, 3, width, dtype=dtype), normal(2, width, dtype=dtype)
    partials = normal(1, splits, 1, 3, width, dtype=dtype if splits == 1 else "float32")
    total, out = layer_ampere.residual_norm(x, partials, scale, eps=1e-5)
    wanted = layer_pallas.residual_norm(x, partials, scale, eps=1e-5, interpret=True)
    np.testing.assert_array_equal(total, wanted[0])
    assert out.dtype == wanted[1].dtype
    assert relative_error(out, np.float64(wanted[1])) <= TOLERANCE[dtype]
    alone = layer_ampere.residual_norm(x[:, 2:], partials[:, :, 2:], scale, eps=1e-5)
    np.testing.assert_array_equal(alone[1][0, 0], out[0, 2])
    first, again = layer_ampere.residual_norm(total, None, scale, eps=1e-5)
    np.testing.assert_array_equal(first, total)
    np.testing.assert_array_equal(again, out)


@pytest.mark.usefixtures("interpreted")
@each_row(
    ("dtype", "kv_heads", "groups", "width"),
    [("float32", 3, 1, 32), ("bfloat16", 1, 17, 48)],
)
def test_heads(dtype: str, kv_heads: int, groups: int, width: int) -> None:
    from longspec_jax.ops import layer_ampere

    qkv = normal(0, 2, 3, kv_heads, groups + 2, width, dtype=dtype)
    angle = jax.random.uniform(jax.random.key(1), (2, 3, width // 2)) * 6
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    scales = normal(2, width, dtype=dtype), normal(3, width, dtype=dtype)
    for norms in (None, scales):
        ours = layer_ampere.split_heads(qkv, cos, sin, norms, eps=1e-2)
        for mine, exact in zip(
            ours, layer.split_heads.definition(qkv, cos, sin, norms, 1e-2), strict=True
        ):
            assert mine.shape == exact.shape and mine.dtype == exact.dtype
            assert relative_error(mine, np.float64(exact)) <= TOLERANCE[dtype]
    rows = (
        normal(4, 2, 7, kv_heads, width, dtype=dtype),
        normal(5, 2, 7, kv_heads, width, dtype=dtype),
    )
    same = cos[:, :1], sin[:, :1]
    ours = layer_ampere.split_heads(qkv, *same, None, rows, first=4)
    repeated = [jnp.broadcast_to(each, cos.shape) for each in same]
    plain = layer.split_into.definition(qkv, repeated[0], repeated[1], rows, 4)
    for mine, exact in zip(ours, plain, strict=True):
        assert relative_error(mine, np.float64(exact)) <= TOLERANCE[dtype]
    np.testing.assert_array_equal(ours[2], plain[2])


@pytest.mark.usefixtures("interpreted")
@each_row(("dtype", "height"), [("bfloat16", 17), ("uint8", 5)])
def test_rows_are_appended(dtype: str, height: int) -> None:
    from longspec_jax.ops import layer_ampere

    def drawn(seed: int, *shape: int) -> jax.Array:
        return jnp.abs(40 * normal(seed, *shape)).astype(dtype)

    caches = [drawn(seed, 4, 2, 29, 24) for seed in range(2)]
    fresh = [drawn(9 + seed, 2, 19, 2, 24) for seed in range(2)]
    path = jax.random.randint(jax.random.key(3), (2, height), 0, 19)
    there = jnp.asarray([3, 1])

    def check(length: list[int], ring: bool, rows: jax.Array | None) -> None:
        some = caches if rows is not None else [cache[:2] for cache in caches]
        operands = some, fresh, path, jnp.asarray(length), rows
        ours = layer_ampere.append_rows(*operands, ring=ring)
        wanted = layer.append_rows.definition(*operands, ring=ring)
        for mine, exact in zip(ours, wanted, strict=True):
            np.testing.assert_array_equal(mine, exact)

    check([12, 5], False, None)
    check([12, 5], False, there)
    check([28, 28 + 29], True, there)
