"""Published kinds of drafts change no token, and load by the name of their folder."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from contrib import tokenswift
from contrib.medusa import MedusaConfig
from longspec_jax import LongSpec
from longspec_jax.config.tree import PLAIN, TreeConfig
from longspec_jax.drafters.base import Drafter, Params
from longspec_jax.drafters.checkpoints import eagle, mtp
from longspec_jax.drafters.draft import with_tree
from longspec_jax.drafters.joined import Joined
from longspec_jax.drafters.ngram import NgramDrafter
from longspec_jax.drafters.parallel import ParallelParams
from longspec_jax.drafters.retrieval.selection import Quest
from longspec_jax.drafters.suffix import SuffixDrafter
from longspec_jax.models.target import Target
from longspec_jax.ops.attention.reference import causal_attention
from longspec_jax.ops.selection.blocks import BlockBudget
from tests.contrib import test_medusa, test_tokenswift
from tests.decoding.layers import RECURRENT
from tests.decoding.lossless import (
    CONFIG,
    EVERY,
    LENGTHS,
    TRANSFORMER,
    Decoded,
    assert_lossless,
    assert_same,
    emitted_in_rounds,
    engine_with,
    outputs_of,
    prompts,
    texts_of,
)
from tests.drafters import test_eagle, test_mtp
from tests.drafters.dflash import test_drafter as test_dflash
from tests.drafters.parallel import test_drafter as test_parallel
from tests.drafters.peagle import test_drafter as test_peagle
from tests.infer.toys import save_toy, toy_spec

pytestmark = pytest.mark.full
MODEL = TRANSFORMER.params
TREE = TreeConfig((4, 5, 3), budget=9)
TOGETHER = TreeConfig((2,), budget=14, lookup=4)
HEADS = test_medusa.DRAFTS["own"]


def decoded(drafter: Drafter, draft: Any) -> Decoded:
    """The end of the last of all requests, after every one was compared; and lookup joined."""
    states = TRANSFORMER.same(drafter, draft, EVERY)
    assert sum(map(emitted_in_rounds, states)) > 0
    members = with_tree(drafter, PLAIN), NgramDrafter(PLAIN)
    joined = Joined(members, replace(TOGETHER, widths=drafter.tree.widths))
    TRANSFORMER.same(joined, (draft, ()), EVERY[:1])
    return states[-1]


TEXTS = EVERY[-1]
"""Of the requests at whose end the states are."""


def test_eagle_changes_no_token(tmp_path: Path) -> None:
    """With a window that wraps, and sinks."""
    test_eagle.published(tmp_path)
    draft = eagle.load(tmp_path, test_eagle.TARGET, eagle.EagleOptions(window=6, sinks=2))
    decoded(draft.drafter(TREE), draft.params)


@pytest.mark.parametrize(("name", "window"), [("mimo", 6), ("qwen3.5-moe", None)])
def test_an_mtp_layer_changes_no_token(name: str, window: int | None, tmp_path: Path) -> None:
    """With a window that wraps, and sinks; and over all entries, with experts and a gate."""
    test_mtp.published(tmp_path, name)
    sinks = {} if window is None else {"window": window, "sinks": 2}
    options = eagle.EagleOptions(**sinks)
    draft = mtp.load(tmp_path, test_mtp.GIVEN[name], options)
    # Another model of the same shape, whose tables these are not.
    decoded(draft.drafter(TREE), replace(draft.params, embedding=MODEL["embedding"]))


def test_the_layer_of_a_recurrent_target_changes_no_token() -> None:
    """After all entries, after a window that wraps, and joined with lookup."""
    family = RECURRENT
    draft = test_mtp.random_draft(family.config, family.models.target)
    alone = draft.drafter(TREE)
    drafters = {
        alone: draft.params,
        replace(alone, window=6, sinks=2): draft.params,
        Joined(
            (draft.drafter(PLAIN), NgramDrafter(PLAIN)),
            TreeConfig((4, 5), budget=14, lookup=4),
        ): (draft.params, ()),
    }
    for drafter, params in drafters.items():
        both = Params(family.models.target, params)
        assert_lossless(family.target, drafter, both, *family.given, family.plain)


def test_dflash_changes_no_token() -> None:
    """With a window that wraps, sinks, and heads of DSpark."""
    window = test_dflash.WINDOW
    drafter = replace(window, tree=replace(window.tree, budget=9))
    decoded(drafter, test_dflash.random_params(window.config, test_dflash.KNOWN))


@pytest.mark.parametrize(
    "config", [test_dflash.CAUSAL, test_dflash.DFLASH2], ids=["jetspec", "dflash2"]
)
def test_its_successors_change_no_token(config: Any) -> None:
    """JetSpec's causal block of 16 slots and DFlash 2, with windows that wrap, and sinks."""
    drafter = replace(test_dflash.WINDOW, config=config, tree=TREE)
    decoded(drafter, test_dflash.random_params(config))


def test_p_eagle_changes_no_token() -> None:
    """With a window that wraps; and what rounds commit is what a prefill would have made."""
    draft = test_peagle.random_params(test_peagle.DRAFT, test_peagle.KNOWN)
    state = decoded(test_peagle.WINDOW, draft)
    texts = [TRANSFORMER.text(row, TEXTS) for row in range(3)]
    lengths = np.array([*map(len, texts)], np.int32)
    padded = np.zeros((3, lengths.max()), np.int32)
    for row, text in zip(padded, texts, strict=True):
        row[: len(text)] = text
    single = replace(TEXTS, max_new_tokens=jnp.ones(3, jnp.int32))
    told = replace(TRANSFORMER, tokens=padded, lengths=lengths)
    _, whole = told.run(test_peagle.WINDOW, draft, single)
    np.testing.assert_allclose(state.rows.draft.feature, whole.rows.draft.feature, atol=1e-4)
    # The prefill is given what the window reaches, so the last layer's window alone is exact.
    ours, theirs = (each.rows.draft.layers[-1].cache.keys[0] for each in (state, whole))
    for row, length in enumerate(lengths - 1):
        ring = np.arange(length)[-6:] % 8
        np.testing.assert_allclose(ours[row][:, ring], theirs[row][:, ring], atol=1e-4)


