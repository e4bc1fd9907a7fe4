"""The benchmark of meshes, on fake devices: the same tokens, and honest bytes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infer.bench import __main__ as bench
from infer.bench import meshes

OPTIONS = ["meshes", "--shape=tiny", "--context=40", "--new_tokens=6", "--tree=2,1"]


def rows(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["rows"]


def test_a_mesh_says_the_same_and_shares_the_bytes(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "meshes.json"
    assert bench.main([*OPTIONS, "--mesh=tp=2", "--mesh=data=2", f"--json={file}"]) == 0
    one, tp, data = rows(file)
    assert (one["mesh"], tp["mesh"], data["mesh"]) == ({}, {"tp": 2}, {"data": 2})
    assert one["prompt_tokens"] == [40, 20]
    for row in (one, tp, data):
        assert row["identical_fraction"] == row["plain_identical_fraction"] == 1.0
    [cache], [weights] = one["cache_bytes_by_device"], one["weight_bytes_by_device"]
    assert tp["cache_bytes_by_device"] == data["cache_bytes_by_device"] == [cache // 2] * 2
    assert data["weight_bytes_by_device"] == [weights] * 2
    assert all(weights / 2 <= share < 0.51 * weights for share in tp["weight_bytes_by_device"])
    assert "per device" in capsys.readouterr().out


def test_a_difference_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: one of two rows differs."""
    file, identical = tmp_path / "meshes.json", meshes._identical

    def wrong(tokens: np.ndarray, expected: np.ndarray) -> float:
        return identical(tokens ^ np.asarray([[0], [1]]), expected)

    monkeypatch.setattr(meshes, "_identical", wrong)
    assert bench.main([*OPTIONS, "--mesh=tp=1", f"--json={file}"]) == 0
    assert [row["identical_fraction"] for row in rows(file)] == [0.5, 0.5]


def test_a_mesh_that_is_too_large(capsys: Any) -> None:
    assert bench.main([*OPTIONS, "--mesh=tp=512"]) == 2
    assert "needs 512 devices" in capsys.readouterr().err
