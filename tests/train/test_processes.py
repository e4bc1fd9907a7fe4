"""Two processes as one run: the same training, one stop for both, one export."""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.children import environment
from tests.kit import relative_error
from tests.train.tiny import ROOT, arguments, command, records, save_tiny_target, write_documents
from train import run

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]


def start(given: list[str], cache: Path) -> list[subprocess.Popen]:
    """Both processes of a run, with two devices each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    kept = {
        "HF_DATASETS_CACHE": str(cache),
        "JAX_COMPILATION_CACHE_DIR": str(cache / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    }
    join = [f"--coordinator=127.0.0.1:{port}", "--processes=2"]
    return [
        subprocess.Popen(
            [sys.executable, "-m", "train.run", *given, *join, f"--process={index}"],
            cwd=ROOT,
            env=environment(devices=2, **kept),
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]


def finish(both: list[subprocess.Popen]) -> list[tuple[int, str]]:
    """Exit statuses and what was printed."""
    try:
        errors = [process.communicate(timeout=300)[1] for process in both]
        return [(process.returncode, e) for process, e in zip(both, errors, strict=True)]
    finally:
        for process in both:
            process.kill()


def test_two_processes_train_like_one_and_stop_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    target = save_tiny_target(tmp_path / "target")
    files = write_documents(tmp_path / "documents.jsonl", 38)
    steps = ["--config.stages.short.steps=12", "--config.stages.short.epochs=0"]
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    mesh = ["--config.mesh.fsdp=4", "--config.accept_rows=4"]
    assert command(*arguments(target, files, alone), *mesh, *steps) == 0

    given = [*arguments(target, files, shared), *mesh, *steps]
    both = start(given, tmp_path / "cache")
    metrics = shared / "metrics.jsonl"
    while all(process.poll() is None for process in both):
        if metrics.is_file() and metrics.read_text().count("loss"):
            both[1].send_signal(signal.SIGTERM)
            break
        time.sleep(0.02)
    for status, error in finish(both):
        assert status == run.INTERRUPTED and "the same command resumes it" in error, error
    assert not (shared / "draft").exists()

    for status, error in finish(start(given, tmp_path / "cache")):
        assert status == 0, error
    one, two = (
        [record for record in records(folder) if "loss" in record] for folder in (alone, shared)
    )
    assert len(one) == len(two) == 12
    for name in ("tokens", "loss", "target_loss", "grad_norm"):
        # Rows differ in the third digit: any other row, or draw, would show.
        np.testing.assert_allclose(
            [record[name] for record in two], [record[name] for record in one], rtol=2e-5
        )
    weights = [load_file(folder / "draft" / "model.safetensors") for folder in (alone, shared)]
    assert set(weights[0]) == set(weights[1])
    for name, expected in weights[0].items():
        assert relative_error(weights[1][name], expected) < 1e-3, name
    measures = [records(folder)[-1]["agree_top4_shift1"] for folder in (alone, shared)]
    assert measures[1] == pytest.approx(measures[0], abs=0.05)
