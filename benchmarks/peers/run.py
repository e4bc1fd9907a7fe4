"""How fast other engines decode the same shapes and texts on this card, next to ours.

Every peer runs in processes of its own, one after the other, and answers rows of one schema
(``benchmarks.peers.rows``): ``plain`` and ``round`` are of random weights of a shape, from prompts
of random tokens; ``real`` continues code with the weights of ``--target`` (``llama.cpp``: of
``--gguf``), past every stop token, plainly, with lookup, and with ``--draft``. Times are medians of
decoding only, on the engine's own clock; prefill is apart. Rounds accept as many tokens as
``--acceptance`` says, drawn by each engine's own means: ours in trees of 64 nodes and in chains of
three, vLLM's in chains of three; of JetSpec's rounds only the time is a figure.
``differing_tokens`` compares the texts of a peer with its own plain decoding at the same
temperature and seed; a peer whose sampled texts depend on the draft by design has figures there
too.
"""

import argparse
import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from longspec_jax import files
from longspec_jax.cli import settled
from longspec_jax.weights.hf import load_target_config
from longspec_jax.weights.hf_config import hf_config

from ..arguments import CODE, SHAPES
from ..prompts import prompts
from ..report import Report, Row, run_header
from ..timing import step
from .rows import ATTENTION, DRAFT, FIELDS, PLAIN, REAL, ROUND, Job, merged_texts, whole

POSITIONS = 2**18
"""Of random weights, whose contexts no training limits."""
SHOWN = [name for name in FIELDS if name not in ("version", "new_tokens")]


@dataclasses.dataclass(frozen=True)
class Peer:
    """How an engine is run, and who proposes in it, for each of the things that are measured."""

    module: str
    package: str
    """The distribution that tells its version."""
    needs: tuple[str, ...]
    """Packages that its processes import, or programs if ``programs``."""
    drafters: dict[str, tuple[str | None, ...]]
    programs: bool = False
    gpu: bool = False
    """Whether it is measured only on NVIDIA GPUs."""
    words: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    plain_with_rounds: bool = False
    """Whether its jobs of rounds have the plain steps next to them."""


NO_FLASHINFER = (("VLLM_USE_FLASHINFER_SAMPLER", "0"),)
"""Its sampler of top-p and top-k, which nothing here asks for, needs a package of its own."""
STEPS = "1 query", "64 nodes"
OURS = Peer(
    module="benchmarks.peers.ours",
    package="longspec_jax",
    needs=("jax",),
    drafters={
        PLAIN: (None,),
        ROUND: ("longspec", "eagle3, chain:3"),
        REAL: (None, "ngram", DRAFT),
        ATTENTION: STEPS,
    },
    plain_with_rounds=True,
)
VLLM = Peer(
    module="benchmarks.peers.vllm_engine",
    package="vllm",
    needs=("vllm",),
    drafters={PLAIN: (None,), ROUND: (DRAFT,), REAL: (None, "ngram", DRAFT)},
    gpu=True,
    environment=NO_FLASHINFER,
)
FLASHINFER = Peer(
    module="benchmarks.peers.attention",
    package="flashinfer_python",
    needs=("flashinfer",),
    drafters={ATTENTION: STEPS},
    gpu=True,
    words=("flashinfer",),
)
ENGINES = {
    "ours": OURS,
    "ours-fastest": dataclasses.replace(OURS, drafters={ROUND: ("longspec",)}, words=("fastest",)),
    "vllm": VLLM,
    "vllm-invariant": dataclasses.replace(
        VLLM,
        drafters={PLAIN: (None,), REAL: (None, "ngram")},
        environment=(*NO_FLASHINFER, ("VLLM_BATCH_INVARIANT", "1")),
    ),
    "transformers": Peer(
        module="benchmarks.peers.hugging_face",
        package="transformers",
        needs=("torch", "transformers"),
        drafters={PLAIN: (None,), REAL: (None, "prompt_lookup")},
    ),
    "jetspec": Peer(
        module="benchmarks.peers.jetspec",
        package="jetspec",
        needs=("jetspec",),
        drafters={PLAIN: (None,), ROUND: ("64 nodes", "128 nodes", "256 nodes")},
        gpu=True,
    ),
    "llama.cpp": Peer(
        module="benchmarks.peers.llama_cpp",
        package="llama_cpp_python",
        needs=("llama-bench", "llama-server"),
        drafters={PLAIN: (None,), REAL: (None, "ngram-simple")},
        programs=True,
        gpu=True,
    ),
    "gpt-fast": Peer(
        module="benchmarks.peers.gpt_fast",
        package="gpt-fast",
        needs=("gptfast",),
        drafters={PLAIN: (None,)},
        gpu=True,
    ),
    "flashinfer": FLASHINFER,
    "tokamax": dataclasses.replace(
        FLASHINFER, package="tokamax", needs=("tokamax",), words=("tokamax",)
    ),
}


