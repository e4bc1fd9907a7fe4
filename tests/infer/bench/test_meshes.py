"""The benchmark of meshes, on fake devices: the same tokens, and honest bytes."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from infer.bench import __main__ as bench
from infer.bench import meshes

OPTIONS = ["meshes", "--shape=tiny", "--context=40", "--new_tokens=6", "--tree=2"]


def test_a_mesh_says_the_same_and_shares_the_bytes(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "meshes.json"
    assert bench.main([*OPTIONS, "--mesh=data=2,tp=2", f"--json={file}"]) == 0
    one, four = json.loads(file.read_text())["rows"]
    assert (one["mesh"], four["mesh"]) == ({}, {"data": 2, "tp": 2})
    assert one["prompt_tokens"] == [40, 20]
    for row in (one, four):
        assert row["identical_fraction"] == row["plain_identical_fraction"] == 1.0
    [cache], [weights] = one["cache_bytes_by_device"], one["weight_bytes_by_device"]
    assert four["cache_bytes_by_device"] == [cache // 4] * 4
    assert all(weights / 2 <= share < 0.51 * weights for share in four["weight_bytes_by_device"])
    assert "per device" in capsys.readouterr().out


def test_a_difference_is_counted() -> None:
    """Negative control: one token of one row differs."""
    expected = np.arange(12).reshape(2, 6)
    tokens = expected.copy()
    tokens[1, 5] += 1
    model: Any = SimpleNamespace(params=SimpleNamespace(target={}))
    batch: Any = SimpleNamespace(length=np.asarray([40, 20]), new_tokens=6)
    passes = (meshes.Pass(found, 1.0, 1.0, 2, [1]) for found in (tokens, expected))
    row = meshes.describe(model, batch, *passes, expected)
    assert (row["identical_fraction"], row["plain_identical_fraction"]) == (0.5, 1.0)


def test_a_mesh_that_is_too_large(capsys: Any) -> None:
    assert bench.main([*OPTIONS, "--mesh=tp=512"]) == 2
    assert "needs 512 devices" in capsys.readouterr().err
