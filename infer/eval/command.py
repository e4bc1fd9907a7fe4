"""What ``python -m infer.eval`` does once its arguments are checked, and how Ctrl-C ends it."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from longspec_jax import LongSpec, cli, files
from longspec_jax.cli import counted
from longspec_jax.generation.endpoint import Endpoint
from longspec_jax.status_line import StatusLine

from ..wording import command_words
from . import records
from .progress import Progress
from .records import Header, SampleRecord


class Evaluation:
    """One start of a run."""

    def __init__(self, arguments: argparse.Namespace, typed: Sequence[str]):
        self._status = StatusLine(sys.stderr)
        self.progress = Progress(self._status)
        self._arguments, self._typed = arguments, typed
        self._run: Any = None

    def save(self) -> None:
        """Say what a stopped run keeps; it is on the disk already."""
        count = 0 if self._run is None else self._run.close()
        self.progress.close()
        cli.say(
            f"interrupted; {self._arguments.out} keeps the results so far ({count}), and the same "
            "command continues from there"
        )

    def work(self) -> None:
        """Load, check and decode."""
        self._status.show("starting")
        from ..models import start_devices

        start_devices()
        files.make_folder(self._arguments.out, "--out")
        with files.alone(self._arguments.out, "--out"):
            self._measure()

    def _measure(self) -> None:
        """The same, in a folder that no other process writes."""
        from ..models import load_named
        from . import run

        arguments, before = self._arguments, self._before()
        spec: LongSpec | Endpoint
        if arguments.endpoint:
            spec, decoders_of = run.endpoint(arguments), run.remote_decoders
        else:
            spec, target, drafts = load_named(arguments, self._status)
            decoders_of = partial(run.ready_decoders, arguments, target=target, drafts=drafts)
        if spec.tokenizer is None:
            raise ValueError(
                f"--target={arguments.target} comes without a tokenizer; add its files"
            )
        self._status.show("preparing the prompts")
        tasks = run.prepared_tasks(arguments, spec)
        spec = run.expecting(tasks, spec)
        decoders = decoders_of(spec)
        settings = {decoder.name: decoder.setting for decoder in decoders}
        header = run.new_header(arguments, self._typed, spec, settings)
        done = self._continued(header, before)
        writer = records.Writer(arguments.out)
        written = () if before is None else before.skipped
        writer.add([each for task in tasks for each in task.skipped if each not in written])
        self._announce(tasks, done)
        start = 0 if before is None else 1 + len(before.header.continued)
        self._run = run.EvalRun(arguments, decoders, spec, done, writer, self.progress, start)
        with command_words():
            self._run.work(tasks)
        records.write_summary(arguments.out, self._run.records)

    def _before(self) -> records.Run | None:
        """What earlier starts have written."""
        folder = self._arguments.out
        if (folder / records.HEADER).exists():
            return records.read(folder)
        if any(folder.iterdir()):
            raise ValueError(
                f"--out={folder} holds other files and no run; name an empty or new folder"
            )
        return None

    def _continued(self, header: Header, before: records.Run | None) -> Sequence[SampleRecord]:
        """Write the header; return the records of earlier starts."""
        folder = self._arguments.out
        if before is None:
            records.write_header(folder, header)
            return ()
        differences = records.differences(before.header, header)
        if differences:
            raise ValueError(
                f"--out={folder} holds a run with other options ({'; '.join(differences)}); repeat "
                f"its command ({before.header.command}), or name another folder"
            )
        again = (*before.header.continued, header.provenance)
        records.write_header(folder, replace(before.header, continued=again))
        if before.torn:
            self.progress.note(
                f"the last line of {folder / records.SAMPLES} was cut short; its sample is "
                "measured again"
            )
        return before.samples

    def _announce(self, tasks: Sequence[Any], done: Sequence[SampleRecord]) -> None:
        """Print how many samples are run, cut, skipped and on file."""
        for task in tasks:
            longest = max(len(prompt.tokens) for prompt in task.prompts)
            cut = sum(len(each.tokens) < each.original_tokens for each in task.prompts)
            words = [f"{counted(len(task.prompts), 'sample')} of up to {longest} tokens"]
            words += [f"{cut} truncated"] if cut else []
            words += [f"{len(task.skipped)} skipped"] if task.skipped else []
            self.progress.note(f"{task.name}: {', '.join(words)}")
        if done:
            self.progress.note(f"{counted(len(done), 'result')} of earlier starts")
