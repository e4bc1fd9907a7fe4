"""The flags of ``python -m infer.eval``, made of the fields of its configuration."""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

import longspec_jax
from longspec_jax import cli
from longspec_jax.config.tree import PLAIN
from longspec_jax.schema import build, options

from ..arguments import add_memory, add_models, models_of
from .config import TASK_NAMES, EvalConfig
from .methods import ALL, METHODS, Chosen

DRAFT_HELP = (
    "Each is measured with the methods of its kind. For the demo all that there are if absent"
)
EPILOG = """\
Results go to a folder: header.json says how they were made, samples.jsonl holds a line of raw
counts per sample, method and temperature, and skipped.jsonl the samples that are skipped.
python -m infer.report makes tables of them. The same command continues an interrupted run.

Acceptance length: emitted tokens / target forward passes of the decode phase, bonus included,
prefill excluded. Tokens/s: tokens of the decode rounds / their seconds.

methods:
{methods}

Exit status: 0, 2 for a request that cannot be met, 1 for a failure while running, 130 if
interrupted.
"""
GROUPS = {
    "tasks": "task data samples context min_prompt max_prompt prompt_style",
    "methods and generation": "method temperature seed top_p top_k max_new_tokens batch ignore_eos "
    "repetitions",
    "output": "out",
}


def parser() -> argparse.ArgumentParser:
    """The command's parser."""
    methods = "\n".join(f"  {name:17} {method.about}" for name, method in METHODS.items())
    result = cli.Parser(
        prog=cli.command_name(__package__),
        description="Measure drafting methods side by side on long-context tasks.",
        epilog=EPILOG.format(methods=methods),
    )
    version = f"longspec_jax {longspec_jax.__version__}"
    result.add_argument("--version", action="version", version=version)
    add_memory(add_models(result, DRAFT_HELP))
    declared = options(EvalConfig)
    several = {
        "data": (data_argument, "[TASK=]PATH"),
        "method": (method_argument, "METHOD[=TREE]"),
        "task": (cli.one_of(TASK_NAMES), "TASK"),
    }
    for title, names in GROUPS.items():
        group = result.add_argument_group(title)
        for name in names.split():
            about = declared[name].about
            if name in several:
                read, metavar = several[name]
                group.add_argument(
                    f"--{name}",
                    required=name == "task",
                    metavar=metavar,
                    help=about,
                    **cli.several(read),
                )
            elif name == "out":
                group.add_argument(
                    "--out", type=cli.file_path, required=True, metavar="FOLDER", help=about
                )
            else:
                cli.add_options(group, {name: declared[name]})
    cli.add_traceback(result)
    return result


def config_of(typed: Sequence[str]) -> EvalConfig:
    """The configuration that a command line asks for.

    Raises:
      ValueError: for a contradiction, naming the options.
    """
    parsed = parser().parse_args(typed)
    declared = options(EvalConfig)
    values = {
        name: value
        for name, value in vars(parsed).items()
        if name in declared and value is not None and value != declared[name].default
    }
    values["models"] = models_of(parsed)
    values["command"] = shlex.join(["python", "-m", "infer.eval", *typed])
    return build(EvalConfig, values, "--")


def method_argument(text: str) -> Chosen:
    """A method and its tree, for ``argparse``."""
    base, equals, tree = text.partition("=")
    if base not in (*METHODS, ALL):
        raise argparse.ArgumentTypeError(
            f"unknown method {base!r}; the methods are {', '.join(METHODS)}"
        )
    if not equals:
        return Chosen(text, base)
    method = METHODS.get(base)
    if method is None or method.kind is None or method.adaptive:
        raise argparse.ArgumentTypeError(f"{base} takes no tree; write --method={base}")
    named = cli.tree(tree)
    if named == PLAIN:
        raise argparse.ArgumentTypeError(f"{text}: decoding without a tree is --method=plain")
    return Chosen(text, base, named)


def data_argument(text: str) -> tuple[str, Path]:
    """A task and the path of its data, for ``argparse``; an empty name stands for all tasks."""
    task, equals, path = text.partition("=")
    if equals and task in TASK_NAMES:
        return task, cli.file_path(path)
    return "", cli.file_path(text)
