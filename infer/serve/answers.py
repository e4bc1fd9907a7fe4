"""Answers in OpenAI's format: bodies, and chunks of streams, of what rows have gained.

:class:`TextFormat` and :class:`ChatFormat` write the choices of
``/v1/completions`` and ``/v1/chat/completions``. Nothing here waits, and nothing knows HTTP.
"""

import json
import secrets
import time
from collections.abc import Container
from dataclasses import dataclass, field, replace
from typing import Any

from longspec_jax.generation.requests import RequestOutput

from .gains import LONGEST_RUN, Answer, TokenText, metrics_of, rounds_of
from .protocol import Call

DONE = b"data: [DONE]\n\n"
"""The last event of a stream."""


def json_bytes(value: Any) -> bytes:
    """Compact JSON in UTF-8; halves of surrogate pairs, which have no UTF-8, become ``?``."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


def event(value: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + json_bytes(value) + b"\n\n"


class TextFormat:
    """Choices of ``/v1/completions``."""

    prefix, whole, part = "cmpl", "text_completion", "text_completion"
    """Of the answer's id, and the ``object`` of a body and of a chunk."""

    def __init__(self, text_of: TokenText, special: Container[int] = ()) -> None:
        """Bind what writes tokens; offsets do not count the special ones."""
        self._text_of, self._special = text_of, special

    def choice(self, index: int, answer: Answer, call: Call) -> dict[str, Any]:
        """Text, log-probabilities and finish reason."""
        gain = answer.gain
        if call.max_tokens == 0:  # One token was generated, because no fewer can be.
            gain = replace(gain, tokens=(), logprobs=(), text="", finish="length")
        found = self._choice(index, answer.echoed + gain.text, gain.finish)
        return {**found, "logprobs": self._logprobs(answer, gain, call)}

    def opening(self, index: int, answer: Answer) -> None:
        """None: an echoed prompt comes with the first tokens."""

    def delta(self, index: int, answer: Answer, gain: RequestOutput, call: Call) -> dict[str, Any]:
        """Text and log-probabilities."""
        first = len(answer.gains) == 1
        if call.max_tokens == 0:
            gain = replace(gain, tokens=(), logprobs=(), text="")
        found = self._choice(index, answer.echoed * first + gain.text, None)
        return {**found, "logprobs": self._logprobs(answer, gain, call)}

    def closing(self, index: int, finish: str) -> dict[str, Any]:
        """The finish reason."""
        return {**self._choice(index, "", finish), "logprobs": None}

    def _choice(self, index: int, text: str, finish: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "finish_reason": finish}

    def _logprobs(self, answer: Answer, gain: RequestOutput, call: Call) -> dict[str, Any] | None:
        """Lists with an entry a token; the prompt's come first where it is echoed."""
        if call.logprobs is None:
            return None
        tokens, entries = gain.tokens, gain.logprobs
        if gain.prompt_logprobs is not None:
            tokens, entries = (*answer.prompt, *tokens), (*gain.prompt_logprobs, *entries)
        texts = [self._text_of(token) for token in tokens]
        found: dict[str, list[Any]] = {
            "tokens": texts,
            "token_logprobs": [entry and entry.logprob for entry in entries],
            "top_logprobs": [
                entry and self._top(text, entry, call.logprobs)
                for text, entry in zip(texts, entries, strict=True)
            ],
            "text_offset": [],
        }
        for token, text in zip(tokens, texts, strict=True):
            found["text_offset"].append(answer.offset)
            answer.offset += 0 if token in self._special else len(text)
        return found

    def _top(self, text: str, entry: Any, alternatives: int) -> dict[str, float]:
        """Log-probabilities by text; of tokens with one text, that of the likeliest."""
        top = {self._text_of(id): value for id, value in reversed(entry.top[:alternatives])}
        return {text: entry.logprob, **top}


