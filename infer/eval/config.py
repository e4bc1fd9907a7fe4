"""The configuration of an evaluation: what it measures, how it asks, and what it keeps.

Every option is declared once, in :class:`EvalConfig`; the command's flags derive from it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from longspec_jax.checks import Each, OneOf, That, Whole
from longspec_jax.config.sampling import OPTIONS, rule
from longspec_jax.embedded import DEMO_NAME, DRAFTS
from longspec_jax.schema import options

from ..arguments import Models
from ..prompts import STYLES
from .methods import Chosen
from .tasks import DEMO_SUITE, FREE, NEEDLE, SUITE, TASKS

TASK_NAMES = (*TASKS, NEEDLE, FREE, *SUITE, DEMO_SUITE)
DEMO_RUN_DRAFTS = (*DRAFTS, "ngram", "streaming")
"""The demo's drafters if none are named: all that there are."""
CONTEXT = 2048
ANYTHING = That(lambda value: True, "anything")
"""The rule of what the command's parser makes, and what loads models checks."""


def refuse_idle_filters(temperatures: Sequence[float], top_k: int, top_p: float) -> None:
    """Raise ValueError for filters where every temperature is 0."""
    if not any(temperatures) and (top_k or top_p < 1):
        raise ValueError(
            "--top_k and --top_p have no effect at temperature 0; add --temperature=1, or leave "
            "them out"
        )


