"""The run: every method over every sample at every temperature, each result written at once."""

import argparse
import dataclasses
import shlex
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from longspec_jax import LongSpec, cli
from longspec_jax.cli import as_options
from longspec_jax.config.tree import PLAIN
from longspec_jax.embedded import DEMO
from longspec_jax.generation.comparison import first_difference
from longspec_jax.generation.endpoint import Endpoint
from longspec_jax.generation.result import ACCEPTANCE_DEFINITION
from longspec_jax.loading import load_tokenizer
from longspec_jax.ops.hardware import has_kernels
from longspec_jax.provenance import provenance
from longspec_jax.weights.hf import load_stop_tokens
from longspec_jax.weights.hf_config import target_config
from longspec_jax.weights.hub import local_model
from longspec_jax.weights.model_files import read_config

from ..arguments import is_demo
from .arguments import LONGSPEC
from .decoders import Decoder, Options, text_by_token
from .methods import JOINED, SERVED, by_kind, with_drafts
from .prepare import (
    LongBenchProtocol,
    LongSpecProtocol,
    PreparedTask,
    Prompt,
    Sources,
    Target,
    prepare,
)
from .progress import Part, Progress, part_line
from .records import (
    PLAIN_METHOD,
    SCHEMA,
    Divergence,
    Header,
    Key,
    SampleRecord,
    Setting,
    Writer,
    by_round,
)

KEPT = (
    "samples context min_prompt max_prompt prompt_style max_new_tokens top_p top_k ignore_eos "
    "revision draft_revision mesh prefill_chunk row_slots offload same_bits kv_dtype attention "
    "breakdown rounds cases repetitions"
).split()
"""Options that a continued run must repeat, beside those with a field in the header."""
DEFINITIONS = {
    "acceptance_length": ACCEPTANCE_DEFINITION,
    "tokens_per_second": "tokens of the decode rounds / their seconds, each call's seconds counted "
    "once; no prefill, no compilation",
    "speedup_over_plain": "tokens per second / those of plain decoding on the same samples",
    "identical_to_plain": "every token is that of plain decoding with the same seed",
}


