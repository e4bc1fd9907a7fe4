"""Adaptive decoding in the decode benchmark: what it emits, and what its row says."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from infer.bench import __main__ as bench
from infer.bench import adaptive as bench_adaptive
from infer.bench.decode_setting import Bench, Setting
from infer.bench.models import random_model
from infer.bench.shapes import SHAPES
from infer.bench.simulated import AcceptanceLengths
from longspec_jax.config import PLAIN, TreeConfig
from longspec_jax.decoding.policy import Measurement

NEW = 17


@pytest.fixture(scope="module")
def prepared() -> Bench:
    """Three rows of different lengths."""
    tree = TreeConfig((2, 3, 2))
    lengths = AcceptanceLengths.geometric(2.0, tree.num_levels)
    setting = Setting("tiny", 64, 32, 3, tree, NEW, lengths, repetitions=2, turns=1)
    return Bench.prepare(setting, random_model(SHAPES["tiny"]))


def test_a_decode_emits_what_was_asked_for_and_hands_the_cache_on(prepared: Bench) -> None:
    for _ in range(2):
        taken = prepared.cache
        run = bench_adaptive.decode(prepared)
        assert len(run.totals) == 3
        # The first token of every row was drawn by a prefill, before any round.
        assert sum(run.totals, Measurement()).tokens == 3 * (NEW - 1)
        assert sum(total.seconds for total in run.totals) <= run.seconds
        leaves = jax.tree.leaves(prepared.cache)
        assert prepared.cache is not taken and not any(leaf.is_deleted() for leaf in leaves)


def test_time_is_per_token_of_a_row_and_rounds_are_of_the_timed_decodes(
    prepared: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first decode, which compiles, counts for nothing."""
    one, nothing = Measurement(16, 48, 3 * (NEW - 1), 1.0), Measurement()
    seen = iter(
        [(900.0, (one, one, one)), (7.0, (one, nothing, nothing)), (9.0, (nothing, one, nothing))]
    )
    monkeypatch.setattr(
        bench_adaptive, "decode", lambda _: bench_adaptive.AdaptiveTime(*next(seen))
    )
    figures = bench_adaptive.time_adaptive(prepared, plain_step=0.4)
    assert figures == {
        "adaptive_ms_per_token": 1e3 * 8.0 / (NEW - 1),
        "adaptive_over_plain": 8.0 / (NEW - 1) / 0.4,
        "adaptive_acceptance_length": 1.0,
        "adaptive_choices": {"plain": 16, "tree chain:2": 16, "tree 2,3,2": 0},
        "adaptive_ms_per_round": {"plain": 62.5, "tree chain:2": 62.5},
    }


def test_two_trees_of_one_budget_have_two_names() -> None:
    trees = PLAIN, TreeConfig((4, 8, 8), 16), TreeConfig((4, 16, 16, 16, 16), 16)
    assert len({bench_adaptive.name(tree) for tree in trees}) == 3


def test_the_command_reports_adaptive_decoding_and_streaming(tmp_path: Path, capsys) -> None:
    """And draws a chart."""
    file, chart = tmp_path / "rows.json", tmp_path / "rows.png"
    bench.main(
        [
            *("decode", "--shape=tiny", "--context=64", "--tree=2,3", "--acceptance=2"),
            *(f"--new_tokens={NEW}", "--turns=1", "--repetitions=2", "--adaptive", "--streaming"),
            *(f"--json={file}", f"--chart={chart}"),
        ]
    )
    [row] = json.loads(file.read_text())["rows"]
    assert list(row["adaptive_choices"]) == ["plain", "tree chain:1", "tree 2,3"]
    rounds = sum(row["adaptive_choices"].values())
    np.testing.assert_allclose(rounds * row["adaptive_acceptance_length"], 2 * (NEW - 1), rtol=1e-3)
    ratio = row["adaptive_ms_per_token"] / row["plain_ms_per_token"]
    np.testing.assert_allclose(row["adaptive_over_plain"], ratio, rtol=2e-3)
    for name in ("streaming", "stepwise"):
        ratio = row[f"{name}_round_ms"] / row["round_ms"]
        np.testing.assert_allclose(row[f"{name}_overhead_percent"], 100 * (ratio - 1), atol=1)
    printed = capsys.readouterr().out
    assert f"{row['adaptive_over_plain']} plain steps" in printed and "% more per round" in printed
    assert chart.read_bytes().startswith(b"\x89PNG")
