"""Decoding with the kernels on a mesh: the same tokens, and no device ever holds a whole cache."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from longspec_jax.config.tree import TreeConfig
from longspec_jax.decoding import prefill as prefill_lib
from longspec_jax.decoding.engine import Engine
from longspec_jax.decoding.report import Report
from longspec_jax.decoding.round import many_rounds
from longspec_jax.decoding.rows import Request, Rows
from longspec_jax.decoding.runner import ModelRunner
from longspec_jax.decoding.sampling import Sampling
from longspec_jax.decoding.target import TargetModel
from longspec_jax.drafters.base import Drafter, Params
from longspec_jax.drafters.longspec import DraftConfig, LongSpecDrafter
from longspec_jax.drafters.retrieval.hierarchy import PartialVerifier
from longspec_jax.drafters.retrieval.selection import SinksAndRecent
from longspec_jax.drafters.retrieval.working_cache import WorkingCache
from longspec_jax.drafters.streaming import StreamingDrafter
from longspec_jax.ops import layer, layer_pallas
from longspec_jax.ops.selection.blocks import BlockBudget
from longspec_jax.sharding import make_mesh, param_shardings
from tests.decoding.lossless import outputs_of, texts_of
from tests.kit import (
    ALL_PASSES,
    draft_params,
    prefill,
    random_draft,
    random_target,
    tiny_target_config,
)

pytestmark = pytest.mark.full

CONFIG = tiny_target_config(
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_width=16,
    model_width=32,
    mlp_width=54,
    vocab_size=18,
)
DRAFT = DraftConfig.for_target(CONFIG, window=11)
CAPACITY = 256
PROMPT = jnp.asarray([[3, 1, 4, 1, 5], [9, 2, 6, 0, 0]])


def interpret_layer_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the small ops of a layer as interpreted kernels too."""
    monkeypatch.setattr(layer, "require_decode_step", lambda kernel, rows, dtype: None)
    for name in ("append_rows", "residual_norm", "split_heads"):
        interpreted = functools.partial(getattr(layer_pallas, name), interpret=True)
        monkeypatch.setattr(layer_pallas, name, interpreted)


def longspec(attention: str | None) -> Drafter:
    """A draft model, which reads the last layer's cache."""
    return LongSpecDrafter(DRAFT, TreeConfig((2,)), attention)


def chosen_chunks(attention: str | None) -> Drafter:
    """A draft model, which reads what the target attends to of the last layer's cache."""
    working = WorkingCache(BlockBudget(32, 8, 8, 8), CONFIG)
    return LongSpecDrafter(DRAFT, TreeConfig((2,)), attention, working)


def partial_passes(attention: str | None) -> Drafter:
    """The target over spans of all layers' caches, after a chain and a tree."""
    inner = StreamingDrafter(TreeConfig((1,)), SinksAndRecent(1, 2))
    return PartialVerifier(inner, SinksAndRecent(2, 3), TreeConfig((1,) * 6))


def target_beside(params: Any, attention: str | None = None) -> TargetModel:
    """The target's static part, which knows the mesh of its parameters."""
    sharding = jax.tree.leaves(params)[0].sharding
    mesh = sharding.mesh.abstract_mesh if isinstance(sharding, NamedSharding) else None
    return TargetModel(CONFIG, attention, mesh)


def start(
    drafter: Callable[[str | None], Drafter], target: Any, draft: Any, attention: str | None = None
) -> tuple[Any, ...]:
    """The arguments of the launch of many rounds after prefill."""
    models = target_beside(target, attention), drafter(attention)
    params = Params(target, draft_params(draft, target))
    greedy = Sampling.greedy(2)
    request = Request(greedy, jnp.full((2, 1), -1), jnp.full(2, 9))
    length = jnp.asarray([5, 3])
    rows = prefill(*models, params, PROMPT, length, request, capacity=CAPACITY, chunk=8)
    return *models, greedy.kind, params, rows, np.int32(8)


def tokens_of(
    launched: tuple[Rows, jax.Array], drafter: Callable[[str | None], Drafter]
) -> list[list[int]]:
    """What a launch has emitted in each row."""
    report = Report.of(np.asarray(launched[1]), drafter(None).tree)
    return [report.of_row(row)[0] for row in range(report.packed.shape[1])]


def largest_gathered(text: str) -> int:
    """Elements of the largest array that the compiled program gathers."""
    shapes = re.findall(r"= \w+\[([\d,]*)\]\S* all-gather\(", text)
    return max((int(np.prod([int(n) for n in s.split(",") if n])) for s in shapes), default=0)


@pytest.fixture(scope="module")
def tables() -> tuple[Any, Any]:
    """Target and draft."""
    return random_target(CONFIG), random_draft(DRAFT)


def spread(mesh: Mesh, tables: tuple[Any, Any]) -> list[Any]:
    """The tables on a mesh."""
    return [jax.device_put(table, param_shardings(mesh, table)) for table in tables]


