"""Where the measurements of a run go.

``metrics.jsonl`` has everything: one JSON object a line, each with its stage and step. A terminal
shows a progress bar, anything else plain lines. TensorBoard and Weights & Biases are imported only
if the configuration names them; if one fails, that is printed once and ends it, never the run.
"""

import dataclasses
import json
import math
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

from longspec_jax import files
from longspec_jax.checks import first_line

from .config import RunConfig
from .processes import is_first

if TYPE_CHECKING:
    from tqdm import tqdm

Record = dict[str, Any]
Given = ParamSpec("Given")
Found = TypeVar("Found")


def read_records(path: Path) -> list[Record]:
    """The records of a log, without lines that a killed process or a full disk cut off."""
    return [record for record in map(_record, _lines(path)) if record is not None]


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines()


def _record(line: str) -> Record | None:
    """The record in a line; None if there is none."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and {"stage", "step"} <= record.keys() else None


class Writer(Protocol):
    """Receives the records of a run."""

    def write(self, record: Record) -> None:
        """Take a record that has just been appended to ``metrics.jsonl``."""
        ...

    def close(self) -> None:
        """Write what is left."""
        ...


class Metrics:
    """Appends one JSON object per line to ``metrics.jsonl``; only process 0 writes."""

    def __init__(self, path: Path, writers: Sequence[Writer] = ()):
        self._path, self._writers = path, writers
        self._bar: tqdm | None = None
        self._counts: Counter[str] = Counter()
        self._file = None
        if is_first():
            if cut := self._open():
                print(f"{path}: a line that was cut off is removed ({cut})", file=sys.stderr)

    def _open(self, stage: str = "", count: int = 0) -> int:
        """Open the file without what is no record, and the records of a stage after its first few.

        Returns:
          The number of lines that were removed.
        """
        self._file = self._path.open("a")
        self._counts.clear()
        kept, lines = [], _lines(self._path)
        for line in lines:
            record = _record(line)
            if record is not None and (record["stage"] != stage or self._counts[stage] < count):
                self._counts[record["stage"]] += 1
                kept.append(line)
        # A line may be whole and yet lack its end, at which the next one begins.
        text = "".join(f"{line}\n" for line in kept).encode()
        if text != self._path.read_bytes():
            self._file.close()
            files.replace(self._path, text)
            self._file = self._path.open("a")
        return len(lines) - len(kept)

    def count(self, stage: str) -> int:
        """Records there are of a stage: where its log stands when it is saved."""
        return self._counts[stage]

    def rewind(self, stage: str, count: int) -> None:
        """Remove the records of a stage after its checkpoint: those steps are repeated."""
        if self._file is not None and count < self.count(stage):
            self._file.close()
            self._open(stage, count)

    def start(self, stage: str, step: int, steps: int) -> None:
        """Begin the display of a stage."""
        if self._file is None or not sys.stderr.isatty():
            return
        from tqdm import tqdm

        self._bar = tqdm(total=steps or None, initial=step, desc=stage, unit="step")

    def advance(self) -> None:
        """One step is done."""
        if self._bar is not None:
            self._bar.update()

    def write(self, stage: str, step: int, values: dict[str, float]) -> None:
        """Record what was measured at a step."""
        if self._file is None:
            return
        rounded = {name: _round(value) for name, value in values.items()}
        record = {"stage": stage, "step": step, **rounded}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        self._counts[stage] += 1
        for writer in self._writers:
            writer.write(record)
        if self._bar is not None:
            self._bar.set_postfix(rounded)
        else:
            words = " ".join(f"{name}={value}" for name, value in rounded.items())
            print(f"{stage} step {step}: {words}", file=sys.stderr, flush=True)

    def finish(self) -> None:
        """End the display of a stage."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def close(self) -> None:
        """Close the file and the other writers."""
        if self._file is not None:
            self._file.close()
            for writer in self._writers:
                writer.close()


def _round(value: float) -> float | None:
    """Six significant digits; null for what JSON cannot write."""
    value = float(value)
    return float(f"{value:.6g}") if math.isfinite(value) else None


