"""Two processes as one run: the same training, one stop for both, one export."""

import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.children import finish, opened
from tests.kit import relative_error
from tests.train.tiny import arguments, command, records, write_documents
from train.loop import TRY_AGAIN

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start(given: list[str], cache: Path) -> list[subprocess.Popen[str]]:
    """Both processes of a run, with two devices each."""
    kept = {"HF_DATASETS_CACHE": str(cache)}
    join = [f"--coordinator=127.0.0.1:{free_port()}", "--processes=2"]
    return [
        opened("-m", "train.run", *given, *join, f"--process={index}", devices=2, **kept)
        for index in range(2)
    ]


def test_two_processes_train_like_one_and_stop_together(
    target: Path, tmp_path: Path, datasets_cache: Path
) -> None:
    files = write_documents(tmp_path / "documents.jsonl", 90)
    steps = ["--config.stages.short.steps=12", "--config.stages.short.epochs=0"]
    steps += ["--config.data.buckets=2"]
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    steps += ["--config.mesh.fsdp=4", "--config.accept_rows=4", "--config.draft.distillation=0.5"]
    assert command(*arguments(target, files, alone), *steps) == 0

    given = [*arguments(target, files, shared), *steps]
    both = start(given, datasets_cache)
    metrics = shared / "metrics.jsonl"
    while all(process.poll() is None for process in both):
        if metrics.is_file() and metrics.read_text().count("loss"):
            both[1].send_signal(signal.SIGTERM)
            break
        time.sleep(0.02)
    for status, _, error in finish(*both):
        assert status == TRY_AGAIN and "the same command resumes it" in error, error
    assert not (shared / "draft").exists()

    for status, _, error in finish(*start(given, datasets_cache)):
        assert status == 0, error
    one, two = (
        [record for record in records(folder) if "loss" in record] for folder in (alone, shared)
    )
    assert len(one) == len(two) == 12
    lengths = [record["row_tokens"] for record in two]
    assert lengths == [record["row_tokens"] for record in one] and {*lengths} == {20, 40}
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

processes.join(None, None, None)
processes.wait("all")
print(jax.process_index(), jax.process_count(), jax.device_count(), flush=True)
"""


def test_processes_that_srun_started_find_each_other() -> None:
    """By what Slurm tells every one of them, as deploy/train.slurm says."""
    step = dict(SLURM_JOB_ID="7", SLURM_STEP_NODELIST="localhost", SLURM_NTASKS="2")
    port = str(free_port())
    both = [
        opened(
            *("-c", JOINING),
            devices=2,
            JAX_COORDINATOR_PORT=port,
            **step,
            SLURM_PROCID=str(process),
            SLURM_LOCALID=str(process),
        )
        for process in range(2)
    ]
    for process, ended in enumerate(finish(*both)):
        # Collectives say something, too, also in the midst of another line.
        said = re.sub(r"\[Gloo\] Rank \d is connected to .* ranks is : 1", "", ended.printed)
        assert f"{process} 2 4" in " ".join(said.split()), ended


@pytest.mark.parametrize(("failing", "how"), [(0, "error"), (1, "error"), (1, "killed")])
def test_what_ends_one_process_ends_the_other(failing: int, how: str) -> None:
    address = f"127.0.0.1:{free_port()}"
    both = [opened("-c", FAILING, address, str(process), str(failing), how) for process in range(2)]
    ended = finish(*both)
    began = min(float(each.printed.split()[-1]) for each in ended)
    assert time.time() - began < 30
    other = 1 - failing
    if how == "killed":
        assert ended[other].status not in (0, 2)
        return
    assert [each.status for each in ended] == [2, 2], ended
    assert "reported: line 7 is broken" in ended[failing].errors
    assert f"process {failing} has failed: line 7 is broken" in ended[other].errors
