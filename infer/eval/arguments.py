"""The arguments of ``python -m infer.eval``, and what follows from them alone."""

import argparse
import importlib.util
from pathlib import Path

import longspec_jax
from longspec_jax.checks import SAMPLING, Whole
from longspec_jax.cli import Parser, command_name, result_file
from longspec_jax.cli import number as number_argument
from longspec_jax.cli import path as path_argument
from longspec_jax.cli import tree as tree_argument
from longspec_jax.cli import word as word_argument
from longspec_jax.config import PLAIN
from longspec_jax.embedded import DEMO_NAME, DRAFTS

from ..arguments import add_models, is_demo
from ..prompts import STYLES
from .methods import ALL, METHODS, Chosen
from .protocols import RAW
from .run_folder import HEADER, SAMPLES, SKIPPED
from .suite import SUITE
from .tasks import DEMO_SUITE, FREE, NEEDLE, TASKS

TASK_NAMES = (*TASKS, NEEDLE, FREE, *SUITE, DEMO_SUITE)
LONGSPEC, LONGBENCH = "longspec", "longbench"
DEMO_RUN_DRAFTERS = (*DRAFTS, "ngram", "streaming")
"""What proposes for the demo's target where nothing is named: all that there is."""
CONTEXT = 2048
DRAFTER_HELP = (
    "Given several times, every one is measured with the methods of its kind; for the demo all "
    "there are if absent"
)
EPILOG = """\
Results go to a folder: header.json says how they were made, samples.jsonl holds a line of raw
counts per sample, method and temperature, skipped.jsonl what the protocol leaves out. The same
command continues a run that was interrupted.

Acceptance length is emitted tokens / target forward passes of the decode phase, bonus included,
prefill excluded; tokens/s are the tokens of the decode rounds by their seconds.

methods:
{methods}

Exit status: 0, 2 for a request that cannot be met, 1 for a failure while running, 130 if
interrupted.
"""


def parser() -> argparse.ArgumentParser:
    """The command's parser."""
    methods = "\n".join(f"  {name:17} {method.about}" for name, method in METHODS.items())
    result = Parser(
        prog=command_name(__package__),
        description="Measure drafting methods side by side on long-context tasks.",
        epilog=EPILOG.format(methods=methods),
    )
    version = f"longspec_jax {longspec_jax.__version__}"
    result.add_argument("--version", action="version", version=version)
    result.set_defaults(tree=None)
    add_models(result, DRAFTER_HELP)
    _add_tasks(result)
    _add_methods(result)
    _add_output(result)
    return result


def _add_tasks(result: argparse.ArgumentParser) -> None:
    group = result.add_argument_group("tasks")
    group.add_argument(
        "--task",
        action="append",
        required=True,
        choices=TASK_NAMES,
        metavar="TASK",
        help=f"repeat for several: {', '.join(TASK_NAMES)}. demo is the four tasks made of the "
        "package's own documents; jsonl takes the prompts of --data",
    )
    group.add_argument(
        "--protocol",
        choices=[LONGSPEC, LONGBENCH],
        default=LONGSPEC,
        help="how tasks ask. longspec: the LongSpec release's format, prompts of more than 1200 "
        "tokens and at most 2000 below the model's range, 1024 new tokens. longbench: long prompts "
        "lose their middle, the model's chat format but for code, 512 or 64 new tokens",
    )
    group.add_argument(
        "--data",
        type=data_argument,
        action="append",
        metavar="[TASK=]PATH",
        help="JSONL, Parquet or zip file with a task's data, or the folder of such files, instead "
        "of the hub's",
    )
    group.add_argument(
        "--hub", type=word_argument, metavar="OWNER/NAME", help="a dataset of the hub with the data"
    )
    group.add_argument(
        "--samples", type=number_argument(Whole()), help="most samples of a task; all if absent"
    )
    group.add_argument(
        "--context",
        type=number_argument(Whole(64)),
        action="append",
        help="tokens of the prompts of demo, needle, pg19 and booksum, which can have any length; "
        f"repeat for several; {CONTEXT} if absent",
    )
    group.add_argument(
        "--min_prompt",
        type=number_argument(Whole(0)),
        help="prompts of so many tokens and fewer are skipped (longspec protocol)",
    )
    group.add_argument(
        "--max_prompt",
        type=number_argument(Whole(2)),
        help="prompts of more tokens are skipped (longspec protocol) or lose their middle "
        "(longbench)",
    )
    group.add_argument(
        "--prompt_style",
        choices=[*STYLES, RAW],
        help="chat format of the longbench protocol and of the jsonl task. native: the "
        "tokenizer's own; raw: none",
    )


def _add_methods(result: argparse.ArgumentParser) -> None:
    group = result.add_argument_group("methods and generation")
    group.add_argument(
        "--method",
        type=method_argument,
        action="append",
        metavar="METHOD[=TREE]",
        help="repeat for several; see below. all: every one whose draft is there. Plain decoding "
        "and what the drafters are for if absent",
    )
    group.add_argument(
        "--temperature",
        type=number_argument(SAMPLING["temperature"]),
        action="append",
        help="repeat for several; 0, which is greedy, if absent",
    )
    group.add_argument(
        "--seed",
        type=number_argument(SAMPLING["seed"]),
        action="append",
        help="of draws above temperature 0; repeat for several; 0 if absent",
    )
    for name, default in (("top_p", 1.0), ("top_k", 0)):
        group.add_argument(f"--{name}", type=number_argument(SAMPLING[name]), default=default)
    group.add_argument(
        "--max_new_tokens",
        type=number_argument(SAMPLING["max_new_tokens"]),
        help="instead of the protocol's number",
    )
    group.add_argument(
        "--batch", type=number_argument(Whole()), default=1, help="prompts decoded together"
    )
    group.add_argument("--ignore_eos", action="store_true", help="do not stop at stop tokens")
    group.add_argument(
        "--repetitions",
        type=number_argument(Whole()),
        default=1,
        help="decode every call so often and keep the run of median seconds",
    )


