"""Prompts that begin with what slots or the host's memory hold: warm text is cold text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.config.tree import TreeConfig
from longspec_jax.decoding.cache import KVCache
from longspec_jax.decoding.cache_transfer import copy_prefix, read_chunk, write_chunk
from longspec_jax.decoding.engine import Engine
from longspec_jax.decoding.prefill import concerns, most_reusable, run_again
from longspec_jax.decoding.prefixes import HostChunks, Match, chunk_names
from longspec_jax.decoding.rows import RowShardings
from longspec_jax.decoding.target import TargetModel
from longspec_jax.drafters.base import NOTHING, Needs, NoDraft, Params
from longspec_jax.drafters.eagle3 import Eagle3Drafter
from longspec_jax.drafters.retrieval.hierarchy import PartialVerifier
from longspec_jax.drafters.retrieval.selection import Quest
from longspec_jax.ops.selection.blocks import BlockBudget
from longspec_jax.sharding import make_mesh, param_shardings
from tests.decoding.engines import (
    CONFIG,
    KINDS,
    STREAMING,
    TABLE,
    TABLES,
    TARGET,
    VOCABULARY,
    asked,
    open_engine,
)
from tests.decoding.lossless import assert_same, generate, outputs_of, texts_of
from tests.drafters.eagle3.toys import config_for, random_params
from tests.kit import random_target, tiny_target_config

CHUNK, CAPACITY = 8, 48
A, B = (np.random.default_rng(seed).integers(0, VOCABULARY, 40).astype(np.int32) for seed in (1, 2))


def begin(*parts: tuple[np.ndarray, int]) -> np.ndarray:
    """A prompt of the first tokens of several texts."""
    return np.concatenate([text[:count] for text, count in parts])


def serve_in_turn(
    engine: Engine, prompts: list[np.ndarray], first_row: int = 0
) -> tuple[list[np.ndarray], list[int]]:
    """Requests one after the other: their tokens, and the tokens of their prompts not prefilled."""
    texts, cached = [], []
    for row, prompt in enumerate(prompts, first_row):
        engine.submit(prompt, asked(row))
        outputs = outputs_of(engine)
        texts.append(np.concatenate([out.tokens for out in outputs]))
        cached.append(outputs[0].cached_tokens)
        assert not any(out.cached_tokens for out in outputs[1:])
    return texts, cached


def cold(prompts: list[np.ndarray], first_row: int = 0) -> list[np.ndarray]:
    """The same requests decoded plainly, each by itself."""
    models = TARGET, NoDraft(), Params(TABLE, ())
    return [
        generate(*models, prompt[None], [len(prompt)], asked(row), CAPACITY, CHUNK)[0][0]
        for row, prompt in enumerate(prompts, first_row)
    ]


# Names and holders, without arrays.


def test_a_name_stands_for_all_tokens_up_to_the_end_of_its_chunk() -> None:
    names = chunk_names(A, CHUNK)
    assert len(names) == len(set(names)) == 5
    assert chunk_names(A[:39], CHUNK) == names[:4] and chunk_names(A[:7], CHUNK) == ()
    other = A.copy()
    other[9] += 1
    assert chunk_names(other, CHUNK)[0] == names[0]
    assert not set(chunk_names(other, CHUNK)[1:]) & set(names)
    # Chunks of another size round differently; the same tokens elsewhere are other tokens.
    assert not set(chunk_names(A, 4)) & set(names)
    assert not set(chunk_names(A[8:], CHUNK)) & set(names)


def test_the_hosts_memory_is_bounded_and_drops_what_was_used_longest_ago() -> None:
    host = HostChunks(10)
    for name in (b"a", b"b", b"c"):
        host.put(name, name.decode(), 3)
    assert host.find([b"a", b"b"]) == ["a", "b"] and host.bytes == 9
    host.put(b"d", "d", 4)
    assert b"c" not in host and host.bytes == 10
    host.put(b"e", "e", 3)
    # Without the first chunk those after it are of no use, so it goes last.
    assert b"b" not in host and host.find([b"a", b"b", b"d"]) == ["a"]
    host.put(b"f", "f", 11)
    assert b"f" not in host and host.bytes == 10
    host.put(b"a", "again", 2)
    assert host.find([b"a"]) == ["again"] and host.bytes == 9


def test_what_a_draft_needs_bounds_what_is_reused() -> None:
    """At least the last token's chunk is run, for its logits."""
    reusable = [most_reusable(NOTHING, length, 8) for length in (1, 8, 9, 16, 17)]
    assert reusable == [0, 0, 1, 1, 2]
    assert most_reusable(Needs(), 33, 8) == 4, "no chunk is run for its tokens"
    quest = PartialVerifier(
        STREAMING, Quest(CONFIG, BlockBudget(32, 8, 8, 8)), TreeConfig((1, 1, 1, 1))
    )
    assert most_reusable(quest.needs, 33, 8) == 0, "summaries of all keys"
    assert [most_reusable(Needs(hidden=(0,), recent=n), 33, 8) for n in (0, 1, 2, 9, 10, 99)] == [
        *(4, 4, 3, 3, 2, 0)
    ]
    sinks = Needs(hidden=(0,), recent=2, first=9)
    assert most_reusable(sinks, 33, 8) == 3 and run_again(sinks, 8) == 2
    assert run_again(Needs(recent=2, first=9), 8) == 0, "no chunk is run for its tokens"
    shown = [concerns(sinks, np.array([33]), offset, 8) for offset in range(0, 40, 8)]
    assert shown == [True, True, False, True, True]


