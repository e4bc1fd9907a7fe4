"""Train a draft: ``python -m train.run --config=configs/vicuna7b.py --workdir=runs/vicuna7b``.

Only flags, errors and exit codes live here; :mod:`train.pipeline` does the work. Overrides are dotted:
``--config.target=FOLDER --config.data.files='data/*.jsonl' --config.mesh.tp=2``.
"""

import dataclasses
import json
import os
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
    "workdir", "", "Folder for checkpoints, metrics and exports; runs/CONFIG if empty."
)
INTERRUPTED = 75
"""Exit status of a run that a signal stopped: try again (EX_TEMPFAIL of sysexits.h)."""


def main(argv: Sequence[str]) -> int:
    """Run; user errors become one sentence and status 1."""
    if len(argv) > 1:
        return _fail(f"unexpected argument {argv[1]!r}; overrides are written --config.NAME=VALUE")
    if _CONFIG.value is None:
        return _fail("--config=FILE is missing; try --config=configs/demo.py")
    # Imported here, so that --help and mistakes answer at once.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    logging.set_verbosity(logging.WARNING)  # Orbax tells every step of every save.
    import jax

    from train.config import from_config
    from train.loop import Interrupted
    from train.pipeline import train

    try:
        config = from_config(_CONFIG.value.to_dict())
        workdir = Path(_WORKDIR.value or _default_workdir())
        workdir.mkdir(parents=True, exist_ok=True)
        if jax.process_index() == 0:
            resolved = json.dumps(dataclasses.asdict(config), indent=1)
            (workdir / "config.json").write_text(resolved + "\n")
        train(config, workdir)
    except (ValueError, FileNotFoundError, NotImplementedError) as error:
        return _fail(str(error))
    except Interrupted as stopped:
        print(f"{stopped}; the same command resumes it", file=sys.stderr)
        return INTERRUPTED
    print(f"done; see {workdir}", file=sys.stderr)
    return 0


def _default_workdir() -> str:
    """``runs/`` and the configuration file's name."""
    argument = next(a for a in sys.argv if a.startswith("--config"))
    return f"runs/{Path(argument.rsplit('=', 1)[-1].split(':')[0]).stem}"


def _fail(message: str) -> int:
    print(f"train.run: {message}", file=sys.stderr)
    return 1


def run() -> None:
    """Parse flags and run; a wrong override is a sentence too, not a traceback."""
    try:
        app.run(main)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        # ml_collections quotes and escapes its sentence.
        sentence = str(error).replace("\\n", ". ").replace("\\", "").strip("'\"")
        sys.exit(_fail(sentence))


if __name__ == "__main__":
    run()