class ChatFormat:
    """Choices of ``/v1/chat/completions``."""

    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, text_of: TokenText) -> None:
        self._text_of = text_of

    def choice(self, index: int, answer: Answer, call: Call) -> dict[str, Any]:
        """Message, log-probabilities and finish reason."""
        gain = answer.gain
        return {
            "index": index,
            "message": {"role": "assistant", "content": gain.text, "refusal": None},
            "logprobs": self._logprobs(gain, call),
            "finish_reason": gain.finish,
        }

    def opening(self, index: int, answer: Answer) -> dict[str, Any]:
        """The role."""
        return self._delta(index, {"role": "assistant", "content": ""})

    def delta(self, index: int, answer: Answer, gain: RequestOutput, call: Call) -> dict[str, Any]:
        """Text and log-probabilities."""
        found = self._delta(index, {"content": gain.text})
        return {**found, "logprobs": self._logprobs(gain, call)}

    def closing(self, index: int, finish: str) -> dict[str, Any]:
        """The finish reason."""
        return {**self._delta(index, {}), "finish_reason": finish}

    def _delta(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _logprobs(self, gain: RequestOutput, call: Call) -> dict[str, Any] | None:
        if call.logprobs is None:
            return None
        content = [
            {
                **self._token(token, entry.logprob),
                "top_logprobs": [
                    self._token(id, value) for id, value in entry.top[: call.logprobs]
                ],
            }
            for token, entry in zip(gain.tokens, gain.logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _token(self, id: int, logprob: float) -> dict[str, Any]:
        text = self._text_of(id)
        return {"token": text, "logprob": logprob, "bytes": [*text.encode("utf-8", "replace")]}


@dataclass
class Writer:
    """Writes the body or the chunks of one call."""

    call: Call
    format: TextFormat | ChatFormat
    model: str
    answers: list[Answer]
    text_of: TokenText
    sources: tuple[str, ...] = ()
    """Names of the drafters that propose."""
    id: str = ""
    created: int = 0
    tails: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """The last tokens of every row that events have told of."""

    def __post_init__(self) -> None:
        """Name the answer."""
        self.id = self.id or f"{self.format.prefix}-{secrets.token_hex(12)}"
        self.created = self.created or int(time.time())

    def body(self) -> dict[str, Any]:
        """The whole answer."""
        found = {
            **self._head(self.format.whole),
            "choices": [
                self.format.choice(index, answer, self.call)
                for index, answer in enumerate(self.answers)
            ],
            "usage": self._usage(),
            "metrics": self._metrics(),
        }
        if self.call.rounds:
            found["longspec"] = [
                rounds_of(answer.gain, self.text_of, index, (), self.sources)
                for index, answer in enumerate(self.answers)
            ]
        return found

    def opening(self) -> bytes:
        """The events before the first token."""
        choices = [self.format.opening(*one) for one in enumerate(self.answers)]
        return b"".join(self._chunk(choice) for choice in choices if choice is not None)

    def events(self, row: int, gain: RequestOutput) -> bytes:
        """The events of what a row has gained, which its answer already holds.

        A token whose text is not complete makes none, unless there is something else to say.
        """
        more, answer, found = {}, self.answers[row], b""
        if self.call.rounds:
            before = self.tails.get(row, ())
            more["longspec"] = rounds_of(gain, self.text_of, row, before, self.sources)
            self.tails[row] = (*before, *gain.tokens)[-LONGEST_RUN:]
        first = len(answer.gains) == 1
        shown = gain.text or (first and answer.echoed) or self.call.logprobs is not None
        if shown or more or self.call.continuous_usage:
            found += self._chunk(self.format.delta(row, answer, gain, self.call), more)
        if gain.finish is not None:
            finish = "length" if self.call.max_tokens == 0 else gain.finish
            found += self._chunk(self.format.closing(row, finish))
        return found

    def ending(self) -> bytes:
        """The last events: the usage, if it is wanted, and ``[DONE]``."""
        if not self.call.include_usage:
            return DONE
        usage = {"usage": self._usage(), "metrics": self._metrics()}
        return event({**self._head(self.format.part), "choices": [], **usage}) + DONE

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _chunk(self, choice: dict[str, Any], more: dict[str, Any] | None = None) -> bytes:
        usage = {}
        if self.call.continuous_usage:
            usage["usage"] = self._usage()
        elif self.call.include_usage:
            usage["usage"] = None
        head = self._head(self.format.part)
        return event({**head, "choices": [choice], **usage, **(more or {})})

    def _usage(self) -> dict[str, Any]:
        """Tokens of prompts and answers. A prompt counts once for all its choices."""
        prompts = self.answers[:: self.call.n]
        new = 0 if self.call.max_tokens == 0 else sum(one.new for one in self.answers)
        prompt = sum(len(one.prompt) for one in prompts)
        cached = sum(gain.cached_tokens for one in prompts for gain in one.gains[:1])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _metrics(self) -> dict[str, Any] | None:
        """Acceptance and times, in the fields of vLLM; None for several rows."""
        return metrics_of(self.answers[0]) if len(self.answers) == 1 else None
