"""A cache in 8 bits: plain decoding defined with it, and text that speculation does not change."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.config.layers import HeadScales
from longspec_jax.config.tree import TreeConfig
from longspec_jax.decoding.target import TargetModel
from longspec_jax.drafters.base import NoDraft, Params
from longspec_jax.drafters.longspec import LongSpecDrafter
from longspec_jax.drafters.ngram import NgramDrafter
from longspec_jax.drafters.retrieval.hierarchy import PartialVerifier
from longspec_jax.drafters.retrieval.selection import AttentionRetriever, Quest
from longspec_jax.drafters.retrieval.working_cache import WorkingCache
from longspec_jax.drafters.small_lm import SmallLMDrafter
from longspec_jax.drafters.streaming import StreamingDrafter
from longspec_jax.models.target import Target
from longspec_jax.ops.attention import float8
from longspec_jax.ops.attention.float8 import CODES, E4M3
from longspec_jax.ops.attention.reference import causal_attention
from longspec_jax.ops.placement import tree_bytes
from longspec_jax.ops.selection.blocks import BlockBudget
from tests.decoding import test_compiled as compiled
from tests.decoding.layers import WINDOWS
from tests.decoding.lossless import (
    CONFIG,
    DRAFT,
    EVERY,
    LENGTHS,
    LONGSPEC,
    MIXED,
    SHORT,
    TRANSFORMER,
    TREES,
    assert_rows_come_and_go,
    emitted_in_rounds,
    generate,
    request,
)
from tests.kit import each_row, in_tiers, random_target

UNSCALED = replace(CONFIG, kv_dtype="fp8")
SCALES = HeadScales((0.25,), (0.03125,)), HeadScales((0.03, 0.05), (0.011, 0.02))
SCALED = replace(UNSCALED, kv_scales=SCALES)
SOME = BlockBudget(slots=20, sinks=4, recent=8, block=4)
ROUNDED = {
    config: replace(TRANSFORMER, target=TargetModel(config), _known={})
    for config in (UNSCALED, SCALED)
}


def quest(config: Any) -> PartialVerifier:
    inner = LongSpecDrafter(DRAFT, TreeConfig((3, 2)))
    return PartialVerifier(inner, Quest(config, SOME), TreeConfig((1,) * 7))


def working(config: Any) -> LongSpecDrafter:
    return LongSpecDrafter(DRAFT, TREES[0], working=WorkingCache(SOME, config))


@pytest.mark.parametrize("config", in_tiers([UNSCALED, SCALED], SCALED), ids=["unscaled", "scaled"])
def test_speculation_changes_no_token(config: Any) -> None:
    """Greedy and sampled; nodes see each other's keys as they will be cached."""
    rounded, near = ROUNDED[config], SmallLMDrafter(CONFIG, TreeConfig((2, 2, 1, 1)))
    _, state = rounded.run(NoDraft(), (), EVERY[0])
    dtypes = {leaf.dtype for leaf in (*state.rows.cache.keys, *state.rows.cache.values)}
    assert dtypes == {jnp.dtype(CODES)}
    # The target without its rounding: most of what it proposes is accepted.
    for state in rounded.same(near, TRANSFORMER.params, EVERY):
        assert emitted_in_rounds(state) > int(state.record.emitted.sum()) // 2
    drafter = LongSpecDrafter(DRAFT, TreeConfig((4, 5, 3), budget=9))
    rounded.drafted(drafter, LONGSPEC, EVERY[:1])  # Its three rows are of three temperatures.
    plain, whole = rounded.plain(EVERY[-1]), TRANSFORMER.plain(EVERY[-1])
    assert any(not np.array_equal(a, b) for a, b in zip(plain, whole, strict=True))


PARTIAL = {
    "quest": quest,
    "attention": lambda config: PartialVerifier(
        StreamingDrafter(TreeConfig((2,)), SHORT),
        AttentionRetriever(config, SOME),
        TreeConfig((1,) * 5),
    ),
    "working": working,
}


@pytest.mark.parametrize("name", in_tiers(PARTIAL, "quest"))
def test_whatever_reads_the_cache_changes_no_token(name: str) -> None:
    """Selections, copies of blocks, and drafts that read part of it."""
    ROUNDED[SCALED].drafted(PARTIAL[name](SCALED), LONGSPEC, EVERY[:1])


@pytest.mark.full
def test_a_cache_in_the_hosts_memory_changes_no_token() -> None:
    """Of which blocks are gathered."""
    req = request(**MIXED)
    ROUNDED[SCALED].plain(req)
    offloaded = replace(ROUNDED[SCALED], target=TargetModel(SCALED, offload=True))
    [state] = offloaded.same(quest(SCALED), LONGSPEC, [req])
    kinds = [(leaf.sharding.memory_kind, leaf.dtype.name) for leaf in state.rows.cache.keys]
    assert kinds == [("pinned_host", "uint8"), ("device", "uint8")]


