"""From the rows of a task to the tokens of its prompts, as a published evaluation asks.

The protocol ``longspec`` is the LongSpec release's: its own chat format in one text, prompts
between two bounds, all others skipped, 1024 new tokens. ``longbench`` is LongBench's (version 1):
long prompts lose their middle, and the model's chat format surrounds the rest, except for code.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from longspec_jax import demo_prompts
from longspec_jax.cli import counted

from ..prompts import SOURCES, STYLES, encode, item_of, read_text, release_turns
from .config import LONGSPEC, EvalConfig
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
FREE_ANSWERS = ("answers", "references")
"""Fields of a user's row that may hold references."""


@dataclass(frozen=True)
class Target:
    """What prompts depend on in the target."""

    tokenizer: Any
    vocab_size: int
    positions: int


@dataclass(frozen=True)
class Asked:
    """The tokens of a prompt, and why it is not decoded."""

    tokens: list[int]
    original_tokens: int
    """With those that the protocol cut out."""
    refusal: str = ""
    """Why the protocol skips it; empty if it does not."""


def longspec_prompt(config: EvalConfig, target: Target, task: Task, sample: Sample) -> Asked:
    """The whole prompt, if its length is within the bounds; the lower one is for long tasks."""
    text = task.release.whole(sample.fields)
    if not task.books:
        question = {"role": "user", "content": task.release.filled(sample.fields)}
        text = "".join([*release_turns(target.tokenizer, [question]), task.release.answer])
    tokens = target.tokenizer(text)["input_ids"]
    least = RELEASE_LEAST if config.min_prompt is None else config.min_prompt
    most = config.max_prompt or max(target.positions - RELEASE_MARGIN, 1)
    refusal = ""
    if len(tokens) <= (least if task.long else 0):
        refusal = f"no more than {least if task.long else 0} tokens, which the protocol skips"
    elif len(tokens) > most:
        refusal = f"more than {most} tokens, which the protocol skips"
    return Asked(tokens, len(tokens), refusal)


def longbench_prompt(config: EvalConfig, target: Target, task: Task, sample: Sample) -> Asked:
    """The prompt, without its middle if it is too long.

    ``original_tokens`` of a cut prompt are those of the result, tokenised again and in its chat
    format, and those that were removed.

    Raises:
      ValueError: for a model without a chat format, and no style.
    """
    style = config.prompt_style or "native"
    if config.prompt_style is None and not getattr(target.tokenizer, "chat_template", None):
        raise ValueError(
            "--protocol=longbench asks in the model's chat format, and the target's "
            f"tokenizer has none; choose --prompt_style={', '.join([*STYLES, RAW])}"
        )
    text = task.longbench.whole(sample.fields)
    tokens = target.tokenizer(text)["input_ids"]
    usual = max(target.positions - LONGBENCH_MARGIN, 2)
    most = config.max_prompt or LONGBENCH_LIMITS.get(target.positions, usual)
    removed = 0
    if len(tokens) > most:
        half = most // 2
        removed = len(tokens) - 2 * half
        halves = (tokens[:half], tokens[len(tokens) - half :])
        text = "".join(target.tokenizer.decode(part, skip_special_tokens=True) for part in halves)
    chat = style if task.chat and style != RAW else None
    found = encode(target.tokenizer, target.vocab_size, text, chat)
    return Asked(found, len(found) + removed)


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

    @property
    def words(self) -> str:
        """How many samples are run, cut and skipped."""
        longest = max(len(prompt.tokens) for prompt in self.prompts)
        cut = sum(len(each.tokens) < each.original_tokens for each in self.prompts)
        words = [f"{counted(len(self.prompts), 'sample')} of up to {longest} tokens"]
        words += [f"{cut} truncated"] if cut else []
        words += [f"{len(self.skipped)} skipped"] if self.skipped else []
        return f"{self.name}: {', '.join(words)}"


def prepare(name: str, config: EvalConfig, target: Target) -> PreparedTask:
    """The prompts of a task.

    Raises:
      OSError: if the task's data cannot be read or fetched.
      ValueError: for malformed data, or if nothing is left to decode.
    """
    most = config.max_new_tokens or _new_tokens(name, config)
    prompts, skipped = [], []
    for sample in samples(name, config, target.tokenizer):
        if config.samples is not None and len(prompts) >= config.samples:
            break
        found = _asked(name, config, target, sample)
        count = len(found.tokens)
        refusal = found.refusal
        if not refusal and count >= target.positions:
            refusal = f"its {count} tokens leave no room in {target.positions} positions"
        if refusal:
            skipped.append(SkippedSample(name, sample.name, found.original_tokens, refusal))
            continue
        fits = min(most, target.positions - count)
        prompts.append(
            Prompt(sample.name, found.tokens, found.original_tokens, fits, sample.references)
        )
    if not prompts:
        why = f" ({skipped[0].sample}: {skipped[0].reason})" if skipped else ""
        remedy = (
            "name a shorter --context"
            if name in (*SUITE, NEEDLE)
            else "--min_prompt and --max_prompt change the protocol's bounds"
        )
        raise ValueError(f"--task={name}: all {len(skipped)} samples are skipped{why}; {remedy}")
    # Names identify samples, also when a run continues.
    [(twice, number)] = Counter(prompt.sample for prompt in prompts).most_common(1)
    if number > 1:
        raise ValueError(
            f"--task={name}: two samples have the id {twice!r}; give every row an id of its own"
        )
    return PreparedTask(name, tuple(prompts), tuple(skipped))


def _asked(name: str, config: EvalConfig, target: Target, sample: Sample) -> Asked:
    if name in TASKS:
        ask = longspec_prompt if config.protocol == LONGSPEC else longbench_prompt
        return ask(config, target, TASKS[name], sample)
    # A finished prompt, without a protocol's wording or bounds.
    style = None if config.prompt_style == RAW else config.prompt_style
    tokens = encode(target.tokenizer, target.vocab_size, sample.prompt, style)
    return Asked(tokens, len(tokens))


def _new_tokens(name: str, config: EvalConfig) -> int:
    if name in TASKS:
        task = TASKS[name]
        return task.release_tokens if config.protocol == LONGSPEC else task.longbench_tokens
    if name in ("demo_needle", NEEDLE):
        return NEEDLE_TOKENS
    return DEMO_TOKENS if name in SUITE else RELEASE_TOKENS


def samples(name: str, config: EvalConfig, tokenizer: Any) -> Iterator[Sample]:
    """The samples of a task, in the order of its data."""
    data = dict(config.data)
    path = data.get(name, data.get(""))
    if name in SUITE:
        for context in config.contexts:
            yield from SUITE[name](tokenizer, context)
    elif name == NEEDLE:
        # A folder or an archive belongs to other tasks.
        texts = [*demo_prompts().values()]
        if path is not None and path.is_file() and path.suffix != ".zip":
            texts = [read_text(path, "--data")]
        for context in config.contexts:
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
            yield from _filled(task, number, row, config, tokenizer)


def _filled(
    task: Task, number: int, row: Row, config: EvalConfig, tokenizer: Any
) -> Iterator[Sample]:
    where, values = row
    fields = {field: text_field(values, field, where) for field in task.fields}
    answers = references(values, task.answers, where)
    name = sample_name(values, number)
    if not task.books:
        yield Sample(name, answers, fields)
        return
    tokens = tokenizer(fields["text"], add_special_tokens=False)["input_ids"]
    for context in config.contexts:
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
