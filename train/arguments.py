"""The arguments of the training commands: a configuration, overrides of its fields, few options.

A configuration is a Python file with ``get_config([variant])``. Those of the project lie next to
this folder, in a checkout and in a wheel alike, and are found by name from anywhere. All fields are
checked before anything runs, by their declarations in :mod:`train.config`: a key that no field
takes and a field that no key fills are errors, too.
"""

import argparse
import re
import sys
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict, FieldReference

from longspec_jax import cli
from longspec_jax.checks import OneOf, Typed, Whole
from longspec_jax.schema import build

from .config import RunConfig
from .drafts.kinds import KINDS

BUNDLED = Path(__file__).parents[1] / "configs"
TRAINING = """\
Train a draft. The same command resumes a stopped run. The exit status is 0, 1 for a training that
has diverged, 2 for bad input, 130 after Ctrl-C, and 75 (try again) after SIGTERM.
"""
EPILOG = """\
--config.FIELD=VALUE changes a field: --config.target=FOLDER --config.data.files='data/*.jsonl'
--config.mesh.tp=2.

configurations of the project:
"""
_OVERRIDE = re.compile(r"--(no)?config\.([^=]+)(=.*)?", re.DOTALL)


@dataclass(frozen=True)
class Arguments:
    """A command line of the trainer, read and checked."""

    config: RunConfig
    """The run, overrides applied."""
    workdir: Path
    options: argparse.Namespace


def parser(command: str, about: str) -> cli.Parser:
    """The parser of a command, as it is typed, that takes a configuration."""
    usage = f"{command} --config=NAME[:VARIANT] [--workdir=FOLDER] [--config.FIELD=VALUE ...]"
    epilog = EPILOG + textwrap.fill(", ".join(bundled_names()), 100)
    result = cli.Parser(prog=command, usage=usage, description=about, epilog=epilog)
    result.add_argument(
        "--config",
        metavar="NAME[:VARIANT]",
        help="configuration, and its variant after a colon: a name such as vicuna7b or "
        "vicuna7b:long, or a Python file of your own with get_config([variant]), made with "
        "longspec_jax.recipes",
    )
    text = "folder for checkpoints, metrics and exports; runs/CONFIG-VARIANT if absent"
    result.add_argument("--workdir", metavar="FOLDER", help=text)
    return result


def training_parser() -> cli.Parser:
    """The parser of ``python -m train.run``."""
    result = parser(cli.command_name(__package__, "run"), TRAINING)
    add = result.add_argument_group("several processes").add_argument
    text = "join the other processes that Slurm, Open MPI or Kubernetes started"
    add("--distributed", action="store_true", help=text)
    text = "process 0, to join without a scheduler; needs --processes and --process"
    add("--coordinator", metavar="HOST:PORT", help=text)
    add("--processes", type=cli.COUNT, help="number of processes")
    add("--process", type=cli.value(Whole(0)), help="number of this process, from 0")
    return result


def parse(argv: Sequence[str], options: cli.Parser | None = None) -> Arguments:
    """Read a command line; that of ``python -m train.run`` without a parser.

    Raises:
      ValueError, OSError: for a mistake, in one sentence.
    """
    overrides, rest = _split(argv)
    given = (options or training_parser()).parse_args(rest)
    if not given.config:  # Before the overrides, which mean nothing without one.
        raise ValueError("--config=FILE is missing; try --config=demo, or --help for the others")
    config = load(given.config)
    if overrides and _has_references(config):
        raise ValueError(
            f"--config={given.config}: fields that refer to each other (get_ref) would not follow "
            f"--config.{next(iter(overrides))}; give such fields their values in the file"
        )
    values = config.to_dict()
    for field, text in overrides.items():
        _override(values, field.split("."), text)
    if options is None:
        _check_processes(given)
    file, colon, variant = given.config.partition(":")
    name = Path(file).stem + (colon + variant) * bool(variant)
    workdir = Path(given.workdir or f"runs/{name.replace(':', '-')}").expanduser()
    return Arguments(from_config(values), workdir, given)


def _has_references(config: ConfigDict) -> bool:
    """Whether a field of a configuration takes its value from another one."""
    return any(
        _has_references(value)
        if isinstance(value, ConfigDict)
        else isinstance(value, FieldReference)
        for _, value in config.items(preserve_field_references=True)
    )


