"""Matmuls of few rows: the Hopper kernel against plain JAX, and plain JAX against float64."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.ops import hardware, layer
from longspec_jax.ops.matmul import few_rows, ordered
from tests.kit import TOLERANCE, each_row, hopper_or_skip, normal, relative_error

DTYPES = ["float32", "bfloat16"]


def exact(x: jax.Array, weights: jax.Array) -> np.ndarray:
    return np.tensordot(np.float64(x), np.float64(weights), 1)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


@each_row("dtype", DTYPES)
@each_row("ops", [few_rows, ordered])
def test_definitions(ops: Any, dtype: str) -> None:
    x, bias = normal(0, 2, 3, 40, dtype=dtype), normal(1, 4, 6, dtype=dtype)
    weights = normal(2, 40, 4, 6, dtype=dtype)
    out = ops.matmul(x, weights, bias)
    assert out.shape == (2, 3, 4, 6) and out.dtype == jnp.dtype(dtype)
    assert relative_error(out, exact(x, weights) + np.float64(bias)) <= TOLERANCE[dtype]

    weights = normal(3, 40, 24, dtype=dtype)
    parts = ops.matmul(x, weights, split=True)
    assert parts.shape[1:] == (2, 3, 24)
    assert relative_error(np.float64(parts).sum(0), exact(x, weights)) <= TOLERANCE[dtype]

    weights = normal(4, 40, 2, 24, dtype=dtype) / 6
    gate, up = np.moveaxis(exact(x, weights), -2, 0)
    out = ops.matmul(x, weights, gated=True)
    assert relative_error(out, silu(gate) * up) <= TOLERANCE[dtype]


def test_gradients_are_those_of_plain_jax() -> None:
    x, weights, bias = normal(0, 3, 8), normal(1, 8, 4), normal(2, 4)
    gate = normal(3, 8, 2, 4)
    for op, plain, arguments in (
        (few_rows.matmul, few_rows.matmul_xla, (x, weights, bias)),
        (partial(few_rows.matmul, split=True), few_rows.matmul_xla, (x, weights)),
        (partial(few_rows.matmul, gated=True), partial(few_rows.matmul_xla, gated=True), (x, gate)),
    ):
        ours, theirs = (
            jax.grad(lambda *a, op=op: jnp.sin(op(*a)).sum(), range(len(arguments)))(*arguments)
            for op in (op, plain)
        )
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@each_row(
    ("rows", "contracted", "columns"),
    [(9, 4096, 4096), (69, 4096, 4096), (72, 4096, 4096), (64, 256, 256), (64, 4096, 4100)],
)
def test_other_matmuls_are_left_to_xla(
    rows: int, contracted: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "require_hopper", lambda kernel: None)
    monkeypatch.setattr(hardware, "require_one_order", lambda kernel: True)
    x = jax.ShapeDtypeStruct((rows, contracted), jnp.bfloat16)
    for gated, parts in ((False, ()), (True, (2,))):
        weights = jax.ShapeDtypeStruct((contracted, *parts, columns), jnp.bfloat16)
        with pytest.raises(NotImplementedError, match="whole groups of 8|multiples of 32"):
            jax.eval_shape(partial(few_rows.matmul.named("mosaic"), gated=gated), x, weights)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rows", [1, 4, 8, 24, 64])
def test_hopper_kernel(rows: int, dtype: str) -> None:
    hopper_or_skip()
    for contracted, columns, split in ((4096, 4096, True), (4224, 8192, True), (3584, 4608, False)):
        x = normal(0, rows, contracted, dtype=dtype)
        weights = normal(1, contracted, columns, dtype=dtype) / 64
        if split:
            out = few_rows.matmul(x, weights, split=True)
            out = layer.add(jnp.zeros((rows, columns), dtype), out)
            expected = exact(x, weights)
        else:
            bias = normal(2, columns, dtype=dtype)
            out = few_rows.matmul(x, weights, bias)
            expected = exact(x, weights) + np.float64(bias)
        assert out.dtype == jnp.dtype(dtype)
        assert relative_error(out, expected) <= TOLERANCE["bfloat16"]

    x, weights = normal(0, rows, 2048, dtype=dtype), normal(1, 2048, 2, 8192, dtype=dtype) / 64
    gate, up = np.moveaxis(exact(x, weights), -2, 0)
    out = few_rows.matmul(x, weights, gated=True)
    assert relative_error(out, silu(gate) * up) <= TOLERANCE["bfloat16"]


@pytest.mark.skipif(not hardware.mosaic_is_supported(), reason="needs jax 0.11 or newer")
def test_a_vocabulary_of_any_size_has_logits_of_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more logits than tokens, and a row's bits are the same alongside any others."""
    from jax.experimental.pallas.mosaic_gpu import InterpretGPUParams

    from longspec_jax.ops.matmul import ordered_mosaic

    kernel = partial(ordered_mosaic.head_matmul, interpret=InterpretGPUParams())
    monkeypatch.setattr(few_rows, "_require_kernel", lambda *_: True)
    monkeypatch.setattr(ordered_mosaic, "head_matmul", kernel)
    x, table = normal(0, 3, 5, 128, dtype="bfloat16"), normal(1, 203, 128, dtype="bfloat16")
    whole = few_rows.head_matmul_mosaic(x, table)
    assert whole.shape == (3, 5, 203) and whole.dtype == jnp.float32
    assert relative_error(whole, exact(x.reshape(15, 128), table.T).reshape(3, 5, 203)) < 1e-5
    np.testing.assert_array_equal(few_rows.head_matmul_mosaic(x[:1, :3], table), whole[:1, :3])
