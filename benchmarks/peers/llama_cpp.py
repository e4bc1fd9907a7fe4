"""llama.cpp: needs ``llama-bench`` and ``llama-server`` of a CUDA build on the path.

Plain steps are ``llama-bench``'s at a depth, of the GGUF file as it is. Texts are decoded by
``llama-server`` from the same ids; ``ngram-simple`` and the like are its lookup. A file in other
types is made by ``llama-quantize --allow-requantize``.
"""

import contextlib
import json
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence

from ..report import Row
from ..timing import rounded, step
from .rows import REAL, Job, text_row

STARTED_WITHIN = 120.0
"""Seconds until a server has read its model."""


def main(path: str) -> None:
    """Measure a job."""
    job = Job.read(path)
    step(f"llama.cpp: {job.drafter or 'plain'}, {job.shape}")
    if job.what == REAL:
        texts(job)
        return
    depths = ",".join(map(str, job.contexts))
    command = ["llama-bench", "-m", job.model, "-p", "0", "-n", str(job.new_tokens), "-d", depths]
    command += ["-r", str(job.repetitions), "-fa", "1", "-ngl", "99", "-o", "json"]
    answer = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    for row in json.loads(answer.stdout):
        job.add(bench_row(row))


def bench_row(row: Row) -> Row:
    """A row of ``llama-bench -o json``, whose samples are nanoseconds of ``n_gen`` tokens."""
    seconds = statistics.median(row["samples_ns"]) / 1e9
    return {
        "context": row["n_depth"],
        "batch": 1,
        "temperature": 0.0,
        "ms": rounded(1e3 * seconds / row["n_gen"]),
        "tokens_per_second": rounded(row["n_gen"] / seconds),
    }


def texts(job: Job) -> None:
    """A row for every text and temperature."""
    room = max(map(len, job.texts)) + job.new_tokens + 64
    command = ["llama-server", "-m", job.model, "-ngl", "99", "-fa", "on", "-np", "1"]
    command += ["-c", str(room), "--no-webui"]
    if job.drafter is not None:
        command += ["--spec-type", job.drafter]
    with served(command) as address:
        answered(address, job.texts[0], 16, 0.0)
        for temperature in job.temperatures:
            for number, prompt in enumerate(job.texts):
                found = answered(address, prompt, job.new_tokens, temperature)
                times = found["timings"]
                row = text_row(
                    job,
                    found["tokens"],
                    times["predicted_ms"] / 1e3,
                    times["prompt_ms"] / 1e3,
                    None if job.drafter is None else times.get("draft_n_accepted", 0),
                )
                job.add(row | {"context": len(prompt), "text": number, "temperature": temperature})


@contextlib.contextmanager
def served(command: Sequence[str]) -> Iterator[str]:
    """The address of a server that is ready; it ends with the block.

    Raises:
      RuntimeError: where it ends, or is not ready in time.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    with subprocess.Popen([*command, "--port", str(port)], stdout=subprocess.DEVNULL) as process:
        try:
            end = time.monotonic() + STARTED_WITHIN
            while not _ready(address):
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"llama-server does not answer; command: {command}")
                time.sleep(0.2)
            yield address
        finally:
            process.terminate()


def _ready(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def answered(address: str, prompt: Sequence[int], tokens: int, temperature: float) -> Row:
    """What ``/completion`` says to ids, past every stop token and without a cached prompt."""
    asked = {
        "prompt": list(prompt),
        "n_predict": tokens,
        "temperature": temperature,
        "seed": 0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "ignore_eos": True,
        "cache_prompt": False,
        "return_tokens": True,
    }
    request = urllib.request.Request(
        f"{address}/completion",
        json.dumps(asked).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.loads(answer.read())


if __name__ == "__main__":
    main(sys.argv[1])
