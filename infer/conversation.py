"""Turns of a user and a model, over an engine of one slot."""

import argparse
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from longspec_jax import LongSpec
from longspec_jax.cli import counted
from longspec_jax.generation.inputs import encode_text
from longspec_jax.generation.text import RequestOutput

from .arguments import has_penalty, sampling_options
from .prompts import check_text, encode
from .wording import command_words

MOST_TOKENS = 16384
"""Tokens of a conversation where the user names no number, if the target has as many positions."""


class Turn(NamedTuple):
    """What a user has written, and what the model has answered."""

    user: str
    answer: str


@dataclass
class Counts:
    """What an answer took."""

    tokens: int = 0
    rounds: int = 0
    cached: int = 0
    """Tokens of the prompt that were not prefilled anew."""

    def add(self, output: RequestOutput) -> None:
        """Count what a step has added."""
        self.tokens += len(output.tokens)
        self.rounds += len(output.rounds)
        self.cached += output.cached_tokens

    def described(self, seconds: float) -> str:
        """For reading; the seconds are those after the first token."""
        words = [counted(self.tokens, "token")]
        if self.rounds:
            behind = self.tokens - 1
            words.append(
                f"{behind / self.rounds:.2f} per target pass, {behind / seconds:.0f} a second"
            )
        if self.cached:
            words.append(f"{self.cached} of the prompt reused")
        return ", ".join(words)


class Conversation:
    """A conversation, which is a prompt that grows with every turn.

    With a chat template turns are messages. Without one they are a single text: the user's line, a
    line feed, what the model wrote after it, and so on.
    """

    def __init__(self, spec: LongSpec, arguments: argparse.Namespace):
        """Make the engine.

        Args:
          spec: the loaded models.
          arguments: of the command.

        Raises:
          ValueError: if there is no tokenizer, or an option has no effect with this target.
        """
        config, self._tokenizer = spec.target_config, spec.tokenizer
        if self._tokenizer is None:
            raise ValueError(
                f"--target {arguments.target} came without a tokenizer: no text, no chat"
            )
        self.is_plain = arguments.prompt_style is None and not self._tokenizer.chat_template
        """Whether the turns are a single text."""
        if self.is_plain and arguments.system is not None:
            raise ValueError(
                "--system is a message of a chat template and this target has none; name a "
                "--prompt_style, or write it as your first line"
            )
        self.max_tokens = min(arguments.max_model_len or MOST_TOKENS, config.max_positions)
        if arguments.max_model_len and arguments.max_model_len > self.max_tokens:
            raise ValueError(
                f"--max_model_len {arguments.max_model_len} is more than the target's "
                f"{config.max_positions} positions; name fewer"
            )
        self._vocab_size, self._positions = config.vocab_size, config.max_positions
        self._arguments, self._options = arguments, sampling_options(arguments)
        self.turns: list[Turn] = []
        self._id: int | None = None
        with command_words():
            self._engine = spec.engine(
                max_num_seqs=1,
                max_model_len=self.max_tokens,
                tree=arguments.tree if spec.drafts else None,
                adaptive=arguments.adaptive,
                enable_penalties=has_penalty(arguments),
                prefixes=True,  # A turn prefills what the one before it has not.
            )

    def ask(self, text: str) -> int:
        """Queue a turn of the user's; :meth:`outputs` answers it, and :meth:`keep` makes it last.

        Returns:
          Tokens of the conversation, the new turn included.

        Raises:
          ValueError: if the conversation and its answer would outgrow the engine.
        """
        with command_words():
            tokens = self._tokens(check_text(text, "your message"))
            new = self._arguments.max_new_tokens
            if len(tokens) + new > self.max_tokens:
                remedies = "/reset begins anew" if self.turns else "write less"
                if self.turns:
                    remedies = (
                        f"/forget N drops the N oldest of {len(self.turns)} turns, {remedies}"
                    )
                raise ValueError(
                    f"{counted(len(tokens), 'token')} and --max_new_tokens {new} for the answer "
                    f"exceed the {self.max_tokens} of --max_model_len; {remedies}"
                )
            self._cancel()
            self._id = self._engine.submit(tokens, **self._options)
        return len(tokens)

    def _cancel(self) -> None:
        if self._id is not None:
            self._engine.cancel(self._id)

    def outputs(self, stop: threading.Event) -> Iterator[RequestOutput]:
        """The answer as it comes.

        Args:
          stop: ends the answer when it is set.

        Raises:
          FloatingPointError: if the target's logits are not finite.
          RuntimeError: if the answer cannot be read.
        """
        while self._engine.busy:
            if stop.is_set():
                self._cancel()
                return
            for output in self._engine.step():
                yield output
                if output.reason is not None:
                    raise RuntimeError(f"the answer cannot go on: {output.reason}")
                if output.finish == "error":
                    raise FloatingPointError(
                        "the target's logits are not finite, so that no token can be drawn; try "
                        "--dtype float32, or another checkpoint"
                    )

    def keep(self, turn: Turn) -> None:
        """Make a turn a part of the conversation."""
        self.turns.append(turn)

    def forget(self, count: int) -> None:
        """Drop the oldest turns.

        Raises:
          ValueError: if there are fewer.
        """
        if not 1 <= count <= len(self.turns):
            raise ValueError(
                f"/forget {count}: the conversation has {counted(len(self.turns), 'turn')}"
            )
        del self.turns[:count]

    def close(self) -> None:
        """Let go of all arrays."""
        self._engine.close()

    def _tokens(self, text: str) -> Sequence[int]:
        """The prompt that ends with this turn."""
        if self.is_plain:
            document = "".join(f"{turn.user}\n{_line(turn.answer)}" for turn in self.turns)
            return encode_text(self._tokenizer, f"{document}{text}\n")
        messages = [] if self._arguments.system is None else [("system", self._arguments.system)]
        for turn in self.turns:
            messages += [("user", turn.user), ("assistant", turn.answer)]
        item = [{"role": role, "content": said} for role, said in (*messages, ("user", text))]
        style = self._arguments.prompt_style
        return encode(self._tokenizer, self._vocab_size, item, style, self._positions)


def _line(text: str) -> str:
    return text if text.endswith("\n") or not text else f"{text}\n"