class EvalRun:
    """Decodes the samples that have no record yet."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        decoders: Sequence[Decoder],
        spec: LongSpec | Endpoint,
        done: Sequence[SampleRecord],
        writer: Writer,
        progress: Progress,
        start: int = 0,
    ):
        self._arguments, self._decoders, self._spec = arguments, decoders, spec
        self._writer, self._progress = writer, progress
        self._start = start
        self._stop_tokens = () if arguments.ignore_eos else spec.stop_tokens
        self._records = {record.key: record for record in done}
        self._lock = threading.Lock()
        self._closed = False

    @property
    def records(self) -> list[SampleRecord]:
        """All records so far."""
        return list(self._records.values())

    def close(self) -> int:
        """Write nothing from now on; the number of records so far."""
        with self._lock:
            self._closed = True
            return len(self._records)

    def work(self, tasks: Sequence[PreparedTask]) -> None:
        """Run all that is missing."""
        for task in tasks:
            for temperature in self._arguments.temperature:
                for decoder in self._decoders:
                    self._part(task, temperature, decoder)

    def _part(self, task: PreparedTask, temperature: float, decoder: Decoder) -> None:
        """One method over one task.

        Groups of prompts are those of an uninterrupted run, wherever an earlier start was killed.
        """
        seeds = self._arguments.seed if temperature > 0 else self._arguments.seed[:1]
        keys = {
            (seed, place): Key(task.name, prompt.sample, decoder.name, temperature, seed)
            for seed in seeds
            for place, prompt in enumerate(task.prompts)
        }
        part = Part(task.name, decoder.name, temperature, len(keys))
        before = self._of(keys.values())
        self._progress.at(part, before)
        for seed in seeds:
            for begin in range(0, len(task.prompts), self._arguments.batch):
                group = range(len(task.prompts))[begin : begin + self._arguments.batch]
                wanted = [keys[seed, place] for place in group]
                if not all(key in self._records for key in wanted):
                    self._group(wanted, [task.prompts[place] for place in group], task, decoder)
                    self._progress.at(part, self._of(keys.values()))
        found = self._of(keys.values())
        if len(found) > len(before):
            plain = self._of(replace(key, method=PLAIN_METHOD) for key in keys.values())
            self._progress.line(part_line(part, found, plain))

    def _of(self, keys: Iterable[Key]) -> list[SampleRecord]:
        return [self._records[key] for key in keys if key in self._records]

    def _group(
        self, keys: Sequence[Key], prompts: Sequence[Prompt], task: PreparedTask, decoder: Decoder
    ) -> None:
        """Decode prompts in one call and write their records."""
        arguments, first = self._arguments, keys[0]
        options = self._options(first)
        tokens = [prompt.tokens for prompt in prompts]
        whole = {**options, "max_new_tokens": [prompt.new_tokens for prompt in prompts]}
        runs = [
            decoder.decode(tokens, whole, self._on_activity) for _ in range(arguments.repetitions)
        ]
        found = sorted(runs, key=lambda run: run.stats.decode_seconds)[len(runs) // 2]
        place = f"{first.task}/{first.sample}/{first.method}"
        shared = {
            "setting": decoder.setting,
            "call": f"{place}/{first.temperature:g}/{first.seed}",
            "batch": len(prompts),
            "prefill_s": found.stats.prefill_seconds,
            "decode_s": found.stats.decode_seconds,
            "compile_s": found.stats.compile_seconds,
            "breakdown": (
                decoder.breakdown(tokens, whole, arguments.breakdown)
                if arguments.breakdown
                else None
            ),
            "start": self._start,
        }
        records = []
        for row, (key, prompt, new) in enumerate(zip(keys, prompts, found.sequences, strict=True)):
            emitted, accepted = by_round(found.drafted[row])
            same, divergence = self._compared(key, prompt, new, options)
            trees = pieces = None
            if arguments.rounds and prompt in task.prompts[: arguments.cases]:
                own = {**options, "max_new_tokens": prompt.new_tokens}
                trees = decoder.trees(prompt.tokens, own, emitted[: arguments.rounds])
                if trees:
                    pieces = text_by_token(self._spec.tokenizer, prompt.tokens, new)
            records.append(
                SampleRecord(
                    **dataclasses.asdict(key),
                    **shared,
                    prompt_tokens=len(prompt.tokens),
                    original_tokens=prompt.original_tokens,
                    new_tokens=len(new),
                    target_passes=found.stats.target_passes[row],
                    emitted_by_round=emitted,
                    accepted_by_round=accepted,
                    tokens=new,
                    text=found.text[row] or "",
                    references=prompt.references,
                    identical_to_plain=same,
                    divergence=divergence,
                    ended="eos" if new[-1] in self._stop_tokens else "length",
                    pieces=pieces,
                    rounds=trees,
                )
            )
        self._keep(records)

    def _options(self, key: Key) -> dict[str, Any]:
        """Of every row of a call, but for the number of its tokens."""
        arguments = self._arguments
        filters = {"top_k": arguments.top_k, "top_p": arguments.top_p}
        return {
            "temperature": key.temperature,
            "seed": key.seed,
            "eos_token_id": list(self._stop_tokens),
            **(filters if key.temperature > 0 else {}),
        }

    def _keep(self, records: Sequence[SampleRecord]) -> None:
        with self._lock:
            if self._closed:
                raise cli.Closed
            # A call of which only a part was on file has been decoded whole again.
            fresh = [record for record in records if record.key not in self._records]
            self._writer.add(fresh)
            self._records |= {record.key: record for record in fresh}

    def _on_activity(self, activity: Any) -> None:
        if self._closed:
            raise cli.Closed
        self._progress.activity(activity)

    def _compared(
        self, key: Key, prompt: Prompt, tokens: tuple[int, ...], options: Options
    ) -> tuple[bool | None, Divergence | None]:
        """Whether the tokens are plain decoding's, and the first difference."""
        plain = self._records.get(replace(key, method=PLAIN_METHOD))
        if plain is None or key.method == PLAIN_METHOD:
            return None, None
        index = first_difference(plain.tokens, tokens)
        if index is None:
            return True, None
        gap = None
        if index < min(len(plain.tokens), len(tokens)):
            gap = self._spec.score_gap(
                [*prompt.tokens, *plain.tokens[:index]],
                *(plain.tokens[index], tokens[index]),
                max_new_tokens=1,
                **options,
            )
        return False, Divergence(index, gap)


