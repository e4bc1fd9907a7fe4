"""Losslessness, pathwise: speculative output equals plain decoding, token for token, in float32."""

from dataclasses import replace
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
from longspec_jax.drafters.retrieval.hierarchy import PartialVerifier
from longspec_jax.drafters.retrieval.selection import AttentionRetriever, Quest
from longspec_jax.drafters.small_lm import SmallLMDrafter
from longspec_jax.drafters.streaming import StreamingDrafter
from longspec_jax.ops.selection.blocks import BlockBudget
from tests.decoding import lossless
from tests.decoding.lossless import (
    CONFIG,
    DRAFT,
    DRAFT_TABLES,
    EVERY,
    GREEDY,
    LENGTHS,
    LONGSPEC,
    LOOKUP,
    MIXED,
    NEW,
    SHORT,
    SMALL,
    SMALL_LM,
    TABLE,
    TRANSFORMER,
    TREES,
    VOCABULARY,
    assert_same,
    emitted_in_rounds,
    request,
)
from tests.kit import draft_params, in_tiers, prefill, random_draft, random_target
from tests.lookup import ConstantDrafter, LookupDrafter

NEAR = DRAFT_TABLES["near"]
REQUESTS = {"greedy": GREEDY, "every": EVERY}


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("draft", DRAFT_TABLES)
def test_lookup_model_is_drafter_invariant(draft: str, temperature: float) -> None:
    for tree in TREES:
        drafter, table = LookupDrafter(tree), DRAFT_TABLES[draft]
        [state] = LOOKUP.same(drafter, table, [request(temperature)])
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
    for tree in TREES[::3]:
        LOOKUP.same(ConstantDrafter(tree), (), [request(temperature)])


@pytest.mark.parametrize(
    "filters",
    [dict(top_k=3), dict(top_p=0.6), dict(min_p=0.3), dict(top_k=5, top_p=0.8, min_p=0.1)],
)
def test_filtered_sampling_is_drafter_invariant(filters: dict[str, Any]) -> None:
    req = request(0.9, **filters)
    plain, free = LOOKUP.plain(req), LOOKUP.plain(request(0.9))
    assert any(not np.array_equal(a, b) for a, b in zip(plain, free, strict=True))
    LOOKUP.same(LookupDrafter(TREES[0]), NEAR, [req])


def alone(subject: lossless.Prompted, row: int, **sizes: int) -> lossless.Prompted:
    """One row of the prompts."""
    own = slice(row, row + 1)
    rows = {"tokens": subject.tokens[own], "lengths": subject.lengths[own]}
    return replace(subject, **rows, sizes=sizes, _known={})


def of_row(req: Request, row: int) -> Request:
    return jax.tree.map(lambda leaf: leaf[row : row + 1], req)


def test_rows_of_one_batch_may_sample_differently() -> None:
    mixed = request(temperature=(0.0, 1.0, 0.7), top_k=(0, 4, 0), top_p=(1.0, 1.0, 0.8))
    rows, _ = LOOKUP.run(LookupDrafter(TREES[0]), NEAR, mixed)
    for row in range(3):
        [plain] = alone(LOOKUP, row).plain(of_row(mixed, row))
        np.testing.assert_array_equal(rows[row], plain)


def test_stop_tokens_and_budgets_cut_each_row_alone() -> None:
    free = LOOKUP.plain(request(1.0))
    stop = ((int(free[0][9]), -1), (int(free[1][4]), int(free[1][6])), (-1, -1))
    expected = []
    for row, stops in zip(free, stop, strict=True):
        cut = [i for i, token in enumerate(row) if token in stops]
        expected.append(row[: cut[0] + 1] if cut else row)
    assert len(expected[0]) < len(free[0]) and len(expected[2]) == NEW[2]
    for drafter in (NoDraft(), *map(LookupDrafter, TREES[:2])):
        assert_same(LOOKUP.run(drafter, TABLE, request(1.0, stop=stop))[0], expected)


def test_a_first_token_that_stops_ends_the_row() -> None:
    stop = ((int(LOOKUP.plain(request())[0][0]),), (-1,), (-1,))
    rows, state = LOOKUP.run(LookupDrafter(TREES[0]), TABLE, request(stop=stop, new=(9, 1, 9)))
    assert [len(row) for row in rows[:2]] == [1, 1]
    assert int(state.record.rounds[0]) == int(state.record.rounds[1]) == 0