@pytest.mark.full
def test_layers_with_windows_slots_and_prefixes_change_no_token() -> None:
    """Two prompts return, with chunks that the host kept."""
    config = replace(WINDOWS.config, kv_dtype="fp8")
    params = random_target(config)
    models, target = Params(params, ()), TargetModel(config)
    drafter, given = NgramDrafter(TreeConfig((3, 2))), WINDOWS.given
    plain, _ = generate(target, NoDraft(), models, *given)
    assert_rows_come_and_go(target, drafter, models, *given, plain)


def test_cached_decoding_equals_running_the_whole_text_again() -> None:
    """The oracle without a cache: one causal pass whose keys and values NumPy's rounding made."""
    model = Target(CONFIG)
    drafter = LongSpecDrafter(DRAFT, TREES[0])
    rows, _ = ROUNDED[SCALED].run(drafter, LONGSPEC, request())

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        each = SCALES[layer].keys, SCALES[layer].values
        k, v = (
            jnp.asarray(
                np.clip(np.asarray(x) / np.reshape(scale, (-1, 1)), -448, 448)
                .astype(np.float32)
                .astype(E4M3)
                .astype(np.float32)
                * np.reshape(scale, (-1, 1)).astype(np.float32)
            )
            for x, scale in zip((k, v), each, strict=True)
        )
        return causal_attention(q, k, v)

    for b, row in [*enumerate(rows)][1:2]:  # Not compiled, so a row is enough.
        text = np.asarray([*TRANSFORMER.tokens[b, : LENGTHS[b]], *row[:-1]])[None]
        positions = np.arange(text.shape[1])[None]
        variables = {"params": TRANSFORMER.params}
        output: Any = model.apply(variables, text, positions, attend)  # NumPy rounds.
        logits: Any = model.apply(variables, output.hidden, method="unembed")
        np.testing.assert_array_equal(logits[0, LENGTHS[b] - 1 :].argmax(axis=1), row)


def test_nodes_that_saw_each_other_unrounded_would_change_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative control, and what a chain's logits are: those of plain steps."""
    target, params = TargetModel(UNSCALED), TRANSFORMER.params
    length, chain = jnp.asarray([19]), jnp.asarray([[7, 3, 50, 9, 1]])
    _, cache, *_ = jax.jit(target.prefill_chunk)(
        params,
        target.allocate(1, 64),
        jnp.asarray(TRANSFORMER.tokens[:1]),
        jnp.zeros(1, int),
        length - 1,
    )

    def verify(cache: Any, tokens: jax.Array, length: jax.Array) -> Any:
        nodes = tokens.shape[1]
        mask = jnp.tril(jnp.ones((1, nodes, nodes), bool))
        positions = length[:, None] + jnp.arange(nodes)
        run = jax.jit(partial(target.verify, levels=nodes - 1))
        return run(params, cache, tokens, positions, mask, length)

    found, steps = verify(cache, chain, length).logits[0], []
    for index in range(5):
        step = verify(cache, chain[:, index : index + 1], length + index)
        steps.append(step.logits[0, 0])
        cache = cache.commit(step.keys, step.values, jnp.zeros((1, 1), int), length + index)
    assert np.abs(found - np.stack(steps)).max() < 1e-4
    monkeypatch.setattr(float8, "stored", lambda scales, k, v: (k, v))
    unrounded = verify(cache, chain, length).logits[0]
    np.testing.assert_allclose(unrounded[0], steps[0], atol=0.3)
    assert np.abs(unrounded - np.stack(steps)).max() > 1e-3


@pytest.mark.parametrize("batch", [1, 3])
def test_a_round_writes_to_the_cache_in_place(batch: int) -> None:
    """XLA would convert all of an array of 8-bit floats to 16 bits and back."""
    config = replace(compiled.CONFIG, kv_dtype="fp8")
    program = compiled.compiled_loop(batch, config=config, plain=True)
    compiled.assert_nothing_grows(program, batch, config=config)


@each_row("offload", [False, True])
def test_a_cache_takes_a_quarter_of_the_bytes_of_float32(offload: bool) -> None:
    whole, small = (TargetModel(each, offload=offload) for each in (CONFIG, SCALED))
    planned = small.cache_bytes(3, 160)
    assert (4 * planned.device, 4 * planned.host) == whole.cache_bytes(3, 160)
    assert planned.device + planned.host >= tree_bytes(small.allocate(3, 160))
    gathered = jax.eval_shape(lambda: small.allocate(1, 8)).keys[0]
    assert gathered.dtype == jnp.dtype(CODES)


@each_row(
    ("fields", "words"),
    [
        ({"kv_dtype": "fp4"}, "kv_dtype='fp4' must be one of fp8"),
        ({"kv_scales": SCALES}, "a kv_dtype"),
        ({"kv_dtype": "fp8", "kv_scales": SCALES[:1]}, "needs one for each of the 2 layers"),
        (
            {"kv_dtype": "fp8", "kv_scales": (None, HeadScales((1.0,), (1.0,) * 3))},
            "layer 1 has 3 scales; it needs 1, or one for each of 2 heads",
        ),
    ],
)
def test_what_is_no_cache_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(CONFIG, **fields)
