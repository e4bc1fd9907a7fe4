"""The benchmark of training steps, on fake devices."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main

OPTIONS = ["--shape=tiny", "--length=64", "--tokens=128", "--accumulation=2", "--steps=1"]


def test_steps_are_timed_on_one_device_and_on_a_mesh(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "training.json"
    assert main(["train", *OPTIONS, "--mesh=data=2,fsdp=2", f"--json={file}"]) == 0
    written = json.loads(file.read_text())
    one, four = written["rows"]
    assert {"device", "versions", "commit", "date"} <= set(written["header"])
    assert (one["gpus"], one["layout"], one["rows"]) == (1, "one", 2)
    assert (four["gpus"], four["layout"], four["rows"]) == (4, "data=2,fsdp=2", 8)
    assert one["efficiency"] == 1.0 and four["efficiency"] > 0
    for row in (one, four):
        tokens = row["rows"] * 64 * row["accumulation"]
        assert row["tokens_per_second"] == pytest.approx(1e3 * tokens / row["step_ms"], rel=1e-2)
        assert (row["mlp_chunk"], row["loss_chunk"]) == (0, 2**28 // 512)
        assert 0 < row["step_bytes"] < row["peak_bytes"]
    # A quarter of masters and moments, half of the weights.
    assert four["peak_bytes"] - four["step_bytes"] < (one["peak_bytes"] - one["step_bytes"]) / 2
    assert "sequence 64  layout data=2,fsdp=2  tokens" in capsys.readouterr().out


def test_a_mesh_that_is_too_large(capsys: Any) -> None:
    assert main(["train", *OPTIONS, "--mesh=fsdp=64"]) == 2
    assert "needs 64 devices" in capsys.readouterr().err
