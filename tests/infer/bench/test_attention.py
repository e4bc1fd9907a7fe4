"""The attention benchmark on a CPU: its rows, its refusals, its arithmetic."""

import json
from pathlib import Path

import numpy as np
import pytest

from infer.bench import __main__ as bench
from infer.bench.attention import Case, operands, tree_mask
from infer.bench.timing import Roofline

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
            f"--json={file}",
        ]
    )
    written = json.loads(file.read_text())
    assert {"device", "versions", "commit", "date", "roof_tb_per_s"} <= set(written["header"])
    ours, other = written["rows"]
    assert set(ours) == FIELDS and ours["microseconds"] > 0
    assert other["implementation"] == "mosaic" and other["microseconds"] is None
    assert other["refusal"].startswith("NotImplementedError: the Mosaic GPU kernel")
    assert other["refusal"] in capsys.readouterr().out


def test_bytes_and_operations_by_hand() -> None:
    assert CASE.cache_bytes == 2 * 3 * 2 * 256 * 16 * 4
    assert CASE.bytes == CASE.cache_bytes + 3 * 7 * 16 * 4 * (2 * 6 + 2 * 2)
    assert CASE.operations == 2 * 2 * 3 * 6 * 7 * (256 + 7) * 16
    assert CASE.calls == CASE.copies * CASE.turns >= 8
    row = CASE.row("ours", Roofline(bytes_per_s=1e9, operations_per_s=1e12), 1e-3)
    assert row["percent_of_roof"] == pytest.approx(100 * CASE.bytes / 1e9 / 1e-3, abs=0.1)


def test_every_call_of_a_program_has_a_cache_of_its_own() -> None:
    q, caches, tree_k, _, mask = operands(CASE)
    assert len(caches) == CASE.copies and q.shape == (3, 7, 6, 16) and tree_k.shape == (3, 7, 2, 16)
    assert caches[0][0].shape == (3, 2, 256, 16) and caches[0][0].dtype == np.float32
    assert not np.array_equal(caches[0][0], caches[1][0])
    assert np.array_equal(mask[2], tree_mask(7)) and mask[0, :, 0].all()