# An engine over the lookup model, whose logits depend on every token before.


@pytest.mark.parametrize("slots", [1, 3])
def test_warm_text_is_cold_text(slots: int) -> None:
    prompts = [
        *(begin((A, 20)), begin((A, 30)), begin((A, 16), (B, 7)), begin((B, 17))),
        *(begin((A, 30)), begin((A, 15), (B, 9)), begin((A, 24))),
    ]
    engine = open_engine(slots=slots, prefixes=True)
    texts, cached = serve_in_turn(engine, prompts)
    assert_same(texts, cold(prompts))
    # One slot knows only the last prompt. Of three, the two prompts that go on from the first
    # take its slot and an empty one.
    assert cached == ([0, 16, 16, 0, 0, 8, 8] if slots == 1 else [0, 16, 16, 0, 24, 8, 16])
    assert engine.status.prefix_hits == sum(cached)
    assert engine.status.prefix_queries == sum(map(len, prompts))


def test_live_rows_share_their_prompts_too_and_equal_prompts_wait_for_the_first() -> None:
    engine = open_engine(slots=3, prefixes=True, prefills=2)
    prompts = [begin((A, 25)), begin((A, 25)), begin((B, 9))]
    ids = [engine.submit(prompt, asked(row)) for row, prompt in enumerate(prompts)]
    outputs = outputs_of(engine)
    texts = texts_of(outputs)
    assert_same([texts[id] for id in ids], cold(prompts))
    first = {out.id: out.cached_tokens for out in reversed(outputs)}
    assert [first[id] for id in ids] == [0, 24, 0]
    assert [out.id for out in outputs if not out.rounds].index(ids[2]) < 2, "others overtake"


def test_chunks_come_back_from_the_hosts_memory() -> None:
    """Two prompts take turns in the only slot."""
    chunk_bytes = 2 * CHUNK * 2 * 4
    prompts = [begin((A, 30)), begin((B, 20)), begin((A, 33)), begin((B, 20)), begin((A, 9))]
    engine = open_engine(slots=1, prefixes=True, host_bytes=5 * chunk_bytes)
    texts, cached = serve_in_turn(engine, prompts[:2])
    engine.prefixes.collect(wait=True)
    assert engine.status.host_bytes == 5 * chunk_bytes
    more, again = serve_in_turn(engine, prompts[2:3], first_row=2)
    engine.prefixes.collect(wait=True)
    last, end = serve_in_turn(engine, prompts[3:], first_row=3)
    assert_same(texts + more + last, cold(prompts))
    # The fourth chunk of the first text took the place of one of the second's.
    assert cached + again + end == [0, 0, 24, 8, 8]
    assert engine.status.host_bytes <= 5 * chunk_bytes


def test_slots_and_the_hosts_memory_serve_one_prompt_together() -> None:
    engine = open_engine(slots=1, prefixes=True, host_bytes=1 << 20)
    prompts = [begin((A, 33)), begin((A, 16), (B, 3)), begin((A, 33))]
    texts, cached = serve_in_turn(engine, prompts)
    assert_same(texts, cold(prompts))
    assert cached == [0, 16, 32]


