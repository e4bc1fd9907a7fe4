"""The run: every method over every sample at every temperature, each result written at once."""

import contextlib
import hashlib
import json
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace

import jax
import numpy as np
from jaxtyping import PyTree

from longspec_jax import LongSpec, cli, files
from longspec_jax.cli import counted
from longspec_jax.config.sampling import GenerateOptions
from longspec_jax.generation.activity import Activity
from longspec_jax.generation.call import weights_digest
from longspec_jax.generation.comparison import first_difference
from longspec_jax.generation.result import ACCEPTANCE_DEFINITION
from longspec_jax.ops.hardware import has_kernels
from longspec_jax.provenance import provenance
from longspec_jax.schema import options
from longspec_jax.status_line import StatusLine

from ..models import load_named, start_devices
from ..wording import command_words
from .config import EvalConfig
from .decoders import Decoder, ready_decoders
from .progress import Part, Progress
from .prompts import PreparedTask, Prompt, Target, prepare
from .records import (
    HEADER,
    PLAIN_METHOD,
    SAMPLES,
    SCHEMA,
    Divergence,
    Header,
    Key,
    Run,
    SampleRecord,
    Writer,
    by_round,
    differences,
    read,
    write_header,
)

SAID = {*"task method temperature seed batch command data context models out".split()}
"""Options that the header says in fields of its own. A continued run must repeat all others."""
NUMBERS = 64
"""Of a matrix, by which it is known; they are spread evenly over it."""
DEFINITIONS = {
    "acceptance_length": ACCEPTANCE_DEFINITION,
    "tokens_per_second": "tokens of the decode rounds / their seconds, each call's seconds counted "
    "once; no prefill, no compilation",
    "speedup_over_plain": "tokens per second / those of plain decoding on the same samples",
    "identical_to_plain": "every token is that of plain decoding with the same seed",
}


def evaluate(config: EvalConfig) -> Run:
    """Measure what a configuration asks for; what is there of an earlier start is not repeated.

    Returns:
      The run, as it is in its folder.

    Raises:
      OSError: for models or data that cannot be read or fetched.
      ValueError: for what cannot be met, and a folder that holds something else.
    """
    evaluation = Evaluation(config)
    with contextlib.closing(evaluation.progress):
        evaluation.work()
    return read(config.out)


class Evaluation:
    """One start of a run."""

    def __init__(self, config: EvalConfig):
        self._status = StatusLine(sys.stderr)
        self.progress = Progress(self._status)
        self._config = config
        self._run: EvalRun | None = None

    def save(self) -> None:
        """Say what a stopped run keeps; it is on the disk already."""
        count = 0 if self._run is None else self._run.close()
        self.progress.close()
        cli.say(
            f"interrupted; {self._config.out} keeps the results so far ({count}), and the same "
            "command continues from there"
        )

    def work(self) -> None:
        """Load, check and decode."""
        self._status.show("starting")
        start_devices()
        files.make_folder(self._config.out, "--out")
        with files.alone(self._config.out, "--out"):
            self._measure()

    def _measure(self) -> None:
        """The same, in a folder that no other process writes."""
        config, folder = self._config, self._config.out
        before = _before(config)
        spec = _loaded(config, self._status)
        if spec.tokenizer is None:
            raise ValueError(f"--target={config.target} comes without a tokenizer; add its files")
        self._status.show("preparing the prompts")
        target = spec.target_config
        given = Target(spec.tokenizer, target.vocab_size, target.max_positions)
        tasks = [prepare(name, config, given) for name in config.tasks]
        spec = expecting(tasks, spec)
        decoders = ready_decoders(config, spec)
        header = replace(_header(config, spec, decoders), contents=_contents(spec, tasks))
        if before is not None:
            self._check_same(before, header)
            again = (*before.header.continued, header.provenance)
            header = replace(before.header, continued=again)
        write_header(folder, header)
        writer = Writer(folder)
        skipped = () if before is None else before.skipped
        writer.add([each for task in tasks for each in task.skipped if each not in skipped])
        for task in tasks:
            self.progress.note(task.words)
        done = () if before is None else before.samples
        if done:
            self.progress.note(f"{counted(len(done), 'result')} of earlier starts")
        start = len(header.continued)
        self._run = EvalRun(config, decoders, spec, done, writer, self.progress, start)
        with command_words():
            self._run.work(tasks)

    def _check_same(self, before: Run, header: Header) -> None:
        """Refuse a folder of another configuration, and say what of it was cut short."""
        folder = self._config.out
        if found := differences(before.header, header):
            raise ValueError(
                f"--out={folder} holds a run with other options ({'; '.join(found)}); repeat its "
                f"command ({before.header.command}), or name another folder"
            )
        if before.torn:
            self.progress.note(
                f"the last line of {folder / SAMPLES} was cut short; its sample is measured again"
            )


