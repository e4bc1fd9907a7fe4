"""The attention benchmark on a CPU: its rows, its refusals, its arithmetic."""

import json
from pathlib import Path

import numpy as np
import pytest

from infer.bench import __main__ as bench
from infer.bench.attention_cases import HEAD_MAJOR, TOKEN_MAJOR, Case, Operands, abstract_operands
from infer.bench.attention_tiles import candidate_tiles
from infer.bench.timing import Roof

FIELDS = {
    *("implementation", "tokens", "heads", "kv_heads", "head_dim", "context", "batch", "dtype"),
    *("microseconds", "tb_per_s", "tflop_per_s", "percent_of_roof"),
}
CASE = Case(tokens=7, heads=6, kv_heads=2, head_dim=16, context=256, batch=3, dtype="float32")


def test_the_command_times_what_runs_and_notes_what_does_not(tmp_path: Path, capsys) -> None:
    file, chart = tmp_path / "rows.json", tmp_path / "rows.png"
    bench.main(
        [
            *("attention", "--tokens=3", "--heads=4/2", "--contexts=256", "--batches=1"),
            *("--head-dim=16", "--dtype=float32", "--implementations=ours,mosaic,cudnn,torch-sdpa"),
            *(f"--json={file}", f"--chart={chart}"),
        ]
    )
    written = json.loads(file.read_text())
    assert {"device", "versions", "commit", "date", "roof_tb_per_s"} <= set(written["header"])
    ours, *others = written["rows"]
    assert set(ours) == FIELDS and ours["microseconds"] > 0
    for row, name in zip(others, ("mosaic", "cudnn", "torch-sdpa"), strict=True):
        assert row["implementation"] == name and row["microseconds"] is None
    assert others[0]["refusal"].startswith("NotImplementedError: the Mosaic GPU kernel")
    assert others[0]["refusal"] in capsys.readouterr().out
    assert chart.stat().st_size > 1000


def test_unknown_implementations_are_refused(capsys) -> None:
    assert bench.main(["attention", "--implementations=ours,magic"]) == 2
    assert "unknown magic; choose from ['ours'" in capsys.readouterr().err


def test_bytes_and_operations_by_hand() -> None:
    assert CASE.cache_bytes == 2 * 3 * 2 * 256 * 16 * 4
    assert CASE.bytes == CASE.cache_bytes + 3 * 7 * 16 * 4 * (2 * 6 + 2 * 2)
    assert CASE.operations == 2 * 2 * 3 * 6 * 7 * (256 + 7) * 16
    assert CASE.calls == CASE.copies * CASE.turns >= 8
    row = CASE.row("ours", Roof(bytes_per_s=1e9, operations_per_s=1e12), 1e-3)
    assert row["percent_of_roof"] == pytest.approx(100 * CASE.bytes / 1e9 / 1e-3, abs=0.1)


@pytest.mark.parametrize("layout", [HEAD_MAJOR, TOKEN_MAJOR])
def test_programs_are_compiled_for_the_operands(layout: str) -> None:
    operands = Operands()
    q, caches, *rest = operands.of(CASE, layout)
    q_shape, cache_shapes, *rest_shapes = abstract_operands(CASE, layout)
    assert len(caches) == len(cache_shapes) == CASE.copies
    found = [q, *caches[0], *caches[-1], *rest]
    expected = [q_shape, *cache_shapes[0], *cache_shapes[-1], *rest_shapes]
    assert [(a.shape, a.dtype) for a in found] == [(b.shape, b.dtype) for b in expected]
    assert not np.array_equal(caches[0][0], caches[1][0])
    assert operands.of(CASE, layout)[1] is caches, "equal caches are drawn once"


@pytest.mark.parametrize("tokens", [1, 16, 69])
def test_candidate_tiles_begin_with_the_heuristics(tokens: int) -> None:
    """And every tile passes its own checks, which run when it is made."""
    case = Case(tokens, heads=32, kv_heads=8, head_dim=128, context=4096, batch=1)
    first, *others = candidate_tiles(case)
    assert others and first not in others
