"""The decode benchmark on a CPU: its rows, its arithmetic, its random models."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from infer.bench import __main__ as bench
from infer.bench import arguments as bench_arguments
from infer.bench import decode as bench_decode
from infer.bench import prefill_time
from infer.bench.decode_setting import Bench, Setting, acceptance_lengths
from infer.bench.models import (
    draft_state,
    random_model,
)
from infer.bench.shapes import SHAPES
from infer.bench.simulated import AcceptanceLengths
from longspec_jax.config import TreeConfig
from longspec_jax.drafters.base import NoDraft
from longspec_jax.drafters.longspec.config import DraftConfig

TREE = TreeConfig((2, 3))
KEYS = {
    *("shape", "context", "batch", "tree", "budget", "plain_ms_per_token", "plain_percent_of_roof"),
    *("round_ms", "draft_ms", "verify_ms", "rest_ms", "commit_ms", "round_over_plain"),
    *("acceptance_length", "tokens_per_second", "plain_tokens_per_second", "speed_up"),
    *("target_bytes", "cache_bytes", "draft_bytes", "draft_state_bytes"),
}


@pytest.fixture(scope="module")
def model():
    return random_model(SHAPES["tiny"])


def test_the_command_writes_header_and_rows(tmp_path: Path, capsys) -> None:
    """And says before what will run, and after what it means."""
    file = tmp_path / "rows.json"
    bench.main(
        [
            *("decode", "--shape=tiny", "--context=64,320", "--tree=2,3", "--acceptance=2"),
            *("--new_tokens=41", "--turns=1", "--repetitions=1", f"--json={file}"),
            *("--prefill=64", f"--profile={tmp_path / 'profile'}"),
        ]
    )
    for case in ("tiny_64_1", "tiny_320_1"):
        written = {path.name for path in (tmp_path / "profile" / case).glob("*.*")}
        assert written == {"plain.txt", "plain.hlo", "round.txt", "round.hlo", "prefill.txt"}
    written = json.loads(file.read_text())
    assert {"device", "versions", "commit", "date", "roof_tb_per_s"} <= set(written["header"])
    short, long = written["rows"]
    assert set(short) >= KEYS
    assert (short["context"], long["context"]) == (64, 320)
    assert short["draft_state_bytes"] == long["draft_state_bytes"]
    assert short["cache_bytes"] < long["cache_bytes"]
    for row in written["rows"]:
        assert row["acceptance_length"] == pytest.approx(2, abs=0.15)
        assert row["prefill_tflop_per_s"] > 0
        assert row["acceptance_of_all_nodes"] == row["acceptance_wanted"] == 2
        assert row["round_over_plain"] == pytest.approx(
            row["round_ms"] / row["plain_ms_per_token"], rel=1e-2
        )
        parts = row["draft_ms"] + row["verify_ms"] + row["rest_ms"]
        assert parts == pytest.approx(row["round_ms"], rel=1e-2, abs=1e-2)
    printed = capsys.readouterr()
    [plan] = printed.err.splitlines()
    assert plan.startswith("on a CPU (") and "2 cases of the shape tiny; about" in plan
    sentences = [row for row in printed.out.splitlines() if row.startswith("tiny at ")]
    assert [row.split(" on ")[0] for row in sentences] == [
        "tiny at 64 tokens",
        "tiny at 320 tokens",
    ]


VERDICT = {
    **{"shape": "vicuna7b", "context": 4096, "batch": 1, "tree": [4, 16, 16, 16, 16], "budget": 64},
    **{"tokens_per_second": 554.83, "plain_tokens_per_second": 227.6, "speed_up": 2.4377},
    **{"acceptance_length": 3.5402},
}


def test_the_result_is_a_sentence() -> None:
    assert bench_decode.verdict(VERDICT, "NVIDIA H200") == (
        "vicuna7b at 4096 tokens on NVIDIA H200: 555 tokens/s with a tree of 64 nodes, 228 "
        "without: 2.4x (accepted length drawn at 3.54, random weights)"
    )
    rows = {**VERDICT, "batch": 8, "tokens_per_second": 4321.0}
    assert ": 4321 tokens/s in 8 rows together with" in bench_decode.verdict(rows, "a")
    assert ": 42.3 tokens/s with" in bench_decode.verdict(
        {**VERDICT, "tokens_per_second": 42.34}, "a"
    )


def test_rows_of_a_batch_may_differ_in_length(tmp_path: Path, capsys) -> None:
    file = tmp_path / "rows.json"
    bench.main(
        [
            *("decode", "--shape=tiny", "--context=65", "--batch=1,3", "--ragged", "--tree=2,3@4"),
            *("--acceptance=2", "--new_tokens=41", "--turns=1", "--repetitions=1"),
            f"--json={file}",
        ]
    )
    one, three = json.loads(file.read_text())["rows"]
    assert (one["lengths"], three["lengths"]) == ([65, 65], [33, 65])
    # Four of six nodes keep three quarters of what is accepted: the row says of what.
    for row in (one, three):
        assert row["acceptance_of_all_nodes"] == 2
        assert row["acceptance_wanted"] == pytest.approx(1.774, abs=1e-3)
    assert three["acceptance_length"] == pytest.approx(1.774, abs=0.15)
    printed = capsys.readouterr().out
    assert "B=1 S=65 " in printed and "B=3 S=33-65 " in printed


@pytest.mark.parametrize(("batch", "fewer"), [(1, 0), (5, 8 + 16 + 24 + 32)])
def test_bytes_are_those_of_the_rows_as_they_are(model, batch: int, fewer: int) -> None:
    """Five rows of 64 to 32 tokens, whose K and V are 2 layers x 2 heads x 16 float32 numbers."""
    lengths = AcceptanceLengths.geometric(2.0, 2)
    even, ragged = (
        Bench.prepare(Setting("tiny", 64, shortest, batch, TREE, 8, lengths, 1, 1), model)
        for shortest in (64, 32)
    )
    assert even.state(NoDraft()).rows.length.tolist() == [64] * batch
    assert ragged.state(NoDraft()).rows.length.tolist() == [64, 56, 48, 40, 32][:batch]
    before, after = map(bench_decode.describe, (even, ragged))
    saved = before["plain_step_bytes"] - after["plain_step_bytes"]
    assert saved == fewer * 2 * (2 * 2 * 16 * 4)
    assert before["lengths"] == [64, 64]
    assert after["lengths"] == [64 if batch == 1 else 32, 64]


def test_the_published_shapes_are_offered() -> None:
    parser = bench_arguments.parser({"decode": "rounds"})
    chosen = parser.parse_args(["decode", "--shape=vicuna7b,qwq32b", "--tree=1,1"])
    assert all(shape in SHAPES for shape in chosen.shape)
    assert SHAPES["llama3-8b"].vocab_size == 128256


def test_random_models_are_random_and_seeded(model) -> None:
    again = random_model(SHAPES["tiny"])
    leaves = jax.tree.leaves(model.params)
    for ours, theirs in zip(leaves, jax.tree.leaves(again.params), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    first, second = (
        model.params.target[f"layers_{layer}"]["mlp"]["down"]["kernel"] for layer in (0, 1)
    )
    assert not np.array_equal(first, second)
    assert float(np.std(first)) == pytest.approx(0.02, rel=0.1)
    assert model.params.draft.embedding is model.params.target["embedding"]


def test_bytes_and_operations_by_hand() -> None:
    config = SHAPES["vicuna7b"]
    per_layer = 4 * 4096 * 4096 + 3 * 4096 * 11008
    attention = 4 * 4096 * (1000 + 1) // 2
    expected = 32 * 1000 * (2 * per_layer + attention) + 2 * 4096 * 32000
    assert prefill_time.prefill_flops(config, 1000) == expected


def test_the_drafters_state_has_its_full_size_at_once(model) -> None:
    drafter = model.drafter(TreeConfig((2,)))
    state = draft_state(model, drafter, 3)
    window = DraftConfig.for_target(model.config).window
    assert state.keys.shape == (3, window, model.config.num_kv_heads, model.config.head_width)


def test_a_histogram_can_replace_the_mean() -> None:
    lengths = AcceptanceLengths.from_histogram([1, 2, 1])
    assert lengths.mean == 2.0
    parser = bench_arguments.parser({"decode": "rounds"})
    given = parser.parse_args(["decode", "--tree=2,3@4", "--histogram=1,2,1"])
    assert acceptance_lengths(given, given.tree) == lengths  # Of the nodes that are verified.
