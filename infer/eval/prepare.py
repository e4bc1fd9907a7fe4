"""The prompts of a run: samples of its tasks, as the protocol asks them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longspec_jax import demo_prompts

from ..prompts import SOURCES, item_of, read_text
from . import protocols, suite
from .loading import Row, rows
from .protocols import EvalProtocol, LeftOut, Ready
from .records import SkippedSample
from .samples import Sample, references, sample_name, text_field
from .tasks import AIME24_ROWS, FREE, NEEDLE, RELEASE_TOKENS, TASKS, Task

FREE_ANSWERS = ("answers", "references")
"""Fields of a user's row that may hold what counts as an answer."""


@dataclass(frozen=True)
class Sources:
    """What the samples are made of."""

    data: Mapping[str, Path]
    """A file or folder by task; under an empty name, for all tasks."""
    mirror: str | None
    """A dataset on the hub instead of a task's own."""
    contexts: Sequence[int]
    """Tokens that texts are cut to, where a task is about texts of any length."""
    style: str | None
    """Chat format of prompts that are taken as they are."""
    limit: int | None
    """Most samples of a task; all of them if absent."""


@dataclass(frozen=True)
class Prompt:
    """One prompt to decode."""

    sample: str
    tokens: list[int]
    original_tokens: int
    new_tokens: int
    """Most, as far as the target's range leaves room."""
    references: tuple[str, ...]


@dataclass(frozen=True)
class PreparedTask:
    """A task's prompts, and what was left out."""

    name: str
    prompts: tuple[Prompt, ...]
    skipped: tuple[SkippedSample, ...]


@dataclass(frozen=True)
class Target:
    """What preparing needs to know of the target."""

    tokenizer: Any
    vocab_size: int
    positions: int


def prepare(
    name: str, sources: Sources, protocol: EvalProtocol, target: Target, new_tokens: int | None
) -> PreparedTask:
    """The prompts of a task.

    Args:
      name: of the task.
      sources: what its samples are made of.
      protocol: how they are asked.
      target: what decodes them.
      new_tokens: most new tokens; the protocol's number if absent.

    Raises:
      OSError: if the task's data cannot be had.
      ValueError: for data that are not as they should be, or if nothing is left to decode.
    """
    task = TASKS.get(name)
    most = new_tokens or _new_tokens(name, task, protocol)
    prompts, skipped = [], []
    for sample in samples(name, sources, target):
        if sources.limit is not None and len(prompts) >= sources.limit:
            break
        found = (
            protocols.as_given(target.tokenizer, target.vocab_size, sample, sources.style)
            if task is None
            else protocol.prompt(task, sample)
        )
        if isinstance(found, Ready) and len(found.tokens) >= target.positions:
            reason = f"its {len(found.tokens)} tokens leave no room in {target.positions} positions"
            found = LeftOut(found.original_tokens, reason)
        if isinstance(found, LeftOut):
            skipped.append(SkippedSample(name, sample.name, found.original_tokens, found.reason))
            continue
        fits = min(most, target.positions - len(found.tokens))
        prompts.append(
            Prompt(sample.name, found.tokens, found.original_tokens, fits, sample.references)
        )
    if not prompts:
        why = f" ({skipped[0].sample}: {skipped[0].reason})" if skipped else ""
        remedy = (
            "name a shorter --context"
            if name in suite.SUITE or name == NEEDLE
            else "--min_prompt and --max_prompt move the protocol's bounds"
        )
        raise ValueError(f"--task={name}: all {len(skipped)} samples are left out{why}; {remedy}")
    _check_names(name, [prompt.sample for prompt in prompts])
    return PreparedTask(name, tuple(prompts), tuple(skipped))


def samples(name: str, sources: Sources, target: Target) -> Iterator[Sample]:
    """The samples of a task, in the order of its data."""
    path = sources.data.get(name, sources.data.get(""))
    tokenizer = target.tokenizer
    if name in suite.SUITE:
        for context in sources.contexts:
            yield from suite.SUITE[name](tokenizer, context)
    elif name == NEEDLE:
        # A folder or an archive is of other tasks.
        texts = [*demo_prompts().values()]
        if path is not None and path.is_file() and path.suffix != ".zip":
            texts = [read_text(path, "--data")]
        for context in sources.contexts:
            yield from suite.needles(tokenizer, texts, context)
    elif name == FREE:
        for number, row in enumerate(rows(name, None, path, None)):
            yield _free(number, row)
    else:
        task = TASKS[name]
        found = rows(name, task.hub, path, sources.mirror)
        if name == "aime24":
            found = _of_2024(found)
        for number, row in enumerate(found):
            yield from _filled(task, number, row, sources, tokenizer)


def _filled(
    task: Task, number: int, row: Row, sources: Sources, tokenizer: Any
) -> Iterator[Sample]:
    where, values = row
    fields = {field: text_field(values, field, where) for field in task.fields}
    answers = references(values, task.answers, where)
    name = sample_name(values, number)
    if not task.books:
        yield Sample(name, answers, fields)
        return
    for context in sources.contexts:
        cut = protocols.first_tokens(tokenizer, fields["text"], context)
        if cut is not None:  # A book that is shorter belongs to a shorter context.
            yield Sample(f"{name} to {context}", answers, {"text": cut})


def _free(number: int, row: Row) -> Sample:
    """A sample of a user's file: ``prompt`` or ``messages``, and what counts as an answer."""
    where, values = row
    given = [name for name in SOURCES if name in values]
    if len(given) != 1:
        found = ", ".join(sorted(map(str, values))) or "nothing"
        raise ValueError(
            f"{where} needs exactly one of prompt, messages and input_ids; it has {found}"
        )
    [kind] = given
    if values[kind] in ("", []):
        raise ValueError(f"{where}: {kind!r} is empty; remove the row, or fill it in")
    text = kind == "prompt"
    prompt = text_field(values, kind, where) if text else item_of(kind, values[kind], where)
    answers = next((name for name in FREE_ANSWERS if name in values), FREE_ANSWERS[0])
    return Sample(sample_name(values, number), references(values, answers, where), prompt=prompt)


def _of_2024(found: Sequence[Row]) -> list[Row]:
    """AIME's problems of 2024: those ids of the usual dataset, or all of another file."""
    chosen = [row for row in found if row[1].get("id") in AIME24_ROWS]
    return chosen if len(chosen) == len(AIME24_ROWS) else list(found)


def _new_tokens(name: str, task: Task | None, protocol: EvalProtocol) -> int:
    if task is not None:
        return protocol.new_tokens(task)
    if name in ("demo_needle", NEEDLE):
        return suite.NEEDLE_TOKENS
    return suite.NEW_TOKENS if name in suite.SUITE else RELEASE_TOKENS


def _check_names(task: str, names: Sequence[str]) -> None:
    """Samples are told apart by their names, also when a run is continued."""
    if len(names) > len(set(names)):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(
            f"--task={task}: two samples have the id {twice!r}; give every row an id of its own"
        )
