"""Losslessness, pathwise: speculative output equals plain decoding, token for token, in float32."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.config.layers import LayerConfig, QueryScaling, Rotary, YarnRopeScaling
from longspec_jax.config.tree import PLAIN, TreeConfig
from longspec_jax.decoding import prefill as prefill_lib
from longspec_jax.decoding import round_noise
from longspec_jax.decoding.rows import Request
from longspec_jax.decoding.runner import slack_slots
from longspec_jax.decoding.sampling import Sampling
from longspec_jax.decoding.target import TargetModel
from longspec_jax.drafters.base import Drafter, Needs, NoDraft, Params
from longspec_jax.drafters.joined import Joined
from longspec_jax.drafters.longspec import DraftConfig, LongSpecDrafter
from longspec_jax.drafters.ngram import NgramDrafter
from longspec_jax.drafters.retrieval.hierarchy import Hierarchy
from longspec_jax.drafters.retrieval.selection import AttentionRetriever, Quest
from longspec_jax.drafters.small_lm import SmallLMDrafter
from longspec_jax.drafters.streaming import StreamingDrafter
from longspec_jax.models.target import Target
from longspec_jax.ops.attention.reference import causal_attention
from longspec_jax.ops.selection.blocks import BlockBudget
from tests.decoding.lossless import (
    CONFIG,
    DRAFT,
    DRAFT_TABLES,
    EVERY,
    GREEDY,
    LENGTHS,
    MIXED,
    NEW,
    SHORT,
    SMALL,
    SMALL_LM,
    TABLE,
    TREES,
    VOCABULARY,
    WINDOW,
    assert_rows_come_and_go,
    assert_same,
    emitted_in_rounds,
    engine_of,
    generate,
    prompts,
    request,
    run,
)
from tests.kit import (
    draft_params,
    in_tiers,
    prefill,
    random_draft,
    random_target,
    tiny_target_config,
)
from tests.lookup import ConstantDrafter, LookupDrafter, LookupTarget


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("draft", DRAFT_TABLES)
def test_lookup_model_is_drafter_invariant(draft: str, temperature: float) -> None:
    target, tokens, req = LookupTarget(VOCABULARY), prompts(VOCABULARY), request(temperature)
    plain, _ = generate(target, NoDraft(), Params(TABLE, ()), tokens, LENGTHS, req)
    params = Params(TABLE, DRAFT_TABLES[draft])
    for tree in TREES:
        rows, state = generate(target, LookupDrafter(tree), params, tokens, LENGTHS, req)
        assert_same(rows, plain)
        rounds, histogram = (
            int(state.record.rounds.sum()),
            np.asarray(state.record.histogram).sum(axis=0),
        )
        assert histogram.sum() == rounds
        # Both count accepted draft tokens, in a round that the budget cut before its bonus too.
        inside = np.arange(state.record.output.shape[1]) < np.asarray(state.record.emitted)[:, None]
        drafted = int((np.asarray(state.record.drafted) & inside).sum())
        assert histogram @ np.arange(tree.num_levels + 1) == drafted
        assert 0 <= drafted + rounds - (int(state.record.emitted.sum()) - 3) <= 3
        if draft == "perfect" and set(tree.widths) == {1}:
            # A chain of the target's own draws: only a row's last round may be cut, by its budget.
            assert histogram[-1] >= rounds - 3
        if draft == "adversarial" and tree.widths == (2,) and temperature == 0:
            assert histogram[0] == rounds


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_duplicate_siblings_do_no_harm(temperature: float) -> None:
    target, tokens, req = LookupTarget(VOCABULARY), prompts(VOCABULARY), request(temperature)
    plain, _ = generate(target, NoDraft(), Params(TABLE, ()), tokens, LENGTHS, req)
    for tree in TREES[::3]:
        rows, _ = generate(target, ConstantDrafter(tree), Params(TABLE, ()), tokens, LENGTHS, req)
        assert_same(rows, plain)


@pytest.mark.parametrize(
    "filters",
    [dict(top_k=3), dict(top_p=0.6), dict(min_p=0.3), dict(top_k=5, top_p=0.8, min_p=0.1)],
)
def test_filtered_sampling_is_drafter_invariant(filters: dict[str, Any]) -> None:
    target, tokens = LookupTarget(VOCABULARY), prompts(VOCABULARY)
    req = request(0.9, **filters)
    plain, _ = generate(target, NoDraft(), Params(TABLE, ()), tokens, LENGTHS, req)
    free, _ = generate(target, NoDraft(), Params(TABLE, ()), tokens, LENGTHS, request(0.9))
    assert any(not np.array_equal(a, b) for a, b in zip(plain, free, strict=True))
    params = Params(TABLE, DRAFT_TABLES["near"])
    rows, _ = generate(target, LookupDrafter(TREES[0]), params, tokens, LENGTHS, req)
    assert_same(rows, plain)


def test_rows_of_one_batch_may_sample_differently() -> None:
    target, tokens = LookupTarget(VOCABULARY), prompts(VOCABULARY)
    mixed = request(temperature=(0.0, 1.0, 0.7), top_k=(0, 4, 0), top_p=(1.0, 1.0, 0.8))
    params = Params(TABLE, DRAFT_TABLES["near"])
    rows, _ = generate(target, LookupDrafter(TREES[0]), params, tokens, LENGTHS, mixed)
    for b in range(3):
        alone = request(
            mixed.sampling.temperature[b],
            mixed.sampling.top_k[b],
            mixed.sampling.top_p[b],
            seeds=mixed.sampling.seed[b : b + 1],
            stop=((-1,),),
            new=NEW[b : b + 1],
        )
        plain, _ = generate(
            target, NoDraft(), Params(TABLE, ()), tokens[b : b + 1], LENGTHS[b : b + 1], alone
        )
        np.testing.assert_array_equal(rows[b], plain[0])


def test_stop_tokens_and_budgets_cut_each_row_alone() -> None:
    target, tokens = LookupTarget(VOCABULARY), prompts(VOCABULARY)
    params = Params(TABLE, TABLE)
    free, _ = generate(target, NoDraft(), params, tokens, LENGTHS, request(1.0))
    stop = ((int(free[0][9]), -1), (int(free[1][4]), int(free[1][6])), (-1, -1))
    expected = []
    for row, stops in zip(free, stop, strict=True):
        cut = [i for i, token in enumerate(row) if token in stops]
        expected.append(row[: cut[0] + 1] if cut else row)
    assert len(expected[0]) < len(free[0]) and len(expected[2]) == NEW[2]
    for drafter in (NoDraft(), *map(LookupDrafter, TREES[:2])):
        rows, _ = generate(target, drafter, params, tokens, LENGTHS, request(1.0, stop=stop))
        assert_same(rows, expected)


def test_a_first_token_that_stops_ends_the_row() -> None:
    target, tokens = LookupTarget(VOCABULARY), prompts(VOCABULARY)
    params = Params(TABLE, TABLE)
    free, _ = generate(target, NoDraft(), params, tokens, LENGTHS, request())
    stop = ((int(free[0][0]),), (-1,), (-1,))
    rows, state = generate(
        target, LookupDrafter(TREES[0]), params, tokens, LENGTHS, request(stop=stop, new=(9, 1, 9))
    )
    assert [len(row) for row in rows[:2]] == [1, 1]
    assert int(state.record.rounds[0]) == int(state.record.rounds[1]) == 0


def test_launches_of_one_round_and_of_many_agree() -> None:
    target, tokens, req = LookupTarget(VOCABULARY), prompts(VOCABULARY), request(0.7)
    drafter, params = LookupDrafter(TREES[0]), Params(TABLE, DRAFT_TABLES["near"])
    rows, final = generate(target, drafter, params, tokens, LENGTHS, req)
    engine = engine_of(target, [drafter], params, tokens, LENGTHS, req, streams=True)
    streamed, last = run(engine)
    assert_same(streamed, rows)
    np.testing.assert_array_equal(last.record.histogram, final.record.histogram)
    np.testing.assert_array_equal(last.record.drafted, final.record.drafted)


@pytest.mark.parametrize("requests", [GREEDY, EVERY], ids=["greedy", "every"])
@pytest.mark.parametrize(
    "drafter",
    [
        StreamingDrafter(TreeConfig((3, 4, 2), budget=6), SHORT),
        Hierarchy(LookupDrafter(TreeConfig((2, 3), budget=4)), SHORT, TreeConfig((1,) * 6)),
    ],
    ids=["streaming", "hierarchy"],
)
def test_partial_passes_of_a_lookup_model_change_no_token(
    drafter: Drafter, requests: list[Request]
) -> None:
    """Though what they draw is mostly wrong: one token that is not seen changes every logit."""
    target, tokens = LookupTarget(VOCABULARY), prompts(VOCABULARY)
    params = Params(TABLE, DRAFT_TABLES["near"])
    for req in requests:
        plain, _ = generate(target, NoDraft(), Params(TABLE, ()), tokens, LENGTHS, req)
        rows, state = generate(target, drafter, params, tokens, LENGTHS, req)
        assert_same(rows, plain)
        assert 0 < emitted_in_rounds(state) < int(state.record.emitted.sum()) - 3


@pytest.fixture(scope="module")
def models() -> Params:
    """A random target, and a draft of which part is the target's own taste."""
    target = random_target(CONFIG)
    return Params(target, draft_params(random_draft(DRAFT), target))


