"""Retrieved context: what is summarised, asked and read, and that a check over it is a check."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.config.tree import TreeConfig
from longspec_jax.decoding.cache import KVCache
from longspec_jax.decoding.target import TargetModel
from longspec_jax.drafters.base import Committed, Features, View
from longspec_jax.drafters.retrieval.hierarchy import PartialVerifier
from longspec_jax.drafters.retrieval.selection import (
    AttentionRetriever,
    LastQuery,
    Quest,
    Retriever,
    Selector,
    Spans,
    WorkingSet,
)
from longspec_jax.drafters.streaming import StreamingDrafter
from longspec_jax.ops.selection.blocks import BlockBudget
from tests.decoding.lossless import CONFIG, TRANSFORMER
from tests.decoding.lossless import request as requested
from tests.drafters.kit import histogram, is_perfect
from tests.kit import each_row, tiny_target_config
from tests.lookup import LookupDrafter
from tests.ops.selection import oracle

LOOKUP = tiny_target_config(num_layers=1, num_heads=1, num_kv_heads=1, head_width=2)
"""Of the lookup model's cache all but the width, which is 1."""
ROOMY = BlockBudget(slots=64, sinks=4, recent=8, block=4)
"""All that the rows ever hold, and half of their capacity."""
TIGHT = BlockBudget(slots=16, sinks=4, recent=8, block=4)
MIXED = requested((0.0, 0.7, 1.0))
CHAIN = TreeConfig((1,) * 6)


def view_at(cache: KVCache, *length: int) -> View:
    """What a selector sees of rows that are so long."""
    at = jnp.asarray(length)
    return View(TargetModel(CONFIG), None, cache, 0 * at, at, at, at < 0)


def over(selector: Selector) -> PartialVerifier:
    """The target's own chains, checked over what the selector chooses."""
    return PartialVerifier(LookupDrafter(TreeConfig((1, 1))), selector, CHAIN)


@pytest.mark.parametrize(
    ("kind", "budget"),
    [(Quest, ROOMY), (AttentionRetriever, ROOMY), (Quest, BlockBudget(512, 4, 8, 4))],
    ids=["quest", "attention", "in-place"],
)
def test_what_sees_every_token_once_is_perfect(kind: Any, budget: BlockBudget) -> None:
    """In rows that have fewer blocks than could be read: one token twice would be another hash."""
    assert is_perfect(histogram(over(kind(LOOKUP, budget)), MIXED))


class Longer(Quest):
    """The last block is read twice."""

    more = 1

    def choose(self, state: Any, view: Any) -> WorkingSet:
        found = super().choose(state, view)
        assert isinstance(found, WorkingSet)
        return replace(found, length=found.length + self.more)


class Shorter(Longer):
    """Tokens are missing at the end."""

    more = -1


@pytest.mark.parametrize("kind", [Longer, Shorter])
def test_a_mistake_lowers_what_is_accepted(kind: Any) -> None:
    """Negative control: the perfection above tells a right reading from a wrong one."""
    found = histogram(over(kind(LOOKUP, ROOMY)), MIXED)
    assert found[-1] < found.sum() / 2


@pytest.mark.parametrize("chunk", [8, 19])
def test_summaries_after_decoding_are_those_of_the_cache(chunk: int) -> None:
    """Of prompts in chunks and of accepted paths; the queries are the last ones' too."""
    quest = Quest(CONFIG, TIGHT, queries=3)
    drafter = PartialVerifier(StreamingDrafter(TreeConfig((2, 2))), quest, CHAIN)
    [state] = TRANSFORMER.same(drafter, None, [MIXED], chunk=chunk)
    found, length = state.rows.draft.selector, state.rows.length
    assert len({*np.asarray(length).tolist()}) == 3
    for layer, keys in enumerate(state.rows.cache.keys):
        wanted = oracle.extremes_of(keys, length, TIGHT.block)
        np.testing.assert_array_equal(found.extremes.highest[:, :, layer], wanted[0])
        np.testing.assert_array_equal(found.extremes.lowest[:, :, layer], wanted[1])
    assert (found.count >= 1).all() and (found.count <= 3).all()


def committed(config: Any, tokens: int, count: Any, seed: int = 0) -> Committed:
    """Random keys and queries of all layers, in rows that start at 0."""
    rows, layers = len(count), range(config.num_layers)
    draw = partial(np.random.default_rng(seed).standard_normal, dtype=np.float32)
    heads = dict(queries=config.num_heads, keys=config.num_kv_heads)
    found = {
        name: {layer: jnp.asarray(draw((rows, tokens, n, config.head_width))) for layer in layers}
        for name, n in heads.items()
    }
    zeros = jnp.zeros((rows, tokens), jnp.int32)
    return Committed(zeros, zeros[:, 0], jnp.asarray(count), Features({}, **found))


def test_the_last_queries_ask_and_rows_that_stand_still_keep_theirs() -> None:
    quest = Quest(CONFIG, TIGHT, queries=3)
    first = committed(CONFIG, 9, [9, 2, 0])
    extend = jax.jit(quest.extend)
    state = extend(quest.begin(3, 32), first)
    assert np.asarray(state.count).tolist() == [3, 2, 0]
    for layer in range(CONFIG.num_layers):
        asked = first.features.queries[layer]
        np.testing.assert_array_equal(state.queries[0, :, layer], asked[0, 6:9])
        np.testing.assert_array_equal(state.queries[1, :2, layer], asked[1, :2])
    after = extend(state, committed(CONFIG, 1, [0, 1, 0], seed=1))
    assert np.asarray(after.count).tolist() == [3, 1, 0]
    np.testing.assert_array_equal(after.queries[0], state.queries[0])


