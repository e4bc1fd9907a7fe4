"""Where metrics go besides ``metrics.jsonl``: TensorBoard, and Weights & Biases.

Each is imported when it is asked for. What goes wrong with one is told once and ends it, never the
run: the file has everything.
"""

import dataclasses
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from longspec_jax import files

from .config import RunConfig
from .processes import is_first
from .records import Record, read_records


class Writer(Protocol):
    """What takes the records of a run."""

    def write(self, record: Record) -> None:
        """Take a record that has just been appended to ``metrics.jsonl``."""
        ...

    def close(self) -> None:
        """Leave nothing unwritten."""
        ...


def open_writers(config: RunConfig, workdir: Path) -> tuple[Writer, ...]:
    """The writers that a run asks for, none of which raises; none but in process 0."""
    if not is_first():
        return ()
    log, writers = config.log, []
    if log.tensorboard:
        folder, source = workdir / "tensorboard", workdir / "metrics.jsonl"
        writers.append(Steady("TensorBoard", lambda: TensorBoard(folder, source)))
    if log.wandb:
        settings = dataclasses.asdict(config)
        writers.append(
            Steady("Weights & Biases", lambda: WeightsAndBiases(workdir, log.wandb, settings))
        )
    return tuple(writers)


class Steady:
    """A writer until its first failure, which is told; nothing afterwards.

    Args:
      name: what people call it.
      make: makes the writer, and may fail.
    """

    def __init__(self, name: str, make: Callable[[], Writer]):
        self._name = name
        self._writer: Writer | None = None
        with self._steadily():
            self._writer = make()

    def write(self, record: Record) -> None:
        """Pass a record on."""
        if self._writer is not None:
            with self._steadily():
                self._writer.write(record)

    def close(self) -> None:
        """Close the writer."""
        if self._writer is not None:
            with self._steadily():
                self._writer.close()

    @contextmanager
    def _steadily(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Whatever it is, the training is worth more.
            self._writer = None
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            print(
                f"{self._name} gets no metrics from here on ({reason}); metrics.jsonl does",
                file=sys.stderr,
                flush=True,
            )


class TensorBoard:
    """Event files, a folder for every stage, so that its steps count from 0 and curves overlay.

    A stage begins with all that ``metrics.jsonl`` has of it, marked as a restart: TensorBoard then
    forgets what it read before, as the file has forgotten the steps that a resumed run repeats.

    Args:
      folder: of the stages' folders.
      source: ``metrics.jsonl``.
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
            self._add(stage, 0, session_log=log(status=log.START))
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
        self._add(record["stage"], record["step"], summary=self._summary(value=values))

    def _add(self, stage: str, step: int, **what: Any) -> None:
        event = self._events.Event(wall_time=time.time(), step=step, **what)
        self._stages[stage].add_event(event)


class WeightsAndBiases:
    """One run of a project for one working folder, however often its command is repeated.

    What a resumed run repeats is there twice: what was sent stays.

    Args:
      workdir: the run's, whose name it gets; what was not sent yet is kept in ``workdir/wandb``.
      project: where it belongs.
      config: what it shows of the configuration.
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
