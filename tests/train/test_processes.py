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


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start(given: list[str], cache: Path) -> list[subprocess.Popen]:
    """Both processes of a run, with two devices each."""
    kept = {
        "HF_DATASETS_CACHE": str(cache),
        "JAX_COMPILATION_CACHE_DIR": str(cache / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    }
    join = [f"--coordinator=127.0.0.1:{free_port()}", "--processes=2"]
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
    steps += ["--config.mesh.fsdp=4", "--config.accept_rows=4", "--config.target_loss_every=1"]
    assert command(*arguments(target, files, alone), *steps) == 0

    given = [*arguments(target, files, shared), *steps]
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


FAILING = """
import os, signal, sys, time
from train import processes

coordinator, process, failing, how = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
processes.HEARTBEAT_SECONDS = 5

def report(error):
    print("reported:", error, file=sys.stderr)
    return 2

processes.join(coordinator, 2, process)
with processes.ending_together(report):
    processes.wait("start")
    print("failing at", time.time(), flush=True)
    if process == failing:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("line 7 is broken")
    processes.wait("never")
"""


JOINING = """
import jax
from train import processes

processes.join("", 0, -1)
processes.wait("all")
print(jax.process_index(), jax.process_count(), jax.device_count(), flush=True)
"""


def test_processes_that_srun_started_find_each_other() -> None:
    """By what Slurm tells every one of them, as docs/training.md says."""
    step = dict(SLURM_JOB_ID="7", SLURM_STEP_NODELIST="localhost", SLURM_NTASKS="2")
    port = str(free_port())
    both = [
        subprocess.Popen(
            [sys.executable, "-c", JOINING],
            cwd=ROOT,
            env=environment(devices=2, JAX_COORDINATOR_PORT=port, **step)
            | dict(SLURM_PROCID=str(process), SLURM_LOCALID=str(process)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]
    try:
        output = [process.communicate(timeout=120) for process in both]
    finally:
        for process in both:
            process.kill()
    for process, (printed, _) in enumerate(output):  # Collectives say something, too.
        assert f"{process} 2 4" in printed.splitlines(), output


@pytest.mark.parametrize(("failing", "how"), [(0, "error"), (1, "error"), (1, "killed")])
def test_what_ends_one_process_ends_the_other(failing: int, how: str) -> None:
    address = f"127.0.0.1:{free_port()}"
    both = [
        subprocess.Popen(
            [sys.executable, "-c", FAILING, address, str(process), str(failing), how],
            cwd=ROOT,
            env=environment(devices=1),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]
    try:
        output = [process.communicate(timeout=120) for process in both]
    finally:
        for process in both:
            process.kill()
    began = min(float(printed.split()[-1]) for printed, _ in output)
    assert time.time() - began < 30
    other = 1 - failing
    if how == "killed":
        assert both[other].returncode not in (0, 2)
        return
    assert [process.returncode for process in both] == [2, 2], output
    assert "reported: line 7 is broken" in output[failing][1]
    assert f"process {failing} has failed: line 7 is broken" in output[other][1]
