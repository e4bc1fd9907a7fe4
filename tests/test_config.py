"""Configurations refuse what they cannot be, in words; trees take any sequence of whole numbers."""

import dataclasses
import math

import numpy as np
import pytest

from longspec_jax.arguments import as_tree
from longspec_jax.config.known import TINY
from longspec_jax.config.layers import (
    ExpertsConfig,
    HeadsConfig,
    LayerConfig,
    LinearRopeScaling,
    Llama3RopeScaling,
    Rotary,
)
from longspec_jax.config.tree import DEFAULT_TREE, MAX_TREE_LEVELS, PLAIN, TreeConfig
from longspec_jax.drafters.longspec import DraftConfig
from tests.kit import each_row, tiny_target_config


@each_row("widths", [[2, 2], (2, 2), range(2, 4), (np.int64(2), np.int32(3))])
def test_trees_of_any_sequence(widths) -> None:
    tree = TreeConfig(widths)
    assert tree == TreeConfig(tuple(int(width) for width in widths))
    assert {type(width) for width in tree.widths} == {int}
    assert hash(tree) == hash(TreeConfig(tree.widths)), "a static argument of jax.jit"


WHOLE = "must be whole numbers, one per level, such as"
BUDGET = "budget.* must be whole and at least 1 node.*leave it out"
THRESHOLD = "threshold.*from 0.001 to 1, got .*leave it out"
CHAIN = "must be a number of first levels of width 1"


@each_row(
    ("fields", "message"),
    [
        (dict(widths="4,16"), f"{WHOLE}.*got '4,16'"),
        (dict(widths=5), f"{WHOLE}.*got 5"),
        (dict(widths={4, 16}), WHOLE),
        (dict(widths=(4, 1.5)), f"{WHOLE}.*1.5"),
        (dict(widths=(4, True)), WHOLE),
        (dict(widths=[[4], [16]]), WHOLE),
        (dict(widths=(4, 0)), "must be positive, got .4, 0."),
        (dict(widths=(-1,)), "must be positive"),
        (
            dict(widths=(1,) * 200),
            f"200 levels is too deep.*largest number that is taken is {MAX_TREE_LEVELS}",
        ),
        (dict(widths=(2**70,)), "at most 256"),
        (dict(widths=(256,)), "257 nodes with its root.*at most 256"),
        *((dict(budget=value), BUDGET) for value in (0, -1, 1.5, True, "8", [8], math.nan)),
        *(
            (dict(threshold=value), THRESHOLD)
            for value in (0, -0.5, 1.5, True, "0.7", math.nan, 1e-9)
        ),
        (dict(widths=(1, 2), chain=2), f"chain=2 {CHAIN}"),
        (dict(widths=(1, 1), chain=3), f"chain=3 {CHAIN}"),
        (dict(widths=(1, 1), chain=-1), f"chain=-1 {CHAIN}"),
        (dict(widths=(1, 1), chain=True), f"chain=True {CHAIN}"),
        (dict(widths=(1, 1, 2), budget=2, chain=2), "budget of 2 leaves no node.*at least 4"),
        (dict(widths=(1, 1, 2), budget=3, chain=2), "budget of 3 leaves no node.*at least 4"),
    ],
)
def test_trees_that_are_none(fields, message) -> None:
    with pytest.raises(ValueError, match=f"(?s){message}"):
        TreeConfig(**fields)


@each_row("text", ["4,16@1", "chain:3@1"])
def test_a_budget_of_only_the_root(text) -> None:
    shape = TreeConfig.parse(text.removesuffix("@1"))
    with pytest.raises(ValueError, match=f"^the tree {text} verifies only the root.*at least 2$"):
        TreeConfig.parse(text)
    with pytest.raises(ValueError, match="verifies only the root"):
        TreeConfig(shape.widths, budget=1)
    assert TreeConfig(shape.widths, budget=2).num_nodes == 2 and PLAIN == TreeConfig(())


