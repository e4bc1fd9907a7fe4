"""Every kind of draft on the demo, through the benchmark: lossless, and each with its state."""

import json

import pytest

from infer.bench import __main__ as bench
from infer.bench.drafters import MEASURED
from longspec_jax.embedded import DEMO


@pytest.mark.slow
@pytest.mark.skipif(not DEMO.is_dir(), reason="the demo model is not in this checkout")
@pytest.mark.parametrize("drafter", MEASURED)
def test_every_kind_of_draft_on_the_demo(drafter, tmp_path, capsys) -> None:
    file = tmp_path / "rows.json"
    options = ["--context=48", "--new_tokens=24", f"--drafters={drafter}", f"--json={file}"]
    assert bench.main(["drafters", *options, "--temperatures=1"]) == 0
    [row] = json.loads(file.read_text())["rows"]
    assert row["drafter"] == drafter and row["temperature"] == 1.0
    assert row["identical_to_plain_fraction"] == 1.0
    assert row["acceptance_length"] > 1 and len(row["acceptance_length_by_row"]) == row["rows"]
    expected = {"longspec": 512 * 2 * 2 * 64 * 4, "streaming": 0}
    assert row["draft_state_bytes"] == expected.get(drafter, row["draft_state_bytes"])
    assert f"{drafter} " in capsys.readouterr().out


@pytest.mark.parametrize("drafter", ["ngram", "streaming", "small_lm"])
def test_rounds_of_other_drafters_are_timed(drafter, tmp_path) -> None:
    file = tmp_path / "rows.json"
    options = ["--shape=tiny", "--context=64", "--turns=1", "--repetitions=1", "--new_tokens=8"]
    tree = ["--tree=2,2", f"--drafter={drafter}", f"--json={file}"]
    assert bench.main(["decode", *options, *tree]) == 0
    [row] = json.loads(file.read_text())["rows"]
    assert row["drafter"] == drafter and row["round_ms"] > 0 and row["plain_ms_per_token"] > 0
    assert "draft_int8" not in row
