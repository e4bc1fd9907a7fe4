"""The decode benchmark on a CPU: its rows, its arithmetic, its random models."""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks import __main__ as bench
from benchmarks import decode as bench_decode
from benchmarks.arguments import SHAPES
from benchmarks.models import draft_state, random_model
from benchmarks.rounds import Bench, Setting
from longspec_jax.config.tree import TreeConfig
from longspec_jax.drafters.base import NoDraft
from longspec_jax.drafters.checkpoints.dflash import save_draft
from longspec_jax.drafters.longspec import DraftConfig
from longspec_jax.ops.placement import tree_bytes
from tests.drafters.dflash.toys import config_for, random_params
from tests.drafters.kit import without_tables

TREE = TreeConfig((2, 3))
KEYS = {
    *("shape", "context", "batch", "tree", "budget", "plain_ms_per_token", "plain_percent_of_roof"),
    *("round_ms", "draft_ms", "verify_ms", "rest_ms", "round_over_plain"),
    *("acceptance_length", "tokens_per_second", "plain_tokens_per_second", "speed_up"),
    *("target_bytes", "cache_bytes", "draft_bytes", "draft_state_bytes"),
}


@pytest.fixture(scope="module")
def model():
    return random_model(SHAPES["tiny"])


def test_the_command_writes_header_and_rows(tmp_path: Path, capsys) -> None:
    """Of a batch with options of the draft; says before what will run, and after what it means."""
    file = tmp_path / "rows.json"
    bench.main(
        [
            *("decode", "--shape=tiny", "--context=65", "--context=320", "--batch=3"),
            *("--tree=2,3@4", "--acceptance=2", "--new_tokens=41", "--turns=1"),
            *("--repetitions=1", f"--json={file}", "--draft_option=vocabulary=61"),
            *("--draft_option=int8", "--prefill=64"),
        ]
    )
    written = json.loads(file.read_text())
    assert {"device", "versions", "commit", "date", "roof_tb_per_s"} <= set(written["header"])
    short, long = written["rows"]
    assert set(short) >= KEYS
    assert (short["context"], long["context"]) == (65, 320)
    assert short["draft_state_bytes"] == long["draft_state_bytes"]
    assert short["cache_bytes"] < long["cache_bytes"]
    for row in written["rows"]:
        assert row["acceptance_length"] == pytest.approx(2, abs=0.15)
        assert row["acceptance_wanted"] == 2
        read = row["prefill_seconds"] * row["prefill_tokens_per_second"]
        assert read == pytest.approx(3 * (row["context"] - row["context"] % 64), rel=1e-2)
        assert row["round_over_plain"] == pytest.approx(
            row["round_ms"] / row["plain_ms_per_token"], rel=1e-2
        )
        parts = row["draft_ms"] + row["verify_ms"] + row["rest_ms"]
        assert parts == pytest.approx(row["round_ms"], rel=1e-2, abs=1e-2)
    assert short["draft_int8"] is True and short["draft_vocabulary"] == 61
    # The layer by hand: the matmuls' elements and a scale an output, biases and norms in float32.
    elements = 64 * 128 + 3 * 64 * 64 + 64 * 2 * 96 + 96 * 64
    outputs = 128 + 3 * 64 + 2 * 96 + 64
    layer = elements + 4 * (outputs + 128 + 64 + 3 * 64)
    # 61 rows of the head with a scale and an id, and of each of the target's tokens if it is one.
    assert short["draft_bytes"] == layer + 61 * (64 + 4 + 4) + 512
    printed = capsys.readouterr()
    steps = printed.err.splitlines()
    assert steps[0] == "... drawing the weights of tiny" and "timing rounds" in printed.err
    where, *lines = printed.out.splitlines()
    assert where.startswith("cpu (") and "a GPU measures the real shapes" in where
    for text, row in zip(lines, written["rows"], strict=True):
        assert text.startswith("shape tiny  weights whole") and f"context {row['context']}" in text
        assert f"speed_up {row['speed_up']}  acceptance_length" in text


