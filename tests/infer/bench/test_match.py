"""The match rate of low precision: which prompts, what a row and a summary say."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from infer.bench import __main__ as bench
from infer.bench import match as bench_match
from infer.bench.match import Window, summary, windows
from longspec_jax.generation.comparison import Comparison, Divergence


def test_the_command_compares_the_demo_in_bfloat16(tmp_path: Path, capsys) -> None:
    file = tmp_path / "rows.json"
    bench.main(
        [
            *("match", "--generations=2", "--context=96", "--new_tokens=7", "--temperatures=1"),
            *("--tree=2", f"--json={file}"),
        ]
    )
    written = json.loads(file.read_text())
    assert written["header"]["dtype"] == "bfloat16"
    assert [row["seed"] for row in written["rows"]] == [0, 1]
    for row in written["rows"]:
        assert row["new_tokens"] == 7 and row["context"] == 96
        assert row["identical"] == (row["first_divergence"] is None)
    [found] = written["summary"]
    assert found["generations"] == 2 and found["temperature"] == 1
    assert f"{written['rows'][0]['document']}[0:], temperature 1" in capsys.readouterr().out


def test_windows_are_different_and_of_one_length() -> None:
    documents = {"a": range(100), "short": range(9), "exact": range(40), "b": range(70)}
    found = windows(documents, 40, 11)
    assert [window.document for window in found[:4]] == ["a", "exact", "b", "a"]
    assert len({(window.document, window.offset) for window in found}) == len(found) == 11
    for window in found:
        assert window.tokens == list(range(window.offset, window.offset + 40))
    ends = [window.offset for window in found if window.document == "a"]
    assert (ends[0], ends[-1]) == (0, 60)


@pytest.mark.parametrize("context", [40, 1000])
def test_too_few_windows(context: int) -> None:
    with pytest.raises(ValueError, match="lower --context or --generations"):
        windows({"a": range(41), "b": range(40)}, context, 4)


def compared(*divergences: Divergence) -> Comparison:
    def stats(acceptance: float):
        return SimpleNamespace(stats=SimpleNamespace(new_tokens=(8,), acceptance_length=acceptance))

    return Comparison(stats(3.0), stats(1.0), divergences)  # type: ignore[arg-type]


def test_a_summary_counts_tokens_up_to_the_divergence() -> None:
    prompt = Window("a", 5, [1, 2, 3])
    flips = [Divergence(0, 3, 11, 12, 0.25), Divergence(0, 1, 11, None, None)]
    runs = [compared(), compared(flips[0]), compared(flips[1]), compared()]
    rows = [bench_match.describe(prompt, 1.0, seed, run) for seed, run in enumerate(runs)]
    rows.append(bench_match.describe(prompt, 0.0, 0, compared()))
    found = summary(rows, 1.0)
    assert (found["generations"], found["identical"], found["identical_share"]) == (4, 2, 0.5)
    # Sixteen tokens in two identical rows, four up to the first flip and two up to the second.
    assert found["divergences_per_token"] == 2 / (16 + 4 + 2)
    assert found["first_divergence"]["median"] == 2.0 and found["acceptance_length"] == 3.0
    assert found["gap"]["least"] == found["gap"]["greatest"] == 0.25
    assert summary(rows, 0.0)["gap"] is None
    assert "differs from token 3 on, gap 2.50e-01" in bench_match.line(rows[1])
    assert "gap unknown" in bench_match.line(rows[2])
