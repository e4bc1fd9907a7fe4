"""Attention without Triton, interpreted: against the dense definition in float32."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.axes import Array
from longspec_jax.ops import hardware
from longspec_jax.ops.attention import reference
from longspec_jax.ops.attention.operands import Fresh, Partial, Prefix
from tests.kit import normal
from tests.ops.interpreted_ampere import interpret

KV_HEADS, HEADS, WIDTH, SLOTS = 2, 6, 64, 192


@pytest.mark.skipif(not hardware.mosaic_is_supported(), reason="needs jax 0.11 or newer")
def test_against_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that see nothing, splits that a row does not reach, what is cached after a row: NaN."""
    from longspec_jax.ops.attention import kernels_ampere

    interpret(monkeypatch)
    monkeypatch.setattr(kernels_ampere, "require_mosaic", lambda _: None)
    monkeypatch.setattr(kernels_ampere, "MULTIPROCESSORS", 48)

    def drawn(seed: int, *shape: int) -> Array:
        return normal(seed, *shape, dtype="bfloat16")

    def check(ours: Array, exact: Array) -> None:
        assert ours.shape == exact.shape and not jnp.isnan(ours).any()
        np.testing.assert_allclose(np.float32(ours), np.float32(exact), atol=0.02)

    def check_partial(ours: Partial, exact: Partial) -> None:
        check(ours.out, exact.out)
        np.testing.assert_allclose(ours.lse, exact.lse, atol=0.01)

    def wide(given: Any) -> Any:
        def exact(leaf: Array) -> Array:
            return jnp.nan_to_num(leaf.astype(jnp.float32)) if leaf.dtype == q.dtype else leaf

        return jax.tree.map(exact, given)

    q, length = drawn(0, 2, 5, HEADS, WIDTH), jnp.asarray([0, 130])
    behind = jnp.arange(SLOTS)[:, None] >= length[jnp.asarray([1, 0, 0])][:, None, None, None]
    keys, values = (
        jnp.where(behind, jnp.nan, drawn(seed, 3, KV_HEADS, SLOTS, WIDTH)) for seed in (1, 2)
    )
    prefix = Prefix(keys, values, length, cache_rows=jnp.asarray([2, 0]))
    ours = kernels_ampere.prefix_attention(q, prefix, scale=0.3)
    check_partial(ours, reference.prefix_attention(q.astype(jnp.float32), wide(prefix), scale=0.3))
    assert (ours.lse[0] == -jnp.inf).all()

    mask = jax.random.bernoulli(jax.random.key(3), 0.3, (2, 5, 70)).at[0, 1].set(False)
    rows = drawn(4, 2, 70, KV_HEADS, WIDTH), drawn(5, 2, 70, KV_HEADS, WIDTH)
    fresh = Fresh(rows[0], rows[1], mask)
    ours = kernels_ampere.tree_attention(q, fresh)
    check_partial(ours, reference.tree_attention(q.astype(jnp.float32), wide(fresh)))
    sinks = normal(6, HEADS)
    fresh = dataclasses.replace(fresh, mask=mask.at[0, 1, 3].set(True))
    for more in (None, sinks):
        out = kernels_ampere.speculative_attention(q, prefix, fresh, more)
        assert out.dtype == q.dtype
        exact = q.astype(jnp.float32), wide(prefix), wide(fresh), more
        check(out, reference.speculative_attention(*exact))

    chunk = [drawn(seed, 2, 70, heads, WIDTH) for seed, heads in ((7, HEADS), (8, 2), (9, 2))]
    out = kernels_ampere.speculative_attention(chunk[0], prefix, Fresh(*chunk[1:]))
    exact = [each.astype(jnp.float32) for each in chunk]
    check(out, reference.speculative_attention(exact[0], wide(prefix), Fresh(*exact[1:])))
