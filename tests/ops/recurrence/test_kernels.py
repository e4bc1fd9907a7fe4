"""The kernels of recurrent layers equal the op; a node's bits depend only on its path."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.config.layers import RecurrenceConfig
from longspec_jax.ops import hardware
from longspec_jax.ops.recurrence import chunk_pallas, recurrence
from longspec_jax.ops.recurrence import recurrence_pallas as kernels
from longspec_jax.ops.recurrence.operands import (
    RecurrentRows,
    RecurrentState,
    RecurrentTokens,
    empty_state,
)
from longspec_jax.ops.recurrence.recurrence import commit_paths, gated_norm, tree_recurrence
from longspec_jax.ops.recurrence.visits import ANEW, CHILD, SIBLING, visits
from tests.kit import COMPILED, TOLERANCE, ancestors, each_row, normal, relative_error
from tests.ops.recurrence.reference import delta_rule_reference

ODD = RecurrenceConfig(key_heads=2, value_heads=6, key_width=5, value_width=11, taps=4)
EVEN = RecurrenceConfig(key_heads=3, value_heads=3, key_width=16, value_width=8, taps=2)
TREES = {
    "one node": (-1,),
    "chain": (-1, 0, 1, 2, 3, 4, 5),
    "branches": (-1, 0, 0, 1, 1, 2, 3, 5, 6, 8, 9),
    "leaves": (-1, 0, 0, 0, 0, 1, 1, 1, 4, 4),
    # As nodes are that fill a group of eight.
    "nodes that see only themselves": (-1, 0, 0, 1, 2, -1, -1, -1),
}
ROWS = 2


def drawn(sizes: RecurrenceConfig, nodes: int, dtype: str) -> tuple:
    """Fresh tokens, with gates after what the convolution reads, its weights, and a state."""
    seed = 10 * nodes + len(dtype)
    heads, wide = (ROWS, nodes, sizes.key_heads), sizes.inputs_width + sizes.shared
    tokens = RecurrentTokens(
        normal(seed, *heads, wide, dtype=dtype),
        -0.1 - 0.5 * jax.nn.sigmoid(normal(seed + 1, *heads, sizes.shared)),
        jax.nn.sigmoid(2 * normal(seed + 2, *heads, sizes.shared)),
    )
    taps = 0.6 * normal(seed + 3, sizes.key_heads, sizes.inputs_width, sizes.taps)
    empty = empty_state(sizes, ROWS, dtype)
    inputs = normal(seed + 5, *empty.inputs.shape, dtype=dtype)
    return tokens, taps, RecurrentState(normal(seed + 4, *empty.memory.shape), inputs)


@partial(jax.jit, static_argnames="interpret")
def run(
    tokens: RecurrentTokens,
    taps: jax.Array,
    state: RecurrentState,
    mask: jax.Array,
    interpret: bool,
) -> tuple[RecurrentRows, jax.Array]:
    """What the kernels make of a tree, as deep as a chain of its nodes."""
    tree = visits(mask, levels=mask.shape[1] - 1)
    keys, updates, out = kernels.tree_recurrence(tokens, taps, state, tree, interpret=interpret)
    gates, depth = tokens.log_decay, jnp.zeros(mask.shape[:2], jnp.int32)
    return RecurrentRows(tokens.inputs, keys, updates, gates, gates, depth), out


commit = jax.jit(kernels.commit_paths, static_argnames="interpret")


@each_row("parents", TREES.values())
def test_a_node_comes_behind_its_parent_or_its_sibling_or_anew(parents: tuple[int, ...]) -> None:
    mask = ancestors(parents)
    tree = visits(jnp.asarray(mask)[None], levels=len(mask) - 1)
    found = jax.tree.map(lambda each: np.asarray(each[0]), tree)
    assert sorted(found.order) == [*range(len(parents))]
    anew, last = 0, None
    for node, link in zip(found.order, found.link, strict=True):
        path = found.path[node, : found.count[node]]
        np.testing.assert_array_equal(path, np.flatnonzero(mask[node]))
        if last is None or link == ANEW:
            anew += 1
        else:
            assert parents[node] == {CHILD: last, SIBLING: parents[last]}[link]
        last = node
    # A new start for every inner node that is not the first of its siblings, and for roots.
    assert anew <= 1 + len([node for node, parent in enumerate(parents) if node in parents[1:]])


@pytest.mark.parametrize("interpret", COMPILED)
@each_row("name", ["branches", "nodes that see only themselves"])
@each_row(("sizes", "dtype"), [(ODD, "float32"), (EVEN, "bfloat16")])
def test_a_tree_is_the_ops_and_has_the_bits_of_plain_steps(
    name: str, sizes: RecurrenceConfig, dtype: str, interpret: bool
) -> None:
    """Along every path: what is read and written, and the state after it."""
    parents, mask = TREES[name], ancestors(TREES[name])
    tokens, taps, state = drawn(sizes, len(mask), dtype)
    masks, depth = jnp.tile(mask, (ROWS, 1, 1)), jnp.tile(mask.sum(axis=1) - 1, (ROWS, 1))
    rows, out = run(tokens, taps, state, masks, interpret)
    wanted, read = jax.jit(tree_recurrence.definition, static_argnums=5)(
        tokens, taps, state, masks, depth, len(mask) - 1
    )
    # Of 16 bits the convolution's result is rounded, where its last bits may differ.
    bound = TOLERANCE["float32"] if dtype == "float32" else 3e-3
    pairs = (rows.keys, wanted.keys), (rows.updates, wanted.updates), (out, read)
    assert max(relative_error(one, other) for one, other in pairs) <= bound
    behind = {-1: state}
    for node, parent in enumerate(parents):
        alone = jax.tree.map(lambda part, node=node: part[:, node : node + 1], tokens)
        row, read = run(alone, taps, behind[parent], jnp.ones((ROWS, 1, 1), bool), interpret)
        np.testing.assert_array_equal(read[:, 0], out[:, node])
        np.testing.assert_array_equal(row.updates[:, 0], rows.updates[:, node])
        ones = jnp.ones(ROWS, jnp.int32)
        [behind[node]] = commit(
            [behind[parent]], [row], 0 * ones[:, None], ones, interpret=interpret
        )
    for node in (len(mask) - 1, len(mask) // 2):
        path = np.flatnonzero(mask[node])
        count = jnp.asarray([len(path), 0])
        padded = jnp.tile(np.pad(path, (0, 2)), (ROWS, 1))
        [whole] = commit([state], [rows], padded, count, interpret=interpret)
        for row, stepped in enumerate((behind[node], state)):
            np.testing.assert_array_equal(whole.memory[row], stepped.memory[row])
            np.testing.assert_array_equal(whole.inputs[row], stepped.inputs[row])


@pytest.mark.parametrize("interpret", COMPILED)
def test_a_commit_is_that_of_the_op(interpret: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several launches, to some rows of a larger cache; the others keep theirs."""
    monkeypatch.setattr(kernels, "LAYERS", 2)
    mask, layers = ancestors(TREES["branches"]), range(3)
    path = jnp.asarray([np.flatnonzero(mask[10]), [0, 2, 5, 7, 7, 7, 7]])
    count, held = jnp.asarray([7, 3]), jnp.asarray([3, 1])
    states, rows = [], []
    for layer in layers:
        tokens, taps, own = drawn(ODD, len(mask), "float32")
        rows.append(run(tokens, taps, own, jnp.tile(mask, (ROWS, 1, 1)), interpret)[0])
        empty = empty_state(ODD, 4, "float32")
        memory, inputs = (normal(layer, *part.shape) for part in (empty.memory, empty.inputs))
        states.append(RecurrentState(memory, inputs).put(held, own))
    # The op reads the sums of decay along paths.
    sums = jnp.asarray(mask, jnp.float32)
    summed = [
        row.replace(total=jnp.einsum("tu,bujp->btjp", sums, row.log_decay, precision="highest"))
        for row in rows
    ]
    wanted = commit_paths.definition(states, summed, path, count, held)
    found = kernels.commit_paths(states, rows, path, count, held, interpret=interpret)
    for state, own, other in zip(states, found, wanted, strict=True):
        assert relative_error(own.memory, other.memory) <= TOLERANCE["float32"]
        np.testing.assert_array_equal(own.inputs, other.inputs)
        for row in (0, 2):
            np.testing.assert_array_equal(own.memory[row], state.memory[row])


