"""Triton's kernel for quantised weights against float64, and weights that are rounded here."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.models.target import head_logits
from longspec_jax.ops import hardware
from longspec_jax.ops.matmul import quantised, quantised_pallas
from longspec_jax.ops.matmul.quantised_weights import FINE, QuantisedMatrix
from tests.kit import COMPILED, TOLERANCE, each_row, relative_error
from tests.ops.matmul.test_packed import CASES, LARGE, Case


def random_table(rows: int, width: int, seed: int) -> np.ndarray:
    """Rows of very different sizes, the fourth of them zero."""
    random = np.random.default_rng(seed)
    sizes = np.exp(2 * random.standard_normal((rows, 1)))
    sizes[3] = 0
    return (sizes * random.standard_normal((rows, width))).astype(np.float32)


def test_rounded_weights_by_hand() -> None:
    """The largest weight of an output takes 127 steps, whatever its sign; zeros stay zeros."""
    table = jnp.asarray([[1.0, -2.54, 0.011], [0, 0, 0], [127, 63.4, -0.6]])
    matrix = QuantisedMatrix.rounded(table)
    np.testing.assert_array_equal(matrix.codes, [[50, -127, 1], [0, 0, 0], [127, 63, -1]])
    np.testing.assert_allclose(matrix.scale, [[0.02], [0], [1]], rtol=1e-6)
    assert matrix.codes.dtype == jnp.int8 and matrix.scale.dtype == jnp.float32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_close_to_the_whole_heads(dtype: str) -> None:
    """In the spread of each token's own logits: every row is rounded by its own scale."""
    table = jnp.asarray(random_table(211, 67, 0), dtype)
    hidden = jax.random.normal(jax.random.key(0), (5, 31, 67), jnp.dtype(dtype))
    expected = np.asarray(head_logits(table, hidden))
    rounded = QuantisedMatrix.rounded(table)
    logits = quantised.quantised_matmul(hidden, rounded, dtype=jnp.float32)
    assert logits.dtype == jnp.float32 and logits.shape == (5, 31, 211)
    assert not np.any(logits[..., 3]), "the row of zeros"
    error, spread = (np.std(x, axis=(0, 1)) for x in (logits - expected, expected))
    others = spread > 0
    assert others.sum() == 210
    # An error of 1 / sqrt(12) steps, 127 of them to 2 or 4 standard deviations: 0.5 to 0.9 %.
    assert 1e-3 < np.max(error[others] / spread[others]) < 1.2e-2


ALL = {
    **CASES,
    "fp8 in float16": Case("float8_e4m3fn", 320, (192,), dtype="float16"),
    "groups of 32": Case("uint8", 416, (96,), group=32, zeros=True),
    "a last split of less": Case("uint8", 1416, (96,), split=True),
    "odd": Case("int8", 67, (83,)),
}


def multiplied(case: Case, rows: int, interpret: bool, **options: Any) -> np.ndarray:
    x, matrix, bias = case.operands(rows)
    x = x if matrix.order is None else jnp.take(x, matrix.order, axis=-1)
    tile = quantised_pallas.triton_tile(rows, matrix, gated=case.gated, split=case.split)
    out = quantised_pallas.matmul(
        *(x, matrix.flat(), None if bias is None else bias.reshape(-1)),
        **dict(tile=tile, gated=case.gated, dtype=x.dtype, interpret=interpret) | options,
    )
    assert out.dtype == (jnp.float32 if case.split else options.get("dtype", x.dtype))
    assert (len(out) > 1) == case.split
    return np.asarray(out, np.float64).sum(0)


@pytest.mark.parametrize("interpret", COMPILED)
@pytest.mark.parametrize("rows", [3, 50])
@pytest.mark.parametrize("case", ALL.values(), ids=ALL)
def test_the_kernel(case: Case, rows: int, interpret: bool) -> None:
    found, right = multiplied(case, rows, interpret), case.expected().reshape(200, -1)[:rows]
    assert relative_error(found, right) <= TOLERANCE[case.dtype]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.group in FINE])
def test_weights_of_fine_groups_are_rounded_once(name: str) -> None:
    """A row with a single 1 is multiplied to what the definition says, bit for bit."""
    case = CASES[name]
    matrix, dtype = case.drawn().flat(), jnp.dtype(case.dtype)
    rows = jnp.eye(case.inputs, dtype=dtype)[case.inputs - 64 :]
    tile = quantised_pallas.triton_tile(64, matrix)
    options: Any = dict(tile=tile, dtype=jnp.dtype(jnp.float32), interpret=True)
    [found] = quantised_pallas.matmul(rows, matrix, **options)
    expected = np.float32(matrix.dequantised(dtype))[:, case.inputs - 64 :]
    np.testing.assert_array_equal(np.asarray(found).T, expected)


def test_logits_in_float32_are_not_rounded() -> None:
    case = Case("int8", 256, (96,))
    found = multiplied(case, 5, True, dtype=jnp.dtype(jnp.float32))
    assert relative_error(found, case.expected()[:5]) < 1e-6


def test_tiles_fill_any_machine_that_they_run_on() -> None:
    """Programs enough, and shared memory where there is least of it."""
    for stored, group in (("int8", 0), ("uint8", 128)):
        for inputs, outputs in ((4096, 4096), (4096, 8192), (5120, 10240), (27648, 5120)):
            for gated, split in ((False, False), (True, False), (False, True)):
                case = Case(stored, inputs, (outputs * (1 + gated),), group)
                for rows in (1, 16, 64):
                    matrix = jax.eval_shape(case.drawn)
                    tile = quantised_pallas.triton_tile(rows, matrix, gated=gated, split=split)
                    assert (tile.splits > 1) == split and tile.rows >= rows
                    assert -(-outputs // tile.outputs) * tile.splits >= 80
                    stage = tile.depth * (2 * tile.rows + tile.outputs * (1 + gated))
                    assert tile.stages * stage <= min(hardware.SHARED_BYTES.values())


def test_what_the_kernel_does_not_serve() -> None:
    matrix = Case("int8", 256, (96,)).drawn()
    floats = Case("uint8", 256, (96,)).drawn().replace(floating=True)  # pyright: ignore
    for rows, weights, message in (
        (65, matrix, "1 to 64 rows, not 65"),
        (1, floats, "no 4-bit floats"),
        (1, Case("int8", 96, (8,), group=48).drawn(), "multiples of 32 inputs, or .* not 48"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            quantised_pallas.triton_tile(rows, weights)


@each_row(
    ("inputs", "outputs", "programs"),
    [
        (4096, 4096, (32, 4)),
        (11008, 4096, (32, 4)),
        (14336, 4096, (64, 4)),
        (27648, 5120, (64, 4)),
        (4096, 8192, (64, 4)),
        (5120, 10240, (64, 2)),
    ],
)
def test_partials_take_the_fastest_tile_of_the_sweep(
    inputs: int, outputs: int, programs: tuple[int, int]
) -> None:
    """docs/results/draft_tiles_h200.json, the last run."""
    matrix = jax.eval_shape(Case("int8", inputs, (outputs,)).drawn)
    tile = quantised_pallas.triton_tile(16, matrix, split=True)
    assert (tile.outputs, tile.splits) == programs


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 64])
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_matmuls_of_real_layers(case: Case, rows: int) -> None:
    found, right = multiplied(case, rows, False), case.expected().reshape(200, -1)[:rows]
    assert relative_error(found, right) <= TOLERANCE[case.dtype]