BUDGETED = TreeConfig((4, 5, 3), budget=9)


@pytest.mark.parametrize(
    ("requests", "trees"),
    [(GREEDY, [BUDGETED]), (EVERY, [*TREES[:2], BUDGETED])],
    ids=["greedy", "every"],
)
def test_transformers_are_drafter_invariant(
    models: Params, requests: list[Request], trees: list[TreeConfig]
) -> None:
    target, tokens = TargetModel(CONFIG), prompts(CONFIG.vocab_size)
    for req in requests:
        plain, _ = generate(target, NoDraft(), models, tokens, LENGTHS, req)
        for tree in trees:
            drafter = LongSpecDrafter(DRAFT, tree)
            rows, _ = generate(target, drafter, models, tokens, LENGTHS, req)
            assert_same(rows, plain)


UNUSUAL = tiny_target_config(
    num_layers=3,
    head_width=12,
    rope_scaling=YarnRopeScaling.usual(4.0, 16),
    rotary_width=8,
    kinds=(LayerConfig(Rotary(scaling=YarnRopeScaling.usual(4.0, 16), width=8)), LayerConfig()),
    pattern=(1, 0, 1),
    wide_qk_norm=True,
    post_norms=True,
    offset_norms=True,
    gelu=True,
    query_scaling=QueryScaling(0.1, 8),
    attention_scale=0.2,
    embedding_factor=6.0,
    residual_factor=0.5,
    logits_divisor=2.0,
    logit_cap=9.0,
)
"""What no family has together: the draft reads its middle layer, the last one with positions."""


