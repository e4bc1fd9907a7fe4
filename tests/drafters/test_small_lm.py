"""A small model as drafter: its cache, its trees, and equality with running whole texts again."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.config.tree import TreeConfig
from longspec_jax.decoding.cache import KVCache
from longspec_jax.decoding.target import TargetModel
from longspec_jax.drafters.base import Committed, Params, View
from longspec_jax.drafters.small_lm import SPARE, SmallLMDrafter, SmallLMState, allocate, append
from tests.decoding.lossless import dense
from tests.drafters.kit import paths, proposed_from
from tests.kit import after_prompts, random_target, tiny_target_config

CONFIG = tiny_target_config(
    model_width=20, mlp_width=31, num_heads=4, num_kv_heads=2, head_width=10, vocab_size=97
)
SMALL = random_target(CONFIG, seed=3)
PARAMS = Params(None, SMALL)
TREE = TreeConfig((3, 4, 4))
LENGTHS = np.array([17, 3], np.int32)
TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, 32)).astype(np.int32)
PENDING = jnp.asarray([61, 5])


def view_at(position: Any, length: Any = None) -> View:
    """What the drafter sees: no cache of the target, which it does not read."""
    position = jnp.asarray(position)
    length = position if length is None else jnp.asarray(length)
    return View(TargetModel(CONFIG), None, KVCache((), ()), PENDING, position, length, length < 0)


@jax.jit
def dense_logits(text: jax.Array) -> jax.Array:
    """The small model's logits at every token of a text, from one causal pass without a cache."""
    return dense(CONFIG, SMALL, text[None])[0]


def path_logits(row: int, length: int, path: tuple[int, ...]) -> np.ndarray:
    """Logits after a path below a row's pending token."""
    text = [*TOKENS[row, :length], int(PENDING[row]), *path]
    padded = jnp.asarray(text + [0] * (24 - len(text)), jnp.int32)
    return np.asarray(dense_logits(padded)[len(text) - 1])


def assert_committed_slots_equal(ours: SmallLMState, theirs: SmallLMState, lengths: Any) -> None:
    """The slots of committed tokens agree; what lies after them is of no concern."""
    assert int(np.max(lengths)) > 0
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        for row, length in enumerate(lengths):
            np.testing.assert_allclose(a[row, :, :length], b[row, :, :length], atol=1e-5)


def in_chunks(lengths: np.ndarray, sizes: list[int]) -> SmallLMState:
    """The state after prompts that arrive in chunks of these sizes."""
    drafter = SmallLMDrafter(CONFIG, TREE)
    state, offset = drafter.begin(PARAMS, len(lengths), 32), 0
    extend = jax.jit(drafter.extend)
    tokens = np.pad(TOKENS, ((0, 0), (0, 128)))
    for size in sizes:
        count = jnp.asarray(np.clip(lengths - offset, 0, size))
        block = jnp.asarray(tokens[:, offset : offset + size])
        state = extend(PARAMS, state, Committed(block, jnp.full_like(count, offset), count))
        offset += size
    return state


def test_the_tree_holds_the_best_paths() -> None:
    """Every score is that of the small model run over the whole path, without cache or tree."""
    drafter = SmallLMDrafter(CONFIG, TREE)
    state = after_prompts(drafter, PARAMS, TOKENS, LENGTHS)
    tree, heard = proposed_from(drafter, PARAMS, state, view_at(LENGTHS))
    for row, length in enumerate(LENGTHS):
        nodes, best = paths(tree, row), {(): 0.0}
        for level, first in enumerate((0, 1, 4)):
            grown = {}
            for path, node in nodes.items():
                if len(path) == level:
                    expected = path_logits(row, length, path)
                    np.testing.assert_allclose(heard[level][row, node - first], expected, atol=2e-4)
                    scores = np.asarray(jax.nn.log_softmax(expected)) + best[path]
                    grown |= {(*path, token): float(s) for token, s in enumerate(scores)}
            kept = sorted(grown, key=lambda path: -grown[path])[: TREE.widths[level]]
            best = {path: grown[path] for path in kept}
            assert {path for path in nodes if len(path) == level + 1} == set(best)


@pytest.mark.parametrize("sizes", [[8] * 4, [4] * 8, [1, 2, 29], [128], [32, 96]])
def test_a_prompt_in_chunks_equals_a_prompt_at_once(sizes: list[int]) -> None:
    """Chunks of both ways of writing; rows end in different ones, and chunks beyond the cache."""
    lengths = np.array([29, 2], np.int32)
    whole = after_prompts(SmallLMDrafter(CONFIG, TREE), PARAMS, TOKENS, lengths)
    assert (max(sizes) > SPARE) == (sizes in ([128], [32, 96]))
    assert_committed_slots_equal(in_chunks(lengths, sizes), whole, lengths)


STARTS = [0, 7, 28, 30, 31, 32, 31 + SPARE, 4000]


@pytest.mark.parametrize("given", [4, SPARE + 4], ids=["block", "chunk"])
@pytest.mark.parametrize("advances", [False, True])
def test_only_the_slots_behind_the_start_are_written(given: int, advances: bool) -> None:
    """Tokens beyond the count or the capacity of 32 are never written over committed ones.

    A round writes a static height, so that the last one reaches beyond the cache; and a row that
    does not advance keeps what it has wherever it is said to start.
    """
    config = tiny_target_config(num_layers=1)
    old = jax.tree.map(
        lambda leaf: leaf + 1 + jnp.arange(leaf.shape[2])[:, None],
        allocate(config, len(STARTS), 32),
    )
    shape = (len(STARTS), given, config.num_kv_heads, config.head_width)
    rows = -1.0 - jnp.broadcast_to(jnp.arange(given)[:, None, None], shape)
    start = np.array(STARTS)
    count = np.clip(32 - start, 0, 3) * advances
    new = jax.jit(append)(old, (rows,), (2 * rows,), jnp.asarray(start), jnp.asarray(count))
    for row, (at, joined) in enumerate(zip(start, count, strict=True)):
        expected = np.array(old.cache.keys[0][row])
        expected[:, at : at + joined] = rows[row].swapaxes(0, 1)[:, :joined]
        end = at + joined if joined else 32
        np.testing.assert_array_equal(new.cache.keys[0][row, :, :end], expected[:, :end])
        written = np.array(new.cache.values[0][row, :, at : at + joined])
        np.testing.assert_array_equal(written, 2 * expected[:, at : at + joined])


def test_it_goes_on_from_where_its_own_cache_ends() -> None:
    """Inside another drafter that is ahead of the target's cache."""
    drafter = SmallLMDrafter(CONFIG, TREE)
    state = after_prompts(drafter, PARAMS, TOKENS, LENGTHS)
    plain, _ = proposed_from(drafter, PARAMS, state, view_at(LENGTHS))
    ahead, _ = proposed_from(drafter, PARAMS, state, view_at(LENGTHS, LENGTHS - 3))
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(ahead), strict=True):
        np.testing.assert_array_equal(a, b)
