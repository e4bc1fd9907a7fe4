"""Passes of the target over a part of its cache, against one dense pass under a written-out mask.

The reference runs the whole text at once: committed tokens see all before them, as when they were
cached; the tokens of the partial pass see what was selected, and what their mask says.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.decoding.cache import KVCache
from longspec_jax.decoding.target import TargetModel
from longspec_jax.drafters.base import Features, Needs, PartialForward, View
from longspec_jax.drafters.retrieval.selection import SinksAndRecent, Spans
from longspec_jax.models.target import Target
from longspec_jax.ops.attention.operands import Fresh
from longspec_jax.ops.attention.reference import tree_attention
from tests.kit import TOLERANCE, random_target, relative_error, tiny_target_config

CONFIG = tiny_target_config()
TARGET = TargetModel(CONFIG)
LENGTHS = np.array([17, 6, 1], np.int32)
CHUNK = 5
NEEDS = Needs(hidden=(0, 1), queries=(1,))
MASK = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], bool)
"""A root, two children and a grandchild."""
DEPTHS = np.array([0, 1, 1, 2])
close = partial(pytest.approx, abs=TOLERANCE["float32"])


class Setting(NamedTuple):
    """Prompts in a cache."""

    params: Any
    tokens: np.ndarray
    view: View
    nodes: jax.Array


@pytest.fixture(scope="module")
def setting() -> Setting:
    params, random = random_target(CONFIG), np.random.default_rng(3)
    tokens = random.integers(0, CONFIG.vocab_size, (3, 20)).astype(np.int32)
    cache, last = TARGET.allocate(3, 32), jnp.zeros(3, jnp.int32)
    run_chunk = jax.jit(TARGET.prefill_chunk)
    for offset in range(0, 20, CHUNK):
        chunk = jnp.asarray(tokens[:, offset : offset + CHUNK])
        _, cache, *_ = run_chunk(params, cache, chunk, jnp.full(3, offset), last)
    nodes = jnp.asarray(random.integers(0, CONFIG.vocab_size, (3, 7)), jnp.int32)
    length = jnp.asarray(LENGTHS)
    view = View(TARGET, params, cache, nodes[:, 0], length, length, length < 0)
    return Setting(params, tokens, view, nodes)


def dense(
    params: Any, tokens: np.ndarray, positions: np.ndarray, mask: np.ndarray
) -> tuple[jax.Array, Features]:
    """Logits and features of one row's text, padded so that all are one program."""
    length, padded = len(tokens), np.eye(32, dtype=bool)
    padded[:length, :length] = mask
    pad = (0, 32 - length)
    found = _dense(params, np.pad(tokens, pad)[None], np.pad(positions, pad)[None], padded[None])
    return jax.tree.map(lambda f: np.asarray(f)[0, :length], found)


@jax.jit
def _dense(
    params: Any, tokens: jax.Array, positions: jax.Array, mask: jax.Array
) -> tuple[jax.Array, Features]:
    queries = {}

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        queries[layer] = q
        return tree_attention(q, Fresh(k, v, mask)).out

    model, variables = Target(CONFIG), {"params": params}
    output: Any = model.apply(variables, tokens, positions, attend, keep=NEEDS.hidden)
    logits: Any = model.apply(variables, output.hidden, method="unembed")
    return logits, Features(output.kept, {layer: queries[layer] for layer in NEEDS.queries})


def expected(
    setting: Setting, row: int, selected: np.ndarray, depths: np.ndarray, own: np.ndarray
) -> tuple[jax.Array, Features]:
    """What the nodes of a row find, if of its prompt they see the selected slots."""
    length, fresh = int(LENGTHS[row]), len(depths)
    mask = np.tri(length + fresh, dtype=bool)
    mask[length:, :length], mask[length:, length:] = selected[:length], own
    tokens = np.concatenate([setting.tokens[row, :length], setting.nodes[row, :fresh]])
    positions = np.concatenate([np.arange(length), length + depths])
    found = dense(setting.params, tokens, positions, mask)
    return jax.tree.map(lambda f: f[length:], found)


def chosen(selection: Spans, row: int) -> np.ndarray:
    """The slots of a row that are selected."""
    slot = np.arange(32)[:, None]
    return ((slot >= selection.start[row]) & (slot < selection.stop[row])).any(axis=1)


@partial(jax.jit, static_argnums=4)
def _partial_forward(
    params: Any, cache: KVCache, nodes: jax.Array, selection: Spans, needs: Needs
) -> PartialForward:
    length = jnp.asarray(LENGTHS)
    view = View(TARGET, params, cache, nodes[:, 0], length, length, length < 0)
    return view.partial_forward(
        nodes[:, :4],
        view.position[:, None] + DEPTHS,
        selection,
        view.uncommitted(4),
        jnp.broadcast_to(MASK, (3, 4, 4)),
        0,
        needs,
    )