def test_a_target_of_unusual_layers_is_drafter_invariant() -> None:
    draft = DraftConfig.for_target(UNUSUAL, window=WINDOW)
    assert (draft.rotary, draft.logits_divisor, UNUSUAL.read_layer) == (UNUSUAL.rotary, 2.0, 1)
    params = random_target(UNUSUAL)
    models = Params(params, draft_params(random_draft(draft), params))
    target, tokens = TargetModel(UNUSUAL), prompts(UNUSUAL.vocab_size)
    drafter = LongSpecDrafter(draft, BUDGETED)
    req = request(np.array([0.0, 0.9, 1.0], np.float32))
    plain, _ = generate(target, NoDraft(), models, tokens, LENGTHS, req)
    rows, _ = generate(target, drafter, models, tokens, LENGTHS, req)
    assert_same(rows, plain)
    assert len({*np.concatenate(plain)}) > 20, "texts that repeat one token would prove nothing"


FEW = BlockBudget(slots=6, sinks=0, recent=2, block=2)
SOME = BlockBudget(slots=20, sinks=4, recent=8, block=4)
RETRIEVED = {
    "quest-longspec": Hierarchy(
        LongSpecDrafter(DRAFT, TreeConfig((3, 2))), Quest(CONFIG, SOME), TreeConfig((1,) * 7)
    ),
    "quest-ngram": Hierarchy(
        NgramDrafter(TreeConfig((2, 2))), Quest(CONFIG, FEW, queries=2), TREES[1]
    ),
    "attention-streaming": Hierarchy(
        StreamingDrafter(TreeConfig((2,)), SHORT),
        AttentionRetriever(CONFIG, SOME),
        TreeConfig((1,) * 5),
    ),
    "quest-end": Hierarchy(
        LongSpecDrafter(DRAFT, TreeConfig((3, 2))),
        Quest(CONFIG, FEW),
        TreeConfig.parse("chain:4/3,4,2@10"),
    ),
}
"""Budgets that are no power of two, chains that are no whole number of rounds."""
PARTIAL = {
    "streaming": StreamingDrafter(TreeConfig((3, 2)), SHORT),
    "hierarchy": Hierarchy(LongSpecDrafter(DRAFT, TreeConfig((3, 2))), SHORT, TreeConfig((1,) * 6)),
    **RETRIEVED,
}


