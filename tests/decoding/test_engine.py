"""The engine: requests pass through slots with the tokens that they would get alone."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.decoding import prompts as prompts_lib
from longspec_jax.decoding.inflight import launch_sizes
from longspec_jax.decoding.rows import RowShardings, insert
from longspec_jax.decoding.sampling import SamplingKind
from longspec_jax.decoding.target import TargetModel
from longspec_jax.drafters.base import Params
from longspec_jax.generation.candidates import candidates
from tests.decoding.engines import (
    CONFIG,
    EVERY_SWITCH,
    KINDS,
    PARAMS,
    SMALL_TREE,
    TABLE,
    TABLES,
    TARGET,
    VOCABULARY,
    alone,
    asked,
    endless,
    launched,
    lookup_engine,
    open_engine,
    plainly,
    prompt,
    serve,
)
from tests.decoding.lossless import assert_same, outputs_of, texts_of
from tests.decoding.lossless import request as requested
from tests.kit import in_tiers, prefill
from tests.lookup import LookupDrafter


@pytest.mark.parametrize("slots", [1, 8])
def test_requests_over_slots_are_those_of_single_runs(slots: int) -> None:
    """Also where a launch is of the live rows and few others, as rows come and go."""
    rows, engine = range(14), open_engine(slots=slots)
    engine.launch_sizes = tuple(size for size in (1, 2, 4, 8) if size <= slots)
    launches = launched(engine)
    shown, outputs = serve(engine, rows)
    taken = {len(given[2]) for given in launches}
    assert taken == {*engine.launch_sizes} - {8}, "at most four rows are live together"
    assert_same(shown, alone(TARGET, TABLE, rows, VOCABULARY))
    assert [out.rounds for out in outputs].count(()) == len(rows)
    ends = [out.finish for out in outputs if out.finish is not None]
    assert len(ends) == len(rows) and set(ends) == {"stop", "length"}
    assert any(any(out.drafted) for out in outputs), "nothing was speculated"
    assert sum(total.tokens for total in engine.totals) == sum(map(len, shown)) - len(rows)


def test_chunks_of_prompts_that_are_prefilled_alone_follow_from_their_own_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: dict[int, int] = {}
    chunks = prompts_lib.prefill_chunks

    def noted(*models_and_tokens: Any, chunk: int, **options: Any) -> Any:
        length = int(models_and_tokens[4][0])
        assert taken.setdefault(length, chunk) == chunk
        return chunks(*models_and_tokens, chunk=chunk, **options)

    monkeypatch.setattr(prompts_lib, "prefill_chunks", noted)
    rows = range(7)
    shown, _ = serve(open_engine(chunks=(2, 4, 8)), rows)
    assert taken == {1: 2, 3: 4, 8: 8, 9: 8, 17: 8, 25: 8, 30: 8}
    monkeypatch.undo()
    assert_same(shown, alone(TARGET, TABLE, rows, VOCABULARY))


def test_requests_take_the_slots_in_turn() -> None:
    """Also where the first one has ended before the second has a slot."""
    engine = open_engine(slots=3)
    for row, new in enumerate((1, 4, 4)):
        engine.submit(prompt(row), endless(new))
    while engine.prefilling:
        engine.step(decode=False)
    assert engine.live == (1, 2)
    np.testing.assert_array_equal(engine.rows.length, [len(prompt(row)) for row in range(3)])


@pytest.fixture(scope="module")
def single() -> list[np.ndarray]:
    return alone(TargetModel(CONFIG), TABLES, range(7), CONFIG.vocab_size)


@pytest.mark.parametrize("kind", in_tiers(KINDS, "longspec", "ngram"))
def test_every_kind_of_drafter_serves(kind: str, single: list[np.ndarray]) -> None:
    """A slot's last row leaves nothing behind in the drafter's state."""
    drafter, draft = KINDS[kind]
    engine = open_engine(TargetModel(CONFIG), [drafter], Params(TABLES, draft))
    engine.launch_sizes = 1, 2
    shown, _ = serve(engine, range(7), CONFIG.vocab_size)
    assert_same(shown, single)


def test_sizes_of_launches_are_few_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert [launch_sizes(slots) for slots in (1, 4, 5, 8)] == [(1,), (4,), (1, 5), (1, 2, 8)]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert [*map(launch_sizes, (1, 2, 6, 8))] == [(1,), (1, 2), (1, 2, 4, 6), (1, 2, 4, 8)]


def test_neither_order_policy_nor_prefills_at_once_change_a_token(single: list[np.ndarray]) -> None:
    drafter, draft = KINDS["longspec"]
    models = TargetModel(CONFIG), candidates([drafter]), Params(TABLES, draft)
    engine = open_engine(*models, policy=EVERY_SWITCH, prefills=3)
    shown, _ = serve(engine, (6, 0, 4, 2, 5, 1, 3), CONFIG.vocab_size)
    assert_same(shown, single)
    assert all(total.rounds for total in engine.totals)


def test_greedy_requests_run_programs_without_noise_or_sort() -> None:
    """The kind of a launch is that of only the live rows."""
    engine = open_engine()
    launches = launched(engine)
    greedy = SamplingKind.GREEDY
    plain = replace(endless(6), sampling=asked(0).sampling.of_kind(greedy))
    engine.submit(prompt(1), plain)
    outputs_of(engine)
    assert {kind for _, kind, *_ in launches} == {greedy}
    engine.submit(prompt(1), plain)
    engine.submit(prompt(3), endless(20))
    outputs_of(engine)
    assert launches[-1][1] == SamplingKind.ANY


def test_a_cancelled_request_makes_room_and_disturbs_nobody() -> None:
    engine = open_engine()
    cancelled = engine.submit(prompt(4), endless(20))
    while not engine.step():
        pass
    waiting = engine.submit(prompt(4), endless(20))
    assert not engine.rows.done.all()
    engine.cancel(cancelled)
    engine.cancel(waiting)
    # The device neither decodes what nobody reads, nor reads its cache.
    assert engine.rows.done.all()
    shown, outputs = serve(engine, range(6))
    assert_same(shown, alone(TARGET, TABLE, range(6), VOCABULARY))
    assert not {cancelled, waiting} & {out.id for out in outputs}


def test_one_of_several_prompts_prefilled_together_can_be_cancelled() -> None:
    req = requested(new=(31, 31, 31))
    expected = plainly(req)
    engine = lookup_engine(req)
    engine.step()
    engine.cancel(1)
    texts = texts_of(outputs_of(engine))
    assert texts.keys() == {0, 2}
    assert_same([texts[0], texts[2]], [expected[0], expected[2]])


def test_requests_that_do_not_fit_are_refused() -> None:
    engine = open_engine()
    engine.submit(np.zeros(40, np.int32), endless(48 - 40 - 3))
    for length, new in ((40, 6), (49, 1)):
        with pytest.raises(ValueError, match="cache slots and a row has 48; make the engine with"):
            engine.submit(np.zeros(length, np.int32), endless(new))
    many = replace(endless(1), stop_tokens=np.arange(3, dtype=np.int32)[None])
    with pytest.raises(ValueError, match="3 stop tokens does not fit an engine made for 2"):
        engine.submit(prompt(0), many)


def test_a_slot_is_written_whole() -> None:
    """NaN of the last row must not reach the next one through a masked product."""
    engine = open_engine()
    poisoned = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), engine.rows.cache)
    rows = prefill(
        *(TARGET, LookupDrafter(SMALL_TREE), PARAMS, np.zeros((1, 3), np.int32), np.asarray([3])),
        asked(0),
        capacity=48,
        chunk=8,
    )
    clean = replace(rows, cache=jax.tree.map(jnp.zeros_like, rows.cache))
    shardings = RowShardings.for_params(TABLE, 2)
    after = insert(shardings, replace(engine.rows, cache=poisoned), np.int32(1), clean)
    for leaf in jax.tree.leaves(after.cache):
        assert np.isnan(leaf[0]).all() and not np.isnan(leaf[1]).any()


def test_rows_that_are_done_read_nothing_of_their_cache() -> None:
    """A row that ended must not make the others' rounds as long as its own context was."""
    engine = lookup_engine(requested(new=(31, 3, 1)))
    while engine.live != (0,):
        engine.step()
    assert engine.rows.attended.tolist()[1:] == [0, 0] and engine.rows.attended[0] > 0