def ready_decoders(
    arguments: argparse.Namespace, spec: Any, target: Path, drafts: Sequence[str | Path]
) -> list[Decoder]:
    """The methods of a run, ready to decode.

    Raises:
      ValueError: for a method without its draft, or two drafts of one kind.
    """
    # Lookup that joined them by itself is behind those that were named.
    own_drafts = spec.drafts[: len(drafts)]
    named: dict[str, tuple[str, str | Path | None]] = {
        kind: (str(name), source)
        for kind, name, source in zip(
            by_kind(own_drafts), arguments.draft or (), drafts, strict=True
        )
    }
    named[JOINED] = "+".join(each.name for each in spec.drafts), None
    found: list[Decoder] = []
    for chosen, draft in with_drafts(arguments.method, own_drafts):
        method = chosen.method
        source, folder = (None, None) if method.kind is None else named[method.kind]
        tree = chosen.tree(draft, jax.default_backend() == "cpu")
        has_options = draft is not None and (draft.own_params or len(own_drafts) == 1)
        setting = Setting(
            source,
            None if tree is None or not tree.num_levels else str(tree),
            None if tree is None else tree.num_nodes,
            as_options(arguments.draft_option) if has_options else {},
        )
        own = replace(spec, draft=draft)
        if method.attention is not None:
            # Attention that reads every slot of a cache gets no more slots than it needs.
            own = replace(own, attention=method.attention, expected_tokens=0)
        found.append(Decoder(chosen.name, setting, own, tree, method.adaptive))
    return found


def endpoint(arguments: argparse.Namespace) -> Endpoint:
    """The server, with what prompts depend on in the target, whose weights are not read."""
    folder = DEMO / "target"
    if not is_demo(arguments):
        folder = local_model(arguments.target, arguments.revision)
    return Endpoint.reached(
        arguments.endpoint,
        target_config(read_config(folder), "float32"),
        load_tokenizer(folder),
        load_stop_tokens(folder),
        concurrency=arguments.batch,
    )


def remote_decoders(server: Any) -> list[Decoder]:
    """The methods of an :class:`Endpoint`: without its draft, and with it."""
    setting = Setting(None, None, None, {})
    trees = {PLAIN_METHOD: PLAIN, SERVED: None}
    return [Decoder(name, setting, server, tree, False) for name, tree in trees.items()]


def prepared_tasks(arguments: argparse.Namespace, spec: LongSpec | Endpoint) -> list[PreparedTask]:
    """The prompts of all tasks."""
    config = spec.target_config
    target = Target(spec.tokenizer, config.vocab_size, config.max_positions)
    if arguments.protocol == LONGSPEC:
        protocol = LongSpecProtocol.of(target, arguments.min_prompt, arguments.max_prompt)
    else:
        protocol = LongBenchProtocol.of(target, arguments.prompt_style, arguments.max_prompt)
    sources = Sources(
        dict(arguments.data or ()), arguments.context, arguments.prompt_style, arguments.samples
    )
    return [prepare(name, sources, protocol, arguments.max_new_tokens) for name in arguments.task]


def expecting(tasks: Sequence[PreparedTask], spec: LongSpec | Endpoint) -> LongSpec | Endpoint:
    """The models, with caches for the longest prompt if empty slots cost no time.

    Prompts of all lengths then share the programs of a method, each of which takes up to half a
    minute to compile. XLA's attention reads empty slots; the kernels do not.
    """
    if isinstance(spec, Endpoint):
        return spec
    if spec.attention is not None or not has_kernels(spec.target_config.dtype):
        return spec
    sizes = (len(each.tokens) + each.new_tokens for task in tasks for each in task.prompts)
    longest = max(sizes, default=0)
    return replace(spec, expected_tokens=longest)


def new_header(
    arguments: argparse.Namespace,
    typed: Sequence[str],
    spec: LongSpec | Endpoint,
    methods: Mapping[str, Setting],
) -> Header:
    """Where, with what and how the run is made."""
    options = {name: getattr(arguments, name) for name in KEPT}
    options["data"] = {task: str(path) for task, path in arguments.data or ()}
    return Header(
        schema=SCHEMA,
        provenance=provenance(arguments.endpoint or jax.devices()[0].device_kind),
        command=shlex.join(["python", "-m", "infer.eval", *typed]),
        target=arguments.target,
        dtype=spec.precision if isinstance(spec, LongSpec) else spec.target_config.dtype,
        protocol=arguments.protocol,
        tasks=tuple(arguments.task),
        methods=methods,
        temperatures=tuple(arguments.temperature),
        seeds=tuple(arguments.seed),
        batch=arguments.batch,
        options=options,
        definitions=DEFINITIONS,
    )
