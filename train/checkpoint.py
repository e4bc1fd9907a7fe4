"""Checkpoints of one stage: masters, optimiser and where the run stands.

Everything else a step needs (order of the data, randomness, learning rate) is a function of seed,
step and elapsed time, so that a resumed run repeats the uninterrupted one bit for bit.

A save grows in a folder whose name ends in ``.partial``. When all is written, the checksums of its
files are put next to them. When all is on the disk, the folder gets its name, and only then are
older ones removed. At whatever moment a run is killed or power is lost, a folder with a name and
checksums that hold is a whole checkpoint, and nothing else is one. The checksums are in the format
of ``sha256sum --check``.
"""

import hashlib
import itertools
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from longspec_jax import cli, files

from .processes import is_first
from .step import TrainState

CHECKSUMS, META, STATE = "SHA256SUMS", "meta.json", "state"
"""What a checkpoint's folder holds."""
_PARTIAL = ".partial"
_NAME = re.compile(r"(\d+)(?:\.(\d+))?")
"""A step, with a number after it if the same step was saved before."""
_NOTHING, _NOTHING_INTACT = -1, -2


@dataclass(frozen=True)
class Saved:
    """A checkpoint whose files are those that were saved."""

    folder: Path
    meta: dict[str, Any]


class Checkpoints:
    """The checkpoints of a stage in a folder; the newest few are kept."""

    def __init__(self, folder: Path, max_to_keep: int):
        self._folder, self._max_to_keep = folder.absolute(), max(1, max_to_keep)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._saver = ocp.StandardCheckpointer()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._finishing: Future[None] | None = None
        self._newest: Path | None = None
        self._damaged: set[str] = set()

    @property
    def newest(self) -> Path | None:
        """The folder that was saved or restored last; None before both."""
        return self._newest

    def save(self, step: int, state: TrainState, meta: dict[str, Any]) -> None:
        """Save in the background; the state may be donated as soon as this returns.

        Raises:
          OSError: if this save cannot be begun, or the one before could not be finished.
        """
        self._wait()
        final = self._folder / self._unused_name(step)
        partial = final.with_name(final.name + _PARTIAL)
        if is_first():
            if partial.exists():
                shutil.rmtree(partial)
            partial.mkdir()
        with _disk_errors(partial):
            self._saver.save(partial / STATE, state)
        self._finishing = self._thread.submit(self._finish, partial, final, meta)
        self._newest = final

    def find(self) -> Saved | None:
        """The newest intact checkpoint, every byte of it checked; None if there never was one.

        Those that are skipped are named on the standard error stream.

        Raises:
          ValueError: if there are checkpoints and none is intact.
        """
        step, repeated = _agreed(self._choose() if is_first() else (_NOTHING, 0))
        if step == _NOTHING:
            return None
        if step == _NOTHING_INTACT:
            raise ValueError(
                f"no checkpoint in {self._folder} is intact; put an undamaged copy back, or remove "
                "that folder to begin the stage anew"
            )
        self._newest = self._folder / _name(step, repeated)
        return Saved(self._newest, json.loads((self._newest / META).read_text()))

    def restore(self, saved: Saved, like: TrainState) -> TrainState:
        """The state of a checkpoint, laid out like the given one (abstract or real)."""
        abstract = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), like
        )
        return self._saver.restore(saved.folder / STATE, abstract)

    def close(self) -> None:
        """Wait for a save under way.

        Raises:
          OSError: if it could not be finished.
        """
        try:
            self._wait()
        finally:
            self._thread.shutdown()
            with _disk_errors(self._folder):
                self._saver.close()

    def _wait(self) -> None:
        finishing, self._finishing = self._finishing, None
        if finishing is not None:
            finishing.result()

    def _unused_name(self, step: int) -> str:
        """A name that is free: an earlier save of the same step stays until this one is whole."""
        repeated = next(
            n for n in itertools.count() if not (self._folder / _name(step, n)).exists()
        )
        return _name(*_agreed((step, repeated)))

    def _finish(self, partial: Path, final: Path, meta: dict[str, Any]) -> None:
        """Complete a save whose arrays are on their way."""
        with _disk_errors(partial):
            self._saver.wait_until_finished()  # By all processes.
        if not is_first():
            return
        files.replace(partial / META, json.dumps(meta).encode())
        files.replace(partial / CHECKSUMS, checksums(partial))
        # Before older ones go: after a loss of power the new one may be the only one.
        for path in (*partial.rglob("*"), partial):
            files.to_disk(path)
        partial.rename(final)
        files.to_disk(self._folder)
        self._damaged.discard(final.name)  # One of that name may have been, and made room.
        self._remove_all_but_newest(final)

    def _remove_all_but_newest(self, newest: Path) -> None:
        """Remove older and damaged checkpoints, and what a killed run left at later steps."""
        intact = [path for path in _named(self._folder) if path.name not in self._damaged]
        earlier = [path for path in intact if _key(path) <= _key(newest)]
        kept = {path.name for path in earlier[-self._max_to_keep :]}
        for path in self._folder.iterdir():
            if path.name in kept or not path.is_dir():
                continue
            if not path.name.endswith(_PARTIAL):  # Killed halfway, it must not look damaged.
                path = path.rename(path.with_name(path.name + _PARTIAL))
            shutil.rmtree(path)

    def _choose(self) -> tuple[int, int]:
        """Step and number of the newest intact checkpoint."""
        found = _named(self._folder)
        for path in reversed(found):
            reason = damage(path)
            if reason is None:
                return _key(path)
            print(f"checkpoint {path} is skipped: {reason}", file=sys.stderr, flush=True)
            self._damaged.add(path.name)
        return (_NOTHING_INTACT if found else _NOTHING), 0


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    """Raise OSError for a full disk, which orbax reports only in the words of a ValueError."""
    try:
        yield
    except ValueError as error:
        for number in cli.DISK_FULL:
            if os.strerror(number) in str(error):
                raise OSError(number, os.strerror(number), str(folder)) from error
        raise


