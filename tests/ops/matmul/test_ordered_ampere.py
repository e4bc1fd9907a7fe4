"""Matmuls of one order without Hopper's instructions: interpreted, against float64."""

import numpy as np
import pytest

from longspec_jax.ops import hardware
from tests.kit import TOLERANCE, relative_error
from tests.ops.interpreted_ampere import interpret
from tests.ops.matmul.published import EVERY_KIND, PUBLISHED, Weights, drawn
from tests.ops.matmul.test_ordered import expected

SMALL = {
    "plain": Weights(192, 192),
    "half blocks": Weights(160, 96),
    "partials": Weights(1088, 128, split=True),
    "gated": Weights(128, 192, gated=True),
    "head": Weights(128, 200, head=True),
}
"""Edges of strips, and uneven splits."""


@pytest.mark.skipif(not hardware.mosaic_is_supported(), reason="needs jax 0.11 or newer")
def test_a_ring_fits_every_gpu() -> None:
    from longspec_jax.ops.matmul.ordered_ampere import Work

    for each in PUBLISHED:
        options = dict(parts=1 + each.gated, head=each.head, split=each.split)
        for rows in (1, 64, 500):
            work = Work(rows, each.contracted, each.columns, **options)
            block = 2 * work.size * (work.height + work.parts * work.size)
            assert 2 <= work.stages and work.stages * block < 99 << 10, each
            assert work.contracted // work.size >= work.splits


def product(rows: int, weights: Weights) -> np.ndarray:
    """What the kernel makes of the first rows of one set of rows, in float64."""
    from longspec_jax.ops.matmul import ordered_ampere

    x, other, bias = drawn(weights, "bfloat16", rows)
    if weights.head:
        return np.float64(ordered_ampere.head_matmul(x, other))
    out = ordered_ampere.matmul(x, other, bias, split=weights.split)
    return np.float64(out).sum(0)


@pytest.mark.skipif(not hardware.mosaic_is_supported(), reason="needs jax 0.11 or newer")
@pytest.mark.parametrize("name", SMALL)
def test_interpreted_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right, and a row's bits are the same alongside any others."""
    interpret(monkeypatch)
    weights = SMALL[name]
    whole = product(200, weights)
    assert relative_error(whole, expected(weights, "bfloat16")) <= TOLERANCE["bfloat16"]
    for rows in (1, 24, 72):
        np.testing.assert_array_equal(product(rows, weights), whole[:rows])


@pytest.mark.gpu
@pytest.mark.parametrize("weights", EVERY_KIND, ids=str)
def test_kernel(weights: Weights) -> None:
    hardware.require_one_order("the kernel")
    whole = product(200, weights)
    assert relative_error(whole, expected(weights, "bfloat16")) <= TOLERANCE["bfloat16"]
    for rows in (1, 8, 24, 64, 72):
        np.testing.assert_array_equal(product(rows, weights), whole[:rows])