TEXTS = {
    "none": PLAIN,
    "4,16,16": TreeConfig((4, 16, 16)),
    "4,16,16,16,16@64": DEFAULT_TREE,
    "chain:4": TreeConfig((1, 1, 1, 1)),
    "chain:1@2": TreeConfig((1,), 2),
    "2,1,1": TreeConfig((2, 1, 1)),
    "4@9": TreeConfig((4,), 9),
    "4,4@9+0.7": TreeConfig((4, 4), 9, 0.7),
    "chain:3+0.05": TreeConfig((1, 1, 1), threshold=0.05),
    "chain:3/4,2@8+0.7": TreeConfig((1, 1, 1, 4, 2), 8, 0.7, chain=3),
    "chain:2/chain:3": TreeConfig((1,) * 5, chain=2),
    "chain:0/2,3": TreeConfig((2, 3), chain=0),
}


@each_row("text", TEXTS)
def test_a_tree_is_written_and_read(text) -> None:
    assert str(TEXTS[text]) == text
    assert TreeConfig.parse(text) == as_tree(text) == TEXTS[text]


def test_a_chain_may_be_spelt_out() -> None:
    assert TreeConfig.parse("1,1,1") == TreeConfig.parse("chain:3")
    assert TreeConfig.parse("4,16x3,2@9") == TreeConfig((4, 16, 16, 16, 2), 9)
    assert TreeConfig.parse("16x10@50+0.7") == TreeConfig((16,) * 10, 50, 0.7)
    assert TreeConfig.parse("chain:3/none") == TreeConfig((1, 1, 1), chain=3)


def test_a_chain_with_a_tree_at_its_end() -> None:
    """All of the chain is verified, and what the budget leaves of the tree with its root."""
    tree = TreeConfig.parse("chain:16/4,8@24+0.7")
    assert (tree.num_levels, tree.num_grown, tree.num_nodes) == (18, 29, 24)
    assert tree.end == TreeConfig((4, 8), 8, 0.7) and tree.end.num_nodes + 16 == tree.num_nodes
    assert TreeConfig.parse("chain:16/4,8").varies and not TreeConfig.parse("chain:0/4,8").varies


@each_row(
    "text",
    ["", "(4, 16)"]
    + "4,,5 4, chain chain:0 chain:2,2 4@ @4 4@4@4 none:2 4.0 4x0 4x 4,4+ 4,4+x +0.7".split()
    + "4,4+0.7@8 chain:4/ 4/chain:4 chain:2/chain:2/4".split(),
)
def test_texts_that_name_no_tree(text) -> None:
    with pytest.raises(ValueError, match="must be the widths of a tree such as 4,16,.* or none"):
        TreeConfig.parse(text)


def test_the_deepest_tree() -> None:
    assert TreeConfig((1,) * MAX_TREE_LEVELS).num_levels == MAX_TREE_LEVELS


SIZES = ("model_width", "mlp_width", "num_heads", "num_kv_heads", "head_width")
BAD_SIZES = (0, -1, 2.0, "4", None, True, math.nan, 2**31, [4])
BAD_NUMBERS = (0, -1.0, "x", None, True, math.nan, math.inf, 1e38)


@each_row("field", [*SIZES, "vocab_size", "num_layers", "max_positions"])
@each_row("value", BAD_SIZES)
def test_sizes_of_a_target(field, value) -> None:
    with pytest.raises(ValueError, match=f"^{field}=.* must be a whole number from 1 to"):
        tiny_target_config(**{field: value})


@each_row("field", ["rope_theta", "norm_eps"])
@each_row("value", BAD_NUMBERS)
def test_numbers_of_a_target(field, value) -> None:
    with pytest.raises(ValueError, match=f"^{field}=.* must be a number from"):
        tiny_target_config(**{field: value})


@each_row("field", [*SIZES, "window"])
@each_row("value", BAD_SIZES)
def test_sizes_of_a_draft(field, value) -> None:
    with pytest.raises(ValueError, match=f"^{field}=.* must be a whole number from 1 to"):
        dataclasses.replace(DraftConfig.for_target(tiny_target_config()), **{field: value})