@pytest.mark.parametrize("drafter", [longspec, partial_passes])
def test_a_mesh_decodes_the_same_tokens(
    drafter: Callable[[str | None], Drafter],
    tables: tuple[Any, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = tokens_of(many_rounds(*start(drafter, *tables)), drafter)
    assert list(map(len, expected)) == [8, 8]
    interpret_layer_ops(monkeypatch)
    # The kernels of the tree are shared out over rows too, the others only over heads.
    mesh = make_mesh(tp=2, data=2 if drafter is longspec else 1)
    # A span's kernel alone is on a mesh in tests/ops/test_partitioned.py: to interpret all those of
    # partial passes takes ten seconds more.
    attention = "interpret" if drafter is longspec else None
    arguments = start(drafter, *spread(mesh, tables), attention)
    cache = arguments[-2].cache.keys[0]
    assert cache.sharding.shard_shape(cache.shape)[:2] == (2 // mesh.shape["data"], 1)
    compiled = many_rounds.lower(*arguments).compile(ALL_PASSES)
    # Logits are gathered; keys, values and a layer's weights never.
    weights = jax.tree.leaves(tables[0]["layers_0"])
    smallest = min(leaf.size for leaf in weights if leaf.ndim > 1)
    assert 0 < largest_gathered(compiled.as_text()) < min(smallest, cache.size // mesh.size)
    assert tokens_of(compiled(*arguments[3:]), drafter) == expected


def test_chunks_are_chosen_and_gathered_on_a_mesh(tables: tuple[Any, Any]) -> None:
    """By heads and rows that lie on several devices; a few scores go between them, and no keys."""
    expected = many_rounds(*start(chosen_chunks, *tables))
    arguments = start(chosen_chunks, *spread(make_mesh(tp=2, data=2), tables))
    compiled = many_rounds.lower(*arguments).compile(ALL_PASSES)
    found = compiled(*arguments[3:])
    assert 0 < largest_gathered(compiled.as_text()) < CAPACITY
    assert tokens_of(found, chosen_chunks) == tokens_of(expected, chosen_chunks)
    np.testing.assert_array_equal(found[0].draft.choice.blocks, expected[0].draft.choice.blocks)


@pytest.mark.parametrize("axes", [{"fsdp": 2}, {"data": 2, "fsdp": 2}], ids=str)
def test_rows_and_their_memory_are_shared_out(
    axes: dict[str, int], tables: tuple[Any, Any]
) -> None:
    """Of four devices and two rows, too: there the rows are whole on each."""
    expected = tokens_of(many_rounds(*start(longspec, *tables)), longspec)
    mesh = make_mesh(**axes)
    arguments = start(longspec, *spread(mesh, tables))
    rows = arguments[-2]
    shares = 2 if mesh.size == 2 else 1
    for leaf in (*rows.cache.keys, *jax.tree.leaves(rows.draft), rows.length, rows.sampling.seed):
        assert leaf.sharding.shard_shape(leaf.shape)[0] == 2 // shares
    compiled = many_rounds.lower(*arguments).compile(ALL_PASSES)
    assert largest_gathered(compiled.as_text()) < rows.cache.keys[0].size // 2
    after = compiled(*arguments[3:])
    assert tokens_of(after, longspec) == expected
    assert after[0].cache.keys[0].sharding.shard_shape((2, 2, CAPACITY, 16))[0] == 2 // shares


@pytest.mark.parametrize("axes", [{"tp": 2}, {"data": 2}, {"fsdp": 2, "tp": 2}], ids=str)
def test_no_device_ever_holds_a_whole_cache(
    axes: dict[str, int], tables: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read before the first chunk: it is made in its shares."""
    mesh = make_mesh(**axes)
    held: list[int] = []

    def first_chunk(
        target: Any, needs: Any, chunk: Any, shardings: Any, params: Any, cache: Any, *_
    ):
        device = mesh.devices.flat[0]
        shards = [shard for leaf in cache.keys for shard in leaf.addressable_shards]
        held.append(sum(shard.data.nbytes for shard in shards if shard.device == device))
        live = [
            shard.data.nbytes
            for array in jax.live_arrays()
            for shard in array.addressable_shards
            if shard.device == device
        ]
        assert max(live) < cache.keys[0].nbytes
        raise InterruptedError

    monkeypatch.setattr(prefill_lib, "_prefill_chunk", first_chunk)
    shares = spread(mesh, tables)
    with pytest.raises(InterruptedError):
        start(longspec, *shares)
    whole = 2 * CONFIG.num_kv_heads * CAPACITY * CONFIG.head_width * 4
    assert held == [whole // mesh.size]


@pytest.mark.parametrize("axes", [{"tp": 2}, {"data": 2}], ids=str)
def test_rows_come_and_go_on_a_mesh(axes: dict[str, int], tables: tuple[Any, Any]) -> None:
    """A prefilled row moves into its slot, on whichever devices that lies."""

    def served(target: Any, draft: Any) -> list[list[int]]:
        params = Params(target, draft_params(draft, target))
        one = Request(
            jax.device_get(Sampling.greedy(1)), np.full((1, 1), -1, np.int32), np.asarray([5])
        )
        models = target_beside(target), (longspec(None),), params
        engine = Engine(ModelRunner(*models, slots=2, capacity=CAPACITY, stop_width=1), chunks=(8,))
        for row in range(4):
            engine.submit(np.arange(3 * row + 1, dtype=np.int32), one)
        texts = texts_of(outputs_of(engine))
        return [texts[row].tolist() for row in range(4)]

    expected = served(*tables)
    assert served(*spread(make_mesh(**axes), tables)) == expected
    assert [len(row) for row in expected] == [5] * 4