def _split(argv: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Overrides of fields, the text by the dotted name, and the other arguments.

    A value may stand apart from its field. A field without one is true, and after ``--no`` false.
    """
    overrides: dict[str, str] = {}
    rest: list[str] = []
    open_field = ""
    for word in argv:
        if found := _OVERRIDE.fullmatch(word):
            no, field, value = found.groups()
            overrides[field] = value[1:] if value else "false" if no else "true"
            open_field = "" if value or no else field
        elif open_field and not word.startswith("--"):
            overrides[open_field], open_field = word, ""
        else:
            rest.append(word)
            open_field = ""
    return overrides, rest


def _override(values: dict[str, Any], field: Sequence[str], text: str) -> None:
    """Change a field, whose type its declaration knows; an unknown one is refused with the rest."""
    for section in field[:-1]:
        if not isinstance(values.get(section), dict):
            values[section] = {}
        values = values[section]
    values[field[-1]] = Typed(text)


def _check_processes(given: argparse.Namespace) -> None:
    """Refuse options about several processes that contradict each other."""
    if not given.coordinator:
        for name in ("processes", "process"):
            if (value := getattr(given, name)) is not None:
                raise ValueError(
                    f"--{name}={value} needs --coordinator=HOST:PORT; --distributed asks the "
                    "scheduler instead"
                )
        return
    if given.distributed:
        raise ValueError("--coordinator and --distributed are two ways to join; give one of them")
    host, colon, port = given.coordinator.rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ValueError(
            f"--coordinator={given.coordinator} must be HOST:PORT, such as node0:55527"
        )
    if given.process is None or given.processes is None:
        raise ValueError("--coordinator needs --processes=N and --process=I, counted from 0")
    if given.process >= given.processes:
        raise ValueError(
            f"--process={given.process} of --processes={given.processes}: count processes from 0"
        )


# The configuration file.


def bundled_names() -> list[str]:
    """The configurations that come with the project."""
    return sorted(path.stem for path in BUNDLED.glob("*.py") if not path.stem.startswith("_"))


def find(name: str) -> Path:
    """The file that ``vicuna7b``, ``vicuna7b.py``, ``configs/vicuna7b.py`` or any other path means.

    A file that exists is taken as it is; the bundled ones are for names that are no file.

    Raises:
      FileNotFoundError: for a name of neither.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return path
    by_name = str(path.parent) in (".", "configs") and path.suffix in ("", ".py")
    if by_name and path.stem in bundled_names():
        return BUNDLED / f"{path.stem}.py"
    raise FileNotFoundError(
        f"there is no configuration file {name!r}; the project's own are "
        f"{', '.join(bundled_names())}"
    )


def load(argument: str) -> ConfigDict:
    """The configuration that ``NAME[:VARIANT]`` stands for.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: if it gives no configuration, with its own words where it refuses a variant.
    """
    name, colon, variant = argument.partition(":")
    path = find(name)
    try:
        with _loaded(path) as get_config:
            config = get_config(*[variant] if colon else [])
    except ValueError:
        raise
    except Exception as error:  # Whatever a user's file may do: it is named, and what went wrong.
        raise ValueError(
            f"the configuration {name} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(config, ConfigDict):
        raise ValueError(
            f"get_config of {name} returned {type(config).__name__}, not a ConfigDict; "
            "longspec_jax.recipes makes one"
        )
    return config


@contextmanager
def _loaded(path: Path) -> Iterator[Callable[..., Any]]:
    """The function a configuration file defines; its module is known while it is called."""
    loader = SourceFileLoader(f"longspec_configuration_{path.stem}", str(path))
    module = types.ModuleType(loader.name)
    module.__file__ = str(path)
    sys.modules[loader.name] = module  # Dataclasses look their module up.
    try:
        loader.exec_module(module)
        yield module.get_config
    finally:
        sys.modules.pop(loader.name, None)


# From its values to the frozen dataclasses.


def from_config(values: Mapping[str, Any]) -> RunConfig:
    """The run that a config file and its overrides describe.

    Raises:
      ValueError: for an unknown, missing, mistyped or out-of-range field, or fields that
        contradict each other.
    """
    draft = values.get("draft")
    if isinstance(draft, Mapping):
        kind = OneOf(tuple(KINDS)).read("--config.draft.kind", draft.get("kind"))
        settings = build(KINDS[kind].settings, draft, "--config.draft.")
        values = {**values, "draft": settings}
    return build(RunConfig, values, "--config.")
