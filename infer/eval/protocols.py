"""From a sample to the tokens of its prompt, as a published evaluation does it.

``LongSpecProtocol`` is the LongSpec release's: its own chat format in one text, prompts between two
bounds, all others left out, 1024 new tokens. ``LongBenchProtocol`` is LongBench's (version 1): long
prompts lose their middle, and the model's chat format is put around what is left, but for code.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..prompts import STYLES, encode, release_turns
from .samples import Sample
from .tasks import Task

RELEASE_LEAST, RELEASE_MARGIN = 1200, 2000
"""The release keeps prompts of more tokens than the one, and the other below the model's range."""
LONGBENCH_LIMITS = {4096: 3500, 8192: 7500, 16384: 15500, 32768: 31500}
"""Longest prompts by a model's range, as LongBench publishes them."""
LONGBENCH_MARGIN = 1268
"""Tokens that LongBench leaves a model of 32k beyond the prompt; taken for other ranges."""
RAW = "raw"
"""The style of a prompt without a chat format."""


@dataclass(frozen=True)
class Ready:
    """The tokens of a prompt."""

    tokens: list[int]
    original_tokens: int
    """Had nothing been cut out."""


@dataclass(frozen=True)
class LeftOut:
    """A prompt that is not decoded."""

    original_tokens: int
    reason: str


class EvalProtocol(Protocol):
    """How samples become prompts."""

    def new_tokens(self, task: Task) -> int:
        """Most new tokens of a task's samples."""
        ...

    def prompt(self, task: Task, sample: Sample) -> Ready | LeftOut:
        """A sample's tokens, or why it is left out."""
        ...


@dataclass(frozen=True)
class LongSpecProtocol:
    """The LongSpec release's."""

    tokenizer: Any
    least: int
    """Prompts of so many tokens and fewer are left out, in tasks with long prompts."""
    most: int
    """Prompts of more tokens are left out."""

    @classmethod
    def of(
        cls, tokenizer: Any, positions: int, least: int | None, most: int | None
    ) -> "LongSpecProtocol":
        """With the release's own bounds where none are given."""
        least = RELEASE_LEAST if least is None else least
        return cls(tokenizer, least, max(positions - RELEASE_MARGIN, 1) if most is None else most)

    def new_tokens(self, task: Task) -> int:
        """Most new tokens of a task's samples."""
        return task.release_tokens

    def prompt(self, task: Task, sample: Sample) -> Ready | LeftOut:
        """The whole prompt, if its length is within the bounds."""
        wording = task.release
        text = wording.whole(sample.fields)
        if not task.books or task.chat:
            text = release_text(self.tokenizer, wording.asked(sample.fields), wording.answer)
        tokens = self.tokenizer(text)["input_ids"]
        least = self.least if task.long else 0
        if len(tokens) <= least:
            return LeftOut(len(tokens), f"no more than {least} tokens, which the protocol skips")
        if len(tokens) > self.most:
            return LeftOut(len(tokens), f"more than {self.most} tokens, which the protocol skips")
        return Ready(tokens, len(tokens))


@dataclass(frozen=True)
class LongBenchProtocol:
    """LongBench's."""

    tokenizer: Any
    vocab_size: int
    style: str
    """A chat format of :data:`infer.prompts.STYLES`, or ``raw`` for none."""
    most: int
    """Longer prompts lose their middle."""

    @classmethod
    def of(
        cls, tokenizer: Any, vocab_size: int, positions: int, style: str | None, most: int | None
    ) -> "LongBenchProtocol":
        """With LongBench's own limit where none is given.

        Raises:
          ValueError: for a model without a chat format, and no style.
        """
        if style is None:
            if not getattr(tokenizer, "chat_template", None):
                raise ValueError(
                    "--protocol=longbench asks in the model's chat format, and the target's "
                    f"tokenizer has none; choose --prompt_style={', '.join([*STYLES, RAW])}"
                )
            style = "native"
        limit = LONGBENCH_LIMITS.get(positions, max(positions - LONGBENCH_MARGIN, 2))
        return cls(tokenizer, vocab_size, style, limit if most is None else most)

    def new_tokens(self, task: Task) -> int:
        """Most new tokens of a task's samples."""
        return task.longbench_tokens

    def prompt(self, task: Task, sample: Sample) -> Ready | LeftOut:
        """The prompt without its middle if it is too long; none is left out."""
        text = task.longbench.whole(sample.fields)
        tokens = self.tokenizer(text)["input_ids"]
        removed = 0
        if len(tokens) > self.most:
            half = self.most // 2
            removed = len(tokens) - 2 * half
            first, last = tokens[:half], tokens[len(tokens) - half :]
            text = "".join(
                self.tokenizer.decode(part, skip_special_tokens=True) for part in (first, last)
            )
        style = None if self.style == RAW or not task.chat else self.style
        found = encode(self.tokenizer, self.vocab_size, text, style)
        return Ready(found, len(found) + removed)


def release_text(tokenizer: Any, question: str, answer: str) -> str:
    """The release's chat format around a question, as one text: ChatML for Qwen, its own else."""
    turns = release_turns(tokenizer, [{"role": "user", "content": question}])
    return "".join([*turns, answer])


def as_given(tokenizer: Any, vocab_size: int, sample: Sample, style: str | None) -> Ready:
    """The tokens of a prompt that is taken as it is, without a protocol's wording or bounds.

    Args:
      tokenizer: a transformers tokenizer.
      vocab_size: width of the target's logits.
      sample: with a prompt.
      style: chat format, by its name; text without one stays text.
    """
    tokens = encode(tokenizer, vocab_size, sample.prompt, None if style == RAW else style)
    return Ready(tokens, len(tokens))


def first_tokens(tokenizer: Any, text: str, count: int) -> str | None:
    """The text of so many first tokens; None if there are not as many."""
    tokens: Sequence[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(tokens) < count:
        return None
    return tokenizer.decode(tokens[:count], skip_special_tokens=True)
