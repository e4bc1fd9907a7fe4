"""From the rows of a task to the tokens of its prompts, as the LongSpec release asks.

Its own chat format in one text, prompts between two bounds, all others skipped, 1024 new tokens.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from longspec_jax import demo_prompts
from longspec_jax.checks import Tokenizer
from longspec_jax.cli import counted

from ..prompts import SOURCES, encode, item_of, read_text, release_turns
from .config import EvalConfig
from .loading import Row, references, rows, sample_name, text_field
from .records import SkippedSample
from .tasks import (
    AIME24_ROWS,
    DEMO_TOKENS,
    FREE,
    NEEDLE,
    NEEDLE_TOKENS,
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
FREE_ANSWERS = ("answers", "references")
"""Fields of a user's row that may hold references."""


@dataclass(frozen=True)
class Target:
    """What prompts depend on in the target."""

    tokenizer: Tokenizer
    vocab_size: int
    positions: int


@dataclass(frozen=True)
class Asked:
    """The tokens of a prompt, and why it is not decoded."""

    tokens: list[int]
    refusal: str = ""
    """Why it is skipped; empty if it is not."""


def longspec_prompt(config: EvalConfig, target: Target, task: Task, sample: Sample) -> Asked:
    """The whole prompt, if its length is within the bounds; the lower one is for long tasks."""
    text = task.wording.whole(sample.fields)
    if not task.books:
        question = {"role": "user", "content": task.wording.filled(sample.fields)}
        text = "".join([*release_turns(target.tokenizer, [question]), task.wording.answer])
    tokens = target.tokenizer(text)["input_ids"]
    least = RELEASE_LEAST if config.min_prompt is None else config.min_prompt
    most = config.max_prompt or max(target.positions - RELEASE_MARGIN, 1)
    refusal = ""
    if len(tokens) <= (least if task.long else 0):
        refusal = f"no more than {least if task.long else 0} tokens, which the release skips"
    elif len(tokens) > most:
        refusal = f"more than {most} tokens, which the release skips"
    return Asked(tokens, refusal)


@dataclass(frozen=True)
class Prompt:
    """One prompt to decode."""

    sample: str
    tokens: list[int]
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
        """How many samples are run and skipped."""
        longest = max(len(prompt.tokens) for prompt in self.prompts)
        words = [f"{counted(len(self.prompts), 'sample')} of up to {longest} tokens"]
        words += [f"{len(self.skipped)} skipped"] if self.skipped else []
        return f"{self.name}: {', '.join(words)}"


def prepare(name: str, config: EvalConfig, target: Target) -> PreparedTask:
    """The prompts of a task.

    Raises:
      OSError: if the task's data cannot be read or fetched.
      ValueError: for malformed data, or if nothing is left to decode.
    """
    most = config.max_new_tokens or _new_tokens(name)
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
            skipped.append(SkippedSample(name, sample.name, count, refusal))
            continue
        fits = min(most, target.positions - count)
        prompts.append(Prompt(sample.name, found.tokens, fits, sample.references))
    if not prompts:
        why = f" ({skipped[0].sample}: {skipped[0].reason})" if skipped else ""
        remedy = (
            "name a shorter --context"
            if name in (*SUITE, NEEDLE)
            else "--min_prompt and --max_prompt change the bounds"
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
        return longspec_prompt(config, target, TASKS[name], sample)
    # A finished prompt, without a protocol's wording or bounds.
    assert sample.prompt is not None, f"samples of {name} bring their prompt"
    style = config.prompt_style
    return Asked(encode(target.tokenizer, target.vocab_size, sample.prompt, style))


def _new_tokens(name: str) -> int:
    if name in TASKS:
        return TASKS[name].new_tokens
    if name in ("demo_needle", NEEDLE):
        return NEEDLE_TOKENS
    return DEMO_TOKENS if name in SUITE else RELEASE_TOKENS


def samples(name: str, config: EvalConfig, tokenizer: Tokenizer) -> Iterator[Sample]:
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
    task: Task, number: int, row: Row, config: EvalConfig, tokenizer: Tokenizer
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
