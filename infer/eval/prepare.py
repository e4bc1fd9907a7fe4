"""From the samples of a task to the tokens of its prompts, as a published evaluation asks.

``LongSpecProtocol`` is the LongSpec release's: its own chat format in one text, prompts between two
bounds, all others skipped, 1024 new tokens. ``LongBenchProtocol`` is LongBench's (version 1): long
prompts lose their middle, and the model's chat format surrounds the rest, except for code.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longspec_jax import demo_prompts

from ..prompts import SOURCES, STYLES, encode, item_of, read_text, release_turns
from .loading import Row, references, rows, sample_name, text_field
from .records import SkippedSample
from .tasks import (
    AIME24_ROWS,
    DEMO_TOKENS,
    FREE,
    NEEDLE,
    NEEDLE_TOKENS,
    RAW,
    RELEASE_TOKENS,
    SUITE,
    TASKS,
    Sample,
    Task,
    needles,
)

RELEASE_LEAST, RELEASE_MARGIN = 1200, 2000
"""The release keeps prompts of more tokens than the first, and of at most the second fewer than
the model's range."""
LONGBENCH_LIMITS = {4096: 3500, 8192: 7500, 16384: 15500, 32768: 31500}
"""Most tokens of a prompt by the model's range, as LongBench publishes them."""
LONGBENCH_MARGIN = 1268
"""Tokens that LongBench leaves a model of 32k beyond the prompt; used for other ranges."""


@dataclass(frozen=True)
class Asked:
    """The tokens of a prompt, and why it is not decoded."""

    tokens: list[int]
    original_tokens: int
    """With those that the protocol cut out."""
    refusal: str = ""
    """Why the protocol skips it; empty if it does not."""


@dataclass(frozen=True)
class Target:
    """What prompts depend on in the target."""

    tokenizer: Any
    vocab_size: int
    positions: int


@dataclass(frozen=True)
class LongSpecProtocol:
    """The LongSpec release's."""

    target: Target
    least: int
    """Prompts of at most this many tokens are skipped, in tasks with long prompts."""
    most: int
    """Prompts of more tokens are skipped."""

    @classmethod
    def of(cls, target: Target, least: int | None, most: int | None) -> "LongSpecProtocol":
        """With the release's bounds as defaults."""
        least = RELEASE_LEAST if least is None else least
        limit = max(target.positions - RELEASE_MARGIN, 1)
        return cls(target, least, limit if most is None else most)

    def new_tokens(self, task: Task) -> int:
        """Most new tokens of a task's samples."""
        return task.release_tokens

    def prompt(self, task: Task, sample: Sample) -> Asked:
        """The whole prompt, if its length is within the bounds."""
        wording = task.release
        text = wording.whole(sample.fields)
        if not task.books:
            question = {"role": "user", "content": wording.filled(sample.fields)}
            text = "".join([*release_turns(self.target.tokenizer, [question]), wording.answer])
        tokens = self.target.tokenizer(text)["input_ids"]
        least = self.least if task.long else 0
        refusal = ""
        if len(tokens) <= least:
            refusal = f"no more than {least} tokens, which the protocol skips"
        elif len(tokens) > self.most:
            refusal = f"more than {self.most} tokens, which the protocol skips"
        return Asked(tokens, len(tokens), refusal)


@dataclass(frozen=True)
class LongBenchProtocol:
    """LongBench's."""

    target: Target
    style: str
    """A chat format of :data:`infer.prompts.STYLES`, or ``raw`` for none."""
    most: int
    """Longer prompts lose their middle."""

    @classmethod
    def of(cls, target: Target, style: str | None, most: int | None) -> "LongBenchProtocol":
        """With LongBench's limit as the default.

        Raises:
          ValueError: for a model without a chat format, and no style.
        """
        if style is None:
            if not getattr(target.tokenizer, "chat_template", None):
                raise ValueError(
                    "--protocol=longbench asks in the model's chat format, and the target's "
                    f"tokenizer has none; choose --prompt_style={', '.join([*STYLES, RAW])}"
                )
            style = "native"
        usual = max(target.positions - LONGBENCH_MARGIN, 2)
        limit = LONGBENCH_LIMITS.get(target.positions, usual)
        return cls(target, style, limit if most is None else most)

    def new_tokens(self, task: Task) -> int:
        """Most new tokens of a task's samples."""
        return task.longbench_tokens

    def prompt(self, task: Task, sample: Sample) -> Asked:
        """The prompt, without its middle if it is too long.

        ``original_tokens`` of a cut prompt are those of the result, tokenised again and in its chat
        format, and those that were removed.
        """
        text = task.longbench.whole(sample.fields)
        tokens = self.target.tokenizer(text)["input_ids"]
        removed = 0
        if len(tokens) > self.most:
            half = self.most // 2
            removed = len(tokens) - 2 * half
            first, last = tokens[:half], tokens[len(tokens) - half :]
            text = "".join(
                self.target.tokenizer.decode(part, skip_special_tokens=True)
                for part in (first, last)
            )
        style = None if self.style == RAW or not task.chat else self.style
        found = encode(self.target.tokenizer, self.target.vocab_size, text, style)
        return Asked(found, len(found) + removed)


EvalProtocol = LongSpecProtocol | LongBenchProtocol


FREE_ANSWERS = ("answers", "references")
"""Fields of a user's row that may hold references."""