def newest_saved(folder: Path) -> Saved | None:
    """The newest checkpoint whose description can be read; its other bytes are not checked."""
    for path in reversed(_named(folder)):
        try:
            return Saved(path, json.loads((path / META).read_text()))
        except (OSError, ValueError):
            continue  # Damaged, which :meth:`Checkpoints.find` reports.
    return None


def _named(folder: Path) -> list[Path]:
    """Folders with a checkpoint's name, the newest last."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted((path for path in found if _NAME.fullmatch(path.name)), key=_key)


def checksums(folder: Path) -> bytes:
    """The SHA-256 of every file of a checkpoint, one a line, as ``sha256sum`` writes them."""
    lines = []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path != folder / CHECKSUMS:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            lines.append(f"{digest}  {path.relative_to(folder).as_posix()}\n")
    return "".join(lines).encode()


def damage(folder: Path) -> str | None:
    """How a checkpoint differs from what was saved; None if it does not."""
    try:
        listed = (folder / CHECKSUMS).read_bytes()
    except OSError:
        return f"it has no {CHECKSUMS}, which a whole checkpoint of this version has"
    try:
        actual = checksums(folder)
    except OSError as error:
        return f"it cannot be read ({error})"
    if listed == actual:
        return None
    lines = set(listed.decode(errors="replace").splitlines()) ^ set(actual.decode().splitlines())
    # A line is a digest, two spaces and a name; those of a damaged list may be anything.
    names = ", ".join(sorted({line[66:] for line in lines} - {""})[:3])
    return f"{names or 'its list'} does not fit the checksums in {CHECKSUMS}"


def _name(step: int, repeated: int) -> str:
    return f"{step}.{repeated}" if repeated else str(step)


def _key(folder: Path) -> tuple[int, int]:
    """Step and number of a checkpoint's folder, by which it is older or newer than another."""
    found = _NAME.fullmatch(folder.name)
    assert found is not None, "the folder is one of a checkpoint"
    return int(found[1]), int(found[2] or 0)


def _agreed(numbers: tuple[int, int]) -> tuple[int, int]:
    """The numbers of process 0."""
    if jax.process_count() == 1:
        return numbers
    first, second = multihost_utils.broadcast_one_to_all(np.asarray(numbers, np.int32))
    return int(first), int(second)
