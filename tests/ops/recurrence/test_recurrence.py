"""Gated DeltaNet as an op: chunks and trees equal the recurrence, token by token.

The oracle is NumPy in float64, written from the recurrence of the paper (arXiv:2412.06464), one
path at a time.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.config.layers import RecurrenceConfig
from longspec_jax.ops.placement import tree_bytes
from longspec_jax.ops.recurrence import recurrence as op
from longspec_jax.ops.recurrence.delta_rule import BLOCK
from longspec_jax.ops.recurrence.operands import (
    RecurrentRows,
    RecurrentState,
    RecurrentTokens,
    commit_path,
    empty_rows,
    empty_state,
    state_bytes,
)
from longspec_jax.ops.recurrence.recurrence import (
    chunk_recurrence,
    continued_recurrence,
    tree_recurrence,
)
from tests.kit import TOLERANCE, ancestors, each_row, normal, relative_error

SHAPE = RecurrenceConfig(key_heads=2, value_heads=6, key_width=5, value_width=7, taps=4)
TAPS = 0.6 * normal(9, SHAPE.key_heads, SHAPE.inputs_width, SHAPE.taps)
PARENTS = (-1, 0, 0, 1, 1, 2, 3, 5, 6, 8, 9)
"""Deeper than the convolution sees, with nodes whose ancestors are all committed tokens."""
NODES = len(PARENTS)
MASK = ancestors(PARENTS)
DEPTH = MASK.sum(axis=1) - 1


def tokens_of(seed: int, rows: int, length: int) -> RecurrentTokens:
    """Random tokens that forget a tenth to a half of the state each."""
    c = SHAPE
    heads = rows, length, c.key_heads
    return RecurrentTokens(
        normal(seed, *heads, c.inputs_width),
        -0.1 - 0.5 * jax.nn.sigmoid(normal(seed + 1, *heads, c.shared)),
        jax.nn.sigmoid(2 * normal(seed + 2, *heads, c.shared)),
    )


def state_of(seed: int, rows: int) -> RecurrentState:
    empty = empty_state(SHAPE, rows, "float32")
    return RecurrentState(normal(seed, *empty.memory.shape), normal(seed + 1, *empty.inputs.shape))


def recurrence(tokens: RecurrentTokens, state: RecurrentState, row: int, path: Any) -> Any:
    """Memory, inputs and reads of one row's tokens of these numbers, in float64."""
    c, cast = SHAPE, lambda part: np.asarray(part, np.float64)
    memory, kept = cast(state.memory[row]), list(cast(state.inputs[row]).swapaxes(0, 1))
    taps, reads = cast(TAPS), []
    for index in path:
        kept.append(cast(tokens.inputs[row, index]))
        mixed = sum(taps[:, :, tap] * kept[tap - c.taps] for tap in range(c.taps))
        mixed = mixed / (1 + np.exp(-mixed))
        q, k, v = np.split(mixed, [c.key_width, 2 * c.key_width], axis=1)
        q, k = (x / np.sqrt((x * x).sum(axis=1, keepdims=True) + 1e-6) for x in (q, k))
        v, q = v.reshape(c.key_heads, c.shared, c.value_width), q / np.sqrt(c.key_width)
        memory = memory * np.exp(cast(tokens.log_decay[row, index]))[:, :, None, None]
        known = np.einsum("jx,jpxy->jpy", k, memory)
        update = (v - known) * cast(tokens.strength[row, index])[:, :, None]
        memory = memory + np.einsum("jx,jpy->jpxy", k, update)
        reads.append(np.einsum("jx,jpxy->jpy", q, memory))
    return memory, np.stack(kept[1 - c.taps :], axis=1), np.asarray(reads)


def close(found: Any, expected: Any) -> None:
    assert relative_error(found, expected) <= TOLERANCE["float32"]


