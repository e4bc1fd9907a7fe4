"""The benchmark of meshes, on fake devices: the same tokens, and honest bytes."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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
    [weights] = one["weight_bytes_by_device"]
    assert all(weights / 2 <= share < 0.51 * weights for share in four["weight_bytes_by_device"])
    assert "weights of each device" in capsys.readouterr().out


def test_a_difference_is_counted() -> None:
    """Negative control: one token of one row differs."""
    expected = ((0, 1, 2), (3, 4, 5))
    stats = SimpleNamespace(
        prompt_tokens=(40, 20),
        target_passes=(2, 2),
        prefill_seconds=1.0,
        decode_seconds=1.0,
        decode_tokens=4,
        memory=SimpleNamespace(cache_bytes=1),
    )
    results: Any = (
        SimpleNamespace(sequences=found, stats=stats)
        for found in (((0, 1, 2), (3, 4, 6)), expected)
    )
    spec: Any = SimpleNamespace(target_params={})
    row = meshes.describe(spec, *results, expected)
    assert (row["identical_fraction"], row["plain_identical_fraction"]) == (0.5, 1.0)


def test_a_mesh_that_is_too_large(capsys: Any) -> None:
    assert bench.main([*OPTIONS, "--mesh=tp=512"]) == 2
    assert "needs 512 devices" in capsys.readouterr().err
