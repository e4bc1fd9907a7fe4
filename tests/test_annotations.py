"""Annotations of ops, decoding and drafters are executed, of shapes and of all else."""

import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Float

from longspec_jax.axes import Array
from longspec_jax.decoding.chooser import Watch
from longspec_jax.decoding.policy import Estimate

annotations = pytest.importorskip("tests.annotations", reason="without beartype nothing is checked")


def test_what_breaks_an_annotation_is_refused() -> None:
    """Of a function with a shape, of a field with one, and of a field without."""
    with pytest.raises(Exception, match="foregone"):
        Watch.of(3, 2).after(0, jnp.zeros((2, 2, 2), int))
    with pytest.raises(Exception, match="known"):
        Watch(jnp.zeros((), int), jnp.zeros((4, 2)))
    with pytest.raises(Exception, match="seconds"):
        Estimate(seconds="1")  # type: ignore[arg-type]


def test_shapes_are_found_inside_other_types() -> None:
    rows = Float[Array, " B"]
    assert all(
        map(
            annotations.has_shape,
            (rows, rows | None, list[tuple[rows, ...]], "Float[Array, 'B T']"),
        )
    )
    assert not any(
        map(annotations.has_shape, (int, "Watch", np.ndarray, list[tuple[int, ...]], None))
    )
