"""Answers in OpenAI's format: bodies, and chunks of streams, of what rows have gained.

:class:`TextFormat` and :class:`ChatFormat` write the choices of
``/v1/completions`` and ``/v1/chat/completions``. Nothing here waits, and nothing knows HTTP.
"""

import json
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any

from longspec_jax.decoding.logprobs import PromptLogprobs, TokenLogprob
from longspec_jax.decoding.report import RoundTree
from longspec_jax.drafters.base import proposers
from longspec_jax.generation.text import RequestOutput

from .calls import Call
from .messages import MessageReader
from .speech import Said
from .streaming import LONGEST_RUN, Answer, TokenText, TokenTexts, completed_text

DONE = b"data: [DONE]\n\n"
"""The last event of a stream."""


LONGEST_GAIN = 256
"""Tokens whose rounds and log-probabilities an event loop writes at once, in some 10 ms."""
SLICE = 64
"""Items of a list that are written at once: :mod:`json` lets no other thread run meanwhile."""


def json_bytes(value: object) -> bytes:
    """Compact JSON in UTF-8; halves of surrogate pairs, which have no UTF-8, become ``?``."""
    return _json(value).encode("utf-8", "replace")


def long_json_bytes(value: object) -> bytes:
    """The same in parts, for what is large: the other threads run between them."""
    return b"".join(part.encode("utf-8", "replace") for part in _parts(value))


def is_long(gain: RequestOutput) -> bool:
    """Whether writing a gain takes a while: for an event loop to leave it to another thread.

    Such as that of a reader who comes back after minutes, or of an echoed prompt.
    """
    return gain.prompt_logprobs is not None or len(gain.tokens) > LONGEST_GAIN


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=_listed)


def _listed(value: object) -> list[Any]:
    """The items of what is made while it is written."""
    if isinstance(value, Iterator):
        return [*value]
    raise TypeError(f"{type(value).__name__} is nothing that JSON has")


def _parts(value: object) -> Iterator[str]:
    opening = ""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            opening = f"{',' if opening else '{'}{_json(name)}:"
            yield opening
            yield from _parts(inner)
        yield "}"
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for inner in value:
            opening = "," if opening else "["
            yield opening
            yield from _parts(inner)
        yield "]"
    elif isinstance(value, list | Iterator):
        items = iter(value)
        while part := [*islice(items, SLICE)]:
            yield ("," if opening else "[") + _json(part)[1:-1]
            opening = ","
        yield "]" if opening else "[]"
    else:
        yield _json(value)


def event(value: object, *, long: bool = False) -> bytes:
    """A server-sent event; a ``long`` one is written in parts."""
    return b"data: " + (long_json_bytes if long else json_bytes)(value) + b"\n\n"


def ending(finish: str | None, reason: str | None) -> dict[str, Any]:
    """How a choice has ended; with ``error`` it says why, as OpenRouter's choices do."""
    return {"finish_reason": finish, **({"error": {"message": reason}} if reason else {})}


GOES_ON = ending(None, None)