def test_heads_of_a_draft() -> None:
    draft = DraftConfig.for_target(tiny_target_config())
    with pytest.raises(ValueError, match="num_heads=6 must be a multiple of num_kv_heads=4"):
        dataclasses.replace(draft, num_kv_heads=4)
    with pytest.raises(ValueError, match="head_width=7 must be even"):
        dataclasses.replace(draft, head_width=7)


@each_row("value", [0, 0.5, -2, "4", True, math.nan, math.inf, 1e7])
def test_factors_of_rope_scalings(value) -> None:
    with pytest.raises(
        ValueError, match="linear rope scaling: factor=.* must be a number from 1 to"
    ):
        LinearRopeScaling(value)
    with pytest.raises(
        ValueError, match="llama3 rope scaling: factor=.* must be a number from 1 to"
    ):
        Llama3RopeScaling(value, 1.0, 4.0, 512)


@each_row(
    "low, high, original, message",
    [
        (0, 4.0, 512, "low_freq_factor=0 must be a number"),
        (1.0, math.nan, 512, "high_freq_factor=nan must be a number"),
        (4.0, 4.0, 512, "high_freq_factor=4.0 must be above low_freq_factor=4.0"),
        (1.0, 4.0, 0.5, "original_max_positions=0.5 must be a whole number"),
    ],
)
def test_llama3_scalings_that_are_none(low, high, original, message) -> None:
    with pytest.raises(ValueError, match=message):
        Llama3RopeScaling(8.0, low, high, original)


@each_row(
    ("kinds", "pattern", "read"),
    [
        ((), (), 3),
        ((LayerConfig(Rotary()), LayerConfig(Rotary(5.0), 7)), (1, 0, 1, 1), 1),
        ((LayerConfig(Rotary()), LayerConfig()), (0, 1, 0, 1), 2),
        ((LayerConfig(),), (0, 0, 0, 0), 3),
        ((LayerConfig(Rotary(), 7),), (0, 0, 0, 0), 3),
    ],
)
def test_drafts_read_the_last_layer_over_the_whole_context(kinds, pattern, read):
    config = dataclasses.replace(TINY, num_layers=4, kinds=kinds, pattern=pattern)
    assert config.read_layer == read
    assert hash(config) == hash(dataclasses.replace(config))


NEAR = LayerConfig(window=7, keys_of=0)


def test_kinds_of_layers_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(ValueError, match="only layers with windows may have heads of their own"):
        LayerConfig(heads=HeadsConfig(2, 8))
    with pytest.raises(ValueError, match="has attention, and no own keys"):
        LayerConfig(keys_are_values=True, keys_of=0)
    with pytest.raises(ValueError, match="it is the MLP"):
        ExpertsConfig(4, 2, 8, shared=8, parallel_mlp=True)


@each_row(
    ("fields", "match"),
    [
        (dict(kinds=(LayerConfig(),), pattern=(0,)), "each of the 2 layers"),
        (dict(kinds=(LayerConfig(),) * 2, pattern=(0, 0)), "every kind must be used"),
        (dict(pattern=(0, 0)), "one of the 0 kinds"),
        (dict(kinds=(LayerConfig(Rotary(5.0)),), pattern=(0, 0)), "must be those of this layer"),
        (dict(kinds=(LayerConfig(keys_of=1), LayerConfig()), pattern=(0, 1)), "must come before"),
        (dict(kinds=(LayerConfig(), NEAR), pattern=(0, 1)), "the same window and heads"),
        (dict(layer_inputs=0), "layer_inputs=0 must be a whole number"),
        (dict(rotary_width=18), "at most head_width=16"),
        (dict(rotary_width=7), "must be even"),
    ],
)
def test_layers_that_do_not_fit_are_refused(fields, match):
    with pytest.raises(ValueError, match=match):
        dataclasses.replace(TINY, **fields)
