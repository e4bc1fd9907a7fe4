"""Attention of training blocks against a softmax that is computed slot by slot."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.axes import Array
from tests.kit import each_row
from train.drafts.block_attention import block_attention

HEADS, KV_HEADS, WIDTH = 4, 2, 8


def attend(q: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """What one query ``[N, H]`` gets of keys ``[n, K, H]``; zeros of none."""
    if not len(keys):
        return np.zeros_like(q)
    keys, values = (each.repeat(HEADS // KV_HEADS, axis=1) for each in (keys, values))
    scores = np.einsum("nh,tnh->nt", q, keys) / np.sqrt(WIDTH)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("nt,tnh->nh", shares / shares.sum(-1, keepdims=True), values)


@pytest.mark.full
@each_row("own", ["none", "whole", "causal"])
@each_row("window", [None, 5])
@each_row(("every", "slots", "length"), [(4, 3, 16), (4, 4, 13), (3, 7, 11), (8, 2, 7)])
def test_every_slot_sees_the_text_before_its_anchor(
    every: int, slots: int, length: int, window: int | None, own: str
) -> None:
    """And of its block all, the earlier slots and itself, or nothing.

    The first block of the first row begins with the row, and may see nothing of the text.
    """
    rng = np.random.default_rng(every)
    starts = np.arange(0, length, every)
    anchors = np.minimum(starts + rng.integers(0, every, (2, len(starts))), length - 1)
    anchors[0, 0] = 0

    def drawn(tokens: int, heads: int) -> np.ndarray:
        return rng.standard_normal((2, tokens, heads, WIDTH)) * 2

    queries = drawn(len(starts) * slots, HEADS)
    keys, values = drawn(length, KV_HEADS), drawn(length, KV_HEADS)
    fresh = drawn(len(starts) * slots, KV_HEADS), drawn(len(starts) * slots, KV_HEADS)
    wanted = np.zeros_like(queries)
    for row, block, slot in np.ndindex(2, len(starts), slots):
        end = anchors[row, block]
        text = slice(0 if window is None else max(0, end - window), end)
        count = {"none": 0, "whole": slots, "causal": slot + 1}[own]
        mine = slice(block * slots, block * slots + count)
        seen = [
            np.concatenate([old[row, text], new[row, mine]])
            for old, new in zip((keys, values), fresh, strict=True)
        ]
        wanted[row, block * slots + slot] = attend(queries[row, block * slots + slot], *seen)

    def whole(*arrays: np.ndarray) -> tuple[Array, ...]:
        return tuple(jnp.asarray(each, jnp.float32) for each in arrays)

    def found(q: Array, past: Any, new: Any) -> Array:
        given, causal = None if own == "none" else new, own == "causal"
        at = jnp.asarray(anchors)
        return block_attention(q, past, at, every, window=window, own=given, causal=causal)

    [q], past, new = whole(queries), whole(keys, values), whole(*fresh)

    def summed(*arrays: Any) -> tuple[Array, Array]:
        result = found(*arrays)
        return result.sum(), result

    both = jax.jit(jax.value_and_grad(summed, argnums=(0, 1, 2), has_aux=True))
    (_, result), gradients = both(q, past, new)
    np.testing.assert_allclose(result, wanted, atol=1e-5)
    assert all(np.isfinite(each).all() for each in jax.tree.leaves(gradients))
