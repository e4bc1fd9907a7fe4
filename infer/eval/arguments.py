"""The arguments of ``python -m infer.eval``, and what follows from them alone."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import longspec_jax
from longspec_jax import cli
from longspec_jax.checks import Whole
from longspec_jax.config.sampling import rule
from longspec_jax.config.tree import PLAIN
from longspec_jax.embedded import DEMO_NAME, DRAFTS

from ..arguments import add_memory, add_models, is_demo
from ..prompts import STYLES
from .methods import ALL, METHODS, SERVED, Chosen
from .tasks import DEMO_SUITE, FREE, NEEDLE, RAW, SUITE, TASKS

TASK_NAMES = (*TASKS, NEEDLE, FREE, *SUITE, DEMO_SUITE)
LONGSPEC, LONGBENCH = "longspec", "longbench"
DEMO_RUN_DRAFTS = (*DRAFTS, "ngram", "streaming")
"""The demo's drafters if none are named: all that there are."""
CONTEXT = 2048
DRAFT_HELP = (
    "Each is measured with the methods of its kind. For the demo all that there are if absent"
)
EPILOG = """\
Results go to a folder: header.json says how they were made, samples.jsonl holds a line of raw
counts per sample, method and temperature, skipped.jsonl the samples that the protocol skips, and
summary.json a row per task, method and temperature once all are measured. The same command
continues an interrupted run.

Acceptance length: emitted tokens / target forward passes of the decode phase, bonus included,
prefill excluded. Tokens/s: tokens of the decode rounds / their seconds.

methods:
{methods}

Exit status: 0, 2 for a request that cannot be met, 1 for a failure while running, 130 if
interrupted.
"""


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
    result.set_defaults(tree=None)
    models = add_models(result, DRAFT_HELP)
    add_memory(models)
    models.add_argument(
        "--endpoint",
        type=cli.word,
        metavar="URL",
        help="measure a server of this target, by its address up to /v1, with its draft "
        f"({SERVED}) and without (plain), --batch requests at a time. The key is taken from the "
        "environment variable LONGSPEC_API_KEY",
    )
    _add_tasks(result.add_argument_group("tasks"))
    _add_methods(result.add_argument_group("methods and generation"))
    _add_output(result.add_argument_group("output"))
    return result


def _add_tasks(group: Any) -> None:
    group.add_argument(
        "--task",
        **cli.several(cli.one_of(TASK_NAMES)),
        required=True,
        metavar="TASK",
        help=f"{', '.join(TASK_NAMES)}. demo: the four tasks made of the package's documents. "
        "jsonl: the prompts of --data",
    )
    group.add_argument(
        "--protocol",
        choices=[LONGSPEC, LONGBENCH],
        default=LONGSPEC,
        help="how tasks ask. longspec: the LongSpec release's format, prompts of more than 1200 "
        "tokens and at least 2000 fewer than the model's range, 1024 new tokens. longbench: long "
        "prompts lose their middle, the model's chat format except for code, 512 or 64 new tokens",
    )
    group.add_argument(
        "--data",
        **cli.several(data_argument),
        metavar="[TASK=]PATH",
        help="JSONL, Parquet or zip file with a task's data, or a folder of such files, instead of "
        "the hub's",
    )
    group.add_argument("--samples", type=cli.COUNT, help="most samples of a task; all if absent")
    group.add_argument(
        "--context",
        **cli.several(cli.number(Whole(128))),
        help=f"tokens of the prompts of demo, needle and pg19; {CONTEXT} if absent",
    )
    group.add_argument(
        "--min_prompt",
        type=cli.number(Whole(0)),
        metavar="TOKENS",
        help="prompts of at most this many tokens are skipped (longspec protocol)",
    )
    group.add_argument(
        "--max_prompt",
        type=cli.number(Whole(2)),
        metavar="TOKENS",
        help="prompts of more tokens are skipped (longspec protocol) or lose their middle "
        "(longbench)",
    )
    group.add_argument(
        "--prompt_style",
        choices=[*STYLES, RAW],
        help="chat format of the longbench protocol and of the jsonl task. native: the "
        "tokenizer's own; raw: none",
    )


def _add_methods(group: Any) -> None:
    group.add_argument(
        "--method",
        **cli.several(method_argument),
        default=[],
        metavar="METHOD[=TREE]",
        help="see below. all: every method whose draft is loaded. Plain decoding and the default "
        "methods of the drafts if absent",
    )
    group.add_argument(
        "--temperature",
        **cli.several(cli.number(rule("temperature"))),
        default=[0.0],
        help="0 is greedy",
    )
    group.add_argument(
        "--seed",
        **cli.several(cli.number(rule("seed"))),
        default=[0],
        help="of the draws above temperature 0",
    )
    for name, default, words in (
        ("top_p", 1.0, "draw from the most probable tokens that together have this share; 1: all"),
        ("top_k", 0, "draw from this many most probable tokens; 0: all"),
    ):
        group.add_argument(f"--{name}", type=cli.number(rule(name)), default=default, help=words)
    group.add_argument(
        "--max_new_tokens",
        type=cli.number(rule("max_new_tokens")),
        metavar="TOKENS",
        help="most new tokens of a sample; the protocol's number if absent",
    )
    group.add_argument("--batch", type=cli.COUNT, default=1, help="prompts decoded together")
    group.add_argument("--ignore_eos", action="store_true", help="do not stop at stop tokens")
    group.add_argument(
        "--repetitions",
        type=cli.COUNT,
        default=1,
        help="decode every call this many times and keep the run of median seconds",
    )