def open_writers(config: RunConfig, workdir: Path) -> tuple[Writer, ...]:
    """The writers that a configuration names; only process 0 has any, and none of them raises."""
    if not is_first():
        return ()
    log, writers = config.log, []
    if log.tensorboard:
        folder, source = workdir / "tensorboard", workdir / "metrics.jsonl"
        writers.append(Guarded("TensorBoard", lambda: TensorBoard(folder, source)))
    if log.wandb:
        settings = dataclasses.asdict(config)
        writers.append(
            Guarded("Weights & Biases", lambda: WeightsAndBiases(workdir, log.wandb, settings))
        )
    return tuple(writers)


class Guarded:
    """A writer until its first failure, which is printed; nothing afterwards."""

    def __init__(self, name: str, make: Callable[[], Writer]):
        self._name = name
        self._writer: Writer | None = self._tried(make)

    def write(self, record: Record) -> None:
        """Pass a record on."""
        if self._writer is not None:
            self._tried(self._writer.write, record)

    def close(self) -> None:
        """Close the writer."""
        if self._writer is not None:
            self._tried(self._writer.close)

    def _tried(
        self, act: Callable[Given, Found], *values: Given.args, **named: Given.kwargs
    ) -> Found | None:
        try:
            return act(*values, **named)
        except Exception as error:  # A writer that fails must not end the training.
            self._writer = None
            print(
                f"{self._name} gets no metrics from here on ({first_line(error)}); metrics.jsonl "
                "does",
                file=sys.stderr,
                flush=True,
            )


class TensorBoard:
    """Event files, a folder for every stage, so that its steps count from 0 and curves overlay.

    A stage begins with all that ``metrics.jsonl`` has of it, marked as a restart: TensorBoard then
    forgets what it read before, as the file has forgotten the steps that a resumed run repeats.
    """

    def __init__(self, folder: Path, source: Path):
        self._folder, self._source = folder, source
        self._events = import_module("tensorboard.compat.proto.event_pb2")
        self._summary = import_module("tensorboard.compat.proto.summary_pb2").Summary
        writer = import_module("tensorboard.summary.writer.event_file_writer")
        self._open_file = writer.EventFileWriter
        self._stages: dict[str, Any] = {}

    def write(self, record: Record) -> None:
        """Write a record's numbers at its step."""
        stage = record["stage"]
        if stage in self._stages:
            self._add_numbers(record)
        else:
            self._stages[stage] = self._open_file(str(self._folder / stage))
            log = self._events.SessionLog
            start = self._events.Event(wall_time=time.time(), session_log=log(status=log.START))
            self._stages[stage].add_event(start)
            for earlier in read_records(self._source):  # The last of which is this one.
                if earlier["stage"] == stage:
                    self._add_numbers(earlier)
        self._stages[stage].flush()

    def close(self) -> None:
        """Close all files."""
        for file in self._stages.values():
            file.close()

    def _add_numbers(self, record: Record) -> None:
        value = self._summary.Value
        values = [value(tag=name, simple_value=v) for name, v in _numbers(record).items()]
        summary = self._summary(value=values)
        event = self._events.Event(wall_time=time.time(), step=record["step"], summary=summary)
        self._stages[record["stage"]].add_event(event)


class WeightsAndBiases:
    """One run of a project for one working folder, however often its command is repeated.

    What a resumed run repeats is there twice: what was sent stays.
    """

    def __init__(self, workdir: Path, project: str, config: dict[str, Any]):
        known = workdir / "wandb" / "id"
        if not known.is_file():
            known.parent.mkdir(parents=True, exist_ok=True)
            files.replace(known, secrets.token_hex(8).encode())
        self._stages: set[str] = set()
        self._run = import_module("wandb").init(
            project=project,
            id=known.read_text(),
            resume="allow",
            name=workdir.resolve().name,
            dir=str(workdir),
            config=config,
        )

    def write(self, record: Record) -> None:
        """Log a record's numbers under its stage, over the steps of that stage."""
        stage = record["stage"]
        if stage not in self._stages:
            self._stages.add(stage)
            self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")
        values = {**_numbers(record), "step": record["step"]}
        self._run.log({f"{stage}/{name}": value for name, value in values.items()})

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()


def _numbers(record: Record) -> dict[str, float]:
    """What was measured; null stands for no number."""
    about = ("stage", "step")
    return {n: v for n, v in record.items() if n not in about and isinstance(v, int | float)}
