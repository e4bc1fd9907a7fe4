"""The arguments of the training command: a configuration, overrides of its fields, a few flags."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import config_flags

from . import config_file

HELP = """\
usage: {command} --config=NAME[:VARIANT] [--workdir=FOLDER] [--config.FIELD=VALUE ...]

Train a draft. Overrides are dotted: --config.target=FOLDER --config.data.files='data/*.jsonl'
--config.mesh.tp=2. The exit status is 0, 1 for a training that has diverged, 2 for bad input, and
75 (try again) for a run that a signal stopped.

configurations of the project: {names}

options:
{options}
"""


@dataclass(frozen=True)
class Arguments:
    """What was asked for."""

    config: Mapping[str, Any]
    """Fields of the run, overrides applied."""
    workdir: Path
    distributed: bool
    coordinator: str
    processes: int
    process: int


def help_text(command: str) -> str:
    """What ``--help`` prints for the command as it was typed."""
    options = _flags(None, []).get_help(include_special_flags=False).strip()
    names = ", ".join(config_file.bundled_names())
    # The first line names the module that declares the flags.
    return HELP.format(command=command, names=names, options=options.partition("\n")[2])


def parse(argv: Sequence[str]) -> Arguments:
    """What a command line asks for.

    Raises:
      ValueError, OSError: for a mistake, in one sentence.
    """
    argv = flags.FlagValues().read_flags_from_files(list(argv), force_gnu=False)
    named, rest = _without_config(argv)
    if not named:  # Before the overrides, which mean nothing without one.
        raise ValueError("--config=FILE is missing; try --config=demo, or --help for the others")
    config = config_file.load(named)
    try:
        values = _flags(config, rest)
        unexpected = values(["train", *rest])[1:]
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(_sentence(error)) from error
    if unexpected:
        raise ValueError(
            f"unexpected argument {unexpected[0]!r}; overrides are written --config.NAME=VALUE"
        )
    return Arguments(
        config=config.to_dict(),
        workdir=Path(values.workdir or _default_workdir(named)).expanduser(),
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
    flags.DEFINE_string(
        "workdir",
        "",
        "Folder for checkpoints, metrics and exports; runs/CONFIG-VARIANT if empty.",
        flag_values=values,
    )
    flags.DEFINE_bool(
        "distributed",
        False,
        "Join the other processes that Slurm, Open MPI or Kubernetes started.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "coordinator",
        "",
        "HOST:PORT of process 0: join --processes by hand, this one as --process.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "processes", 0, "Processes of the run, with --coordinator.", flag_values=values
    )
    flags.DEFINE_integer(
        "process", -1, "Number of this process, with --coordinator.", flag_values=values
    )
    return values


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


def _default_workdir(named: str) -> str:
    """``runs/vicuna7b-long`` for ``--config=vicuna7b:long``, whatever the path to it."""
    file, _, variant = named.partition(":")
    return "runs/" + "-".join(filter(None, (Path(file).stem, variant)))


def _sentence(error: Exception) -> str:
    """What a flag library's error says, without quoting and line breaks."""
    text = str(error)
    names = re.findall(r'"(\w+)"', text) or re.findall(r"\w+", text)
    if names and ("instead of" in text or isinstance(error, KeyError | AttributeError)):
        near = f"; did you mean {names[0]!r}?" if len(names) == 2 else ""
        return f"the configuration has no field {names[-1]!r}{near}"
    said = ". ".join(line.strip() for line in text.splitlines() if line.strip())
    return said or f"the arguments cannot be read ({type(error).__name__}); see --help"