def main(arguments: argparse.Namespace) -> None:
    """Run every peer's jobs, print their rows, and write the file."""
    gpu = gpu_line()
    arguments = settled(arguments, not gpu)
    missing = {name: lacking(ENGINES[name], arguments.home, gpu) for name in arguments.peer}
    for name, needs in missing.items():
        if needs:
            step(f"{name} is left out: it needs {', '.join(needs)} (--home, or installed)")
    names = [name for name in arguments.peer if not missing[name]]
    if not names:
        raise ValueError(f"--peer: none of {', '.join(arguments.peer)} can run here")
    if REAL in arguments.what and arguments.target is None:
        raise ValueError("--what=real decodes texts with real weights: name their folder, --target")
    method, device = __doc__ or "", gpu.partition(",")[0] or "cpu"
    with (
        tempfile.TemporaryDirectory() as scratch,
        Report(run_header(device, method, gpu=gpu), arguments.json, SHOWN) as report,
    ):
        folder = Path(scratch)
        texts = real_texts(arguments) if REAL in arguments.what else ()
        for name in names:
            plain: dict[str, list[Row]] = {}
            for job in jobs(name, arguments, texts, folder):
                found = measured(name, job, folder, arguments)
                if job.what == REAL:
                    beside = plain.get(job.shape, []) if job.drafter else []
                    plain |= {} if job.drafter else {job.shape: found}
                    found = merged_texts(found, beside)
                for row in found:
                    report.add(whole(row, name, version_of(ENGINES[name], arguments.home)))


def jobs(
    name: str, arguments: argparse.Namespace, texts: tuple[tuple[int, ...], ...], folder: Path
) -> Iterator[Job]:
    """What a peer's processes measure, one after the other."""
    drafters = ENGINES[name].drafters
    for what in (what for what in arguments.what if what in drafters):
        if what == PLAIN and ROUND in arguments.what and ENGINES[name].plain_with_rounds:
            continue
        models = {shape: str(shape_folder(shape, folder)) for shape in arguments.shape}
        if what == REAL:
            models = {Path(arguments.target).name: str(arguments.target)}
        if ENGINES[name].programs:
            models = {file.stem: str(file) for file in arguments.gguf}
        for shape, model in models.items():
            for drafter in drafters[what]:
                if what == REAL and drafter == DRAFT and arguments.draft is None:
                    continue
                yield Job(
                    what=what,
                    drafter=drafter,
                    shape=shape,
                    model=model,
                    contexts=() if what == REAL else tuple(arguments.context),
                    batches=(1,) if what == REAL else tuple(arguments.batch),
                    temperatures=tuple(arguments.temperature),
                    tau=arguments.acceptance,
                    new_tokens=arguments.new_tokens,
                    repetitions=arguments.repetitions,
                    texts=texts if what == REAL else (),
                    draft=arguments.draft,
                    rows=str(folder / "rows.jsonl"),
                )