def test_p_eagle_in_fewer_slots_than_rows_changes_no_token() -> None:
    """A row's ring may hold what another row left in its slot."""
    params = Params(MODEL, test_peagle.random_params(test_peagle.DRAFT, test_peagle.KNOWN))
    sizes: Any = dict(slots=2, capacity=128, chunks=(8,), stop_width=1)
    engine = engine_with(TRANSFORMER.target, [test_peagle.WINDOW], params, **sizes)
    order = [1, 0, 2, 0]
    for row in order:
        engine.submit(TRANSFORMER.tokens[row, : TRANSFORMER.lengths[row]], EVERY[0].row(row))
    texts, plain = texts_of(outputs_of(engine)), TRANSFORMER.plain(EVERY[0])
    assert_same([texts[id] for id in sorted(texts)], [plain[row] for row in order])


def test_a_parallel_draft_changes_no_token() -> None:
    """With a window that wraps, and a tree as deep as its block."""
    drafter = replace(test_parallel.DRAFTER, tree=TreeConfig((3, 7, 7, 2), budget=12))
    decoded(drafter, ParallelParams.with_target_tables(MODEL, test_parallel.TREE))


def test_medusa_changes_no_token() -> None:
    """And what a row keeps is the last token's hidden state after the final norm."""
    state = decoded(HEADS.drafter(TREE), HEADS.params)
    texts = [TRANSFORMER.text(row, TEXTS) for row in range(3)]
    padded = np.zeros((3, max(map(len, texts))), np.int32)
    for row, text in zip(padded, texts, strict=True):
        row[: len(text)] = text
    places = np.broadcast_to(np.arange(padded.shape[1]), padded.shape)

    @jax.jit
    def hidden(params: Any) -> Any:
        output: Any = Target(CONFIG).apply(
            {"params": params}, padded, places, lambda layer, q, k, v: causal_attention(q, k, v)
        )
        return output.hidden

    whole = hidden(MODEL)
    for b, text in enumerate(texts):
        kept = np.asarray(state.rows.draft[b])
        np.testing.assert_allclose(kept, whole[b, len(text) - 1], atol=1e-4)


def test_medusa_heads_of_some_tokens_change_no_token() -> None:
    draft = test_medusa.OF_VLLM["token_map"]
    decoded(draft.drafter(TreeConfig((4, 5), budget=9)), draft.params)


def test_tokenswift_changes_no_token(tmp_path: Path) -> None:
    """Where its forward sees the whole cache, the first level is what the target draws."""
    test_tokenswift.published(tmp_path)
    draft = tokenswift.load(tmp_path, test_tokenswift.TARGET)
    drafter = replace(draft.drafter(TREE), selector=Quest(CONFIG, BlockBudget(64, 4, 8, 4)))
    state = decoded(drafter, draft.params)
    assert int(state.record.histogram[:, 0].sum()) <= 3, "rounds that a budget cut"
    for row, kept in enumerate(np.asarray(state.rows.draft.row.tokens)):
        text = TRANSFORMER.text(row, TEXTS)
        np.testing.assert_array_equal(kept[: len(text)], text)


def test_suffix_decoding_changes_no_token() -> None:
    """Of rows that know each other's texts; and what another row has emitted is drafted."""
    drafter = SuffixDrafter(TreeConfig((6,) * 4, budget=12))
    state = decoded(drafter, ())
    for row, kept in enumerate(np.asarray(state.rows.draft.tokens)):
        text = TRANSFORMER.text(row, TEXTS)
        np.testing.assert_array_equal(kept[: len(text)], text)
    # The last row of the first requests is sampled at temperature 1.
    tokens, lengths = np.pad(prompts(CONFIG.vocab_size), ((0, 0), (0, 8))), LENGTHS.copy()
    [*_, last] = TRANSFORMER.plain(EVERY[0])
    answered = [*tokens[2, :1], *last]
    tokens[1, : len(answered)], lengths[1] = answered, len(answered)
    told = replace(TRANSFORMER, tokens=tokens, lengths=lengths)
    rows, again = told.run(drafter, (), EVERY[0])
    np.testing.assert_array_equal(rows[2], last)
    assert int(again.record.rounds[2]) <= 5
    assert emitted_in_rounds(again) > 11


def test_a_folder_is_all_that_a_user_names(tmp_path: Path) -> None:
    target, _ = save_toy(tmp_path)
    config, params = toy_spec().target_config, toy_spec().target_params
    test_eagle.published(tmp_path / "eagle", test_eagle.config_for(config))
    sizes = config.model_width, config.vocab_size, config.num_layers
    heads = MedusaConfig(2, 1, *sizes, own_tables=False, dtype="float32")
    test_medusa.published(tmp_path / "medusa", test_medusa.random_heads(heads, params))
    drafts = [tmp_path / "eagle", f"contrib.medusa:{tmp_path / 'medusa'}", "suffix"]
    found = LongSpec.from_pretrained(target, drafts).drafts
    assert [each.name for each in found] == ["eagle", "medusa", "suffix"]
    with pytest.raises(ValueError, match="unknown option 'window' for .*medusa; it has retrieve"):
        LongSpec.from_pretrained(target, drafts[1], draft_options={"window": 16})