@dataclass(frozen=True)
class EvalConfig:
    """An evaluation.

    Raises:
      Refused: for a value that breaks its rule.
      ValueError: for options that contradict each other, naming them.
    """

    task: Annotated[
        Sequence[str],
        Each(OneOf(TASK_NAMES), least=1),
        f"{', '.join(TASK_NAMES)}. demo: the four tasks made of the package's documents. jsonl: "
        "the prompts of --data",
    ]
    out: Annotated[Path, ANYTHING, "folder of the run; made if absent"]
    models: Annotated[Models, ANYTHING] = field(default_factory=Models)
    data: Annotated[
        Sequence[tuple[str, Path]],
        ANYTHING,
        "JSONL, Parquet or zip file with a task's data, or a folder of such files, instead of the "
        "hub's",
    ] = ()
    samples: Annotated[int | None, Whole(), "most samples of a task; all if absent"] = None
    context: Annotated[
        Sequence[int] | None,
        Each(Whole(128)),
        f"tokens of the prompts of demo, needle and pg19; {CONTEXT} if absent",
    ] = None
    min_prompt: Annotated[
        int | None,
        Whole(0),
        "prompts of at most this many tokens are skipped; 1200 of long tasks if absent",
    ] = None
    max_prompt: Annotated[
        int | None,
        Whole(2),
        "prompts of more tokens are skipped; the target's range less 2000 if absent",
    ] = None
    prompt_style: Annotated[
        str | None,
        OneOf(tuple(STYLES)),
        "chat format of the jsonl task. native: the tokenizer's own; text as it is if absent",
    ] = None
    method: Annotated[
        Sequence[Chosen],
        ANYTHING,
        "see below. all: every method whose draft is loaded. Plain decoding and the default "
        "methods of the drafts if absent",
    ] = ()
    temperature: Annotated[Sequence[float], Each(rule("temperature")), "0 is greedy"] = (0.0,)
    seed: Annotated[Sequence[int], Each(rule("seed")), "of the draws above temperature 0"] = (0,)
    top_p: Annotated[float, OPTIONS["top_p"]] = 1.0
    top_k: Annotated[int, OPTIONS["top_k"]] = 0
    max_new_tokens: Annotated[
        int | None,
        rule("max_new_tokens"),
        "most new tokens of a sample; the published number if absent",
    ] = None
    batch: Annotated[int, Whole(), "prompts decoded together"] = 1
    ignore_eos: Annotated[bool, "do not stop at stop tokens"] = False
    repetitions: Annotated[
        int, Whole(), "decode every call this many times and keep the run of median seconds"
    ] = 1
    command: str = ""
    """As it was typed, for the header of the run."""

    def __post_init__(self) -> None:
        for name, option in options(EvalConfig).items():
            option.rule.read(f"--{name}", getattr(self, name))
        self._check_data()
        self._check_effects()
        for values, option in ((self.tasks, "task"), ([m.name for m in self.method], "method")):
            twice = next((value for value in values if values.count(value) > 1), None)
            if twice is not None:
                raise ValueError(f"--{option}={twice} is given twice; name it once")
        refuse_idle_filters(self.temperature, self.top_k, self.top_p)

    @property
    def tasks(self) -> list[str]:
        """The tasks, each by its own name."""
        return [name for task in self.task for name in (SUITE if task == DEMO_SUITE else (task,))]

    @property
    def target(self) -> str:
        """The target by its name."""
        return self.models.target or DEMO_NAME

    @property
    def temperatures(self) -> list[float]:
        """The temperatures, ascending."""
        return sorted(set(self.temperature))

    @property
    def seeds(self) -> list[int]:
        """The seeds, ascending."""
        return sorted(set(self.seed))

    @property
    def contexts(self) -> list[int]:
        """The lengths of prompts that can have any, ascending."""
        return sorted(set(self.context or [CONTEXT]))

    @property
    def drafts(self) -> Sequence[str]:
        """What proposes: what is named, else all of the demo's, or those of a released model."""
        if self.models.draft is not None:
            return self.models.draft
        return DEMO_RUN_DRAFTS if self.models.is_demo else self.models.drafts

    def _check_data(self) -> None:
        """Refuse data files that do not exist, or of no task of the run."""
        named = [task for task, _ in self.data]
        for task, path in self.data:
            if not path.exists():
                raise FileNotFoundError(f"--data={path}: no such file or folder")
            if task and task not in self.tasks:
                raise ValueError(
                    f"--data={task}={path} names a task that is not run; add --task={task}"
                )
            if named.count(task) > 1:
                words = f"--data={task}" if task else "--data=PATH"
                raise ValueError(
                    f"{words} is given twice; name one file or folder, or one for each task"
                )
            if task in SUITE:
                raise ValueError(
                    f"--data={task}={path}: {task} is made of the package's documents and reads no "
                    "data; leave it out"
                )
        if FREE in self.tasks and not {"", FREE} & {*named}:
            raise ValueError(f"--task={FREE} reads a file of yours; name it with --data=FILE.jsonl")
        of_files = [task for task in self.tasks if task not in SUITE]
        for task, path in self.data:
            if not task and path.is_file() and path.suffix != ".zip" and len(of_files) > 1:
                raise ValueError(
                    f"--data={path} is one file for {len(of_files)} tasks ({', '.join(of_files)}); "
                    f"write --data={of_files[0]}={path}, or name a folder"
                )

    def _check_effects(self) -> None:
        """Refuse options that no task of the run reads."""
        readers: dict[str, tuple[bool, Callable[[str], bool]]] = {
            "--data": ("" in dict(self.data), lambda task: task not in SUITE),
            "--context": (
                self.context is not None,
                lambda task: task in (*SUITE, NEEDLE) or (task in TASKS and TASKS[task].books),
            ),
            "--min_prompt": (
                self.min_prompt is not None,
                lambda task: task in TASKS and TASKS[task].long,
            ),
            "--max_prompt": (self.max_prompt is not None, lambda task: task in TASKS),
            "--prompt_style": (
                self.prompt_style is not None,
                lambda task: task == FREE,
            ),
        }
        for option, (is_given, reads) in readers.items():
            if is_given and not any(map(reads, self.tasks)):
                readable = [task for task in TASK_NAMES if task != DEMO_SUITE and reads(task)]
                raise ValueError(
                    f"{option} has no effect on --task={', '.join(self.tasks)}; leave it "
                    "out" + (f". It is for {', '.join(readable)}" if readable else "")
                )