def test_a_drafts_folder_and_random_ones_of_its_kind(tmp_path: Path) -> None:
    """With a window their state takes the same bytes at any context."""
    shape = SHAPES["tiny"]
    config = config_for(shape)
    save_draft(tmp_path, config, without_tables(random_params(config)))
    for kind, levels in ((str(tmp_path), 3), ("dflash", 15)):
        drawn = random_model(shape, kind=kind, options={"window": 32, "sinks": 4})
        drafter = drawn.drafter(TreeConfig((1,) * levels))
        assert drafter.name == "dflash" and drafter.window == 32
        short, long = (tree_bytes(draft_state(drawn, drafter, 2, slots)) for slots in (64, 512))
        heads = drafter.config.trunk.num_kv_heads * drafter.config.trunk.head_width
        assert short == long == drafter.config.trunk.num_layers * 2 * 2 * (32 + 4) * heads * 4


@pytest.mark.parametrize(
    ("kind", "options", "grows"),
    [
        ("longspec", {}, False),
        ("parallel", {}, False),
        ("eagle3", {"window": 32}, False),
        ("peagle", {"window": 32}, False),
        ("mtp", {"window": 32}, False),
        ("small_lm", {}, True),
    ],
)
def test_the_state_of_a_draft_with_a_window_does_not_grow(
    kind: str, options: dict, grows: bool
) -> None:
    """Nothing is drawn: the bytes are those of the shapes."""

    def state(slots: int) -> Any:
        drawn = random_model(SHAPES["tiny"], kind=kind, options=options)
        return draft_state(drawn, drawn.drafter(TreeConfig((1, 1))), 1, slots)

    short, long = (
        sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
        for shapes in (jax.eval_shape(functools.partial(state, slots)) for slots in (64, 512))
    )
    assert long > short if grows else long == short


def test_bytes_of_a_plain_step_count_every_row(model) -> None:
    """K and V of a token are 2 layers x 2 heads x 16 float32 numbers each."""
    one, five = (
        Bench.prepare(Setting("tiny", 64, batch, TREE, 8, 2.0, 1, 1), model) for batch in (1, 5)
    )
    assert five.rows(NoDraft()).length.tolist() == [64] * 5
    read = [bench_decode.describe(each)["plain_step_bytes"] for each in (one, five)]
    assert read[1] - read[0] == 4 * (64 + 8 // 2) * 2 * (2 * 2 * 16 * 4)


def test_lookup_joins_where_the_tree_says_so(tmp_path: Path) -> None:
    """Of more nodes than the draft grows, too: the others are lookup's."""
    file = tmp_path / "rows.json"
    short = "decode", "--shape=tiny", "--context=65", "--turns=1", "--repetitions=1"
    trees = "--tree=2,3@4", "--tree=2,3@8~6"
    bench.main([*short, *trees, "--acceptance=1.8", "--new_tokens=17", f"--json={file}"])
    alone, joined = json.loads(file.read_text())["rows"]
    assert (alone["draft"], joined["draft"]) == ("longspec", "longspec+ngram")
    assert (alone["lookup"], joined["lookup"]) == (None, 6)
    assert joined["draft_state_bytes"] > alone["draft_state_bytes"]
    assert joined["acceptance_length"] == pytest.approx(1.8, abs=0.2)


def test_rounds_on_a_mesh(tmp_path: Path) -> None:
    """Of random drafts with their own weights, spread like the target's, and of quantised ones."""
    short = "decode", "--shape=tiny", "--context=65", "--batch=2", "--tree=2,3@4", "--turns=1"
    few = "--acceptance=2", "--new_tokens=9", "--repetitions=1", "--prefill=64"
    file = tmp_path / "rows.json"
    for mesh, more in (("tp=2", "--draft=eagle3"), ("data=2,tp=2", "--weights=w4a16")):
        bench.main([*short, *few, f"--mesh={mesh}", more, f"--json={file}"])
        [row] = json.loads(file.read_text())["rows"]
        assert row["mesh"] == mesh and set(row) >= KEYS
    # What one device reads in a plain step.
    assert row["plain_step_bytes"] < row["target_bytes"]


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


def test_the_drafters_state_has_its_full_size_at_once(model) -> None:
    drafter = model.drafter(TreeConfig((2,)))
    state = draft_state(model, drafter, 3)
    window = DraftConfig.for_target(model.config).window
    assert state.keys.shape == (3, window, model.config.num_kv_heads, model.config.head_width)
