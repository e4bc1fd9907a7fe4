"""Retrieval as it is asked for: next to a draft's own options, in words that say what is wrong."""

import re

import pytest

from longspec_jax.arguments import check_drafts
from longspec_jax.config.tree import DEFAULT_TREE, PLAIN, TreeConfig
from longspec_jax.drafters.draft import Draft, Target, with_tree
from longspec_jax.drafters.ngram import NgramDraft
from longspec_jax.drafters.retrieval.hierarchy import PartialVerifier, RetrievalDraft, behind_chain
from longspec_jax.drafters.retrieval.selection import AttentionRetriever, Quest
from longspec_jax.drafters.streaming import StreamingDraft, StreamingDrafter
from longspec_jax.generation.candidates import candidates
from longspec_jax.loading import choose_drafts
from longspec_jax.ops.selection.blocks import BlockBudget
from tests.kit import each_row, tiny_target_config

CONFIG = tiny_target_config()
CHAIN = TreeConfig((1,) * 8)


def loaded(**options: object) -> RetrievalDraft:
    [chosen] = choose_drafts(["streaming"], options)
    draft = chosen.load(Target(CONFIG, None))
    assert isinstance(draft, RetrievalDraft) and isinstance(draft, Draft)
    return draft


def test_a_draft_keeps_its_own_options() -> None:
    draft = loaded(recent=64, retrieve=1024, retrieve_tree="2,1")
    drafter = draft.drafter(CHAIN)
    assert isinstance(drafter, PartialVerifier) and isinstance(drafter.inner, StreamingDrafter)
    assert drafter.inner.selection.recent == 64 and drafter.inner.tree.widths == (2, 1)
    assert drafter.selector == Quest(CONFIG, BlockBudget(1024))
    assert draft.name == drafter.name == "hierarchy of streaming"
    assert with_tree(drafter, PLAIN).tree == PLAIN


def test_what_sees_what_can_be_chosen() -> None:
    options = dict(retrieve_block=16, retrieve_sinks=0, retrieve_recent=32)
    drafter = loaded(retrieve=64, retrieve_by="attention", **options).drafter(CHAIN)
    assert drafter.selector == AttentionRetriever(CONFIG, BlockBudget(64, 0, 32, 16))


def test_the_lossy_option_says_what_it_is() -> None:
    draft = loaded(retrieve=1024, retrieve_verify="partial")
    drafter = draft.drafter(CHAIN)
    assert not drafter.lossless and drafter.unverified_levels == 8
    assert loaded(retrieve=1024).drafter(CHAIN).lossless
    assert draft.name == drafter.name == "hierarchy of streaming, not lossless"
    assert not with_tree(drafter, PLAIN).lossless
    with pytest.raises(ValueError, match="retrieve_verify=partial changes the text, which must"):
        check_drafts([draft, NgramDraft()])


def test_its_usual_trees_are_chains_with_the_draft_s_tree_behind() -> None:
    usual = loaded(retrieve=1024).default_trees
    for tree in (*usual.cpu, *usual.gpu, *usual.large):
        assert loaded(retrieve=1024).drafter(tree).tree == tree
        assert tree.chain in (0, 8, 16, 24) and tree.end == StreamingDraft().default_trees.cpu[0]


def test_how_long_its_chain_is_and_whether_it_pays_is_measured() -> None:
    """By what settles a call's tree, on large targets too, and by what chooses during a run."""
    usual = loaded(retrieve=1024).default_trees
    for trees in (usual.cpu, usual.gpu, usual.large):
        assert len({tree.chain for tree in trees}) > 2 and trees[-1].chain == 0
    assert not usual.settled and StreamingDraft().default_trees.settled
    drafter = loaded(retrieve=1024, retrieve_tree="chain:2").drafter(
        TreeConfig.parse("chain:9/4,2@12")
    )
    found = [str(candidate.tree) for candidate in candidates([drafter])]
    assert found == ["none", "chain:0/chain:2", "chain:5/4,2@8", "chain:9/4,2@12"]
    one_level = candidates([drafter])[1]
    assert [str(d.tree) for d in candidates([one_level])] == [
        "none",
        "chain:0/chain:1",
        "chain:0/chain:2",
    ]


def test_a_chain_and_its_tree_share_the_usual_nodes() -> None:
    assert str(behind_chain(16, DEFAULT_TREE)) == "chain:16/4,16,16,16,16@64"
    assert str(behind_chain(8, TreeConfig((8,) * 8, 16))) == "chain:8/8,8,8,8,8,8,8,8@24"
    assert str(behind_chain(8, TreeConfig((1, 1), threshold=0.5))) == "chain:8/chain:2+0.5"


@each_row(
    ("options", "message"),
    [
        (dict(retrieve=512), "retrieve=512: 512 slots cannot hold sinks=32 and recent=512"),
        (dict(retrieve=1000), "retrieve=1000: 1000 slots must be whole blocks of 32 slots"),
        (dict(retrieve_block=16), "retrieve_block needs retrieval, which retrieve=4096 turns"),
        (dict(retrieve=1024, retrieve_by="luck"), "retrieve_by='luck' must be one of quest, att"),
        (dict(retrieve=1024, retrieve_verify="no"), "retrieve_verify='no' must be one of full, pa"),
        (dict(retrieve=1024, retrieve_tree="4*4"), "'4*4' must be the widths of a tree"),
        (
            dict(retrieve=1024, retrieved=1),
            "unknown option 'retrieved' for streaming with retrieve",
        ),
        (dict(retrieve=True), "retrieve=True must be a whole number"),
        (
            dict(retrieve=1024, chunk=3),
            "unknown option 'chunk' for streaming; it has sinks, recent",
        ),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^draft_options: {re.escape(message)}"):
        loaded(**options)


def test_a_target_that_it_was_not_made_for_is_refused() -> None:
    draft = loaded(retrieve=1024)
    draft.check_fits(CONFIG)
    with pytest.raises(ValueError, match="made for a target of another shape"):
        draft.check_fits(tiny_target_config(num_layers=3))
