"""The report's lines, from hand-made statistics."""

import dataclasses
import json
import re

import jax
import pytest

from infer.results import Outcome, as_json, header_lines, lines, tuned_line
from longspec_jax import PLAIN, GenerateResult, MemoryPlan, Stats, TreeConfig, TreeUse
from longspec_jax.cli import counted
from longspec_jax.generation.activity import TreeTiming, Tuned
from longspec_jax.generation.comparison import Comparison, Divergence
from longspec_jax.ops import hardware
from tests.kit import each_row, tiny_target_config


def stats(trees: tuple[TreeConfig, ...] = (TreeConfig((4, 5)),), new_tokens: int = 5) -> Stats:
    return Stats(
        prompt_tokens=(2,),
        new_tokens=(new_tokens,),
        target_passes=((new_tokens - 1) // 2,),
        histograms=((0, (new_tokens - 1) // 2, 0),),
        trees=tuple(TreeUse("longspec", tree, 2, 4, 0.5) for tree in trees),
        prefill_seconds=1.0,
        decode_seconds=0.5,
        compile_seconds=3.0,
        draft_state_bytes=1_500_000,
        memory=MemoryPlan(1, 256, 1, 2, 3_000_000_000, 4, 5),
    )


def outcome(*divergences: Divergence, found: Stats | None = None) -> Outcome:
    result = GenerateResult(((1, 2, 3, 4, 5),), ("abc",), ((True,) * 5,), found or stats())
    return Outcome("prompt", ("prompt",), result, Comparison(result, result, divergences))


def test_identical() -> None:
    printed = [*lines([outcome()], "float32")]
    assert "identical to plain  yes, all 5 tokens" in printed
    assert "acceptance length   2.00 tokens per target pass" in printed
    assert "tokens/s            8.0 with this method, 8.0 without (1.00x)" in printed
    assert any(line.startswith("memory              draft state 1.5 MB") for line in printed)
    assert any("target cache 3.00 GB for 1 x 256 slots" in line for line in printed)


def test_what_is_not_lossless_is_called_so() -> None:
    found, difference = dataclasses.replace(stats(), lossless=False), Divergence(0, 1, 2, 3, None)
    printed = [*lines([outcome(difference, found=found)], "float32")]
    assert printed[0].startswith("not lossless ")
    assert any("retrieve_verify=partial is not lossless" in x for x in printed)
    told = as_json([outcome(difference, found=found)], {})
    assert told["lossless"] is False and as_json([outcome()], {})["lossless"] is True
    assert repr(outcome(found=found).result).endswith("not lossless)")


@each_row(
    ("dtype", "promised", "meaning"),
    [
        ("bfloat16", False, "(bfloat16 rounds near-ties either way; --dtype float32 is identical)"),
        ("bfloat16", True, "(bfloat16 must not differ here: please report this)"),
        ("float32", True, "(float32 must not differ here: please report this)"),
    ],
)
def test_what_a_difference_means(dtype, promised, meaning) -> None:
    printed = [*lines([outcome(Divergence(0, 2, 7, 9, 0.03125))], dtype, promised)]
    assert f"identical to plain  no: 1 of 1 row {meaning}" in printed
    assert (
        printed[-1]
        == "  prompt: first at token 3 of 5, 7 became 9, a gap of 3.12e-02 in the logits"
    )


def test_tables_fit_60_columns() -> None:
    trees = (TreeConfig(()), TreeConfig((1, 1, 1)), TreeConfig((4, 16, 16, 16, 16)))
    printed = [*lines([outcome(found=stats(trees, 100_001))], "float32")]
    histogram = printed.index("accepted  rounds                               at least")
    uses = next(index for index, line in enumerate(printed) if line.startswith("  draft "))
    table = [*printed[histogram : histogram + 4], *printed[uses : uses + 4]]
    assert table[3].startswith("       2") and table[-1].startswith("  longspec    4,16,16,16,16")
    assert all(len(line) <= 60 for line in table), table


def test_nothing_is_one_nodes() -> None:
    setting = {
        "target": "t",
        "drafts": [],
        "device": "cpu",
        "dtype": "float32",
        "temperature": 0.0,
        "seed": 0,
    }
    config = tiny_target_config(num_layers=1)
    printed = [*header_lines(setting, config, TreeConfig(()))]
    assert "1 layer of width" in printed[0] and "tree none (1 node per target pass)" in printed[1]
    assert len(printed) == 2
    assert (counted(1, "token"), counted(0, "token")) == ("1 token", "0 tokens")
    every = " ".join([*printed, *lines([outcome()], "float32")])
    assert not re.search(r"\b1 \w+s\b (?!per)|tokens? a |nodes a ", every), every


@each_row(
    ("capability", "has_kernels", "said"),
    [((9, 0), False, True), ((9, 0), True, False), ((8, 0), False, False), (None, False, False)],
)
def test_a_jax_too_old_for_the_gpu_is_said(
    capability, has_kernels, said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.11 installs a jax without the Hopper kernels: slower, and without the same bits."""
    monkeypatch.setattr(hardware, "compute_capability", lambda: capability)
    monkeypatch.setattr(hardware, "mosaic_is_supported", lambda: has_kernels)
    setting = {"target": "t", "drafts": [], "device": "d", "dtype": "bfloat16"}
    setting |= {"temperature": 0.0, "seed": 0}
    printed = [*header_lines(setting, tiny_target_config(), PLAIN)]
    assert (f"jax {jax.__version__} has no Hopper kernels" in printed[-1]) == said


def test_json_of_a_gap_that_is_none() -> None:
    """Of two tokens a filter left one out."""
    left_out = outcome(Divergence(0, 2, 7, 9, None))
    assert json.loads(json.dumps(as_json([left_out], {}), allow_nan=False))["rows"][0][
        "first_divergence"
    ] == {"row": 0, "index": 2, "plain_token": 7, "speculative_token": 9, "gap": None}
    assert [*lines([left_out], "bfloat16")][-1].endswith("7 became 9, gap unknown")


def test_a_call_that_is_its_own_comparison_was_compiled_once() -> None:
    assert as_json([outcome()], {})["compile_seconds"] == 3.0
    one = outcome()
    assert one.comparison is not None
    other = dataclasses.replace(one.result, stats=stats())
    compared = Comparison(one.result, other, ())
    both = Outcome("prompt", ("prompt",), one.result, compared)
    assert as_json([both], {})["compile_seconds"] == 6.0


def test_why_a_tree() -> None:
    """The fastest, none, or the usual one where nothing is known."""
    chain = TreeConfig((1, 1, 1))
    slow = (
        TreeTiming("plain", TreeConfig(()), 0.01, 1.0),
        TreeTiming("longspec", chain, 0.04, 2.0),
    )
    assert tuned_line(Tuned("plain", TreeConfig(()), slow), "this shows it pay") == (
        "plain decoding: no tree paid for this model here: 100 tokens/s, 50 with tree chain:3 "
        "(--tree takes it all the same); this shows it pay"
    )
    assert tuned_line(Tuned("longspec", chain, ()), "") == (
        "tree chain:3 (4 nodes per target pass), usual on this kind of machine "
        "(--tree names another)"
    )
    assert tuned_line(Tuned("longspec", chain, slow[1:]), "") == (
        "tree chain:3 (4 nodes per target pass), the fastest of 1 in earlier calls here: "
        "50 tokens/s (--tree names another)"
    )


def test_calls_of_trees_of_different_depths_add_up() -> None:
    plain = Outcome("b", ("b",), GenerateResult(((1,),), ("a",), ((False,),), plain_stats()))
    assert as_json([outcome(), plain], {})["acceptance_histogram"] == [3, 2, 0]


def plain_stats() -> Stats:
    return dataclasses.replace(stats((TreeConfig(()),)), histograms=((3,),))
