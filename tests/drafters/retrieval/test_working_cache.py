"""Working caches: which slots are read, when they are chosen, and that no token depends on it."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.config.tree import PLAIN, TreeConfig
from longspec_jax.drafters.base import Drafter, Params
from longspec_jax.drafters.joined import Joined
from longspec_jax.drafters.longspec import LongSpecDrafter, LongSpecOptions
from longspec_jax.drafters.ngram import NgramDrafter
from longspec_jax.drafters.retrieval.hierarchy import PartialVerifier
from longspec_jax.drafters.retrieval.selection import LastQuery
from longspec_jax.drafters.retrieval.working_cache import (
    CachedSelection,
    WorkingCache,
    WorkingCacheOptions,
)
from longspec_jax.drafters.small_lm import SmallLMDrafter, SmallLMOptions
from longspec_jax.ops.attention.operands import Prefix
from longspec_jax.ops.selection.blocks import BlockBudget
from tests.decoding import lossless
from tests.kit import each_row, in_tiers, random_target, tiny_target_config, view_of

ONE_LAYER = tiny_target_config(num_layers=1)
SLOTS, CHUNK = 256, 8


def working(target: Any = ONE_LAYER, slots: int = 32) -> WorkingCache:
    """32 of the slots, in chunks of 8: one of sinks, one recent, and two that are chosen."""
    recent = max(CHUNK, slots // 64 * CHUNK)
    return WorkingCache(BlockBudget(slots, CHUNK, recent, CHUNK), target)


def slots_read(cache: WorkingCache, choice: CachedSelection, length: Any) -> list[list[int]]:
    """The slots of every row's working cache, found by reading their own numbers."""
    prefix = _read(cache, choice, jnp.asarray(length, jnp.int32))
    np.testing.assert_array_equal(prefix.keys, -prefix.values)
    found = np.asarray(prefix.keys)[:, 0, :, 0].astype(int)
    return [row[:count].tolist() for row, count in zip(found, prefix.length, strict=True)]


@partial(jax.jit, static_argnums=0)
def _read(cache: WorkingCache, choice: Any, length: jax.Array) -> Prefix:
    shape = len(length), 1, SLOTS, 1
    numbers = jnp.broadcast_to(jnp.arange(SLOTS, dtype=jnp.float32)[:, None], shape)
    table = cache.table(choice, length, SLOTS)
    return cache.read(Prefix(numbers, -numbers, table.length), table)


def attending(cache: WorkingCache, length: Any, slots: Any) -> CachedSelection:
    """What was chosen where the target attends to one slot of every row."""
    return looking(cache, cache.begin(len(length)), length, slots)


def looking(cache: WorkingCache, choice: Any, length: Any, slots: Any) -> CachedSelection:
    """A look at a target's cache in which the row's query attends to only one slot."""
    rows, config = len(length), cache.target
    shape = (rows, config.num_kv_heads, SLOTS, config.head_width)
    keys = np.full(shape, -1.0, np.float32)
    keys[np.arange(rows), :, np.asarray(slots)] = 40.0
    return _looked(cache, choice, jnp.asarray(length, jnp.int32), keys)


@partial(jax.jit, static_argnums=0)
def _looked(cache: WorkingCache, choice: Any, length: jax.Array, keys: Any) -> Any:
    view = view_of(jnp.zeros_like(length), length, keys, keys)
    query = LastQuery(jnp.ones_like(choice.retriever.query))
    return cache.before_round(replace(choice, retriever=query), view)


