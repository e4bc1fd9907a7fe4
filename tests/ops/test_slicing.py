"""Chunks of tokens."""

import jax.numpy as jnp

from longspec_jax.ops.slicing import chunk_length, cut, put, whole_chunks
from tests.kit import each_row


def test_chunks_divide_the_length() -> None:
    assert chunk_length(4, 96, 100) == 24
    assert chunk_length(256, 97, 8) == 1
    assert chunk_length(1, 97, 1000) == 97


@each_row("length", [97, 127, 2 * 113, 16381])
def test_no_length_falls_into_chunks_of_single_tokens(length: int) -> None:
    for rows, chunk in [(1, 40), (3, 200), (2, 8192)]:
        size = chunk_length(rows, length, chunk)
        fits = chunk // rows
        assert size <= fits and 2 * size >= min(fits, length)
        # As many chunks as there must be, or twice that; less than one of them is padding.
        padded = whole_chunks(jnp.zeros((rows, length)), size).shape[1]
        assert padded % size == 0 and padded - length < size and padded < 1.3 * length


def test_a_chunk_that_is_cut_out_can_be_put_back() -> None:
    rows = jnp.arange(24.0).reshape(2, 12)
    part = cut(rows, jnp.int32(4), 4)
    assert part.tolist() == rows[:, 4:8].tolist()
    assert jnp.array_equal(put(rows, -part, jnp.int32(4)), rows.at[:, 4:8].multiply(-1))