@pytest.mark.parametrize("interpret", COMPILED)
@each_row("width", [7, 16])
def test_gated_norms_are_those_of_the_op(width: int, interpret: bool) -> None:
    """Some numbers stand before the gates; a token's bits do not depend on those next to it."""
    read, scale = normal(0, ROWS, 5, 3, 2, width), normal(1, width)
    gates = normal(2, ROWS, 5, 3, 4 + 2 * width, dtype="bfloat16")
    norm = jax.jit(partial(kernels.gated_norm, eps=1e-6, interpret=interpret))
    found = norm(read, gates, scale)
    assert found.dtype == gates.dtype and found.shape == (ROWS, 5, 6, width)
    assert relative_error(found, gated_norm.definition(read, gates, scale, 1e-6)) <= 3e-3
    np.testing.assert_array_equal(norm(read[:, 2:3], gates[:, 2:3], scale), found[:, 2:3])


def mixed_of(length: int, alike: bool) -> tuple[jax.Array, ...]:
    """A state, and a chunk after the convolution; of tokens that are alike nothing fades."""
    mixed = normal(1, ROWS, length, 2, 2 * 32 + 3 * 64)
    log_decay, strength = (jax.nn.sigmoid(normal(seed, ROWS, length, 2, 3)) for seed in (2, 3))
    if alike:
        mixed, log_decay = mixed[:, :1] + 0.01 * mixed, 0.01 * log_decay
        strength = 0.9 + 0.1 * strength
    mixed = jax.nn.silu(mixed).astype("bfloat16")
    return normal(4, ROWS, 2, 3, 32, 64), mixed, -0.3 * log_decay, strength


