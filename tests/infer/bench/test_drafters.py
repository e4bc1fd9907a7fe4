"""Every kind of draft on the demo, through the benchmark: lossless, and each with its state."""

import json

import pytest

from infer.bench import __main__ as bench
from infer.bench import drafters as bench_drafters
from infer.bench.drafters import MEASURED
from longspec_jax import LongSpec, TreeConfig, demo_prompts
from longspec_jax.embedded import DEMO

on_the_demo = pytest.mark.skipif(not DEMO.is_dir(), reason="the demo model is not in this checkout")
SMALL = {"longspec": "4,4@6", "ngram": "4,4,4@8", "streaming": "chain:2", "small_lm": "4,4"}
"""Trees of the same forms as those measured, with fewer passes to compile."""


@pytest.fixture(scope="module")
def two_documents() -> dict[str, str]:
    return dict(sorted(demo_prompts().items(), key=lambda document: len(document[1]))[:2])


@on_the_demo
@pytest.mark.parametrize("drafter", MEASURED)
def test_the_demo_takes_the_trees_that_are_measured(drafter) -> None:
    source, tree = MEASURED[drafter]
    assert LongSpec.demo(draft=source).check([[1, 2, 3]], tree=tree, max_new_tokens=8)


@on_the_demo
@pytest.mark.parametrize("drafter", MEASURED)
def test_every_kind_of_draft_on_the_demo(
    drafter, two_documents, tmp_path, monkeypatch, capsys
) -> None:
    measured = MEASURED[drafter][0], TreeConfig.parse(SMALL[drafter])
    monkeypatch.setattr(bench_drafters, "MEASURED", {drafter: measured})
    monkeypatch.setattr(bench_drafters, "demo_prompts", lambda: two_documents)
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


@pytest.mark.parametrize("drafter", ["streaming", "small_lm"])
def test_rounds_of_other_drafters_are_timed(drafter, tmp_path) -> None:
    """One with weights of its own, and one without."""
    file = tmp_path / "rows.json"
    options = ["--shape=tiny", "--context=64", "--turns=1", "--repetitions=1", "--new_tokens=8"]
    tree = ["--tree=2,2", f"--drafter={drafter}", f"--json={file}"]
    assert bench.main(["decode", *options, *tree]) == 0
    [row] = json.loads(file.read_text())["rows"]
    assert row["drafter"] == drafter and row["round_ms"] > 0 and row["plain_ms_per_token"] > 0
    assert "draft_int8" not in row
