"""Matmuls of one order: the Hopper kernel against plain JAX, and plain JAX against float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.ops import hardware, layer
from longspec_jax.ops.matmul import ordered, ordered_mosaic, ordered_tiles
from longspec_jax.ops.matmul.ordered_tiles import MatmulTile, head_tile, matmul_tile
from tests.kit import TOLERANCE, each_row, hopper_or_skip, normal, relative_error
from tests.ops.matmul.published import EVERY_KIND, EXTRA_HEADS, PUBLISHED, Weights, drawn, product
from tests.ops.matmul.test_few_rows import DTYPES, exact, silu


@each_row("dtype", DTYPES)
def test_definition_of_a_head(dtype: str) -> None:
    x = normal(0, 2, 3, 40, dtype=dtype)
    table = normal(5, 24, 40, dtype=dtype)
    out = ordered.head_matmul(x, table)
    assert out.shape == (2, 3, 24) and out.dtype == jnp.float32
    assert relative_error(out, exact(x, table.T)) <= TOLERANCE["float32"]


@each_row("rows", [8, 128, 500])
def test_work_is_shared_out_evenly_and_fits_the_machine(rows: int) -> None:
    for weights in [*PUBLISHED, *EXTRA_HEADS]:
        work = weights.work(rows)
        assert work.programs <= hardware.MULTIPROCESSORS
        assert 0 <= work.programs * work.turns - work.units < work.turns
        assert work.strips * work.tile.columns >= weights.columns
        assert work.steps * work.tile.depth >= weights.contracted
        out = 64 * work.warpgroups * work.tile.columns * work.out_bytes
        assert 2 <= work.stages
        assert work.stages * work.stage_bytes + out <= hardware.SHARED_BYTES[(9, 0)] - 1024


def test_large_weights_keep_the_machine_reading() -> None:
    """Predicted: small ones are bound by their launches, whatever the tile."""
    for weights in [*PUBLISHED, *EXTRA_HEADS]:
        work = weights.work(8)
        size = weights.contracted * weights.columns * work.parts
        if size >= 2**24:  # The share of the time at the full rate.
            assert 2 * size / work.read() >= 0.8, weights


def test_odd_weights_are_refused() -> None:
    for choose in (matmul_tile, partial(matmul_tile, gated=True), head_tile):
        with pytest.raises(
            NotImplementedError, match=r"takes weights in multiples of \d\d, not 100"
        ):
            choose(100, 4096)
    with pytest.raises(NotImplementedError, match="takes weights in multiples of 32, not 4100"):
        matmul_tile(4096, 4100)
    with pytest.raises(NotImplementedError, match="takes vocabularies in multiples of 8, not 4100"):
        head_tile(4096, 4100)


def test_what_the_kernel_does_not_serve_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "require_one_order", lambda kernel: True)
    x, nothing = (jax.ShapeDtypeStruct((rows, 512), jnp.bfloat16) for rows in (4, 0))
    weights = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
    table = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    matmul, head = ordered.MATMUL.named("mosaic"), ordered.HEAD_MATMUL.named("mosaic")
    for call in (matmul, partial(matmul, split=True), head):
        with pytest.raises(NotImplementedError, match="one row or more"):
            jax.eval_shape(call, nothing, weights)
        with pytest.raises(NotImplementedError, match="not bfloat16 and float32"):
            jax.eval_shape(call, x, table)


def interpreted(rows: int, weights: Weights, tile: MatmulTile | None = None) -> np.ndarray:
    """What the interpreted kernel makes of the first ``rows`` of one set of rows, in float64."""
    from jax.experimental.pallas.mosaic_gpu import InterpretGPUParams

    x, other, bias = drawn(weights, "bfloat16", rows)
    options = dict(tile=tile or weights.tile, interpret=InterpretGPUParams())
    if weights.head:
        return np.float64(ordered_mosaic.head_matmul(x, other, **options))
    out = np.float64(ordered_mosaic.matmul(x, other, bias, **options))
    return out.sum(0) if out.ndim == 3 else out


def expected(weights: Weights, dtype: str) -> np.ndarray:
    """The result of all rows in float64."""
    x, other, bias = drawn(weights, dtype)
    if weights.head:
        return exact(x, other.T)
    out = exact(x, other)
    if weights.gated:
        return silu(out[:, 0]) * out[:, 1]
    return out if bias is None else out + np.float64(bias)


SMALL = {
    "plain": (Weights(192, 192), MatmulTile(128, 1, 128)),
    "narrow": (Weights(128, 64), MatmulTile(32, 1, 128)),
    "half blocks": (Weights(160, 96), matmul_tile(160, 96)),
    "partials": (Weights(320, 128, split=True), MatmulTile(64, 2, 64)),
    "gated": (Weights(128, 192, gated=True), MatmulTile(128, 1, 64)),
    "head": (Weights(128, 200, head=True), MatmulTile(64, 1, 64)),
}
"""Edges in both axes of the weights, uneven splits, and several turns of a program."""


@pytest.mark.skipif(not hardware.mosaic_is_supported(), reason="needs jax 0.11 or newer")
@pytest.mark.parametrize("name", SMALL)
def test_interpreted_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right, and a row's bits are the same alongside any others."""
    monkeypatch.setattr(ordered_tiles, "MULTIPROCESSORS", 2)
    weights, tile = SMALL[name]
    whole = interpreted(200, weights, tile)
    assert relative_error(whole, expected(weights, "bfloat16")) <= TOLERANCE["bfloat16"]
    for rows in (1, 24, 72):
        np.testing.assert_array_equal(interpreted(rows, weights, tile), whole[:rows])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("weights", EVERY_KIND, ids=str)
def test_hopper_kernel(weights: Weights, dtype: str) -> None:
    hopper_or_skip()
    right = expected(weights, dtype)
    for rows in (1, 8, 24, 64, 72, 200):
        out = product(weights, *drawn(weights, dtype, rows))
        if weights.split:
            out = layer.add(jnp.zeros((rows, weights.columns), dtype), out)
        assert out.dtype == (jnp.float32 if weights.head else jnp.dtype(dtype))
        assert relative_error(out, right[:rows]) <= TOLERANCE["bfloat16"]


@pytest.mark.gpu
def test_hopper_kernel_keeps_rows_apart() -> None:
    """What is not finite in one row stays there, and rows that do not exist are never seen."""
    x = normal(0, 8, 4096, dtype="bfloat16").at[3].set(jnp.nan)
    weights = normal(1, 4096, 4096, dtype="bfloat16")
    out = np.float64(ordered.matmul(x, weights, split=True).sum(axis=0))
    assert np.isnan(out[3]).all()
    assert np.isfinite(np.delete(out, 3, axis=0)).all()