def test_what_the_target_attends_to_is_read_until_the_next_choice() -> None:
    """Sinks, the chunk that is attended to, the last one, and all that is committed after it."""
    cache, length = working(), np.array([203, 120, 30, 200])
    choice = attending(cache, length, [101, 17, 9, 199])
    for committed in (0, 3, 19):
        read = slots_read(cache, choice, length + committed)
        for row, (start, slot) in enumerate(zip(length, [101, 17, 9, 199], strict=True)):
            end, last = start + committed, (start - 1) // CHUNK * CHUNK
            assert len(read[row]) == len(set(read[row])), "no slot is read twice"
            assert {*range(8), *range(slot // 8 * 8, slot // 8 * 8 + 8)} <= set(read[row])
            assert set(range(last, end)) <= set(read[row]) <= set(range(end))
            # Four chunks at the choice, the last of which need not be full.
            assert len(read[row]) == min(24 + start - last, start) + committed


def test_rows_choose_in_every_round() -> None:
    cache = working()
    first = attending(cache, [150, 150], [60, 60])
    second = looking(cache, first, [155, 152], [100, 20])
    for row, slot in enumerate((100, 20)):
        assert slot // CHUNK in np.asarray(second.blocks[row])
    np.testing.assert_array_equal(second.length, [155, 152])


def test_a_row_that_has_not_chosen_yet_reads_sinks_and_the_last_chunks() -> None:
    cache = working()
    length = np.array([201, 32, 5, 0])
    read = slots_read(cache, cache.begin(4), length)
    assert all(row == sorted({*row}) for row in read)
    assert set(read[0]) >= {*range(8), *range(184, 201)}
    assert read[1:] == [[*range(end)] for end in length[1:]]


def test_a_choice_is_of_one_size_whatever_the_capacity() -> None:
    """The small model's whole cache grows, to choose from; a LongSpec draft's state does not."""

    def sizes(drafter: Any, capacity: int) -> list[int]:
        state = jax.eval_shape(lambda: drafter.begin(Params(None, None), 2, capacity))
        return [leaf.size for leaf in jax.tree.leaves(state.choice)]

    small = SmallLMDrafter(ONE_LAYER, working=working())
    own = LongSpecDrafter(lossless.DRAFT, TreeConfig((2,)), working=working(lossless.CONFIG))
    for drafter in (small, own):
        assert sizes(drafter, 128) == sizes(drafter, 1 << 17) != []
    assert small.begin(Params(None, None), 1, 100).cache.keys[0].shape[2] % CHUNK == 0


LENGTHS = np.array([131, 70, 3], np.int32)
MIXED = lossless.request(**lossless.MIXED)
LONG = replace(
    lossless.TRANSFORMER,
    tokens=lossless.prompts(101, LENGTHS),
    lengths=LENGTHS,
    sizes={"capacity": SLOTS, "chunk": 72},
    _known={},
)
"""Two of whose prompts are far longer than what is read."""
TREE = TreeConfig((3, 2), budget=5)
CHAIN = TreeConfig((1, 1, 1))
CHOSEN = working(lossless.CONFIG)
SMALL = lossless.SMALL
OF_SMALL = random_target(SMALL, seed=5)
DRAFTERS: dict[str, tuple[Drafter, Any]] = {
    "small_lm": (SmallLMDrafter(SMALL, TREE, None, True, CHOSEN), OF_SMALL),
    "longspec": (LongSpecDrafter(lossless.DRAFT, TREE, None, CHOSEN), lossless.LONGSPEC),
    "triforce": (
        PartialVerifier(
            SmallLMDrafter(SMALL, TreeConfig((1, 1)), None, True, CHOSEN),
            tree=TreeConfig((1,) * 6),
        ),
        OF_SMALL,
    ),
}


@pytest.mark.parametrize("name", in_tiers(DRAFTERS, "longspec"))
def test_a_working_cache_changes_no_token(name: str) -> None:
    """Rows at temperatures 0, 0.7 and 1, of different lengths."""
    drafter, draft = DRAFTERS[name]
    [state] = LONG.drafted(drafter, draft, [MIXED])
    if drafter.needs.queries:
        choice = getattr(state.rows.draft, "inner", state.rows.draft).choice
        # The rows that end before it read nothing any more.
        assert choice.length[0] > LENGTHS[0], "the longest row chose again while it went on"


@pytest.mark.parametrize("budget", [64, SLOTS])
def test_a_working_cache_of_everything_is_as_good_as_the_whole(budget: int) -> None:
    """The target drafts for itself: it is always right where it sees all, and not where less."""
    cache = working(lossless.CONFIG, budget)
    drafter = SmallLMDrafter(lossless.CONFIG, CHAIN, working=cache)
    [state] = LONG.same(drafter, LONG.params, [MIXED])
    best = -(-(lossless.NEW - 1) // 4)
    rounds = np.asarray(state.record.rounds)
    assert (rounds == best).all() if budget == SLOTS else (rounds > best)[0]


def test_only_the_members_that_propose_look() -> None:
    looks = []

    class Looks(NgramDrafter):
        def before_round(self, params: Params, state: Any, view: Any) -> Any:
            looks.append(params.draft)
            return state + 1

    class Model(Looks):
        looks_up = False

    both = Joined((Model(PLAIN), Looks(PLAIN), Looks(PLAIN)), TreeConfig((), 6, lookup=2))
    params, length = Params(None, ("a", "b", "c")), jnp.zeros(1, jnp.int32)
    view = view_of(length, length, *[jnp.zeros((1, 1, 8, 2))] * 2)
    assert both.before_round(params, (0, 0, 0), view) == (0, 1, 1) and looks == ["b", "c"]
    own = replace(both, tree=TreeConfig((2,)))
    assert own.before_round(params, (0, 0, 0), view) == (1, 0, 0)
    assert replace(both, tree=PLAIN).before_round(params, (0, 0, 0), view) == (0, 0, 0)


REFUSED = {
    "working=1000 must be a multiple of 32, such as 992": dict(working=1000),
    "working=64 tokens must hold the first 32, 32 recent": dict(working=64),
}


@each_row("message", REFUSED)
def test_what_cannot_be_read_is_refused(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WorkingCacheOptions(**REFUSED[message])
    assert issubclass(SmallLMOptions, WorkingCacheOptions)
    assert issubclass(LongSpecOptions, WorkingCacheOptions)


def test_the_papers_setting_is_one_option() -> None:
    cache = SmallLMOptions(working=1024).working_cache(ONE_LAYER)
    assert cache is not None and (cache.budget.block, cache.budget.blocks) == (32, 32)
    assert (cache.budget.sinks, cache.budget.recent) == (32, 128)
    assert SmallLMOptions().working_cache(ONE_LAYER) is None