def _add_output(group: Any) -> None:
    group.add_argument(
        "--out",
        type=cli.file_path,
        required=True,
        metavar="FOLDER",
        help="folder of the run; made if absent",
    )
    group.add_argument(
        "--breakdown",
        type=cli.COUNT,
        metavar="ROUNDS",
        help="time drafting, verification and the rest of N rounds of every call, in a "
        "second run of the call",
    )
    group.add_argument(
        "--rounds",
        type=cli.COUNT,
        help="keep the trees of N rounds of the first samples of every task",
    )
    group.add_argument(
        "--cases", type=cli.COUNT, default=1, help="samples of every task whose rounds are kept"
    )
    cli.add_traceback(group)


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


def settled(arguments: argparse.Namespace) -> argparse.Namespace:
    """Fill in defaults that depend on other options, and refuse contradictions.

    Raises:
      ValueError: for a contradiction, naming the options.
    """
    tasks = [name for task in arguments.task for name in (SUITE if task == DEMO_SUITE else (task,))]
    _check_endpoint(arguments)
    _check_data(arguments, tasks)
    _check_effects(arguments, tasks)
    methods = [each.name for each in arguments.method]
    for values, option in ((tasks, "task"), (methods, "method")):
        twice = next((value for value in values if values.count(value) > 1), None)
        if twice is not None:
            raise ValueError(f"--{option}={twice} is given twice; name it once")
    if not any(arguments.temperature) and (arguments.top_k or arguments.top_p < 1):
        raise ValueError(
            "--top_k and --top_p have no effect at temperature 0; add --temperature=1, or leave "
            "them out"
        )
    drafts = arguments.draft
    if drafts is None and is_demo(arguments) and not arguments.endpoint:
        drafts = [*DEMO_RUN_DRAFTS]
    settled = {
        "task": tasks,
        "temperature": sorted(set(arguments.temperature)),
        "seed": sorted(set(arguments.seed)),
        "context": sorted(set(arguments.context or [CONTEXT])),
        "draft": drafts,
        "target": arguments.target or DEMO_NAME,
    }
    return argparse.Namespace(**{**vars(arguments), **settled})


def _check_endpoint(arguments: argparse.Namespace) -> None:
    """Refuse options that are the server's."""
    names = "draft draft_option mesh offload attention kv_dtype prefill_chunk row_slots method"
    for name in (*names.split(), "breakdown", "rounds") if arguments.endpoint else ():
        if getattr(arguments, name):
            raise ValueError(f"--{name} cannot be asked of --endpoint, a server; leave it out")


def _check_data(arguments: argparse.Namespace, tasks: list[str]) -> None:
    """Refuse data files that do not exist, or of no task of the run."""
    data = arguments.data or []
    for task, path in data:
        if not path.exists():
            raise FileNotFoundError(f"--data={path}: no such file or folder")
        if task and task not in tasks:
            raise ValueError(
                f"--data={task}={path} names a task that is not run; add --task={task}"
            )
    named = {task for task, _ in data}
    if len(named) < len(data):
        for_tasks = [task for task, _ in data]
        twice = next(task for task in for_tasks if for_tasks.count(task) > 1)
        words = f"--data={twice}" if twice else "--data=PATH"
        raise ValueError(f"{words} is given twice; name one file or folder, or one for each task")
    if FREE in tasks and not named & {"", FREE}:
        raise ValueError(f"--task={FREE} reads a file of yours; name it with --data=FILE.jsonl")
    of_files = [task for task in tasks if task not in SUITE]
    alone = [path for task, path in data if not task and path.is_file() and path.suffix != ".zip"]
    if alone and len(of_files) > 1:
        raise ValueError(
            f"--data={alone[0]} is one file for {len(of_files)} tasks ({', '.join(of_files)}); "
            f"write --data={of_files[0]}={alone[0]}, or name a folder"
        )


def _check_effects(arguments: argparse.Namespace, tasks: Sequence[str]) -> None:
    """Refuse options that no task of the run reads."""
    longbench = arguments.protocol == LONGBENCH
    named = {task for task, _ in arguments.data or ()}
    readers: dict[str, tuple[bool, Callable[[str], bool]]] = {
        "--protocol=longbench": (longbench, lambda task: task in TASKS),
        "--data": ("" in named, lambda task: task not in SUITE),
        "--context": (
            arguments.context is not None,
            lambda task: task in (*SUITE, NEEDLE) or (task in TASKS and TASKS[task].books),
        ),
        "--min_prompt": (
            arguments.min_prompt is not None,
            lambda task: task in TASKS and TASKS[task].long and not longbench,
        ),
        "--max_prompt": (arguments.max_prompt is not None, lambda task: task in TASKS),
        "--prompt_style": (
            arguments.prompt_style is not None,
            lambda task: task == FREE or (longbench and task in TASKS and TASKS[task].chat),
        ),
    }
    for option, (is_given, reads) in readers.items():
        if is_given and not any(map(reads, tasks)):
            protocol = f" with --protocol={arguments.protocol}" if "prompt" in option else ""
            readable = [task for task in TASK_NAMES if task != DEMO_SUITE and reads(task)]
            raise ValueError(
                f"{option} has no effect on --task={', '.join(tasks)}{protocol}; leave it out"
                + (f". It is for {', '.join(readable)}" if readable else "")
            )
    for task, path in arguments.data or ():
        if task in SUITE:
            raise ValueError(
                f"--data={task}={path}: {task} is made of the package's documents and reads no "
                "data; leave it out"
            )