class TextFormat:
    """Choices of ``/v1/completions``."""

    prefix, whole, part = "cmpl", "text_completion", "text_completion"
    """Of the answer's id, and the ``object`` of a body and of a chunk."""

    def __init__(self, texts: TokenTexts, alternatives: int | None) -> None:
        """Bind the texts of tokens, and how many alternatives of each are reported, if any are."""
        self._texts, self._alternatives = texts, alternatives

    def choice(
        self, index: int, answer: Answer, gain: RequestOutput, said: Said, end: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The choice of a whole answer: text, log-probabilities, and the end as of `ending`."""
        return {**self.delta(index, answer, gain, said, first=True), **end}

    def opening(self, index: int) -> None:
        """None: an echoed prompt comes with the first tokens."""

    def delta(
        self, index: int, answer: Answer, gain: RequestOutput, said: Said, *, first: bool
    ) -> dict[str, Any]:
        """Text and log-probabilities of a gain, after the echoed prompt if it is the first."""
        scores = self._logprobs(answer, gain)
        text = answer.echoed * first + said.content
        return {"index": index, "text": text, "logprobs": scores, **GOES_ON}

    def closing(self, index: int, end: Mapping[str, Any]) -> dict[str, Any]:
        """The end, as in :func:`ending`."""
        return {"index": index, "text": "", "logprobs": None, **end}

    def _logprobs(self, answer: Answer, gain: RequestOutput) -> dict[str, Any] | None:
        """Lists with an entry a token; the prompt's come first where it is echoed."""
        if self._alternatives is None:
            return None
        own: Iterable[TokenLogprob | None] = gain.logprobs
        tokens, entries, offsets = gain.tokens, own, list[int]()
        if (prompt := gain.prompt_logprobs) is not None:
            tokens, entries = (*answer.prompt, *tokens), chain(prompt, own)
            bare = prompt.without_alternatives() if isinstance(prompt, PromptLogprobs) else prompt
            own = chain(bare, own)
            offsets = self._offsets_of_prompt(answer)
        texts = [self._texts(token) for token in tokens]
        return {
            "tokens": texts,
            "token_logprobs": [entry and entry.logprob for entry in own],
            # Made while they are written: of a long prompt all together take a gigabyte.
            "top_logprobs": (
                entry and self._top(text, entry) for text, entry in zip(texts, entries, strict=True)
            ),
            "text_offset": offsets + [self._offset(answer, token) for token in gain.tokens],
        }

    def _offsets_of_prompt(self, answer: Answer) -> list[int]:
        """Counted from the end of the echoed text, whose tokens may have one more space."""
        found = [self._offset(answer, token) for token in answer.prompt]
        excess = answer.offsets.characters - len(answer.echoed)
        if not answer.offsets.run:
            answer.offsets.characters -= excess
            found = [max(0, at - excess) for at in found]
        return found

    def _offset(self, answer: Answer, token: int) -> int:
        """Where a token begins, and where the next one does if it adds something to the text."""
        if token in self._texts.special:
            return answer.offsets.here(self._texts)
        return answer.offsets.add(token, self._texts)

    def _top(self, text: str, entry: TokenLogprob) -> dict[str, float]:
        """Log-probabilities by text; of tokens with one text, that of the likeliest."""
        top = {self._texts(id): value for id, value in reversed(entry.top[: self._alternatives])}
        return {text: entry.logprob, **top}


class ChatFormat:
    """Choices of ``/v1/chat/completions``; methods as in :class:`TextFormat`."""

    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, texts: TokenTexts, alternatives: int | None) -> None:
        self._texts, self._alternatives = texts, alternatives

    def choice(
        self, index: int, answer: Answer, gain: RequestOutput, said: Said, end: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Message, log-probabilities and finish reason."""
        text = said.content if said.content or not said else None
        message = {"role": "assistant", "content": text, "refusal": None, **_beside(said)}
        if said.calls:
            message["tool_calls"] = [call.told for call in said.calls]
        return {"index": index, "message": message, "logprobs": self._logprobs(gain), **end}

    def opening(self, index: int) -> dict[str, Any]:
        """The role."""
        return self._chunk(index, {"role": "assistant", "content": ""})

    def delta(
        self, index: int, answer: Answer, gain: RequestOutput, said: Said, *, first: bool
    ) -> dict[str, Any]:
        """Text, reasoning, calls and log-probabilities.

        A call has its place in all deltas, and its name in the first: clients append what comes
        again.
        """
        delta: dict[str, object] = {"content": said.content} if said.content or not said else {}
        delta |= _beside(said)
        if said.calls:
            delta["tool_calls"] = [{"index": call.place, **call.told} for call in said.calls]
        return self._chunk(index, delta) | {"logprobs": self._logprobs(gain)}

    def closing(self, index: int, end: Mapping[str, Any]) -> dict[str, Any]:
        """The end."""
        return {**self._chunk(index, {}), **end}

    def _chunk(self, index: int, delta: Mapping[str, object]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, **GOES_ON}

    def _logprobs(self, gain: RequestOutput) -> dict[str, Any] | None:
        if self._alternatives is None:
            return None
        content = (
            self._token(token, entry.logprob)
            | {"top_logprobs": [self._token(*one) for one in entry.top[: self._alternatives]]}
            for token, entry in zip(gain.tokens, gain.logprobs, strict=True)
        )
        return {"content": content, "refusal": None}

    def _token(self, id: int, logprob: float) -> dict[str, Any]:
        return {"token": self._texts(id), "logprob": logprob, "bytes": self._texts.bytes_of(id)}


def _beside(said: Said) -> dict[str, str]:
    """Reasoning under both names that clients read."""
    thought = said.reasoning
    return {"reasoning": thought, "reasoning_content": thought} if thought else {}


@dataclass
class Writer:
    """Writes the body or the chunks of one call."""

    call: Call
    model: str
    answers: list[Answer]
    readers: list[MessageReader]
    """One for each answer."""
    texts: TokenTexts
    sources: tuple[str, ...] = ()
    """Names of the drafters that propose."""
    accepted_only: bool = False
    """Show no nodes of trees but the accepted ones: the others may be of other people's texts."""
    tails: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """The last tokens of every row that events have told of."""

    def __post_init__(self) -> None:
        """Name the answer."""
        kind = ChatFormat if self.call.chat else TextFormat
        self.format: TextFormat | ChatFormat = kind(self.texts, self.call.alternatives)
        self.id, self.created = f"{kind.prefix}-{secrets.token_hex(12)}", int(time.time())

    def body(self) -> dict[str, Any]:
        """The whole answer."""
        choices = []
        for index, answer in enumerate(self.answers):
            gain = self._shown(answer.gain)
            said = self.readers[index].read(gain)
            choices.append(self.format.choice(index, answer, gain, said, self._end(index, gain)))
        usage = {"usage": self._usage(), "metrics": self._metrics()}
        found = {**self._head(self.format.whole), "choices": choices, **usage}
        if self.call.longspec.rounds:
            found["longspec"] = [
                self._rounds(answer.gain, index) for index, answer in enumerate(self.answers)
            ]
        return found

    def _end(self, row: int, gain: RequestOutput) -> dict[str, Any]:
        """How a row has ended that has been read."""
        called = gain.finish == "stop" and self.readers[row].calls
        return ending("tool_calls" if called else gain.finish, gain.reason)

    def _shown(self, gain: RequestOutput) -> RequestOutput:
        """What is shown of a gain. A call for no tokens has one, because no fewer can be."""
        if self.call.most_new != 0:
            return gain
        finish = None if gain.finish is None else "length"
        return replace(gain, tokens=(), logprobs=(), text="", finish=finish)

    def opening(self) -> bytes:
        """The events before the first token."""
        choices = map(self.format.opening, range(len(self.answers)))
        return b"".join(self._chunk(choice) for choice in choices if choice is not None)

    def events(self, row: int, gain: RequestOutput) -> bytes:
        """The events of what a row has gained, which its answer already holds.

        A token whose text is not complete makes none, unless there is something else to say.
        """
        more, answer, found = {}, self.answers[row], b""
        if self.call.longspec.rounds:
            before = self.tails.get(row, ())
            more["longspec"] = self._rounds(gain, row, before)
            self.tails[row] = (*before, *gain.tokens)[-LONGEST_RUN:]
        first, shown = answer.begins_with(gain), self._shown(gain)
        said = self.readers[row].read(shown)
        tells = said or (first and answer.echoed) or self.call.alternatives is not None
        if tells or more or self.call.stream_options.continuous_usage_stats:
            delta = self.format.delta(row, answer, shown, said, first=first)
            found += self._chunk(delta, more, long=is_long(gain))
        if gain.finish is not None:
            found += self._chunk(self.format.closing(row, self._end(row, shown)))
        return found

    def ending(self) -> bytes:
        """The last events: the usage, if it is wanted, and ``[DONE]``."""
        if not self.call.stream_options.include_usage:
            return DONE
        usage = {"usage": self._usage(), "metrics": self._metrics()}
        return event({**self._head(self.format.part), "choices": [], **usage}) + DONE

    def _rounds(
        self, gain: RequestOutput, row: int, before: tuple[int, ...] = ()
    ) -> dict[str, Any]:
        return rounds_of(
            gain, self.texts, row, before, self.sources, accepted_only=self.accepted_only
        )

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _chunk(
        self, choice: dict[str, Any], more: dict[str, Any] | None = None, *, long: bool = False
    ) -> bytes:
        usage = {}
        if self.call.stream_options.continuous_usage_stats:
            usage["usage"] = self._usage()
        elif self.call.stream_options.include_usage:
            usage["usage"] = None
        head = self._head(self.format.part)
        return event({**head, "choices": [choice], **usage, **(more or {})}, long=long)

    def _usage(self) -> dict[str, Any]:
        """Tokens of prompts and answers. A prompt counts once for all its choices."""
        prompts = self.answers[:: self.call.n]
        new = 0 if self.call.most_new == 0 else sum(one.new for one in self.answers)
        prompt = sum(len(one.prompt) for one in prompts)
        cached = sum(one.cached for one in prompts)
        found = {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        if any(reader.thinks for reader in self.readers):
            reasoning = sum(reader.reasoning_tokens for reader in self.readers)
            found["completion_tokens_details"] = {"reasoning_tokens": reasoning}
        return found

    def _metrics(self) -> dict[str, Any] | None:
        """Acceptance and times, in the fields of vLLM; None for several rows."""
        return metrics_of(self.answers[0]) if len(self.answers) == 1 else None


def metrics_of(answer: Answer) -> dict[str, Any]:
    """Acceptance and times of a row that has ended."""
    times = answer.times
    first = _milliseconds(times.arrived, times.first)
    decode = _milliseconds(times.first, times.last)
    whole = _milliseconds(times.arrived, times.last)
    between = answer.new - 1
    return {
        "speculative_decoding": acceptance_of(answer),
        "time_to_first_token_ms": first,
        "queue_time_ms": _milliseconds(times.arrived, times.started),
        "mean_itl_ms": decode / between if decode is not None and between > 0 else None,
        "tokens_per_second": 1000 * answer.new / whole if whole else None,
    }


def _milliseconds(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else round(1000 * (end - begin), 3)


def acceptance_of(answer: Answer) -> dict[str, Any] | None:
    """What the draft has given a row; None if it drafted nothing."""
    levels, proposed = answer.levels, answer.proposed
    rounds, accepted = len(answer.rounds), sum(answer.rounds)
    if not rounds or not proposed:
        return None
    counts = Counter(answer.rounds)
    return {
        "mean_acceptance_length": 1 + accepted / rounds,
        "draft_acceptance_rate": accepted / proposed,
        "acceptance_histogram": [counts[n] for n in range(max(levels, *counts) + 1)],
        "num_spec_steps": rounds,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": proposed,
        "num_spec_tokens": levels,
    }


def rounds_of(
    gain: RequestOutput,
    text_of: TokenText,
    row: int,
    before: Sequence[int] = (),
    sources: tuple[str, ...] = (),
    *,
    accepted_only: bool = False,
) -> dict[str, Any]:
    """The tokens of a row's gain and the rounds that they came from, for the page.

    Args:
      before: the last tokens before the gain, which may begin its first character.
      sources: names of the drafters; where there are several, each draft token says who proposed
        it.
      accepted_only: show no other nodes of a tree than those of the accepted path.
    """
    tokens, depth, ids = [], 0, [*before]
    proposed = gain.sources or gain.drafted
    for token, drafted, bits in zip(gain.tokens, gain.drafted, proposed, strict=True):
        depth = depth + 1 if drafted else 0
        ids.append(token)
        text = completed_text(text_of, ids[-LONGEST_RUN:])
        told = {"text": text, "id": token, "drafted": drafted, "depth": depth}
        by = {"source": proposers(sources, bits)} if drafted and len(sources) > 1 else {}
        tokens.append({**told, **by})
    rounds: list[dict[str, Any]] = [
        {"accepted": accepted, "tree": None} for accepted in gain.rounds
    ]
    for one, tree in zip(rounds, gain.trees, strict=False):
        reached = [node for node, parent in enumerate(tree.parents) if parent >= 0 or node == 0]
        one["tree"] = _tree_of(tree, tree.path if accepted_only else reached, text_of)
    return {"index": row, "tokens": tokens, "rounds": rounds}


def _tree_of(tree: RoundTree, kept: Sequence[int], text_of: TokenText) -> dict[str, Any]:
    """A round's tree by texts, of some nodes, the root among them."""
    place = {-1: -1, **{node: index for index, node in enumerate(kept)}}
    return {
        "tokens": [text_of(tree.tokens[node]) for node in kept],
        "parents": [place[tree.parents[node]] for node in kept],
        "draws": [text_of(tree.draws[node]) for node in kept],
        "path": [place[node] for node in tree.path],
    }
