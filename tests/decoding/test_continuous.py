"""Rows come and go: every request gets the tokens it would get alone, and nothing is compiled."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer.bench.compilations import compilations
from longspec_jax.config import TreeConfig
from longspec_jax.decoding import prefill as prefill_lib
from longspec_jax.decoding.adaptive import candidates
from longspec_jax.decoding.ahead import one_round
from longspec_jax.decoding.continuous import ContinuousBatch, Gained
from longspec_jax.decoding.policy import Always, Policy
from longspec_jax.decoding.rows import Request, insert
from longspec_jax.decoding.sampling import Sampling
from longspec_jax.decoding.target import CachedTarget
from longspec_jax.drafters.base import Drafter, NoDraft, Params
from longspec_jax.drafters.longspec.config import DraftConfig
from longspec_jax.drafters.longspec.drafter import LongSpecDrafter
from longspec_jax.drafters.ngram import NgramDrafter
from longspec_jax.drafters.retrieval.hierarchy import Hierarchy
from longspec_jax.drafters.retrieval.selection import SinksAndRecent
from longspec_jax.drafters.small_lm.drafter import SmallLMDrafter
from longspec_jax.drafters.streaming import StreamingDrafter
from tests.decoding.lossless import assert_same, generate
from tests.decoding.test_adaptive import EVERY_ROUND, Forced
from tests.kit import draft_params, random_draft, random_target, tiny_target_config
from tests.lookup import LookupDrafter, LookupTarget, random_table

VOCABULARY = 13
TREE = TreeConfig((3, 2))
TABLE = random_table(0, 97, VOCABULARY)
NEAR = TABLE + 0.5 * random_table(1, 97, VOCABULARY)
CONFIG = tiny_target_config(num_layers=1)
DRAFT = DraftConfig.for_target(CONFIG, window=11)
SMALL = tiny_target_config(num_layers=1)
LENGTHS = (1, 30, 8, 3, 17, 9, 25)
NEW = (9, 1, 12, 4, 2, 7, 5)
SIZES: dict[str, Any] = {"capacity": 48, "chunk": 8}


def asked(row: int) -> Request:
    """What a row asks for: no two alike."""
    sampling = Sampling(
        np.asarray([(0.0, 0.7, 1.0)[row % 3]], np.float32),
        np.asarray([(0, 5)[row % 2]], np.int32),
        np.asarray([1.0 - 0.05 * row], np.float32),
        np.asarray([11 * row], np.uint32),
    )
    stops = np.asarray([[row, -1]], np.int32)
    return Request(sampling, stops, np.asarray([NEW[row % len(NEW)]], np.int32))


def prompt(row: int, vocabulary: int) -> np.ndarray:
    length = LENGTHS[row % len(LENGTHS)]
    return np.random.default_rng(row).integers(0, vocabulary, length).astype(np.int32)


def begin(
    target: Any,
    drafters: Sequence[Drafter],
    params: Params,
    slots: int = 2,
    policy: Policy | None = None,
) -> ContinuousBatch:
    models = target, drafters, params, asked(0)
    return ContinuousBatch(*models, slots=slots, policy=policy or Always(), **SIZES)


def serve(
    batch: ContinuousBatch, rows: Sequence[int], vocabulary: int
) -> tuple[list[np.ndarray], list[Gained]]:
    """Admit the rows in this order; their tokens by number, and everything that was gained."""
    waiting, all_ = deque(rows), []
    while waiting or batch.busy:
        if waiting and batch.wants_more:
            row = waiting.popleft()
            batch.admit(row, prompt(row, vocabulary), asked(row))
        all_ += batch.step()
    parts = [[gained.tokens for gained in all_ if gained.key == row] for row in sorted(rows)]
    return [np.concatenate(part) for part in parts], all_


def alone(target: Any, params: Any, rows: Sequence[int], vocabulary: int) -> list[np.ndarray]:
    """The rows decoded plainly, each by itself."""
    found = []
    for row in rows:
        tokens = np.zeros((1, max(LENGTHS)), np.int32)
        text = prompt(row, vocabulary)
        tokens[0, : len(text)] = text
        models = target, NoDraft(), Params(params, ())
        [own], _ = generate(*models, tokens, np.asarray([len(text)]), asked(row), **SIZES)
        found.append(own)
    return found


@pytest.mark.parametrize("slots", [1, 3])
def test_requests_over_slots_are_those_of_single_runs(slots: int) -> None:
    target, rows = LookupTarget(VOCABULARY), range(14)
    batch = begin(target, [LookupDrafter(TREE)], Params(TABLE, NEAR), slots)
    shown, all_ = serve(batch, rows, VOCABULARY)
    assert_same(shown, alone(target, TABLE, rows, VOCABULARY))
    assert [gained.first for gained in all_].count(True) == len(rows)
    assert [gained.ended for gained in all_].count(True) == len(rows)
    assert any(gained.drafted.any() for gained in all_), "nothing was speculated"
    assert sum(total.tokens for total in batch.totals) == sum(map(len, shown)) - len(rows)


TABLES = random_target(CONFIG)
STREAMING = StreamingDrafter(TreeConfig((1, 1)), SinksAndRecent(1, 4))
KINDS = {
    "longspec": (LongSpecDrafter(DRAFT, TREE), draft_params(random_draft(DRAFT), TABLES)),
    "ngram": (NgramDrafter(TreeConfig((2, 2))), ()),
    "small_lm": (SmallLMDrafter(SMALL, TREE), random_target(SMALL, seed=3)),
    "hierarchy": (Hierarchy(STREAMING, SinksAndRecent(2, 6), TreeConfig((1, 1, 1, 1))), ()),
}


@pytest.fixture(scope="module")
def single() -> list[np.ndarray]:
    return alone(CachedTarget(CONFIG), TABLES, range(7), CONFIG.vocab_size)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_drafter_takes_newcomers(kind: str, single: list[np.ndarray]) -> None:
    """A slot's last row leaves nothing behind in the drafter's state."""
    drafter, draft = KINDS[kind]
    batch = begin(CachedTarget(CONFIG), [drafter], Params(TABLES, draft))
    shown, _ = serve(batch, range(7), CONFIG.vocab_size)
    assert_same(shown, single)


def test_the_order_of_arrival_and_the_policy_change_no_token(single: list[np.ndarray]) -> None:
    drafter, draft = KINDS["longspec"]
    several = candidates([drafter])
    batch = begin(CachedTarget(CONFIG), several, Params(TABLES, draft), policy=Forced(EVERY_ROUND))
    shown, _ = serve(batch, (6, 0, 4, 2, 5, 1, 3), CONFIG.vocab_size)
    assert_same(shown, single)
    assert all(total.rounds for total in batch.totals)


def test_a_long_prompt_comes_in_between_the_rounds_of_the_others() -> None:
    """Five chunks: the other row advances behind every one of them."""
    batch = begin(LookupTarget(VOCABULARY), [NoDraft()], Params(TABLE, ()))
    long = np.arange(36, dtype=np.int32) % VOCABULARY
    forever = asked(0).replace(stop_tokens=np.full((1, 2), -1, np.int32))
    batch.admit(0, long[:3], forever.replace(max_new_tokens=np.asarray([40], np.int32)))
    while not batch.step():
        pass
    batch.admit(1, long, asked(1))
    assert not batch.wants_more
    keys: list[int] = []
    while 1 not in keys:
        keys += [gained.key for gained in batch.step()]
    assert keys.count(0) >= 5


def test_newcomers_compile_nothing() -> None:
    """Whatever their lengths, options and slots are."""
    drafter, draft = KINDS["longspec"]
    prefilling = prefill_lib._prefill_chunk, prefill_lib._extend, prefill_lib._start
    programs = *prefilling, insert, one_round
    batch = begin(CachedTarget(CONFIG), [drafter], Params(TABLES, draft), slots=3)
    serve(batch, (0,), CONFIG.vocab_size)
    before = [program._cache_size() for program in programs]
    with compilations() as found:
        serve(batch, range(1, 7), CONFIG.vocab_size)
    assert not found
    assert [program._cache_size() for program in programs] == before


def test_a_row_that_is_dropped_makes_room_and_disturbs_nobody() -> None:
    target, params = LookupTarget(VOCABULARY), Params(TABLE, NEAR)
    batch = begin(target, [LookupDrafter(TREE)], params)
    forever = asked(0).replace(stop_tokens=np.full((1, 2), -1, np.int32))
    batch.admit(99, prompt(4, VOCABULARY), forever.replace(max_new_tokens=np.asarray([20])))
    while not batch.step():
        pass
    batch.drop(99)
    shown, all_ = serve(batch, range(6), VOCABULARY)
    assert_same(shown, alone(target, TABLE, range(6), VOCABULARY))
    late = [part for part in all_ if part.key == 99]
    assert len(late) <= 2 and not batch.busy, "what was under way is all that is reported"


def test_only_one_newcomer_at_a_time() -> None:
    batch = begin(LookupTarget(VOCABULARY), [NoDraft()], Params(TABLE, ()))
    batch.admit(0, prompt(0, VOCABULARY), asked(0))
    with pytest.raises(RuntimeError, match="step until wants_more"):
        batch.admit(1, prompt(1, VOCABULARY), asked(1))


def test_what_a_slot_has_no_room_for_is_refused() -> None:
    batch = begin(LookupTarget(VOCABULARY), [LookupDrafter(TREE)], Params(TABLE, NEAR))
    fits = asked(0).replace(max_new_tokens=np.asarray([48 - 40 - 3]))
    batch.admit(0, np.zeros(40, np.int32), fits)
    other = begin(LookupTarget(VOCABULARY), [LookupDrafter(TREE)], Params(TABLE, NEAR))
    for length, new in ((40, 6), (49, 1)):
        more = asked(0).replace(max_new_tokens=np.asarray([new]))
        with pytest.raises(ValueError, match="cache slots and a row has capacity=48; make the"):
            other.admit(0, np.zeros(length, np.int32), more)
    assert other.wants_more


def test_a_slot_is_written_whole() -> None:
    """Not-a-number of the last row must not reach the next one through a masked product."""
    target, drafter = LookupTarget(VOCABULARY), LookupDrafter(TREE)
    batch = begin(target, [drafter], Params(TABLE, NEAR))
    poisoned = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), batch.rows.cache)
    batch._rows = batch.rows.replace(cache=poisoned)
    rows = prefill_lib.prefill(
        *(target, drafter, Params(TABLE, NEAR), np.zeros((1, 3), np.int32), np.asarray([3])),
        asked(0),
        **SIZES,
        max_emitted=1,
    ).rows
    clean = rows.replace(cache=jax.tree.map(jnp.zeros_like, rows.cache))
    after = insert(batch._home, batch.rows, np.int32(1), clean)
    for leaf in jax.tree.leaves(after.cache):
        assert np.isnan(leaf[0]).all() and not np.isnan(leaf[1]).any()
