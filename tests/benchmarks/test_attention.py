"""The attention benchmark on a CPU: its rows, its refusals, its arithmetic."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import __main__ as bench
from benchmarks.attention import HEAD_MAJOR, TOKEN_MAJOR, Case, operands_of
from benchmarks.timing import Roofline

FIELDS = {
    *("implementation", "tokens", "heads", "kv_heads", "head_dim", "context", "batch", "dtype"),
    *("microseconds", "tb_per_s", "tflop_per_s", "percent_of_roof"),
}
CASE = Case(tokens=7, heads=6, kv_heads=2, head_dim=16, context=256, batch=3, dtype="float32")


def test_the_command_times_what_runs_and_notes_what_does_not(tmp_path: Path, capsys) -> None:
    file = tmp_path / "rows.json"
    bench.main(
        [
            *("attention", "--tokens=3", "--heads=4/2", "--context=256", "--batch=1"),
            *("--dtype=float32", "--implementation=ours", "--implementation=mosaic"),
            *("--implementation=cudnn", f"--json={file}"),
        ]
    )
    written = json.loads(file.read_text())
    assert {"device", "versions", "commit", "date", "roof_tb_per_s"} <= set(written["header"])
    ours, *others = written["rows"]
    assert set(ours) == FIELDS and ours["microseconds"] > 0
    for row, name in zip(others, ("mosaic", "cudnn"), strict=True):
        assert row["implementation"] == name and row["microseconds"] is None
    assert others[0]["refusal"].startswith("NotImplementedError: the Mosaic GPU kernel")
    assert others[0]["refusal"] in capsys.readouterr().out


def test_bytes_and_operations_by_hand() -> None:
    assert CASE.cache_bytes == 2 * 3 * 2 * 256 * 16 * 4
    assert CASE.bytes == CASE.cache_bytes + 3 * 7 * 16 * 4 * (2 * 6 + 2 * 2)
    assert CASE.operations == 2 * 2 * 3 * 6 * 7 * (256 + 7) * 16
    assert CASE.calls == CASE.copies * CASE.turns >= 8
    row = CASE.row("ours", Roofline(bytes_per_s=1e9, operations_per_s=1e12), 1e-3)
    assert row["percent_of_roof"] == pytest.approx(100 * CASE.bytes / 1e9 / 1e-3, abs=0.1)


@pytest.mark.parametrize("layout", [HEAD_MAJOR, TOKEN_MAJOR])
def test_programs_take_distinct_caches(layout: str) -> None:
    q, caches, *_ = operands_of(CASE, layout)
    assert q.shape == (3, 7, 6, 16) and len(caches) == CASE.copies
    assert {each.shape for pair in caches for each in pair} == {CASE.cache_shape(layout)}
    first, last = caches[0], caches[-1]
    assert not np.array_equal(*first) and not np.array_equal(first[0], last[0])
