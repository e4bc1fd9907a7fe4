"""Attention's Mosaic GPU kernels, interpreted, with caches of 16 and of 8 bits."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.decoding.cache import ring_slots
from longspec_jax.ops.attention import float8, path, path_kernels, reference, widening
from longspec_jax.ops.attention.operands import Fresh, Prefix
from longspec_jax.ops.hardware import mosaic_is_supported
from tests.kit import TOLERANCE, ancestors, each_row, relative_error
from tests.ops.attention.test_path import Scores, Text
from tests.ops.attention.test_path_ampere import check_bits

MOSAIC = pytest.mark.skipif(not mosaic_is_supported(), reason="the kernels need jax 0.11 or newer")


@each_row("dtype", ["bfloat16", "float16"])
def test_words_of_two_codes_become_two_numbers(dtype: str) -> None:
    codes = np.asarray([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
    signs = np.where(codes & 0x80, 0xFF, 0).astype(np.uint8)
    halves = np.stack([codes, signs], axis=1).reshape(-1).view(np.uint32)
    words = np.concatenate([halves, halves[::-1]])
    found = widening.in_place(words, jnp.dtype(dtype)).view(jnp.dtype(dtype))
    factor = np.asarray(2.0**8 if dtype == "float16" else 2.0**120, found.dtype)
    expected = words.view(np.uint8)[::2].view(float8.E4M3)
    np.testing.assert_array_equal(found * factor, expected.astype(found.dtype))


class Case(NamedTuple):
    """A call of path attention; a second row has 40 tokens, and the first nodes are a chain."""

    nodes: int
    heads: int
    kv_heads: int
    width: int
    length: int
    dtype: str = "bfloat16"
    batch: int = 1
    chain: int = 1
    narrow: bool = True


CASES = [
    Case(1, 4, 1, 128, 300),
    Case(8, 2, 2, 64, 300, batch=2),  # Two warpgroups have a split each.
    Case(40, 2, 1, 64, 150, "float16", batch=2, chain=12),
    Case(8, 4, 1, 64, 300),  # Of twice the splits.
    Case(1, 4, 1, 256, 300, narrow=False),
    Case(40, 4, 1, 256, 300, batch=2, chain=12, narrow=False),
]


def operands(case: Case, slots: int = 448) -> tuple[Any, ...]:
    """Of path attention to a cache in 8 bits: a random tree, and what no query may see is NaN."""
    rng = np.random.default_rng(case.nodes)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), case.dtype)

    batch, nodes, kv_heads, width = case.batch, case.nodes, case.kv_heads, case.width
    parents, depth = [-1], np.zeros(nodes, int)
    for node in range(1, nodes):
        any_other = rng.choice([n for n in range(node) if depth[n] < 5])
        parents.append(node - 1 if node < case.chain else int(any_other))
        depth[node] = depth[parents[node]] + 1
    lengths = np.asarray([case.length, 40][:batch])
    unseen = np.arange(slots) >= lengths[:, None]
    keys, values = (
        jnp.where(
            unseen[:, None, :, None],
            np.uint8(0x7F),
            float8.codes(float8.rounded(normal(batch, kv_heads, slots, width))),
        )
        for _ in range(2)
    )
    tree = (float8.rounded(normal(batch, nodes, kv_heads, width)) for _ in range(2))
    return (
        normal(batch, nodes, case.heads, width),
        Prefix(keys, values, jnp.asarray(lengths, jnp.int32)),
        Fresh(*tree, jnp.broadcast_to(ancestors(parents), (batch, nodes, nodes))),
        jnp.broadcast_to(jnp.asarray(depth, jnp.int32), (batch, nodes)),
    )


def interpret_path(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """Interpret path attention, by one program that has two splits, or twice as many."""
    from tests.ops.attention.interpreted import interpret

    interpret(monkeypatch, dtype)
    for module in (path, path_kernels):
        monkeypatch.setattr(module, "splits_of", lambda kv_heads, groups, narrow: 2)
        monkeypatch.setattr(module, "FAR", 128)
    tile = path_kernels.path_tile
    monkeypatch.setattr(
        path_kernels, "path_tile", lambda *a: dataclasses.replace(tile(*a), programs=1)
    )


@MOSAIC
@each_row("case", CASES)
def test_interpreted_path_attention(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    interpret_path(monkeypatch, case.dtype)
    q, narrow, tree, depth = operands(case)
    prefix = narrow
    if not case.narrow:
        wide = (float8.widened(each, case.dtype) for each in (narrow.keys, narrow.values))
        prefix = Prefix(*wide, narrow.length)
    found = path_kernels.path_attention(q, prefix, tree, depth)
    there = jnp.arange(narrow.keys.shape[2]) < narrow.length[:, None, None]
    exact = (
        jnp.where(there[..., None], float8.widened(each, jnp.float32), 0)
        for each in (narrow.keys, narrow.values)
    )
    tree = dataclasses.replace(
        tree, keys=tree.keys.astype(jnp.float32), values=tree.values.astype(jnp.float32)
    )
    prefix = Prefix(*exact, narrow.length)
    expected = reference.speculative_attention(q.astype(jnp.float32), prefix, tree)
    assert relative_error(found, expected) <= TOLERANCE[case.dtype]


@MOSAIC
@each_row("width", [64, 256])
def test_a_node_has_the_bits_of_a_plain_step(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of both kernels, interpreted, the narrow heads with twice the splits."""
    interpret_path(monkeypatch, "bfloat16")
    length, text = 300, Text.drawn(320, 4, 1, width)
    # Scores are exact: a CPU adds them up in an order that depends on the number of keys.
    text = text._replace(q=jnp.round(2 * text.q) / 2, keys=jnp.round(2 * text.keys) / 2)
    operands, along = text.tree(length, 24, 3, seed=5)
    found = np.float32(path_kernels.path_attention(*operands))[0]
    for position, node in enumerate(along, length):
        at = slice(position, position + 1)
        alone = Fresh(text.keys[:, at], text.values[:, at], jnp.ones((1, 1, 1), bool))
        step = text.q[:, at], text.prefix(position), alone, jnp.zeros((1, 1), jnp.int32)
        plain = np.float32(path_kernels.path_attention(*step))[0, 0]
        np.testing.assert_array_equal(found[node], plain)


@MOSAIC
@pytest.mark.slow
@each_row(("nodes", "scores"), [(8, Scores(150)), (40, Scores(40, (1.5, -20.0, 0.0, 40.0), 5.0))])
def test_interpreted_path_attention_of_bounded_layers(nodes, scores, monkeypatch) -> None:
    """With trees about a window's first turns and the seam of its ring; of many nodes light items.

    Their last rows are one warpgroup's, alongside two that attend.
    """
    interpret_path(monkeypatch, "bfloat16")
    text = Text.drawn(576, 4, 1, 64)
    # Scores are exact, as above.
    text = text._replace(q=jnp.round(2 * text.q) / 2, keys=jnp.round(2 * text.keys) / 2)
    turn = ring_slots(scores.window, path.SLOTS)
    positions = [scores.window, turn - 2, 2 * turn + 17]
    check_bits(path_kernels.path_attention, text, positions, (nodes, 3), scores)
