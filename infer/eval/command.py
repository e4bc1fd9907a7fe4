"""The run of ``python -m infer.eval`` behind its arguments, and how it is left early."""

import argparse
import importlib.util
import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import interruption
from ..boundary import INTERRUPTED
from ..wording import command_words
from . import run_folder
from .progress import Progress
from .records import SCHEMA, Header, SampleRecord


class Evaluation:
    """A request, and how far it has got."""

    def __init__(self, arguments: argparse.Namespace, typed: Sequence[str]):
        """Begin with nothing loaded.

        Args:
          arguments: of the command, settled.
          typed: as they were typed.
        """
        self.progress = Progress()
        self._arguments, self._typed = arguments, typed
        self._run: Any = None

    @property
    def records(self) -> list[SampleRecord]:
        """All that there are, those of an earlier run too."""
        return [] if self._run is None else self._run.records

    def close(self) -> None:
        """Nothing is written from now on."""
        if self._run is not None:
            self._run.close()

    def work(self) -> None:
        """Load, check and decode."""
        arguments, progress = self._arguments, self.progress
        progress.starting("starting")
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        if arguments.compilation_cache is not None:
            os.environ["LONGSPEC_CACHE"] = arguments.compilation_cache
        from longspec_jax.compilation import keep_programs

        from ..models import check_devices, fetch, load
        from .decoders import LibraryDecoder
        from .methods import settled
        from .run import EvalRun, Plan

        check_devices()
        arguments.out.mkdir(parents=True, exist_ok=True)
        before = self._before()
        keep_programs()
        target, drafts = fetch(arguments)
        progress.starting("loading the models")
        with command_words():
            spec = load(arguments, target, drafts)
        if spec.tokenizer is None:
            raise ValueError(
                f"--target={arguments.target} comes without a tokenizer; add its files"
            )
        with_torch = importlib.util.find_spec("torch") is not None and arguments.batch == 1
        methods = settled(arguments.method, spec.drafts, with_torch)
        sources = {
            id(draft): name
            for draft, name in zip(spec.drafts, arguments.drafter or (), strict=True)
        }
        options = dict(arguments.drafter_option or ())
        inside = [
            LibraryDecoder.of(
                chosen, draft, spec, None if draft is None else sources[id(draft)], options
            )
            for chosen, draft in methods
            if not chosen.method.outside
        ]
        outside = [chosen.name for chosen, _ in methods if chosen.method.outside]
        decoders = [*inside, *self._outside(outside, spec, target, drafts)]
        progress.starting("preparing the prompts")
        tasks = self._prepared(spec)
        header = self._header(spec, {each.name: each.setting for each in decoders})
        done = self._continued(header, before)
        writer = run_folder.Writer(arguments.out)
        told = () if before is None else before.skipped
        writer.add([each for task in tasks for each in task.skipped if each not in told])
        self._announce(tasks, done)
        plan = Plan(
            arguments.temperature,
            arguments.seed,
            arguments.top_k,
            arguments.top_p,
            arguments.batch,
            arguments.repetitions,
            () if arguments.ignore_eos else spec.stop_tokens,
            arguments.breakdown or 0,
            arguments.rounds or 0,
            arguments.cases,
        )
        self._run = EvalRun(plan, decoders, spec, done, writer, progress)
        with command_words():
            self._run.work(tasks)

    def _outside(
        self, names: Sequence[str], spec: Any, target: Path, drafts: Sequence[str | Path]
    ) -> list[Any]:
        """The methods of transformers."""
        if not names:
            return []
        from . import hugging_face
        from .methods import kind_of

        small = [
            (named, source)
            for draft, named, source in zip(
                spec.drafts, self._arguments.drafter or (), drafts, strict=True
            )
            if kind_of(draft) == "small_lm"
        ]
        named, folder = small[0] if small else (None, None)
        loaded = hugging_face.Loaded(
            target, spec.target_config.dtype, None if folder is None else Path(folder)
        )
        return list(hugging_face.decoders(names, loaded, spec.tokenizer, named))

    def _prepared(self, spec: Any) -> list[Any]:
        """The prompts of all tasks."""
        from .arguments import LONGSPEC
        from .prepare import Sources, Target, prepare
        from .protocols import LongBenchProtocol, LongSpecProtocol

        arguments, config = self._arguments, spec.target_config
        target = Target(spec.tokenizer, config.vocab_size, config.max_positions)
        bounds = spec.tokenizer, config.max_positions, arguments.min_prompt, arguments.max_prompt
        if arguments.protocol == LONGSPEC:
            protocol = LongSpecProtocol.of(*bounds)
        else:
            protocol = LongBenchProtocol.of(
                spec.tokenizer,
                config.vocab_size,
                config.max_positions,
                arguments.prompt_style,
                arguments.max_prompt,
            )
        sources = Sources(
            dict(arguments.data or ()),
            arguments.hub,
            arguments.context,
            arguments.prompt_style,
            arguments.samples,
        )
        return [
            prepare(name, sources, protocol, target, arguments.max_new_tokens)
            for name in arguments.task
        ]

    def _header(self, spec: Any, methods: Any) -> Header:
        """Of this run."""
        import jax

        from longspec_jax.generation.result import ACCEPTANCE_DEFINITION
        from longspec_jax.provenance import provenance

        arguments = self._arguments
        kept = (
            *("samples", "context", "min_prompt", "max_prompt", "prompt_style", "max_new_tokens"),
            *("top_p", "top_k", "ignore_eos", "revision", "drafter_revision", "hub", "mesh"),
            *(
                "prefill_chunk",
                "row_slots",
                "attention",
                "breakdown",
                "rounds",
                "cases",
                "repetitions",
            ),
        )
        options = {name: getattr(arguments, name) for name in kept}
        options["data"] = {task: str(path) for task, path in arguments.data or ()}
        return Header(
            schema=SCHEMA,
            provenance=provenance(jax.devices()[0].device_kind),
            command=shlex.join(["python", "-m", "infer.eval", *self._typed]),
            target=arguments.target,
            dtype=spec.target_config.dtype,
            protocol=arguments.protocol,
            tasks=tuple(arguments.task),
            methods=methods,
            temperatures=tuple(arguments.temperature),
            seeds=tuple(arguments.seed),
            batch=arguments.batch,
            options=options,
            definitions={
                "acceptance_length": ACCEPTANCE_DEFINITION,
                "tokens_per_second": "tokens of the decode rounds / their seconds, each call's "
                "seconds counted once; no prefill, no compilation",
                "speedup_over_plain": "tokens per second by those of plain decoding on the same "
                "samples",
            },
        )

    def _before(self) -> run_folder.Run | None:
        """What the folder holds of an earlier run."""
        folder = self._arguments.out
        if (folder / run_folder.HEADER).exists():
            return run_folder.read(folder)
        if any(folder.iterdir()):
            raise ValueError(
                f"--out={folder} holds files and no run; name a folder that is empty or new"
            )
        return None

    def _continued(self, header: Header, before: run_folder.Run | None) -> Sequence[SampleRecord]:
        """The records of an earlier run, if this one continues it; the header is written."""
        folder = self._arguments.out
        if before is None:
            run_folder.write_header(folder, header)
            return ()
        differences = run_folder.differences(before.header, header)
        if differences:
            raise ValueError(
                f"--out={folder} holds a run with other options ({'; '.join(differences)}); repeat "
                f"its command ({before.header.command}), or name another folder"
            )
        again = (*before.header.continued, header.provenance)
        run_folder.write_header(folder, replace(before.header, continued=again))
        if before.torn:
            self.progress.note(
                f"the last line of {folder / run_folder.SAMPLES} was cut short; its sample is made "
                "again"
            )
        return before.samples

    def _announce(self, tasks: Sequence[Any], done: Sequence[SampleRecord]) -> None:
        """Say what is run, what is left out and what is there already."""
        for task in tasks:
            longest = max(len(prompt.tokens) for prompt in task.prompts)
            cut = sum(len(each.tokens) < each.original_tokens for each in task.prompts)
            words = [f"{len(task.prompts)} samples of up to {longest} tokens"]
            words += [f"{cut} truncated"] if cut else []
            words += [f"{len(task.skipped)} skipped"] if task.skipped else []
            self.progress.note(f"{task.name}: {', '.join(words)}")
        if done:
            self.progress.note(f"{len(done)} results are there already")

    def summarize(self) -> None:
        """Write the summary if one is wanted."""
        if self._arguments.summary is None:
            return
        import json

        from longspec_jax import files

        from .summary import rows

        header = run_folder.read_header(self._arguments.out)
        values = {"header": run_folder.plain(header), "rows": rows(self.records)}
        data = (json.dumps(values, indent=1) + "\n").encode()
        files.replace(Path(self._arguments.summary).expanduser(), data)


def evaluate(
    arguments: argparse.Namespace,
    typed: Sequence[str],
    end: Callable[[int], object] | None,
) -> int:
    """Do what the arguments say; returns the exit status.

    Args:
      arguments: of the command, settled.
      typed: as they were typed.
      end: ends the process after Ctrl-C.
    """
    evaluation = Evaluation(arguments, typed)
    try:
        interruption.run_interruptibly(evaluation.work)
        evaluation.summarize()
        return 0
    except KeyboardInterrupt:
        if end is None:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            interruption.end_soon(INTERRUPTED)
        evaluation.close()
        evaluation.progress.close()
        print(
            f"interrupted: {len(evaluation.records)} results are in {arguments.out}; the same "
            "command goes on from there",
            file=sys.stderr,
        )
        (end or interruption.end_now)(INTERRUPTED)
        return INTERRUPTED
    finally:
        evaluation.progress.close()