def test_launches_of_one_round_and_of_many_agree() -> None:
    given = LookupDrafter(TREES[0]), NEAR, request(0.7)
    (rows, final), (streamed, last) = (LOOKUP.run(*given, streams=each) for each in (False, True))
    assert_same(streamed, rows)
    np.testing.assert_array_equal(last.record.histogram, final.record.histogram)
    np.testing.assert_array_equal(last.record.drafted, final.record.drafted)


@pytest.mark.parametrize("requests", REQUESTS)
@pytest.mark.parametrize(
    "drafter",
    [
        StreamingDrafter(TreeConfig((3, 4, 2), budget=6), SHORT),
        PartialVerifier(LookupDrafter(TreeConfig((2, 3), budget=4)), SHORT, TreeConfig((1,) * 6)),
    ],
    ids=["streaming", "hierarchy"],
)
def test_partial_passes_of_a_lookup_model_change_no_token(drafter: Drafter, requests: str) -> None:
    """Though what they draw is mostly wrong: one token that is not seen changes every logit."""
    for state in LOOKUP.drafted(drafter, NEAR, REQUESTS[requests]):
        assert emitted_in_rounds(state) < int(state.record.emitted.sum()) - 3


BUDGETED = TreeConfig((4, 5, 3), budget=9)


def test_transformers_are_drafter_invariant() -> None:
    TRANSFORMER.same(LongSpecDrafter(DRAFT, BUDGETED), LONGSPEC, GREEDY)
    for tree in (*TREES[:2], BUDGETED):
        TRANSFORMER.same(LongSpecDrafter(DRAFT, tree), LONGSPEC, EVERY)


