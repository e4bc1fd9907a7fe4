"""Decode prompts with speculation, show what the draft contributed, and compare with plain decoding.

    python -m infer.decode
    python -m infer.decode --target=FOLDER --draft=FOLDER --prompt_file=report.txt --json=out.json

Without arguments the embedded demo model completes a held-out document. ``--help`` lists the rest.
"""

import argparse
import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import arguments as arguments_lib
from .compilation import enable_cache
from .display import Screen, wants_color
from .report import Outcome, as_json

USER_ERRORS = (ValueError, OSError, NotImplementedError, MemoryError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 0, 2 for bad input, 1 for a failure while running."""
    arguments = arguments_lib.parser().parse_args(argv)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # A model may say what a terminal cannot show.
    try:
        run(arguments)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:  # The boundary to the shell: one message and a status.
        if arguments.traceback:
            traceback.print_exc()
        bad_input = isinstance(error, USER_ERRORS)
        label = "error" if bad_input else f"failed while running: {type(error).__name__}"
        print(f"{label}: {error}", file=sys.stderr)
        return 2 if bad_input else 1
    return 0


def run(arguments: argparse.Namespace) -> list[Outcome]:
    """Do what the arguments say; returns what was measured."""
    if arguments.list:
        _list_prompts()
        return []
    tree = arguments_lib.chosen_tree(arguments)  # Before the models: a bad tree fails at once.
    _check_json_folder(arguments.json)
    # A Python without PyTorch is what we run in; transformers need not warn of it.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    enable_cache(arguments.compilation_cache)
    from .session import Session, load  # Slow to import: not for --help or a typing error.

    # With JSON on standard output, everything meant for reading goes to standard error.
    out = sys.stderr if arguments.json == "-" else sys.stdout
    screen = Screen(wants_color(arguments.color, out), out)
    session = Session(load(arguments), arguments, tree, screen)
    session.print_header()
    outcomes = session.decode()
    if arguments.json:
        _write_json(arguments.json, as_json(outcomes, session.setting()))
    return outcomes


def _list_prompts() -> None:
    from longspec_jax.loading import DEMO

    for path in sorted(DEMO.glob("prompts/*.txt")):
        print(f"{path}  ({path.stat().st_size:,} bytes)")


def _check_json_folder(name: str | None) -> None:
    """Notice before the run that its numbers could not be written."""
    if name not in (None, "-") and not Path(name).absolute().parent.is_dir():
        raise FileNotFoundError(f"--json={name}: its folder does not exist; make it first")


def _write_json(name: str, values: dict[str, Any]) -> None:
    text = json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False)
    if name == "-":
        print(text)
    else:
        Path(name).write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    sys.exit(main())
