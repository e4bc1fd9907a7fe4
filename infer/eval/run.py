"""The run: every method over every sample at every temperature, each result written as it ends."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from longspec_jax import LongSpec, cli
from longspec_jax.generation.comparison import first_difference

from .decoders import Decoded, Decoder, Request
from .prepare import PreparedTask, Prompt
from .progress import Part, Progress, part_line
from .records import PLAIN_METHOD, Divergence, End, Key, SampleRecord
from .run_folder import Writer


@dataclass(frozen=True)
class Plan:
    """What is run, beside models and prompts."""

    temperatures: Sequence[float]
    seeds: Sequence[int]
    top_k: int
    top_p: float
    batch: int
    repetitions: int
    """Runs of every call, of which the one of median seconds is kept."""
    stop_tokens: Sequence[int]
    breakdown: int
    """Rounds of every call whose parts are timed; 0 for none."""
    rounds: int
    """Rounds whose trees are kept; 0 for none."""
    cases: int
    """Samples of every task whose rounds are kept."""


class EvalRun:
    """Decodes what is not decoded yet."""

    def __init__(
        self,
        plan: Plan,
        decoders: Sequence[Decoder],
        spec: LongSpec,
        done: Sequence[SampleRecord],
        writer: Writer,
        progress: Progress,
    ):
        """Begin with what an earlier run has left.

        Args:
          plan: what is run.
          decoders: the methods, plain decoding before those that are compared with it.
          spec: the target, to measure gaps with.
          done: records of an earlier run.
          writer: where records go.
          progress: where to show them.
        """
        self._plan, self._decoders, self._spec = plan, decoders, spec
        self._writer, self._progress = writer, progress
        self._records = {record.key: record for record in done}
        self._lock = threading.Lock()
        self._closed = False

    @property
    def records(self) -> list[SampleRecord]:
        """All records so far."""
        return list(self._records.values())

    def close(self) -> None:
        """Leave the run: nothing is written from now on."""
        with self._lock:
            self._closed = True

    def work(self, tasks: Sequence[PreparedTask]) -> None:
        """Run all that is missing."""
        for task in tasks:
            for temperature in self._plan.temperatures:
                for decoder in self._decoders:
                    self._part(task, temperature, decoder)

    def _part(self, task: PreparedTask, temperature: float, decoder: Decoder) -> None:
        """One method over one task."""
        seeds = self._plan.seeds if temperature > 0 else self._plan.seeds[:1]
        keys = [
            Key(task.name, prompt.sample, decoder.name, temperature, seed)
            for seed in seeds
            for prompt in task.prompts
        ]
        part = Part(task.name, decoder.name, temperature, len(keys))
        before = self._of(keys)
        self._progress.at(part, before)
        for seed in seeds:
            for group in self._groups(task, decoder, temperature, seed):
                self._group(task, group, temperature, seed, decoder)
                self._progress.at(part, self._of(keys))
        found = self._of(keys)
        if len(found) > len(before):
            plain = [
                Key(key.task, key.sample, PLAIN_METHOD, key.temperature, key.seed) for key in keys
            ]
            self._progress.line(part_line(part, found, self._of(plain)))

    def _of(self, keys: Sequence[Key]) -> list[SampleRecord]:
        return [self._records[key] for key in keys if key in self._records]

    def _groups(
        self, task: PreparedTask, decoder: Decoder, temperature: float, seed: int
    ) -> Iterator[tuple[Prompt, ...]]:
        """Groups of prompts that are decoded together, but for those that are through.

        Groups are those of an uninterrupted run, so that it does not matter where one was killed.
        """
        size = self._plan.batch
        for start in range(0, len(task.prompts), size):
            group = task.prompts[start : start + size]
            keys = [
                Key(task.name, prompt.sample, decoder.name, temperature, seed) for prompt in group
            ]
            if not all(key in self._records for key in keys):
                yield group

    def _group(
        self,
        task: PreparedTask,
        group: Sequence[Prompt],
        temperature: float,
        seed: int,
        decoder: Decoder,
    ) -> None:
        """Decode a group and write its records."""
        plan = self._plan
        request = Request(
            temperature,
            plan.top_k,
            plan.top_p,
            seed,
            [prompt.new_tokens for prompt in group],
            plan.stop_tokens,
        )
        prompts = [prompt.tokens for prompt in group]
        runs = [
            decoder.decode(prompts, request, self._on_activity) for _ in range(plan.repetitions)
        ]
        found = sorted(runs, key=lambda run: run.decode_s)[len(runs) // 2]
        breakdown = decoder.breakdown(prompts, request, plan.breakdown) if plan.breakdown else None
        call = f"{task.name}/{group[0].sample}/{decoder.name}/{temperature:g}/{seed}"
        records = []
        for row, (prompt, decoded) in enumerate(zip(group, found.rows, strict=True)):
            key = Key(task.name, prompt.sample, decoder.name, temperature, seed)
            same, divergence = self._compared(key, prompt, decoded, request.of_row(row), decoder)
            ended: End = "eos" if decoded.tokens[-1] in plan.stop_tokens else "length"
            records.append(
                SampleRecord(
                    task=task.name,
                    sample=prompt.sample,
                    method=decoder.name,
                    temperature=temperature,
                    seed=seed,
                    setting=decoder.setting,
                    call=call,
                    batch=len(group),
                    prompt_tokens=len(prompt.tokens),
                    original_tokens=prompt.original_tokens,
                    new_tokens=len(decoded.tokens),
                    target_passes=decoded.target_passes,
                    emitted_by_round=decoded.emitted_by_round,
                    accepted_by_round=decoded.accepted_by_round,
                    prefill_s=found.prefill_s,
                    decode_s=found.decode_s,
                    compile_s=found.compile_s,
                    breakdown=breakdown,
                    tokens=decoded.tokens,
                    text=decoded.text,
                    references=prompt.references,
                    identical_to_plain=same,
                    divergence=divergence,
                    ended=ended,
                    **self._seen(task, prompt, decoded, request.of_row(row), decoder),
                )
            )
        self._keep(records)

    def _keep(self, records: Sequence[SampleRecord]) -> None:
        with self._lock:
            if self._closed:
                raise cli.Closed
            # A call that was on file in part has been decoded whole again.
            fresh = [record for record in records if record.key not in self._records]
            self._writer.add(fresh)
            self._records |= {record.key: record for record in fresh}

    def _on_activity(self, activity: Any) -> None:
        if self._closed:
            raise cli.Closed
        self._progress.activity(activity)

    def _compared(
        self, key: Key, prompt: Prompt, decoded: Decoded, request: Request, decoder: Decoder
    ) -> tuple[bool | None, Divergence | None]:
        """Whether the tokens are plain decoding's, and where they part."""
        plain = self._records.get(
            Key(key.task, key.sample, PLAIN_METHOD, key.temperature, key.seed)
        )
        alike = decoder.draws_like_plain(key.temperature)
        if plain is None or key.method == PLAIN_METHOD or not alike:
            return None, None
        index = first_difference(plain.tokens, decoded.tokens)
        if index is None:
            return True, None
        gap = None
        if index < min(len(plain.tokens), len(decoded.tokens)):
            gap = self._spec.score_gap(
                [*prompt.tokens, *plain.tokens[:index]],
                *(plain.tokens[index], decoded.tokens[index]),
                max_new_tokens=1,
                **request.options,
            )
        return False, Divergence(index, gap)

    def _seen(
        self,
        task: PreparedTask,
        prompt: Prompt,
        decoded: Decoded,
        request: Request,
        decoder: Decoder,
    ) -> dict[str, Any]:
        """The text by token and the rounds as trees, of the samples that they are kept of."""
        if not self._plan.rounds or prompt not in task.prompts[: self._plan.cases]:
            return {}
        emitted = decoded.emitted_by_round[: self._plan.rounds]
        return {
            "pieces": decoder.pieces(prompt.tokens, decoded.tokens),
            "rounds": decoder.trees(prompt.tokens, request, emitted),
        }