def _add_output(result: argparse.ArgumentParser) -> None:
    group = result.add_argument_group("output")
    group.add_argument(
        "--out",
        type=lambda text: Path(path_argument(text)),
        required=True,
        metavar="FOLDER",
        help="of the run, made if need be",
    )
    group.add_argument(
        "--summary",
        type=path_argument,
        metavar="FILE.json",
        help="write a row per task, method and temperature as well",
    )
    group.add_argument(
        "--breakdown",
        type=number_argument(Whole()),
        metavar="ROUNDS",
        help="time drafting, verification and the rest of so many rounds of every call, in a run "
        "of its own",
    )
    group.add_argument(
        "--rounds",
        type=number_argument(Whole()),
        help="keep the trees of so many rounds of the first samples of every task",
    )
    group.add_argument(
        "--cases",
        type=number_argument(Whole()),
        default=1,
        help="samples of every task whose rounds are kept",
    )
    group.add_argument(
        "--compilation_cache",
        type=path_argument,
        metavar="DIR",
        help="where to keep compiled programs; off for nowhere",
    )
    group.add_argument("--traceback", action="store_true", help="show Python's traceback on errors")


def method_argument(text: str) -> Chosen:
    """A method, and the tree it is to run, for ``argparse``."""
    base, equals, tree = text.partition("=")
    if base not in (*METHODS, ALL):
        raise argparse.ArgumentTypeError(f"no method {base!r}; there are {', '.join(METHODS)}")
    if not equals:
        return Chosen(text, base)
    method = METHODS.get(base)
    if method is None or method.kind is None or method.outside or method.adaptive:
        raise argparse.ArgumentTypeError(f"{base} takes no tree; write --method={base}")
    named = tree_argument(tree)
    if named == PLAIN:
        raise argparse.ArgumentTypeError(f"{text}: without a tree it is --method=plain")
    return Chosen(text, base, named)


def data_argument(text: str) -> tuple[str, Path]:
    """A path, and the task it is for, for ``argparse``; for all tasks if none is named."""
    task, equals, path = text.partition("=")
    if equals and task in TASK_NAMES:
        return task, Path(path_argument(path))
    return "", Path(path_argument(text))


def settled(arguments: argparse.Namespace) -> argparse.Namespace:
    """The arguments with defaults that depend on each other filled in, and contradictions refused.

    Raises:
      ValueError: for a contradiction, naming both options.
    """
    tasks = [name for task in arguments.task for name in (SUITE if task == DEMO_SUITE else (task,))]
    _check_data(arguments, tasks)
    methods = arguments.method or []
    for values, option in ((tasks, "task"), ([each.name for each in methods], "method")):
        twice = next((value for value in values if values.count(value) > 1), None)
        if twice is not None:
            raise ValueError(f"--{option}={twice} is given twice; name it once")
    temperatures = arguments.temperature or [0.0]
    if not any(temperatures) and (arguments.top_k or arguments.top_p < 1):
        raise ValueError(
            "--top_k and --top_p have no effect at temperature 0; add --temperature=1, or leave "
            "them out"
        )
    outside = [each.name for each in methods if each.base != ALL and each.method.outside]
    if outside and arguments.batch > 1:
        raise ValueError(
            f"--method={outside[0]} decodes one row at a time, and --batch={arguments.batch} asks "
            "for more; leave one of the two out"
        )
    if outside and importlib.util.find_spec("torch") is None:
        raise ModuleNotFoundError("PyTorch decodes there", name="torch")
    if arguments.min_prompt is not None and arguments.protocol == LONGBENCH:
        raise ValueError(
            "--min_prompt is of the longspec protocol; longbench skips nothing: leave it out"
        )
    drafters = arguments.draft
    if drafters is None and is_demo(arguments):
        drafters = [*DEMO_RUN_DRAFTERS]
    return argparse.Namespace(
        **{
            **vars(arguments),
            "task": tasks,
            "method": methods,
            "temperature": sorted(set(temperatures)),
            "seed": sorted(set(arguments.seed or [0])),
            "context": sorted(set(arguments.context or [CONTEXT])),
            "draft": drafters,
            "target": arguments.target or DEMO_NAME,
            "summary": _summary_file(arguments.summary, arguments.out),
        }
    )


def _summary_file(text: str | None, run: Path) -> Path | None:
    """A file that can be written once the run's folder is there, which may be what it is in."""
    if text is None:
        return None
    path = Path(text)
    inside = path.resolve().parent == run.resolve()
    if inside and path.name in (HEADER, SAMPLES, SKIPPED):
        raise ValueError(f"--summary={text} would replace a file of the run; name another")
    if inside and not run.exists():
        return path
    try:
        return result_file(text)
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"--summary: {error}") from None


def _check_data(arguments: argparse.Namespace, tasks: list[str]) -> None:
    """Files are there, and each is for a task of the run."""
    data = arguments.data or []
    for task, path in data:
        if not path.exists():
            raise FileNotFoundError(f"--data={path}: there is no such file or folder")
        if task and task not in tasks:
            raise ValueError(
                f"--data={task}={path} is for a task that is not run; add --task={task}"
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