def measured(name: str, job: Job, folder: Path, arguments: argparse.Namespace) -> list[Row]:
    """The rows of a job; those it had when it failed or its time was over."""
    engine, file = ENGINES[name], folder / "job.json"
    job.write(file)
    Path(job.rows).write_text("")
    command = [sys.executable, "-m", engine.module, str(file), *engine.words]
    environment = dict(engine.environment) | paths(engine, arguments.home)
    said = f"{name}, {job.what}, {job.drafter or 'plain'}"
    with subprocess.Popen(command, env=os.environ | environment, start_new_session=True) as process:
        try:
            if process.wait(arguments.seconds):
                step(f"{said}: failed ({process.returncode})")
        except subprocess.TimeoutExpired:
            step(f"{said}: over {arguments.seconds} s")
        finally:  # What it started, too: an engine's core holds the GPU's memory.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return [json.loads(line) for line in Path(job.rows).read_text().splitlines()]


def lacking(engine: Peer, home: Path | None, gpu: str) -> list[str]:
    """What a peer needs that is neither here nor in a folder of ``home``."""
    if engine.gpu and not gpu:
        return [*engine.needs, "an NVIDIA GPU"]
    if engine.programs:
        path = paths(engine, home).get("PATH")
        return [name for name in engine.needs if shutil.which(name, path=path) is None]
    return [
        name
        for name in engine.needs
        if importlib.util.find_spec(name) is None
        and not (home is not None and (home / engine.needs[0] / name).is_dir())
    ]


def paths(engine: Peer, home: Path | None) -> dict[str, str]:
    """Where a peer's process looks first: ``home/PACKAGE``, or ``home/llama.cpp/bin``."""
    if home is None:
        return {}
    variable = "PATH" if engine.programs else "PYTHONPATH"
    first = home / "llama.cpp" / "bin" if engine.programs else home / engine.needs[0]
    if not first.is_dir():
        return {}
    return {variable: os.pathsep.join(filter(None, [str(first), os.environ.get(variable)]))}


def version_of(engine: Peer, home: Path | None) -> str | None:
    """The version of a peer; None where no installed distribution says it."""
    folders = [*map(str, home.iterdir())] if home else []
    found = importlib.metadata.distributions(name=engine.package, path=[*folders, *sys.path])
    return next((each.version for each in found), None)


def shape_folder(shape: str, folder: Path) -> Path:
    """A folder with the configuration of a shape, as checkpoints have it, without their limit."""
    place = folder / shape
    place.mkdir(exist_ok=True)
    config = hf_config(dataclasses.replace(SHAPES[shape], max_positions=POSITIONS))
    files.replace(place / "config.json", json.dumps(config).encode())
    return place


def real_texts(arguments: argparse.Namespace) -> tuple[tuple[int, ...], ...]:
    """The prompts of ``real``, code, by the target's own tokenizer.

    Raises:
      ValueError: for prompts that are too long for the target.
    """
    from transformers import AutoTokenizer

    longest = max(arguments.context) + arguments.new_tokens
    if longest > (most := load_target_config(arguments.target).max_positions):
        raise ValueError(
            f"--context and --new_tokens are {longest} tokens, and the target of real texts takes "
            f"{most}; measure longer ones by themselves, with --what=plain,round"
        )
    reader = Reader(AutoTokenizer.from_pretrained(arguments.target))
    found = [
        prompt
        for context in arguments.context
        for prompt in prompts(reader, CODE, context, arguments.texts, arguments.files)
    ]
    return tuple(tuple(map(int, prompt.tokens)) for prompt in found)


@dataclasses.dataclass(frozen=True)
class Reader:
    """What prompts are made with."""

    tokenizer: object


def gpu_line() -> str:
    """The first GPU's name, driver, clocks and power limit; empty without one."""
    fields = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0]
    command += ["-i", visible] if visible else []
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