@pytest.mark.parametrize("interpret", COMPILED)
@each_row("alike", [False, True])
def test_a_chunk_is_the_definition_wherever_it_is_cut(alike: bool, interpret: bool) -> None:
    """Not a bit changes where it is cut after whole blocks."""
    memory, *tokens = mixed_of(192, alike)
    rule = jax.jit(partial(chunk_pallas.delta_rule_chunk, interpret=interpret))
    behind, read = rule(memory, *tokens)
    given = recurrence._operands(memory, *tokens)
    wanted, reads = jax.jit(delta_rule_reference)(memory, given)
    assert relative_error(behind, wanted) <= 2e-5 and relative_error(read, reads) <= 2e-5
    first, rest = ([part[:, at] for part in tokens] for at in (slice(64), slice(64, 192)))
    between, read_first = rule(memory, *first)
    again, read_rest = rule(between, *rest)
    np.testing.assert_array_equal(again, behind)
    np.testing.assert_array_equal(jnp.concatenate([read_first, read_rest], axis=1), read)


def test_a_chunk_is_whole_blocks_and_differentiable(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernel does not take is refused, and tokens beyond the chunk write nothing."""
    monkeypatch.setattr(hardware, "compute_capability", lambda: (8, 0))
    interpreted = partial(chunk_pallas.delta_rule_chunk, interpret=True)
    monkeypatch.setattr(chunk_pallas, "delta_rule_chunk", interpreted)
    memory, mixed, *gates = mixed_of(100, alike=False)
    behind, read = recurrence.delta_rule(memory, mixed, *gates)
    wanted, reads = recurrence.delta_rule.definition(memory, mixed, *gates)
    assert read.shape == reads.shape
    assert relative_error(behind, wanted) <= 2e-5 and relative_error(read, reads) <= 2e-5
    for other in (mixed.astype("float32"), mixed[:, :32]):
        cut = [gate[:, : other.shape[1]] for gate in gates]
        with pytest.raises(NotImplementedError, match="whole blocks in bfloat16"):
            recurrence.delta_rule.named("pallas")(memory, other, *cut)

    def total(rule, memory):
        return sum((part**2).sum() for part in rule(memory, mixed, *gates))

    found = jax.grad(partial(total, recurrence.delta_rule))(memory)
    expected = jax.grad(partial(total, recurrence.delta_rule.definition))(memory)
    assert relative_error(found, expected) <= TOLERANCE["float32"]


def test_gated_norms_have_a_gradient() -> None:
    """That of the plain form."""
    read, gates, scale = normal(0, 1, 3, 2, 2, 4), normal(1, 1, 3, 2, 8), normal(2, 4)

    def total(norm, *parts):
        return (norm(*parts, 1e-6) ** 2).sum()

    found = jax.grad(partial(total, gated_norm), argnums=(0, 1, 2))(read, gates, scale)
    wanted = jax.grad(partial(total, gated_norm.definition), argnums=(0, 1, 2))(read, gates, scale)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)
