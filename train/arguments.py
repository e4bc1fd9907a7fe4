"""The arguments of the training commands: a configuration, overrides of its fields, a few flags.

A configuration is a Python file with ``get_config([variant])``. Those of the project lie beside
this folder, in a checkout and in a wheel alike, and are found by name from anywhere. Types and
ranges of all fields are checked here, before anything runs: a key that no field takes and a field
that no key fills are errors, too.
"""

import dataclasses
import difflib
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from longspec_jax.checks import shown

from .config import DraftSettings, RunConfig
from .drafts.kinds import SETTINGS

BUNDLED = Path(__file__).parents[1] / "configs"
HELP = """\
usage: {command} --config=NAME[:VARIANT] [--workdir=FOLDER] [--config.FIELD=VALUE ...]

Train a draft. Overrides are dotted: --config.target=FOLDER --config.data.files='data/*.jsonl'
--config.mesh.tp=2. The exit status is 0, 1 for a training that has diverged, 2 for bad input, 130
after Ctrl-C, and 75 (try again) after SIGTERM; the same command resumes a stopped run.

configurations of the project: {names}

options:
{options}
"""


@dataclass(frozen=True)
class Arguments:
    """A command line of the trainer, read and checked."""

    name: str
    """Of the configuration and its variant, ``vicuna7b:long``, without the path to it."""
    config: RunConfig
    """The run, overrides applied."""
    workdir: Path
    distributed: bool
    coordinator: str
    processes: int
    process: int


def help_text(command: str) -> str:
    """What ``--help`` prints for the command as it was typed."""
    options = _flags(None, []).get_help(include_special_flags=False).strip()
    names = ", ".join(bundled_names())
    # The first line names the module that declares the flags.
    return HELP.format(command=command, names=names, options=options.partition("\n")[2])


def parse(argv: Sequence[str]) -> Arguments:
    """Read a command line.

    Raises:
      ValueError, OSError: for a mistake, in one sentence.
    """
    argv = flags.FlagValues().read_flags_from_files(list(argv), force_gnu=False)
    named, rest = _without_config(argv)
    if not named:  # Before the overrides, which mean nothing without one.
        raise ValueError("--config=FILE is missing; try --config=demo, or --help for the others")
    config = load(named)
    try:
        values = _flags(config, rest)
        unexpected = values(["train", *rest])[1:]
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(_sentence(error)) from error
    if unexpected:
        raise ValueError(
            f"unexpected argument {unexpected[0]!r}; overrides are written --config.NAME=VALUE"
        )
    _check_processes(values)
    file, colon, variant = named.partition(":")
    name = Path(file).stem + (colon + variant) * bool(variant)
    return Arguments(
        name=name,
        config=from_config(config.to_dict()),
        workdir=Path(values.workdir or f"runs/{name.replace(':', '-')}").expanduser(),
        distributed=values.distributed,
        coordinator=values.coordinator,
        processes=values.processes,
        process=values.process,
    )


def _flags(config: Any, overrides: Sequence[str]) -> flags.FlagValues:
    """The flags, with one for every field of a configuration that is overridden."""
    values = flags.FlagValues()
    text = (
        "Configuration, and its variant after a colon: a name such as vicuna7b or vicuna7b:long, "
        "or a Python file of your own with get_config([variant]), made with longspec_jax.recipes."
    )
    if config is None:
        flags.DEFINE_string("config", None, text, flag_values=values)
    else:
        config_flags.DEFINE_config_dict(
            "config", config, text, values, sys_argv=["train", *overrides]
        )
    text = "Folder for checkpoints, metrics and exports; runs/CONFIG-VARIANT if empty."
    flags.DEFINE_string("workdir", "", text, flag_values=values)
    text = "Join the other processes that Slurm, Open MPI or Kubernetes started."
    flags.DEFINE_bool("distributed", False, text, flag_values=values)
    text = "HOST:PORT of process 0, to join without a scheduler; needs --processes and --process."
    flags.DEFINE_string("coordinator", "", text, flag_values=values)
    text = "Number of processes; needs --coordinator."
    flags.DEFINE_integer("processes", 0, text, flag_values=values)
    text = "Number of this process, from 0; needs --coordinator."
    flags.DEFINE_integer("process", -1, text, flag_values=values)
    return values


