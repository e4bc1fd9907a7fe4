"""GGUF's blocks as quantised matrices: the weights of the package ``gguf``, bit for bit."""

import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.ops.matmul.quantised_weights import QuantisedMatrix
from longspec_jax.weights.gguf.matrices import (
    TYPES,
    Form,
    as_blocks,
    codes,
    dequantised,
    offsets,
    scales,
)
from tests.kit import each_row


def blocks(name: str, *shape: int) -> np.ndarray:
    """Random rows whose scales are finite; some of them negative, small or zero."""
    own, random = TYPES[name], np.random.default_rng(len(name))
    found = random.integers(0, 256, (*shape, own.size), np.uint8)
    halves = {"Q6_K": [208], "MXFP4": []}.get(name, [0, 2] if own.form.offset else [0])
    for at in halves:
        scale = random.normal(size=shape) * 10.0 ** random.integers(-7, 1, shape)
        scale = np.where(random.random(shape) < 0.05, 0, scale).astype(np.float16)
        found[..., at : at + 2] = scale[..., None].view(np.uint8)
    if name == "MXFP4":  # Powers of two of float32's normal numbers, and sums below infinity.
        found[..., 0] = found[..., 0] % 128 + 64
    return found.reshape(*shape[:-1], -1)


def from_blocks(rows: np.ndarray, name: str, form: Form | None = None) -> QuantisedMatrix:
    """A matrix of a tensor's rows, in the form of its type unless another is given."""
    form, cut = form or Form.of([name]), as_blocks(rows, name)
    fields = form.fields(cut.shape[-2] * TYPES[name].inputs).items()
    return form.matrix(
        {key: jnp.asarray(field.of_blocks(cut, name, form)) for key, field in fields}
    )


@each_row("name", TYPES)
def test_weights_are_those_of_the_package(name: str) -> None:
    """In a form of their own, and in one that holds all types together."""
    quants = pytest.importorskip("gguf.quants")
    own = TYPES[name]
    rows = blocks(name, 2, 32, 4 * 256 // own.inputs)
    expected = quants.dequantize(rows, quants.GGMLQuantizationType[name])
    for form in (None, Form.of([name, "Q4_1"]), Form.of(list(TYPES))):
        matrix = from_blocks(rows, name, form)
        assert (matrix.inputs, matrix.group) == (1024, (form or own.form).group)
        assert (matrix.packed, matrix.offset is not None) == (form or own.form)[::2]
        np.testing.assert_array_equal(np.asarray(matrix.dequantised(jnp.float32)), expected)
        rounded = np.asarray(matrix.dequantised(jnp.bfloat16))
        np.testing.assert_array_equal(rounded, expected.astype(jnp.bfloat16))


def test_what_has_no_such_form_is_named() -> None:
    with pytest.raises(NotImplementedError, match="Q2_K has no packed form"):
        from_blocks(np.zeros((1, 84), np.uint8), "Q2_K")
    with pytest.raises(ValueError, match="rows of 20 bytes are not blocks of 18, as Q4_0 has"):
        from_blocks(np.zeros((1, 20), np.uint8), "Q4_0")


@each_row("name", ["Q4_K", "Q5_K", "Q6_K"])
def test_every_scale_is_exact(name: str) -> None:
    """All float16 numbers times every factor: no product is rounded, the sum once, and in 16 bits.

    So a fused multiply-add and two instructions give the same weight. Rounding the exact sum to
    bfloat16 at once does not, for one in 20,000 weights: that is no fault of a kernel.
    """
    own = TYPES[name]
    every = np.arange(1 << 16, dtype=np.uint16)
    units = every[np.isfinite(every.view(np.float16))]
    random = np.random.default_rng(5)
    rows = random.integers(0, 256, (len(units), own.size), np.uint8)
    for at in [208] if name == "Q6_K" else [0, 2]:
        rows[:, at : at + 2] = random.permutation(units)[:, None].view(np.uint8)
    form = Form(False, own.form.group, own.form.offset)
    for blocks in np.array_split(rows[:, None], 16):
        shape = len(blocks), own.inputs // form.group, form.group
        code = codes(blocks, name, form).reshape(shape).astype(np.float64)
        product = code * scales(blocks, name, form)[..., None]
        np.testing.assert_array_equal(product.astype(np.float32), product)
        if form.offset:
            product += offsets(blocks, name, form)[..., None]
        weights = dequantised(blocks, name).reshape(shape)
        np.testing.assert_array_equal(weights, product.astype(np.float32))