@pytest.mark.parametrize(
    "name", in_tiers(PARTIAL, "quest-longspec", "attention-streaming", "quest-end")
)
def test_partial_passes_of_a_transformer_change_no_token(models: Params, name: str) -> None:
    tokens_are_those_of_plain_decoding(models, PARTIAL[name], EVERY)


def test_partial_passes_of_a_greedy_batch_change_no_token(models: Params) -> None:
    """Whose program has no noise."""
    tokens_are_those_of_plain_decoding(models, PARTIAL["quest-longspec"], GREEDY)


def tokens_are_those_of_plain_decoding(
    models: Params, drafter: Drafter, requests: list[Request]
) -> None:
    """And some of them were drafted."""
    target, tokens = TargetModel(CONFIG), prompts(CONFIG.vocab_size)
    for req in requests:
        plain, _ = generate(target, NoDraft(), models, tokens, LENGTHS, req)
        rows, state = generate(target, drafter, models, tokens, LENGTHS, req)
        assert_same(rows, plain)
        assert emitted_in_rounds(state) > 0


OFFLOADED = {
    "plain": NoDraft(),
    "tree": LongSpecDrafter(DRAFT, TREES[0]),
    "quest-longspec": RETRIEVED["quest-longspec"],
}


@pytest.mark.parametrize("name", in_tiers(OFFLOADED, "plain", "quest-longspec"))
def test_a_cache_in_the_hosts_memory_changes_no_token(models: Params, name: str) -> None:
    drafter, tokens, req = OFFLOADED[name], prompts(CONFIG.vocab_size), request(**MIXED)
    plain, _ = generate(TargetModel(CONFIG), NoDraft(), models, tokens, LENGTHS, req)
    target = TargetModel(CONFIG, offload=True)
    rows, state = generate(target, drafter, models, tokens, LENGTHS, req)
    assert_same(rows, plain)
    cache = state.rows.cache
    kinds = [leaf.sharding.memory_kind for leaf in (*cache.keys, *cache.values)]
    assert kinds == ["pinned_host", "device"] * 2


def lossy(budget: BlockBudget, tree: str) -> Hierarchy:
    """Published partial verification, of the target's own chains."""
    inner = StreamingDrafter(TreeConfig((1,)), SHORT)
    return Hierarchy(inner, Quest(CONFIG, budget), TreeConfig.parse(tree), verify_all=False)


@pytest.mark.parametrize("tree", in_tiers(["chain:6", "chain:6/2,2@9"], "chain:6"))
def test_the_lossy_option_fails_where_all_others_pass(models: Params, tree: str) -> None:
    """Negative control; and where it sees all of the context it is no other than they."""
    target, tokens, req = TargetModel(CONFIG), prompts(CONFIG.vocab_size), EVERY[0]
    plain, _ = generate(target, NoDraft(), models, tokens, LENGTHS, req)
    if tree != "chain:6":  # The other one runs the same chain, and a tree behind it.
        all_of_it = lossy(BlockBudget(64, 4, 8, 4), tree)
        assert_same(generate(target, all_of_it, models, tokens, LENGTHS, req)[0], plain)
    rows, state = generate(target, lossy(FEW, tree), models, tokens, LENGTHS, req)
    assert any(not np.array_equal(a, b) for a, b in zip(rows, plain, strict=True))
    assert int(state.record.histogram[:, 5:].sum()) > 0
    # What it emitted is in the cache as if all of the context had been seen.
    for b, row in enumerate(rows):
        text, alone = np.zeros((1, 50), np.int32), request(seeds=(1,), stop=((-1,),), new=(1,))
        told = np.array([LENGTHS[b] + len(row)])
        text[0, : told[0]] = [*tokens[b, : LENGTHS[b]], *row]  # Padded: of one program.
        _, exact = generate(target, NoDraft(), models, text, told, alone)
        length = int(state.rows.length[b])
        for ours, theirs in zip(state.rows.cache.keys, exact.rows.cache.keys, strict=True):
            np.testing.assert_allclose(
                ours[b, :, :length], theirs[0, :, :length], rtol=1e-4, atol=1e-4
            )


def test_a_small_model_changes_no_token(models: Params) -> None:
    """Nor do the chunks in which it reads the prompts: shorter than they, and longer."""
    target, tokens = TargetModel(CONFIG), prompts(CONFIG.vocab_size)
    params = Params(models.target, random_target(SMALL, seed=5))
    for req in EVERY:
        plain, _ = generate(target, NoDraft(), models, tokens, LENGTHS, req)
        for chunk in (8, 72):
            rows, state = generate(target, SMALL_LM, params, tokens, LENGTHS, req, 128, chunk)
            assert_same(rows, plain)
            assert emitted_in_rounds(state) > 0