def _check_processes(values: Any) -> None:
    """Refuse flags about several processes that contradict each other."""
    if not values.coordinator:
        for name, absent in (("processes", 0), ("process", -1)):
            if (value := values[name].value) != absent:
                raise ValueError(
                    f"--{name}={value} needs --coordinator=HOST:PORT; --distributed asks the "
                    "scheduler instead"
                )
        return
    if values.distributed:
        raise ValueError("--coordinator and --distributed are two ways to join; give one of them")
    host, colon, port = values.coordinator.rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ValueError(
            f"--coordinator={values.coordinator} must be HOST:PORT, such as node0:55527"
        )
    if not 0 <= values.process < values.processes:
        raise ValueError(
            f"--process={values.process} of --processes={values.processes}: give both with "
            "--coordinator, and count processes from 0"
        )


def _without_config(argv: Sequence[str]) -> tuple[str, list[str]]:
    """The value of ``--config``, which decides what other flags there are, and the rest."""
    named, rest = "", []
    words = iter(argv)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag in ("--config", "-config"):
            named = value if equals else next(words, "")
        else:
            rest.append(word)
    return named, rest


def _sentence(error: Exception) -> str:
    """The message of a flag library's error, without quoting and line breaks."""
    text = str(error)
    names = re.findall(r'"(\w+)"', text) or re.findall(r"\w+", text)
    if names and ("instead of" in text or isinstance(error, KeyError | AttributeError)):
        near = f"; did you mean {names[0]!r}?" if len(names) == 2 else ""
        return f"the configuration has no field {names[-1]!r}{near}"
    lines = ". ".join(line.strip() for line in text.splitlines() if line.strip())
    return lines or f"the arguments cannot be read ({type(error).__name__}); see --help"


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
    return _build(RunConfig, values, "--config")


def _build(cls: Any, values: Mapping[str, Any], path: str) -> Any:
    """An instance of a dataclass from a mapping with exactly its fields."""
    if cls is DraftSettings:
        cls = _draft_settings(values.get("kind"), path)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for name in values:
        if name not in fields:
            close = difflib.get_close_matches(name, fields, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(fields)}"
            raise ValueError(f"{path} has no field {name!r}{hint}")
    required = {n for n, f in fields.items() if f.default is dataclasses.MISSING}
    if missing := sorted(required - set(values)):
        raise ValueError(
            f"{path} lacks {', '.join(missing)}; longspec_jax.recipes.base_config gives their "
            "values"
        )
    kinds = typing.get_type_hints(cls, include_extras=True)
    converted = {n: _convert(kinds[n], v, f"{path}.{n}") for n, v in values.items()}
    try:
        return cls(**converted)
    except ValueError as error:
        if cls.__module__.startswith(__package__ or "train"):
            raise
        raise ValueError(f"{path}: {error}") from None  # A shape of the library, without the path.


def _draft_settings(kind: Any, path: str) -> type[DraftSettings]:
    """The settings of a kind of draft."""
    if isinstance(kind, str) and kind in SETTINGS:
        return SETTINGS[kind]
    raise ValueError(f"{path}.kind={shown(kind)} must be one of {', '.join(SETTINGS)}")


def _convert(kind: Any, value: Any, path: str) -> Any:
    """A value of a field's type and range."""
    if typing.get_origin(kind) is typing.Annotated:
        kind, rule = typing.get_args(kind)
        value = _convert(kind, value, path)
        if words := rule.refusal(value):
            raise ValueError(f"{path}={shown(value)} must be {words}")
        return value
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        if value is None:
            return None
        kind = next(k for k in typing.get_args(kind) if k is not type(None))
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, Mapping):
            raise ValueError(f"{path}={shown(value)} must be a section with fields of its own")
        return _build(kind, value, path)
    if typing.get_origin(kind) is tuple:
        item = typing.get_args(kind)[0]
        if isinstance(value, Mapping):
            return _stages(item, value, path)
        if not isinstance(value, list | tuple):
            raise ValueError(f"{path}={shown(value)} must be a list")
        return tuple(_convert(item, each, path) for each in value)
    if kind is float and type(value) is int:
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"{path}={shown(value)} must be of type {kind.__name__}")
    return value


def _stages(kind: Any, sections: Mapping[str, Any], path: str) -> tuple[Any, ...]:
    """Named stages, from short to long sequences: a ConfigDict forgets the order of writing."""
    built = [_build(kind, {"name": n, **s}, f"{path}.{n}") for n, s in sections.items()]
    return tuple(sorted(built, key=lambda stage: (stage.seq_len, stage.name)))