def partial_forward(setting: Setting, selection: Spans, needs: Needs = NEEDS) -> PartialForward:
    """The tree of ``MASK`` below the pending tokens, in one pass; on the host."""
    view = setting.view
    return jax.device_get(
        _partial_forward(view.params, view.cache, setting.nodes, selection, needs)
    )


def test_a_partial_forward_over_everything_is_a_verification(setting: Setting) -> None:
    view = setting.view
    found = partial_forward(setting, SinksAndRecent(3, 100)(view.length))
    verified = jax.jit(partial(TARGET.verify, levels=3, needs=NEEDS))(
        *(setting.params, view.cache, setting.nodes[:, :4], view.position[:, None] + DEPTHS),
        *(np.broadcast_to(MASK, (3, 4, 4)), view.length),
    )
    assert relative_error(found.logits, verified.logits) == close(0)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
        (found.fresh, found.features),
        (type(found.fresh)(verified.keys, verified.values), verified.features),
    )


def several(length: jax.Array) -> Spans:
    """An empty one among them."""
    start = jnp.array([[0, 4, 9], [1, 1, 5], [0, 0, 0]])
    return Spans(start, jnp.array([[2, 5, 14], [1, 3, 6], [1, 0, 0]]))


@pytest.mark.parametrize(
    "selection",
    [SinksAndRecent(2, 4), SinksAndRecent(0, 3), several],
    ids=["both", "recent", "several spans"],
)
def test_a_partial_forward_sees_what_is_selected_and_no_more(
    setting: Setting, selection: Callable[[jax.Array], Spans]
) -> None:
    """In rows that are longer than the selection, about as long, and shorter."""
    spans = selection(setting.view.length)
    found = partial_forward(setting, spans)
    for row in range(3):
        logits, features = expected(setting, row, chosen(spans, row), DEPTHS, MASK)
        assert relative_error(found.logits[row], logits) == close(0)
        mine = jax.tree.map(lambda f, row=row: f[row], found.features)
        assert jax.tree.all(jax.tree.map(lambda a, b: relative_error(a, b) < 1e-5, mine, features))
    everything, _ = expected(setting, 0, np.ones(32, bool), DEPTHS, MASK)
    assert relative_error(found.logits[0], everything) > 0.01  # So the selection matters.


def test_levels_that_are_run_one_by_one_are_one_tree(setting: Setting) -> None:
    view, spans = setting.view, SinksAndRecent(2, 4)(setting.view.length)

    @jax.jit
    def one_by_one() -> jax.Array:
        fresh, logits = view.uncommitted(4), []
        for level in (slice(0, 1), slice(1, 3), slice(3, 4)):
            mask = jnp.broadcast_to(MASK[level], (3, *MASK[level].shape))
            positions = view.position[:, None] + DEPTHS[level]
            tokens = setting.nodes[:, level]
            found = view.partial_forward(tokens, positions, spans, fresh, mask, level.start)
            fresh, logits = found.fresh, [*logits, found.logits]
        return jnp.concatenate(logits, axis=1)

    assert relative_error(one_by_one(), partial_forward(setting, spans).logits) == close(0)


def test_a_view_from_further_on_sees_the_tokens_between(setting: Setting) -> None:
    """Chains of 3, 1 and 0 tokens in two parts, and a tree after them."""
    view, spans = setting.view, SinksAndRecent(2, 4)(setting.view.length)
    nodes, parts = np.asarray(setting.nodes), np.array([[2, 1], [1, 0], [0, 0]])

    def following(done: np.ndarray, width: int) -> jax.Array:
        found = [row[start : start + width] for row, start in zip(nodes, done, strict=True)]
        return jnp.asarray(np.stack(found))

    @jax.jit
    def further_on() -> tuple[jax.Array, jax.Array, PartialForward]:
        ahead, done = view, np.zeros(3, np.int32)
        for part in parts.T:
            width = int(part.max())
            found = ahead.partial_forward(
                *(following(done, width), ahead.position[:, None] + np.arange(width), spans),
                *(ahead.uncommitted(width), jnp.tri(width, dtype=bool)[None].repeat(3, 0), 0),
            )
            done = done + part
            ahead = ahead.ahead(following(done, 1)[:, 0], jnp.asarray(part), found.fresh)
        found = ahead.partial_forward(
            *(following(done, 4), ahead.position[:, None] + DEPTHS, spans, ahead.uncommitted(4)),
            *(jnp.broadcast_to(MASK, (3, 4, 4)), 0),
        )
        return ahead.position, ahead.length, found

    position, length, found = jax.device_get(further_on())
    done = parts.sum(axis=1)
    np.testing.assert_array_equal(position, LENGTHS + done)
    np.testing.assert_array_equal(length, LENGTHS)
    assert found.fresh.keys[0].shape[1] == 4
    for row, chain in enumerate(done):
        own = np.tri(chain + 4, dtype=bool)
        own[chain:, chain:] = MASK
        depths = np.concatenate([np.arange(chain), chain + DEPTHS])
        logits, _ = expected(setting, row, chosen(spans, row), depths, own)
        assert relative_error(found.logits[row], logits[chain:]) == close(0)