def test_a_target_is_its_own_perfect_drafter(models: Params) -> None:
    """Every round accepts the whole chain, but a row's last one, which its budget cuts."""
    target, tokens = TargetModel(CONFIG), prompts(CONFIG.vocab_size)
    drafter = SmallLMDrafter(CONFIG, TreeConfig((1, 1, 1, 1)))
    itself = Params(models.target, models.target)
    for req in EVERY:
        plain, _ = generate(target, NoDraft(), models, tokens, LENGTHS, req)
        rows, state = generate(target, drafter, itself, tokens, LENGTHS, req)
        assert_same(rows, plain)
        np.testing.assert_array_equal(state.record.rounds, -(-(NEW - 1) // 5))


@pytest.mark.parametrize("budget", [2, 9])
def test_a_budget_changes_no_token(budget: int) -> None:
    """Not even one that leaves the root a single child."""
    target, tokens = LookupTarget(VOCABULARY), prompts(VOCABULARY)
    params = Params(TABLE, DRAFT_TABLES["near"])
    drafter = LookupDrafter(TreeConfig((4, 5, 3), budget))
    for req in EVERY:
        plain, _ = generate(target, NoDraft(), params, tokens, LENGTHS, req)
        rows, state = generate(target, drafter, params, tokens, LENGTHS, req)
        assert_same(rows, plain)
        accepted = state.record.emitted - 1 - state.record.rounds
        assert int(accepted.min()) > 0


@pytest.mark.parametrize("own", in_tiers([False, True], True))
def test_a_reduced_draft_vocabulary_changes_no_token(models: Params, own: bool) -> None:
    """And what it accepts under noise shows that each token is scored with its own noise.

    The tokens that a row's text holds may join it.
    """
    target, tokens = TargetModel(CONFIG), prompts(CONFIG.vocab_size)
    drafter = LongSpecDrafter(DRAFT, TREES[0], own_tokens=own)
    part = jnp.asarray(np.random.default_rng(0).permutation(101)[:60], jnp.int32)
    reduced = Params(models.target, models.draft.restricted(part, own))
    in_order = Params(models.target, models.draft.restricted(jnp.sort(part), own))
    for req in EVERY:
        plain, _ = generate(target, NoDraft(), models, tokens, LENGTHS, req)
        rows, state = generate(target, drafter, reduced, tokens, LENGTHS, req)
        assert_same(rows, plain)
        _, other = generate(target, drafter, in_order, tokens, LENGTHS, req)
        np.testing.assert_array_equal(state.record.histogram, other.record.histogram)
        assert emitted_in_rounds(state) > 0


@pytest.mark.parametrize("size", in_tiers([None, 60], 60))
def test_a_draft_in_8_bits_changes_no_token(models: Params, size: int | None) -> None:
    """Though its noise moves, and it goes on to accept."""
    draft = models.draft
    if size is not None:
        part = np.random.default_rng(0).permutation(101)[:size]
        draft = draft.restricted(jnp.asarray(part, jnp.int32))
    rounded = Params(models.target, draft.in_int8())
    tokens_are_those_of_plain_decoding(rounded, LongSpecDrafter(DRAFT, TREES[0]), EVERY)


@pytest.mark.parametrize("name", in_tiers(["tree", "quest-longspec"], "tree"))
def test_output_does_not_depend_on_chunk_capacity_or_neighbours(models: Params, name: str) -> None:
    """Nor does what is accepted. A row alone lies in a longer cache, and comes in more chunks."""
    target, tokens, req = TargetModel(CONFIG), prompts(CONFIG.vocab_size), EVERY[0]
    drafter = OFFLOADED[name]
    rows, state = generate(target, drafter, models, tokens, LENGTHS, req)
    for b in range(3):
        single, other = generate(
            *(target, drafter, models, tokens[b : b + 1], LENGTHS[b : b + 1]),
            *(jax.tree.map(lambda leaf, b=b: leaf[b : b + 1], req), 640, 5),
        )
        np.testing.assert_array_equal(single[0], rows[b])
        np.testing.assert_array_equal(other.record.histogram[0], state.record.histogram[b])
    order = np.array([2, 0, 1])
    turned = jax.tree.map(lambda leaf: leaf[order], req)
    found, other = generate(target, drafter, models, tokens[order], LENGTHS[order], turned)
    assert_same([found[i] for i in np.argsort(order)], rows)
    np.testing.assert_array_equal(other.record.histogram, state.record.histogram[order])


def test_cached_decoding_equals_running_the_whole_text_again(models: Params) -> None:
    """The oracle that uses no cache: every token from one causal pass over all before it."""
    target, tokens = TargetModel(CONFIG), prompts(CONFIG.vocab_size)
    rows, _ = generate(target, LongSpecDrafter(DRAFT, TREES[0]), models, tokens, LENGTHS, request())
    # Padded to one length: no token sees what is behind it.
    text = np.zeros((3, int((LENGTHS + NEW).max())), np.int32)
    for b, row in enumerate(rows):
        text[b, : LENGTHS[b] + NEW[b]] = [*tokens[b, : LENGTHS[b]], *row]

    @jax.jit
    def draws(params: Any, text: jax.Array) -> jax.Array:
        model, positions = Target(CONFIG), jnp.broadcast_to(jnp.arange(text.shape[1]), text.shape)
        output: Any = model.apply(
            {"params": params}, text, positions, lambda layer, q, k, v: causal_attention(q, k, v)
        )
        logits: Any = model.apply({"params": params}, output.hidden, method="unembed")
        return jnp.argmax(logits, axis=-1)

    for b, drawn in enumerate(np.asarray(draws(models.target, text))):
        start = LENGTHS[b] - 1
        np.testing.assert_array_equal(drawn[start : start + NEW[b]], rows[b])


def test_draft_state_bytes_do_not_depend_on_the_context(models: Params) -> None:
    target, drafter = TargetModel(CONFIG), LongSpecDrafter(DRAFT, TREES[0])
    sizes = []
    for length, capacity in ((23, 128), (401, 640)):
        lengths = np.array([length], np.int32)
        req = request(seeds=(1,), stop=((-1,),), new=(3,))
        rows = prefill(
            target,
            drafter,
            models,
            jnp.asarray(prompts(101, lengths)),
            jnp.asarray(lengths),
            req,
            capacity=capacity,
            chunk=64,
        )
        sizes.append(sum(leaf.nbytes for leaf in jax.tree.leaves(rows.draft)))
    assert sizes[0] == sizes[1] == 2 * WINDOW * CONFIG.num_kv_heads * CONFIG.head_width * 4


def test_the_suite_catches_noise_that_depends_on_the_round(
    models: Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: key the noise by anything but seed and position, and equality breaks."""
    target, tokens, req = LookupTarget(VOCABULARY), prompts(VOCABULARY), request(1.0)
    plain, _ = generate(target, NoDraft(), Params(TABLE, ()), tokens, LENGTHS, req)
    honest = round_noise.noise

    def shifted(sampling: Sampling, positions: jax.Array, vocabulary: int) -> jax.Array:
        # Every node of a round draws with the noise of the round's first position.
        return honest(sampling, jnp.broadcast_to(positions[:, :1], positions.shape), vocabulary)

    monkeypatch.setattr(round_noise, "noise", shifted)
    fresh = LookupDrafter(TreeConfig((5, 4)))  # A shape no other test has compiled.
    rows, _ = generate(target, fresh, Params(TABLE, TABLE), tokens, LENGTHS, req)
    assert any(not np.array_equal(a, b) for a, b in zip(rows, plain, strict=True))


def test_slack_slots_are_what_a_round_writes() -> None:
    """A cache filled to the brim: the last round must not be clamped back over the prefix."""
    target, tokens = LookupTarget(VOCABULARY), prompts(VOCABULARY)
    params = Params(TABLE, TABLE)
    plain, _ = generate(target, NoDraft(), params, tokens, LENGTHS, request(), capacity=128)
    tree = TREES[0]
    tight = int((LENGTHS + NEW).max()) + slack_slots(tree.num_levels)
    rows, _ = generate(
        target, LookupDrafter(tree), params, tokens, LENGTHS, request(), capacity=tight
    )
    assert_same(rows, plain)


def test_chunks_that_a_drafter_does_not_need_are_not_shown_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A draft that remembers 3 tokens sees the chunks that hold the last 3 of some prompt."""
    shown, whole = [], prefill_lib._extend

    def counted(target, drafter, chunk, home, params, draft, tokens, length, offset, features):
        shown.append(int(offset))
        return whole(target, drafter, chunk, home, params, draft, tokens, length, offset, features)

    monkeypatch.setattr(prefill_lib, "_extend", counted)
    tokens = np.zeros((2, 30), np.int32)
    for recent, wanted in ((None, [0, 4, 8, 12, 16, 20, 24, 28]), (3, [8, 24, 28]), (0, [])):
        drafter = LookupDrafter(TreeConfig((2,)), Needs(recent=recent))
        shown.clear()
        generate(
            LookupTarget(VOCABULARY),
            drafter,
            Params(TABLE, TABLE),
            tokens,
            np.array([11, 30]),
            request(seeds=(5, 6), stop=((-1,),) * 2, new=NEW[:2]),
            chunk=4,
        )
        assert shown == wanted


def repetitive(batch: int, vocabulary: int) -> np.ndarray:
    """Prompts that repeat a few phrases, each row its own, with some noise between them."""
    random = np.random.default_rng(3)
    tokens = random.integers(1, vocabulary, (batch, 64))
    for row in tokens:
        for at in (9, 20, 31, 42, 53):
            row[at : at + 7] = row[:7]
    return tokens


CHUNKS = {"3,3,3": 72, "8,8,8,8@12": 8, "chain:4": 8, "2,5,1": 72}


@pytest.mark.parametrize("tree", in_tiers(CHUNKS, "3,3,3", "8,8,8,8@12"))
def test_prompt_lookup_changes_no_token(tree: str) -> None:
    target, tokens = LookupTarget(VOCABULARY), repetitive(3, VOCABULARY)
    drafter, chunk = NgramDrafter(TreeConfig.parse(tree)), CHUNKS[tree]
    for req in (*EVERY, *GREEDY) if tree == "3,3,3" else EVERY:
        plain, _ = generate(target, NoDraft(), Params(TABLE, ()), tokens, LENGTHS, req)
        rows, _ = generate(target, drafter, Params(TABLE, ()), tokens, LENGTHS, req, 128, chunk)
        assert_same(rows, plain)


def test_prompt_lookup_for_a_transformer_changes_no_token(models: Params) -> None:
    target, tokens = TargetModel(CONFIG), repetitive(3, CONFIG.vocab_size)
    drafter = NgramDrafter(TreeConfig((4, 4, 4), budget=9))
    for req in EVERY:
        plain, _ = generate(target, NoDraft(), models, tokens, LENGTHS, req)
        rows, state = generate(target, drafter, Params(models.target, ()), tokens, LENGTHS, req)
        assert_same(rows, plain)
        kept = np.asarray(state.rows.draft.tokens)
        for b, (row, length) in enumerate(zip(rows, LENGTHS, strict=True)):
            text = [*tokens[b, :length], *row[:-1]]
            np.testing.assert_array_equal(kept[b, : len(text)], text)


JOINED = TreeConfig.parse("3,4,2@12~4")


def joined(tree: TreeConfig = JOINED) -> Joined:
    """A LongSpec draft and lookup."""
    return Joined((LongSpecDrafter(DRAFT, PLAIN), NgramDrafter(PLAIN)), tree)


def test_candidates_of_joined_drafters_share_a_state_and_all_learn(models: Params) -> None:
    target, tokens, req = TargetModel(CONFIG), repetitive(3, CONFIG.vocab_size), request(0.7)
    plain, _ = generate(target, NoDraft(), models, tokens, LENGTHS, req)
    params = Params(models.target, (models.draft, ()))
    tree = TREES[2]
    lone, alone = generate(target, LongSpecDrafter(DRAFT, tree), models, tokens, LENGTHS, req)
    rows, state = generate(target, joined(tree), params, tokens, LENGTHS, req)
    looked_up = TreeConfig((), 9, lookup=4)
    other, beside = generate(target, joined(looked_up), params, tokens, LENGTHS, req)
    for found in (lone, rows, other):
        assert_same(found, plain)
    np.testing.assert_array_equal(state.record.histogram, alone.record.histogram)
    for b, row in enumerate(rows):
        length = int(LENGTHS[b]) + len(row) - 1
        for one in (state, beside):
            text = np.asarray(one.rows.draft[1].tokens)[b, :length]
            np.testing.assert_array_equal(text, [*tokens[b, : LENGTHS[b]], *row[:-1]])


@pytest.mark.parametrize("streams", in_tiers([False, True], False))
def test_trees_that_are_weighed_change_no_token(models: Params, streams: bool) -> None:
    """Lookup alone, verified where it is worth its seconds: always, never, and now and then."""
    target, tokens = TargetModel(CONFIG), repetitive(3, CONFIG.vocab_size)
    drafter, draft = joined(TreeConfig((), 9, lookup=4)), (models.draft, ())
    for req in (*GREEDY, EVERY[0]):
        plain, _ = generate(target, NoDraft(), models, tokens, LENGTHS, req)
        unweighed = Params(models.target, draft)
        _, always = generate(target, drafter, unweighed, tokens, LENGTHS, req, streams=streams)
        accepted = []
        for tree in (0.0, 2.5, 99.0):
            params = Params(models.target, draft, jnp.asarray([1.0, tree]))
            rows, state = generate(target, drafter, params, tokens, LENGTHS, req, streams=streams)
            assert_same(rows, plain)
            accepted.append(emitted_in_rounds(state))
            for b, row in enumerate(rows):
                length = int(LENGTHS[b]) + len(row) - 1
                text = np.asarray(state.rows.draft[1].tokens)[b, :length]
                np.testing.assert_array_equal(text, [*tokens[b, : LENGTHS[b]], *row[:-1]])
        assert accepted[0] == emitted_in_rounds(always)
        assert accepted[0] > accepted[1] > accepted[2] == 0


@pytest.mark.parametrize("requests", [GREEDY, EVERY], ids=["greedy", "every"])
@pytest.mark.parametrize("tree", in_tiers(["3,4,2@12~4", "4,4@9~2", "1,1,1~8"], "3,4,2@12~4"))
def test_joined_drafters_change_no_token(tree: str, requests: list[Request]) -> None:
    """Of a table that drafts well, and of lookup in a text that repeats itself."""
    target, tokens = LookupTarget(VOCABULARY), repetitive(3, VOCABULARY)
    drafter = Joined((LookupDrafter(PLAIN), NgramDrafter(PLAIN)), TreeConfig.parse(tree))
    params = Params(TABLE, (DRAFT_TABLES["near"], ()))
    for req in requests:
        plain, _ = generate(target, NoDraft(), Params(TABLE, ()), tokens, LENGTHS, req)
        rows, state = generate(target, drafter, params, tokens, LENGTHS, req)
        assert_same(rows, plain)
        assert emitted_in_rounds(state) > 0


REQUESTS = {"greedy": GREEDY, "every": EVERY}


@pytest.mark.parametrize("requests", in_tiers(REQUESTS, "every"))
def test_joined_drafters_of_a_transformer_change_no_token(models: Params, requests: str) -> None:
    target, tokens = TargetModel(CONFIG), repetitive(3, CONFIG.vocab_size)
    params = Params(models.target, (models.draft, ()))
    for req in REQUESTS[requests]:
        plain, _ = generate(target, NoDraft(), models, tokens, LENGTHS, req)
        rows, state = generate(target, joined(), params, tokens, LENGTHS, req)
        assert_same(rows, plain)
        bits = np.asarray(state.record.sources)
        assert {*np.unique(bits)} <= {0, 1, 2, 3} and (bits & 1).any() and (bits & 2).any()


@pytest.mark.full
def test_joined_drafters_inside_partial_verification_change_no_token(models: Params) -> None:
    params = Params(models.target, (models.draft, ()))
    target, tokens, req = TargetModel(CONFIG), repetitive(3, CONFIG.vocab_size), EVERY[0]
    plain, _ = generate(target, NoDraft(), models, tokens, LENGTHS, req)
    drafter = Hierarchy(joined(TreeConfig.parse("3,2@6~3")), SHORT, TreeConfig((1,) * 6))
    rows, state = generate(target, drafter, params, tokens, LENGTHS, req)
    assert_same(rows, plain)
    assert emitted_in_rounds(state) > 0


@pytest.mark.full
def test_what_joined_drafters_accept_does_not_depend_on_neighbours(models: Params) -> None:
    """Nor on slots: what a row's lookup has counted is its own."""
    target, tokens, req = TargetModel(CONFIG), repetitive(3, CONFIG.vocab_size), EVERY[0]
    params, lengths = Params(models.target, (models.draft, ())), np.array([61, 27, 40], np.int32)
    rows, state = generate(target, joined(), params, tokens, lengths, req)
    for b in range(3):
        single, other = generate(
            *(target, joined(), params, tokens[b : b + 1], lengths[b : b + 1]),
            *(jax.tree.map(lambda leaf, b=b: leaf[b : b + 1], req), 640, 5),
        )
        np.testing.assert_array_equal(single[0], rows[b])
        np.testing.assert_array_equal(other.record.histogram[0], state.record.histogram[b])
        np.testing.assert_array_equal(
            other.record.sources[0, : len(rows[b])], state.record.sources[b, : len(rows[b])]
        )
    assert_rows_come_and_go(target, joined(), params, tokens, lengths, req, rows)