class EvalRun:
    """Decodes the samples that have no record yet."""

    def __init__(
        self,
        config: EvalConfig,
        decoders: Sequence[Decoder],
        spec: LongSpec,
        done: Sequence[SampleRecord],
        writer: Writer,
        progress: Progress,
        start: int = 0,
    ):
        self._config, self._decoders, self._spec = config, decoders, spec
        self._writer, self._progress = writer, progress
        self._start = start
        self._stop_tokens = () if config.ignore_eos else spec.stop_tokens
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
            for temperature in self._config.temperatures:
                for decoder in self._decoders:
                    self._part(task, temperature, decoder)

    def _part(self, task: PreparedTask, temperature: float, decoder: Decoder) -> None:
        """One method over one task.

        Groups of prompts are those of an uninterrupted run, wherever an earlier start was killed.
        """
        seeds = self._config.seeds if temperature > 0 else self._config.seeds[:1]
        keys = {
            (seed, place): Key(task.name, prompt.sample, decoder.name, temperature, seed)
            for seed in seeds
            for place, prompt in enumerate(task.prompts)
        }
        part = Part(task.name, decoder.name, temperature, len(keys))
        before = self._of(keys.values())
        self._progress.at(part, before)
        for seed in seeds:
            for begin in range(0, len(task.prompts), self._config.batch):
                group = range(len(task.prompts))[begin : begin + self._config.batch]
                wanted = [keys[seed, place] for place in group]
                if not all(key in self._records for key in wanted):
                    self._group(wanted, [task.prompts[place] for place in group], decoder)
                    self._progress.at(part, self._of(keys.values()))
        found = self._of(keys.values())
        if len(found) > len(before):
            plain = self._of(replace(key, method=PLAIN_METHOD) for key in keys.values())
            self._progress.line(part.line(found, plain))

    def _of(self, keys: Iterable[Key]) -> list[SampleRecord]:
        return [self._records[key] for key in keys if key in self._records]

    def _group(self, keys: Sequence[Key], prompts: Sequence[Prompt], decoder: Decoder) -> None:
        """Decode prompts in one call and write their records."""
        config, first = self._config, keys[0]
        options = self._options(first)
        tokens = [prompt.tokens for prompt in prompts]
        whole: GenerateOptions = {
            **options,
            "max_new_tokens": [prompt.new_tokens for prompt in prompts],
        }
        runs = [decoder.decode(tokens, whole, self._on_activity) for _ in range(config.repetitions)]
        found = sorted(runs, key=lambda run: run.stats.decode_seconds)[len(runs) // 2]
        stats = found.stats
        call = f"{first.task}/{first.sample}/{first.method}/{first.temperature:g}/{first.seed}"
        records = []
        for row, (key, prompt, new) in enumerate(zip(keys, prompts, found.sequences, strict=True)):
            emitted, accepted = by_round(found.drafted[row])
            same, divergence = self._compared(key, prompt, new, options)
            records.append(
                SampleRecord(
                    task=key.task,
                    sample=key.sample,
                    method=key.method,
                    temperature=key.temperature,
                    seed=key.seed,
                    setting=decoder.setting,
                    call=call,
                    batch=len(prompts),
                    prompt_tokens=len(prompt.tokens),
                    new_tokens=len(new),
                    target_passes=stats.target_passes[row],
                    emitted_by_round=emitted,
                    accepted_by_round=accepted,
                    prefill_s=stats.prefill_seconds,
                    decode_s=stats.decode_seconds,
                    compile_s=stats.compile_seconds,
                    tokens=new,
                    text=found.text[row] or "",
                    references=prompt.references,
                    identical_to_plain=same,
                    divergence=divergence,
                    ended="eos" if new[-1] in self._stop_tokens else "length",
                    start=self._start,
                )
            )
        self._keep(records)

    def _options(self, key: Key) -> GenerateOptions:
        """Options of every row of a call, but for the number of its tokens."""
        found: GenerateOptions = {
            "temperature": key.temperature,
            "seed": key.seed,
            "eos_token_id": list(self._stop_tokens),
        }
        if key.temperature > 0:
            found |= {"top_k": self._config.top_k, "top_p": self._config.top_p}
        return found

    def _keep(self, records: Sequence[SampleRecord]) -> None:
        with self._lock:
            if self._closed:
                raise cli.Closed
            # A call of which only a part was on file has been decoded whole again.
            fresh = [record for record in records if record.key not in self._records]
            self._writer.add(fresh)
            self._records |= {record.key: record for record in fresh}

    def _on_activity(self, activity: Activity) -> None:
        if self._closed:
            raise cli.Closed
        self._progress.activity(activity)

    def _compared(
        self, key: Key, prompt: Prompt, tokens: tuple[int, ...], options: GenerateOptions
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
            before = [*prompt.tokens, *plain.tokens[:index]]
            single: GenerateOptions = {**options, "max_new_tokens": 1}
            gap = self._spec.score_gap(before, plain.tokens[index], tokens[index], **single)
        return False, Divergence(index, gap)


def _before(config: EvalConfig) -> Run | None:
    """What earlier starts have written."""
    if (config.out / HEADER).exists():
        return read(config.out)
    if any(config.out.iterdir()):
        raise ValueError(
            f"--out={config.out} holds other files and no run; name an empty or new folder"
        )
    return None


def _loaded(config: EvalConfig, status: StatusLine) -> LongSpec:
    """The models of a run, with all its drafts."""
    models = replace(config.models, target=config.target, draft=list(config.drafts) or None)
    return load_named(models, status)


def expecting(tasks: Sequence[PreparedTask], spec: LongSpec) -> LongSpec:
    """The models, with caches for the longest prompt if empty slots cost no time.

    Prompts of all lengths then share the programs of a method, each of which takes up to half a
    minute to compile. XLA's attention reads empty slots; the kernels do not.
    """
    if spec.attention is not None or not has_kernels(spec.target_config.dtype):
        return spec
    sizes = (len(each.tokens) + each.new_tokens for task in tasks for each in task.prompts)
    return replace(spec, expected_tokens=max(sizes, default=0))


def _contents(spec: LongSpec, tasks: Sequence[PreparedTask]) -> dict[str, str]:
    """Digests of prompts and models: files are edited, and drafts trained on in their folder."""
    rows = [[each.name, prompt.sample, prompt.tokens] for each in tasks for prompt in each.prompts]
    prompts = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    drafts = {f"draft {draft.name}": weights_digest(draft.own_params) for draft in spec.drafts}
    target = spec.target_params
    found = {"target": weights_digest(target), "matrices of the target": _matrices_digest(target)}
    return {"prompts": prompts, **found, **drafts}


def _matrices_digest(params: PyTree) -> str:
    """A hash of a few numbers of every matrix: fine-tuning often leaves the small arrays alone."""
    numbers = []
    for leaf in jax.tree.leaves(params):
        if leaf.ndim > 1:
            spread = np.linspace(0, leaf.size - 1, NUMBERS, dtype=np.int64)
            numbers.append(leaf[np.unravel_index(spread, leaf.shape)])
    return hashlib.sha256(b"".join(each.tobytes() for each in jax.device_get(numbers))).hexdigest()


def _header(config: EvalConfig, spec: LongSpec, decoders: Sequence[Decoder]) -> Header:
    """Where, with what and how the run is made."""
    return Header(
        schema=SCHEMA,
        provenance=provenance(jax.devices()[0].device_kind),
        command=config.command,
        target=config.target,
        dtype=spec.precision,
        tasks=tuple(config.tasks),
        methods={decoder.name: decoder.setting for decoder in decoders},
        temperatures=tuple(config.temperatures),
        seeds=tuple(config.seeds),
        batch=config.batch,
        options={
            **{name: getattr(config, name) for name in options(EvalConfig) if name not in SAID},
            **{name: each for name, each in config.models.options.items() if name != "dtype"},
            "mesh": config.models.mesh,
            "context": config.contexts,
            "data": {task: str(path) for task, path in config.data},
        },
        definitions=DEFINITIONS,
    )