def test_a_row_without_finite_logits_leaves_nothing_to_reuse() -> None:
    engine = open_engine(
        slots=1, prefixes=True, params=Params(jnp.full_like(TABLE, jnp.nan), TABLE)
    )
    engine.submit(begin((A, 20)), asked(0))
    [output] = [out for _ in range(9) if engine.busy for out in engine.step()]
    assert output.finish == "error"
    assert engine.prefixes.slots.find(chunk_names(A, CHUNK)) == Match(0, None)


# A transformer, with every kind of drafter.


EAGLE3 = config_for(CONFIG, features=(-1, 0, 0))
SINKS = Eagle3Drafter(EAGLE3, TreeConfig((1, 1)), window=4, sinks=2), random_params(EAGLE3)
"""It needs features of the first tokens and of the last."""


@pytest.mark.parametrize("kind", [*KINDS, "sinks"])
def test_a_warm_row_is_a_cold_one_bit_for_bit(kind: str) -> None:
    """Cache, draft state and text, of every kind of drafter, from a slot and from the host."""
    drafter, draft = KINDS.get(kind, SINKS)
    rows, texts, known = [], [], []
    for warm, host in ((False, 0), (True, 0), (True, 1 << 20)):
        engine = open_engine(
            *(TargetModel(CONFIG), [drafter], Params(TABLES, draft)),
            slots=1,
            prefixes=warm,
            host_bytes=host,
        )
        before = [begin((A, 26), (B, 3))] if not host else [begin((A, 26)), begin((B, 30))]
        serve_in_turn(engine, before, first_row=5)
        if warm:
            engine.prefixes.collect(wait=True)
        text, cached = serve_in_turn(engine, [begin((A, 30))])
        texts += text
        known += cached
        rows.append(jax.device_get((engine.rows.cache, engine.rows.draft, engine.rows.length)))
    assert known == ([0, 16, 16] if kind == "sinks" else [0, 24, 24])
    for own, text in zip(rows[1:], texts[1:], strict=True):
        np.testing.assert_array_equal(text, texts[0])
        length = int(rows[0][2][0])
        for mine, its in zip(jax.tree.leaves(own[0]), jax.tree.leaves(rows[0][0]), strict=True):
            np.testing.assert_array_equal(mine[:, :, :length], its[:, :, :length])
        if kind != "small_lm":  # What lies after its committed tokens may be anything.
            jax.tree.map(np.testing.assert_array_equal, own[1], rows[0][1])
        else:
            for mine, its in zip(own[1].cache.keys, rows[0][1].cache.keys, strict=True):
                np.testing.assert_array_equal(mine[:, :, :length], its[:, :, :length])


# The programs on a mesh.


@pytest.mark.full
def test_a_slot_of_a_mesh_is_copied_without_what_lies_behind() -> None:
    mesh = make_mesh(tp=2, data=2)
    params = random_target(tiny_target_config(num_layers=1, vocab_size=18, mlp_width=54))
    params = jax.device_put(params, param_shardings(mesh, params))
    batch, row = RowShardings.for_params(params, 4), RowShardings.for_params(params, 1)
    assert batch.row_shards == 2
    random = np.random.default_rng(0)
    layers = [random.normal(size=(4, 2, 16, 6)).astype(np.float32) for _ in range(2)]
    for layer in layers:
        layer[0], layer[2, :, 9:] = np.nan, np.nan
    cache = KVCache(*[(jax.device_put(layer, batch.cache),) for layer in layers])
    copy = copy_prefix(batch, row, cache, np.int32(2), np.int32(8))
    for mine, layer in zip(jax.tree.leaves(copy), layers, strict=True):
        np.testing.assert_array_equal(mine[0, :, :8], layer[2, :, :8])
        assert not np.asarray(mine[:, :, 8:]).any()
        assert mine.sharding.shard_shape(mine.shape)[1] == 1
    part = jax.device_get(read_chunk(row, 4, copy, np.int32(4)))
    moved, _ = write_chunk(row, 4, copy, jax.device_put(part, row.cache), np.int32(8))
    for mine, layer in zip(jax.tree.leaves(moved), layers, strict=True):
        np.testing.assert_array_equal(mine[0, :, 8:12], layer[2, :, 4:8])