@dataclass(frozen=True)
class Sources:
    """Where samples come from."""

    data: Mapping[str, Path]
    """A file or folder by task; the one of an empty name is for all tasks."""
    contexts: Sequence[int]
    """Tokens of the prompts of tasks whose texts can have any length."""
    style: str | None
    """Chat format of a user's prompts."""
    limit: int | None
    """Most samples of a task; None for all."""


@dataclass(frozen=True)
class Prompt:
    """One prompt to decode."""

    sample: str
    tokens: list[int]
    original_tokens: int
    new_tokens: int
    """Most new tokens, within the target's range."""
    references: tuple[str, ...]


@dataclass(frozen=True)
class PreparedTask:
    """A task's prompts, and its skipped samples."""

    name: str
    prompts: tuple[Prompt, ...]
    skipped: tuple[SkippedSample, ...]


def prepare(
    name: str, sources: Sources, protocol: EvalProtocol, new_tokens: int | None
) -> PreparedTask:
    """The prompts of a task.

    Raises:
      OSError: if the task's data cannot be read or fetched.
      ValueError: for malformed data, or if nothing is left to decode.
    """
    task, target = TASKS.get(name), protocol.target
    most = new_tokens or _new_tokens(name, task, protocol)
    prompts, skipped = [], []
    for sample in samples(name, sources, target.tokenizer):
        if sources.limit is not None and len(prompts) >= sources.limit:
            break
        if task is None:  # A finished prompt, without a protocol's wording or bounds.
            style = None if sources.style == RAW else sources.style
            tokens = encode(target.tokenizer, target.vocab_size, sample.prompt, style)
            found = Asked(tokens, len(tokens))
        else:
            found = protocol.prompt(task, sample)
        refusal = found.refusal
        if not refusal and len(found.tokens) >= target.positions:
            count = len(found.tokens)
            refusal = f"its {count} tokens leave no room in {target.positions} positions"
        if refusal:
            skipped.append(SkippedSample(name, sample.name, found.original_tokens, refusal))
            continue
        fits = min(most, target.positions - len(found.tokens))
        prompts.append(
            Prompt(sample.name, found.tokens, found.original_tokens, fits, sample.references)
        )
    if not prompts:
        why = f" ({skipped[0].sample}: {skipped[0].reason})" if skipped else ""
        remedy = (
            "name a shorter --context"
            if name in SUITE or name == NEEDLE
            else "--min_prompt and --max_prompt change the protocol's bounds"
        )
        raise ValueError(f"--task={name}: all {len(skipped)} samples are skipped{why}; {remedy}")
    _check_names(name, [prompt.sample for prompt in prompts])
    return PreparedTask(name, tuple(prompts), tuple(skipped))


def samples(name: str, sources: Sources, tokenizer: Any) -> Iterator[Sample]:
    """The samples of a task, in the order of its data."""
    path = sources.data.get(name, sources.data.get(""))
    if name in SUITE:
        for context in sources.contexts:
            yield from SUITE[name](tokenizer, context)
    elif name == NEEDLE:
        # A folder or an archive belongs to other tasks.
        texts = [*demo_prompts().values()]
        if path is not None and path.is_file() and path.suffix != ".zip":
            texts = [read_text(path, "--data")]
        for context in sources.contexts:
            yield from needles(tokenizer, texts, context)
    elif name == FREE and path is not None:  # Without a path the arguments are refused.
        for number, row in enumerate(rows(name, path)):
            yield _free(number, row)
    else:
        task = TASKS[name]
        found = rows(name, path or task.hub)
        of_2024 = [row for row in found if row[1].get("id") in AIME24_ROWS]
        if name == "aime24" and len(of_2024) == len(AIME24_ROWS):  # Else another dataset's rows.
            found = of_2024
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
    tokens = tokenizer(fields["text"], add_special_tokens=False)["input_ids"]
    for context in sources.contexts:
        if len(tokens) >= context:  # A shorter book belongs to a shorter context.
            cut = tokenizer.decode(tokens[:context], skip_special_tokens=True)
            yield Sample(f"{name} to {context}", answers, {"text": cut})


def _free(number: int, row: Row) -> Sample:
    """A sample of a user's file: ``prompt``, ``messages`` or ``input_ids``, and references."""
    where, values = row
    given = [name for name in SOURCES if name in values]
    if len(given) != 1:
        found = ", ".join(sorted(map(str, values))) or "nothing"
        raise ValueError(
            f"{where} needs exactly one of prompt, messages and input_ids; it has {found}"
        )
    [kind] = given
    prompt = item_of(kind, values[kind], where)
    answers = next((name for name in FREE_ANSWERS if name in values), FREE_ANSWERS[0])
    return Sample(sample_name(values, number), references(values, answers, where), prompt=prompt)


def _new_tokens(name: str, task: Task | None, protocol: EvalProtocol) -> int:
    if task is not None:
        return protocol.new_tokens(task)
    if name in ("demo_needle", NEEDLE):
        return NEEDLE_TOKENS
    return DEMO_TOKENS if name in SUITE else RELEASE_TOKENS


def _check_names(task: str, names: Sequence[str]) -> None:
    """Refuse equal names: they identify samples, also when a run continues."""
    if len(names) > len(set(names)):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(
            f"--task={task}: two samples have the id {twice!r}; give every row an id of its own"
        )