@each_row("length", [1, 2, BLOCK, 2 * BLOCK + 5])
def test_a_chunk_is_the_recurrence(length: int) -> None:
    """Of rows that own all tokens of the chunk, some, and none."""
    tokens, state = tokens_of(0, 3, length), state_of(5, 3)
    count = np.array([length, length // 2 + 1, 0])
    after, out = jax.jit(chunk_recurrence)(tokens, TAPS, state, jnp.asarray(count))
    for row, own in enumerate(count):
        memory, inputs, reads = recurrence(tokens, state, row, range(own))
        close(after.memory[row], memory)
        close(after.inputs[row], inputs)
        if own:
            close(out[row, :own], reads)
    np.testing.assert_array_equal(after.memory[2], state.memory[2])
    np.testing.assert_array_equal(after.inputs[2], state.inputs[2])


def test_long_rows_are_run_in_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 50 tokens, the last one of which is not whole."""
    tokens, state, count = tokens_of(0, 2, 149), state_of(5, 2), np.array([149, 101])
    monkeypatch.setattr(op, "SEGMENT", 100)
    after, out = jax.jit(lambda *given: chunk_recurrence(*given))(tokens, TAPS, state, count)
    for row, own in enumerate(count):
        memory, inputs, reads = recurrence(tokens, state, row, range(own))
        close(after.memory[row], memory)
        close(after.inputs[row], inputs)
        close(out[row, :own], reads)


def test_what_stands_behind_a_rows_own_tokens_changes_no_bit() -> None:
    tokens, state, count = tokens_of(0, 2, 70), state_of(5, 2), jnp.asarray([30, 66])
    beyond = (jnp.arange(70) >= count[:, None])[:, :, None, None]
    other = jax.tree.map(lambda part: jnp.where(beyond, 3.0, part), tokens)
    run = jax.jit(chunk_recurrence)
    after, out = run(tokens, TAPS, state, count)
    again, others = run(other, TAPS, state, count)
    jax.tree.map(np.testing.assert_array_equal, after, again)
    np.testing.assert_array_equal(out[0, :30], others[0, :30])


def tree(tokens: RecurrentTokens, state: RecurrentState) -> tuple[RecurrentRows, jax.Array]:
    rows = len(tokens.inputs)
    mask = jnp.broadcast_to(MASK, (rows, *MASK.shape))
    depth, levels = jnp.tile(DEPTH, (rows, 1)), int(DEPTH.max())
    run = jax.jit(tree_recurrence, static_argnames="levels")
    return run(tokens, TAPS, state, mask, depth, levels=levels)


def test_every_node_reads_behind_its_own_path() -> None:
    tokens, state = tokens_of(0, 2, NODES), state_of(5, 2)
    _, out = tree(tokens, state)
    for row in range(2):
        for node in range(NODES):
            *_, reads = recurrence(tokens, state, row, np.flatnonzero(MASK[node]))
            close(out[row, node], reads[-1])


def test_a_commit_is_the_state_behind_the_accepted_path() -> None:
    """Whole paths, a part, and none, in rows of a larger batch; the other rows keep theirs."""
    slots, tokens = state_of(5, 5), tokens_of(0, 3, NODES)
    held = jnp.asarray([4, 0, 2])
    state = slots.of_batch(held)
    rows, _ = tree(tokens, state)
    deepest = np.flatnonzero(MASK[10])
    path = np.stack([deepest, deepest, [0, 2, 5, 7, 7, 7, 7]])
    count = np.array([7, 0, 3])
    after = jax.jit(commit_path)(state, rows, jnp.asarray(path), jnp.asarray(count))
    whole = slots.put(held, after)
    for row, (slot, own) in enumerate(zip(held, count, strict=True)):
        memory, inputs, _ = recurrence(tokens, state, row, path[row, :own])
        close(whole.memory[slot], memory)
        close(whole.inputs[slot], inputs)
    for slot in (0, 1, 3):
        np.testing.assert_array_equal(whole.memory[slot], slots.memory[slot])


def test_levels_one_by_one_are_the_tree() -> None:
    """As a drafter runs them, after the rows of a path that is not in the state either."""
    tokens, state, path = tokens_of(0, 2, NODES), state_of(5, 2), 3
    chain, whole = tokens_of(50, 2, path), path + NODES
    both = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), chain, tokens)
    rows = empty_rows(state, 2, whole)
    seen = np.zeros((whole, whole), bool)
    seen[:path, :path] = np.tri(path)
    seen[path:, :path], seen[path:, path:] = True, MASK
    depth, at = np.concatenate([np.arange(path), path + DEPTH]), 0
    run = jax.jit(continued_recurrence, static_argnums=5)
    for size in (path, 1, 2, 3, 2, 1, 1, 1):
        part = jax.tree.map(lambda each, at=at, size=size: each[:, at : at + size], both)
        mask = jnp.broadcast_to(seen[at : at + size], (2, size, whole))
        own = jnp.tile(depth[at : at + size], (2, 1))
        rows, out = run(part, TAPS, state, rows, mask, at, own)
        for row in range(2):
            for node in range(size):
                *_, reads = recurrence(both, state, row, np.flatnonzero(seen[at + node]))
                close(out[row, node], reads[-1])
        at += size
    assert at == whole


def test_the_bytes_of_a_state_are_known() -> None:
    for dtype in ("float32", "bfloat16"):
        assert tree_bytes(empty_state(SHAPE, 3, dtype)) == 3 * state_bytes(SHAPE, dtype)