def test_every_head_of_every_layer_reads_the_block_that_its_query_wants() -> None:
    """A key along the last query, planted in a block of its own for every layer and head."""
    quest, slots = Quest(CONFIG, TIGHT), 48
    told = committed(CONFIG, slots, [slots])
    layers, heads = range(CONFIG.num_layers), range(CONFIG.num_kv_heads)
    keys = {layer: 0.1 * np.asarray(told.features.keys[layer]) for layer in layers}
    queries = {layer: np.zeros_like(told.features.queries[layer]) for layer in layers}
    wanted = {(layer, head): 2 + 3 * layer + head for layer in layers for head in heads}
    for (layer, head), block in wanted.items():
        mine = slice(head * CONFIG.num_groups, (head + 1) * CONFIG.num_groups)
        direction = np.where(np.arange(CONFIG.head_width) % 2, 1.0, -1.0)
        queries[layer][0, -1, mine] = direction
        keys[layer][0, block * 4 + 1, head] = direction
    keys, queries = jax.tree.map(jnp.asarray, (keys, queries))
    state = quest.begin(1, slots)
    state = jax.jit(quest.extend)(state, told._replace(features=Features({}, queries, keys)))
    cache = tuple(keys[layer].swapaxes(1, 2) for layer in layers)
    view = view_at(KVCache(cache, cache), slots)
    found = jax.jit(lambda state: quest.choose(state, view))(state)
    assert isinstance(found, WorkingSet) and int(found.length[0]) == 16
    for (layer, head), block in wanted.items():
        read = np.asarray(found.keys[layer])[0, head]
        mine = np.asarray(cache[layer])[0, head].reshape(12, 4, -1)
        np.testing.assert_array_equal(read, mine[[0, 10, block, 11]].reshape(16, -1))


def test_rows_of_a_larger_cache_choose_and_read_as_alone() -> None:
    """As in a launch of two rows of four, the others of which are NaN."""
    draw, slots, rows = np.random.default_rng(3), 48, jnp.asarray([3, 1])
    shape = (2, CONFIG.num_kv_heads, slots, CONFIG.head_width)
    layers = [jnp.asarray(draw.normal(size=shape), jnp.float32) for _ in range(4)]
    larger = [jnp.full((4, *shape[1:]), jnp.nan).at[rows].set(layer) for layer in layers]
    query = draw.normal(size=(2, CONFIG.num_heads, CONFIG.head_width))
    state = LastQuery(jnp.asarray(query, jnp.float32))
    caches = (
        KVCache((*layers[:2],), (*layers[2:],)),
        KVCache((*larger[:2],), (*larger[2:],), rows),
    )
    own, among = (
        AttentionRetriever(CONFIG, TIGHT).choose(state, view_at(cache, 41, 30)) for cache in caches
    )
    assert isinstance(own, WorkingSet)
    jax.tree.map(np.testing.assert_array_equal, among, own)


def test_the_last_token_asks_for_all_layers() -> None:
    """Of the last layer; a row that stands still goes on asking what it asked."""
    attended, told = AttentionRetriever(CONFIG, TIGHT), committed(CONFIG, 9, [9, 2, 0])
    state = attended.extend(attended.begin(3, 32), told)
    asked = told.features.queries[CONFIG.num_layers - 1]
    np.testing.assert_array_equal(state.query[:2], jnp.stack([asked[0, 8], asked[1, 1]]))
    after = attended.extend(state, committed(CONFIG, 1, [0, 1, 0], seed=1))
    np.testing.assert_array_equal(after.query[0], state.query[0])
    assert attended.needs.keys == () and attended.needs.recent == 1


@each_row("kind", [Quest, AttentionRetriever])
def test_it_is_a_selector_and_refuses_what_cannot_be(kind: Any) -> None:
    assert isinstance(kind(CONFIG, TIGHT), Retriever)
    with pytest.raises(ValueError, match="46 slots is not a whole number of blocks of 4"):
        kind(CONFIG, TIGHT).begin(1, 46)
    with pytest.raises(ValueError, match="queries=0 must be at least 1"):
        Quest(CONFIG, TIGHT, queries=0)


def test_it_says_how_much_of_the_cache_it_copies() -> None:
    selector = Quest(CONFIG, TIGHT)
    for capacity in (16, 64):
        view = view_at(TargetModel(CONFIG).allocate(1, capacity), 9)
        found = selector.choose(selector.begin(1, capacity), view)
        copied = found.keys[0].shape[2] if isinstance(found, WorkingSet) else 0
        assert selector.gathered_slots(capacity) == copied


def test_a_cache_within_the_budget_is_read_where_it_lies() -> None:
    quest = Quest(CONFIG, BlockBudget(32, 4, 8, 4))
    view = view_at(TargetModel(CONFIG).allocate(1, 32), 9)
    assert isinstance(quest.choose(quest.begin(1, 32), view), Spans)