UNUSUAL = lossless.tiny_target_config(
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
    draft = DraftConfig.for_target(UNUSUAL, window=lossless.WINDOW)
    assert (draft.rotary, draft.logits_divisor, UNUSUAL.read_layer) == (UNUSUAL.rotary, 2.0, 1)
    params, req = random_target(UNUSUAL), request(np.array([0.0, 0.9, 1.0], np.float32))
    unusual = replace(TRANSFORMER, target=TargetModel(UNUSUAL), params=params, _known={})
    own = draft_params(random_draft(draft), params)
    unusual.same(LongSpecDrafter(draft, BUDGETED), own, [req])
    texts = {*np.concatenate(unusual.plain(req))}
    assert len(texts) > 20, "texts that repeat one token would prove nothing"


FEW = BlockBudget(slots=6, sinks=0, recent=2, block=2)
SOME = BlockBudget(slots=20, sinks=4, recent=8, block=4)
NARROW = LongSpecDrafter(DRAFT, TreeConfig((3, 2)))
RETRIEVED = {
    "quest-longspec": PartialVerifier(NARROW, Quest(CONFIG, SOME), TreeConfig((1,) * 7)),
    "quest-ngram": PartialVerifier(
        NgramDrafter(TreeConfig((2, 2))), Quest(CONFIG, FEW, queries=2), TREES[1]
    ),
    "attention-streaming": PartialVerifier(
        StreamingDrafter(TreeConfig((2,)), SHORT),
        AttentionRetriever(CONFIG, SOME),
        TreeConfig((1,) * 5),
    ),
    "quest-end": PartialVerifier(NARROW, Quest(CONFIG, FEW), TreeConfig.parse("chain:4/3,4,2@10")),
}
"""Budgets that are not a power of two, chains that are not whole rounds."""
PARTIAL = {
    "streaming": StreamingDrafter(TreeConfig((3, 2)), SHORT),
    "hierarchy": PartialVerifier(NARROW, SHORT, TreeConfig((1,) * 6)),
    **RETRIEVED,
}


@pytest.mark.parametrize(
    "name", in_tiers(PARTIAL, "quest-longspec", "attention-streaming", "quest-end")
)
def test_partial_passes_of_a_transformer_change_no_token(name: str) -> None:
    """Also of a greedy batch, whose program has no noise."""
    requests = [*EVERY, *GREEDY] if name == "quest-longspec" else EVERY
    TRANSFORMER.drafted(PARTIAL[name], LONGSPEC, requests)


OFFLOADED = {
    "plain": NoDraft(),
    "tree": LongSpecDrafter(DRAFT, TREES[0]),
    "quest-longspec": RETRIEVED["quest-longspec"],
}


@pytest.mark.parametrize("name", in_tiers(OFFLOADED, "plain", "quest-longspec"))
def test_a_cache_in_the_hosts_memory_changes_no_token(name: str) -> None:
    req, offloaded = (
        request(**MIXED),
        replace(TRANSFORMER, target=TargetModel(CONFIG, offload=True)),
    )
    TRANSFORMER.plain(req)
    [state] = offloaded.same(OFFLOADED[name], LONGSPEC, [req])
    cache = state.rows.cache
    kinds = [leaf.sharding.memory_kind for leaf in (*cache.keys, *cache.values)]
    assert kinds == ["pinned_host", "device"] * 2


def lossy(budget: BlockBudget, tree: str) -> PartialVerifier:
    """Published partial verification, of the target's own chains."""
    inner = StreamingDrafter(TreeConfig((1,)), SHORT)
    return PartialVerifier(inner, Quest(CONFIG, budget), TreeConfig.parse(tree), verify_all=False)


@pytest.mark.parametrize("tree", in_tiers(["chain:6", "chain:6/2,2@9"], "chain:6"))
def test_the_lossy_option_fails_where_all_others_pass(tree: str) -> None:
    """Negative control; and where it sees all of the context it is no other than they."""
    req = EVERY[0]
    if tree != "chain:6":  # The other one runs the same chain, and a tree after it.
        TRANSFORMER.same(lossy(BlockBudget(64, 4, 8, 4), tree), LONGSPEC, [req])
    rows, state = TRANSFORMER.run(lossy(FEW, tree), LONGSPEC, req)
    plain = TRANSFORMER.plain(req)
    assert any(not np.array_equal(a, b) for a, b in zip(rows, plain, strict=True))
    assert int(state.record.histogram[:, 5:].sum()) > 0
    # What it emitted is in the cache as if all of the context had been seen.
    for b, row in enumerate(rows):
        text, one = np.zeros((1, 50), np.int32), request(seeds=(1,), stop=((-1,),), new=(1,))
        told = np.array([LENGTHS[b] + len(row)])
        text[0, : told[0]] = [*TRANSFORMER.tokens[b, : LENGTHS[b]], *row]  # Padded: of one program.
        exact = replace(TRANSFORMER, tokens=text, lengths=told).run(NoDraft(), LONGSPEC, one)[1]
        length = int(state.rows.length[b])
        for ours, theirs in zip(state.rows.cache.keys, exact.rows.cache.keys, strict=True):
            np.testing.assert_allclose(
                ours[b, :, :length], theirs[0, :, :length], rtol=1e-4, atol=1e-4
            )


def test_a_small_model_changes_no_token() -> None:
    """Nor do the chunks in which it reads the prompts: shorter than they, and longer."""
    for chunk in (8, 72):
        TRANSFORMER.drafted(SMALL_LM, random_target(SMALL, seed=5), EVERY, chunk=chunk)


def test_a_target_is_its_own_perfect_drafter() -> None:
    """Every round accepts the whole chain, but a row's last one, which its budget cuts."""
    drafter = SmallLMDrafter(CONFIG, TreeConfig((1, 1, 1, 1)))
    for state in TRANSFORMER.same(drafter, TRANSFORMER.params, EVERY):
        np.testing.assert_array_equal(state.record.rounds, -(-(NEW - 1) // 5))


@pytest.mark.parametrize("budget", [2, 9])
def test_a_budget_changes_no_token(budget: int) -> None:
    """Not even one that leaves the root a single child."""
    for state in LOOKUP.same(LookupDrafter(TreeConfig((4, 5, 3), budget)), NEAR, EVERY):
        assert int((state.record.emitted - 1 - state.record.rounds).min()) > 0


def part(size: int = 60) -> jax.Array:
    """Some tokens in any order."""
    tokens = np.random.default_rng(0).permutation(CONFIG.vocab_size)[:size]
    return jnp.asarray(tokens, jnp.int32)


@pytest.mark.parametrize("own", in_tiers([False, True], True))
def test_a_reduced_draft_vocabulary_changes_no_token(own: bool) -> None:
    """And what it accepts under noise shows that each token is scored with its own noise.

    The tokens that a row's text holds may join it.
    """
    drafter = LongSpecDrafter(DRAFT, TREES[0], own_tokens=own)
    states, others = (
        TRANSFORMER.drafted(drafter, LONGSPEC.restricted(tokens, own), EVERY)
        for tokens in (part(), jnp.sort(part()))
    )
    for state, other in zip(states, others, strict=True):
        np.testing.assert_array_equal(state.record.histogram, other.record.histogram)


@pytest.mark.parametrize("size", in_tiers([None, 60], 60))
def test_a_draft_in_8_bits_changes_no_token(size: int | None) -> None:
    """Though its noise moves, and it goes on to accept."""
    draft = LONGSPEC if size is None else LONGSPEC.restricted(part(size))
    TRANSFORMER.drafted(LongSpecDrafter(DRAFT, TREES[0]), draft.in_int8(), EVERY)


DYNAMIC = TreeConfig((3, 4, 2), budget=6, threshold=0.4)
DEEP: dict[str, tuple[Drafter, Any]] = {
    "longspec": (LongSpecDrafter(DRAFT, DYNAMIC), LONGSPEC),
    "small_lm": (SmallLMDrafter(SMALL, DYNAMIC, narrower=True), random_target(SMALL, seed=5)),
    "streaming": (StreamingDrafter(DYNAMIC, SHORT), None),
}


@pytest.mark.parametrize("name", in_tiers(DEEP, "longspec"))
def test_trees_of_any_depth_change_no_token(name: str) -> None:
    """Which end where a level adds too little."""
    TRANSFORMER.drafted(*DEEP[name], [request(**MIXED)])


def assert_rows_are_their_own(
    subject: lossless.Prompted, drafter: Drafter, draft: Any, *, sources: bool = False
) -> list[np.ndarray]:
    """A row alone, in a longer cache and more chunks, has text and acceptance of one of many."""
    rows, state = subject.run(drafter, draft, EVERY[0])
    for b, row in enumerate(rows):
        own = alone(subject, b, capacity=640, chunk=5)
        [single], other = own.run(drafter, draft, of_row(EVERY[0], b))
        np.testing.assert_array_equal(single, row)
        np.testing.assert_array_equal(other.record.histogram[0], state.record.histogram[b])
        if sources:
            found, expected = other.record.sources[0], state.record.sources[b]
            np.testing.assert_array_equal(found[: len(row)], expected[: len(row)])
    return rows


@pytest.mark.parametrize("name", in_tiers(["tree", "quest-longspec"], "tree"))
def test_output_does_not_depend_on_chunk_capacity_or_neighbours(name: str) -> None:
    """Nor does what is accepted."""
    drafter, req = OFFLOADED[name], EVERY[0]
    rows = assert_rows_are_their_own(TRANSFORMER, drafter, LONGSPEC)
    order = np.array([2, 0, 1])
    turned = replace(TRANSFORMER, tokens=TRANSFORMER.tokens[order], lengths=LENGTHS[order])
    found, other = turned.run(drafter, LONGSPEC, jax.tree.map(lambda leaf: leaf[order], req))
    assert_same([found[i] for i in np.argsort(order)], rows)
    [state] = TRANSFORMER.same(drafter, LONGSPEC, [req])
    np.testing.assert_array_equal(other.record.histogram, state.record.histogram[order])


def test_cached_decoding_equals_running_the_whole_text_again() -> None:
    """The oracle that uses no cache: every token from one causal pass over all before it."""
    rows, _ = TRANSFORMER.run(LongSpecDrafter(DRAFT, TREES[0]), LONGSPEC, request())
    # Padded to one length: no token sees what is after it.
    text = np.zeros((3, int((LENGTHS + NEW).max())), np.int32)
    for b, row in enumerate(rows):
        text[b, : LENGTHS[b] + NEW[b]] = [*TRANSFORMER.tokens[b, : LENGTHS[b]], *row]
    drawn = np.asarray(lossless.dense(CONFIG, TRANSFORMER.params, jnp.asarray(text))).argmax(axis=2)
    for b, row in enumerate(rows):
        start = LENGTHS[b] - 1
        np.testing.assert_array_equal(drawn[b, start : start + NEW[b]], row)


def test_draft_state_bytes_do_not_depend_on_the_context() -> None:
    drafter, sizes = LongSpecDrafter(DRAFT, TREES[0]), []
    for length, capacity in ((23, 128), (401, 640)):
        lengths = np.array([length], np.int32)
        req = request(seeds=(1,), stop=((-1,),), new=(3,))
        models = TRANSFORMER.target, drafter, Params(TRANSFORMER.params, LONGSPEC)
        given = jnp.asarray(lossless.prompts(101, lengths)), jnp.asarray(lengths), req
        rows = prefill(*models, *given, capacity=capacity, chunk=64)
        sizes.append(sum(leaf.nbytes for leaf in jax.tree.leaves(rows.draft)))
    slot = 2 * CONFIG.num_kv_heads * CONFIG.head_width * 4
    assert sizes[0] == sizes[1] == lossless.WINDOW * slot


def test_the_suite_catches_noise_that_depends_on_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: key the noise by anything but seed and position, and equality breaks."""
    req, honest = request(1.0), round_noise.noise
    plain = LOOKUP.plain(req)

    def shifted(sampling: Sampling, positions: jax.Array, vocabulary: int) -> jax.Array:
        # Every node of a round draws with the noise of the round's first position.
        return honest(sampling, jnp.broadcast_to(positions[:, :1], positions.shape), vocabulary)

    monkeypatch.setattr(round_noise, "noise", shifted)
    fresh = LookupDrafter(TreeConfig((5, 4)))  # A shape no other test has compiled.
    rows, _ = LOOKUP.run(fresh, TABLE, req)
    assert any(not np.array_equal(a, b) for a, b in zip(rows, plain, strict=True))


def test_slack_slots_are_what_a_round_writes() -> None:
    """A cache filled to the brim: the last round must not be clamped back over the prefix."""
    tight = int((LENGTHS + NEW).max()) + slack_slots(TREES[0].num_levels)
    LOOKUP.same(LookupDrafter(TREES[0]), TABLE, [request()], capacity=tight)


def test_chunks_that_a_drafter_does_not_need_are_not_shown_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A draft that remembers 3 tokens sees the chunks that hold the last 3 of some prompt."""
    shown, whole = [], prefill_lib._extend

    def counted(target, drafter, chunk, home, params, draft, tokens, length, offset, features):
        shown.append(int(offset))
        return whole(target, drafter, chunk, home, params, draft, tokens, length, offset, features)

    monkeypatch.setattr(prefill_lib, "_extend", counted)
    two = replace(LOOKUP, tokens=np.zeros((2, 30), np.int32), lengths=np.array([11, 30]))
    req = request(seeds=(5, 6), stop=((-1,),) * 2, new=NEW[:2])
    for recent, wanted in ((None, [0, 4, 8, 12, 16, 20, 24, 28]), (3, [8, 24, 28]), (0, [])):
        shown.clear()
        two.run(LookupDrafter(TreeConfig((2,)), Needs(recent=recent)), TABLE, req, chunk=4)
        assert shown == wanted


def repetitive(batch: int, vocabulary: int) -> np.ndarray:
    """Prompts that repeat a few phrases, each row its own, with some noise between them."""
    random = np.random.default_rng(3)
    tokens = random.integers(1, vocabulary, (batch, 64))
    for row in tokens:
        for at in (9, 20, 31, 42, 53):
            row[at : at + 7] = row[:7]
    return tokens


REPEATED = replace(LOOKUP, tokens=repetitive(3, VOCABULARY), _known={})
REPEATING = replace(TRANSFORMER, tokens=repetitive(3, CONFIG.vocab_size), _known={})
CHUNKS = {"3,3,3": 72, "8,8,8,8@12": 8, "chain:4": 8, "2,5,1": 72}


@pytest.mark.parametrize("tree", in_tiers(CHUNKS, "3,3,3", "8,8,8,8@12"))
def test_prompt_lookup_changes_no_token(tree: str) -> None:
    drafter, requests = NgramDrafter(TreeConfig.parse(tree)), EVERY + GREEDY * (tree == "3,3,3")
    REPEATED.same(drafter, (), requests, chunk=CHUNKS[tree])


def assert_knows_the_text(tokens: Any, subject: lossless.Prompted, req: Request) -> None:
    """What lookup keeps of every row is what the cache holds."""
    for row, kept in enumerate(np.asarray(tokens)):
        text = subject.text(row, req)
        np.testing.assert_array_equal(kept[: len(text)], text)


def test_prompt_lookup_for_a_transformer_changes_no_token() -> None:
    drafter = NgramDrafter(TreeConfig((4, 4, 4), budget=9))
    for req, state in zip(EVERY, REPEATING.same(drafter, (), EVERY), strict=True):
        assert_knows_the_text(state.rows.draft.tokens, REPEATING, req)


JOINED = TreeConfig.parse("3,4,2@12~4")
BOTH = LONGSPEC, ()
ALONE = TreeConfig((), 9, lookup=4)
"""Of lookup alone."""


def joined(tree: TreeConfig = JOINED) -> Joined:
    """A LongSpec draft and lookup."""
    return Joined((LongSpecDrafter(DRAFT, PLAIN), NgramDrafter(PLAIN)), tree)


def test_candidates_of_joined_drafters_share_a_state_and_all_learn() -> None:
    req, tree = request(0.7), TREES[2]
    [single] = REPEATING.same(LongSpecDrafter(DRAFT, tree), LONGSPEC, [req])
    [state], [beside] = (REPEATING.same(joined(each), BOTH, [req]) for each in (tree, ALONE))
    np.testing.assert_array_equal(state.record.histogram, single.record.histogram)
    for each in (state, beside):
        assert_knows_the_text(each.rows.draft[1].tokens, REPEATING, req)


@pytest.mark.parametrize("streams", in_tiers([False, True], False))
def test_trees_that_are_weighed_change_no_token(streams: bool) -> None:
    """Lookup alone, verified where it is worth its seconds: always, never, and now and then."""
    for req in (*GREEDY, EVERY[0]):
        _, always = REPEATING.run(joined(ALONE), BOTH, req, streams=streams)
        accepted = []
        for tree in (0.0, 2.5, 99.0):
            params = Params(TRANSFORMER.params, BOTH, jnp.asarray([1.0, tree]))
            [state] = REPEATING.same(joined(ALONE), params, [req], streams=streams)
            accepted.append(emitted_in_rounds(state))
            assert_knows_the_text(state.rows.draft[1].tokens, REPEATING, req)
        assert accepted[0] == emitted_in_rounds(always)
        assert accepted[0] > accepted[1] > accepted[2] == 0


@pytest.mark.parametrize("requests", REQUESTS)
@pytest.mark.parametrize("tree", in_tiers(["3,4,2@12~4", "4,4@9~2", "1,1,1~8"], "3,4,2@12~4"))
def test_joined_drafters_change_no_token(tree: str, requests: str) -> None:
    """Of a table that drafts well, and of lookup in a text that repeats itself."""
    drafter = Joined((LookupDrafter(PLAIN), NgramDrafter(PLAIN)), TreeConfig.parse(tree))
    REPEATED.drafted(drafter, (NEAR, ()), REQUESTS[requests])


@pytest.mark.parametrize("requests", in_tiers(REQUESTS, "every"))
def test_joined_drafters_of_a_transformer_change_no_token(requests: str) -> None:
    for state in REPEATING.same(joined(), BOTH, REQUESTS[requests]):
        bits = np.asarray(state.record.sources)
        assert {*np.unique(bits)} <= {0, 1, 2, 3} and (bits & 1).any() and (bits & 2).any()


@pytest.mark.full
def test_joined_drafters_inside_partial_verification_change_no_token() -> None:
    drafter = PartialVerifier(joined(TreeConfig.parse("3,2@6~3")), SHORT, TreeConfig((1,) * 6))
    REPEATING.drafted(drafter, BOTH, EVERY[:1])


@pytest.mark.full
def test_what_joined_drafters_accept_does_not_depend_on_neighbours() -> None:
    """Nor on slots: what a row's lookup has counted is its own."""
    others = replace(REPEATING, lengths=np.array([61, 27, 40], np.int32), _known={})
    rows = assert_rows_are_their_own(others, joined(), BOTH, sources=True)
    given = Params(others.params, BOTH), others.tokens, others.lengths, EVERY[0], rows
    lossless.assert_rows_come_and_go(others.target, joined(), *given)
