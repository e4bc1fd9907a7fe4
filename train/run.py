"""Train a draft: ``python -m train.run --config=configs/vicuna7b.py --workdir=runs/vicuna7b``.

Only flags, errors and exit codes live here; :mod:`train.pipeline` does the work. Overrides are dotted:
``--config.target=FOLDER --config.data.files='data/*.jsonl' --config.mesh.tp=2``. The exit status is 0,
2 for bad input, and 75 (try again) for a run that a signal stopped.
"""

import dataclasses
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags, logging
from ml_collections import config_flags

_CONFIG = config_flags.DEFINE_config_file(
    "config",
    None,
    "Configuration file, such as configs/vicuna7b.py or configs/vicuna7b.py:long.",
    lock_config=True,
)
_WORKDIR = flags.DEFINE_string(
    "workdir", "", "Folder for checkpoints, metrics and exports; runs/CONFIG-VARIANT if empty."
)
_DISTRIBUTED = flags.DEFINE_bool(
    "distributed", False, "Join the other processes that Slurm, Open MPI or Kubernetes started."
)
_COORDINATOR = flags.DEFINE_string(
    "coordinator", "", "HOST:PORT of process 0: join --processes by hand, this one as --process."
)
_PROCESSES = flags.DEFINE_integer("processes", 0, "Processes of the run, with --coordinator.")
_PROCESS = flags.DEFINE_integer("process", -1, "Number of this process, with --coordinator.")

BAD_INPUT, INTERRUPTED = 2, 75
"""Exit statuses; the second is EX_TEMPFAIL of sysexits.h."""


def main(argv: Sequence[str]) -> int:
    """Run; user errors become one sentence and a status."""
    if len(argv) > 1:
        return _fail(f"unexpected argument {argv[1]!r}; overrides are written --config.NAME=VALUE")
    if _CONFIG.value is None:
        return _fail("--config=FILE is missing; try --config=configs/demo.py")
    # Imported here, so that --help and mistakes answer at once.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # It misses PyTorch; we do not.
    logging.set_verbosity(logging.WARNING)  # Orbax tells every step of every save.
    from jax.errors import JaxRuntimeError

    from . import processes
    from .card import portable_command
    from .config import from_config
    from .loop import Interrupted
    from .pipeline import train

    try:
        config = from_config(_CONFIG.value.to_dict())
        if _DISTRIBUTED.value or _COORDINATOR.value:
            processes.join(_COORDINATOR.value, _PROCESSES.value, _PROCESS.value)
        workdir = Path(_WORKDIR.value or _default_workdir())
        workdir.mkdir(parents=True, exist_ok=True)
        if processes.is_first():
            resolved = json.dumps(dataclasses.asdict(config), indent=1)
            (workdir / "config.json").write_text(resolved + "\n")
        train(config, workdir, portable_command(sys.argv[1:]))
    except (ValueError, OSError, NotImplementedError) as error:
        return _fail(str(error))
    except JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return _fail(
            "the devices' memory is full; raise a stage's accumulation, lower --config.loss_chunk or "
            f"accept_rows, or shard over more devices. {str(error).splitlines()[0]}"
        )
    except Interrupted as stopped:
        print(f"{stopped}; the same command resumes it", file=sys.stderr)
        return INTERRUPTED
    print(f"done; see {workdir}", file=sys.stderr)
    return 0


def _default_workdir() -> str:
    """``runs/vicuna7b-long`` for ``--config=configs/vicuna7b.py:long``."""
    file, _, variant = (_config_argument() or "").partition(":")
    return "runs/" + "-".join(filter(None, (Path(file).stem, variant)))


def parse(argv: Sequence[str]) -> list[str]:
    """Flags parsed, a mistake told in one sentence."""
    try:
        rest = flags.FLAGS(list(argv))
        if _CONFIG.value is not None:
            _CONFIG.value.to_dict()  # A file that could not be loaded says so only when it is used.
        return rest
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError, OSError) as error:
        sys.exit(_fail(_sentence(error)))


def _sentence(error: Exception) -> str:
    """What a configuration library's error says, without quoting, tracebacks and line breaks."""
    file = (_config_argument() or "").partition(":")[0]
    if file and not Path(file).is_file():
        return f"there is no configuration file {file!r}; configs/ holds those of the project"
    text = str(error)
    if "instead of" in text or isinstance(error, KeyError | AttributeError):
        names = re.findall(r'"(\w+)"', text) or re.findall(r"\w+", text)
        near = f"; did you mean {names[0]!r}?" if len(names) == 2 else ""
        return f"the configuration has no field {names[-1]!r}{near}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if any(line.startswith("Traceback") for line in lines):
        return lines[-1].partition(": ")[2] or lines[-1]
    return ". ".join(lines)


def _config_argument() -> str | None:
    """The value of ``--config`` as it was typed."""
    given = sys.argv[1:]
    for index, argument in enumerate(given):
        name, equals, value = argument.lstrip("-").partition("=")
        if name == "config":
            return value if equals else "".join(given[index + 1 : index + 2])
    return None


def _fail(message: str) -> int:
    print(f"train.run: {message}", file=sys.stderr)
    return BAD_INPUT


if __name__ == "__main__":
    app.run(main, flags_parser=parse)
