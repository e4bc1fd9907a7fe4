"""Checkpoints: what is restored is what was saved, whatever happened to the files or the run."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from longspec_jax import cli, files
from longspec_jax.sharding import make_mesh
from tests.kit import each_row
from train import checkpoint
from train.checkpoint import Checkpoints, damage, newest_saved
from train.step import TrainState


def state(step: int) -> TrainState:
    values = jnp.arange(40.0).reshape(5, 8) + step
    return TrainState(jnp.int32(step), {"kernel": values, "scale": values[0]}, {"mu": -values})


def save(folder: Path, *steps: int, keep: int = 9) -> None:
    checkpoints = Checkpoints(folder, keep)
    for step in steps:
        checkpoints.save(step, state(step), {"step": step})
    checkpoints.close()


def restored(folder: Path) -> int | None:
    """The step that is restored, every array of which is that of the step."""
    checkpoints = Checkpoints(folder, 9)
    try:
        if (saved := checkpoints.find()) is None:
            return None
        found = checkpoints.restore(saved, state(0))
    finally:
        checkpoints.close()
    jax.tree.map(np.testing.assert_array_equal, found, state(saved.meta["step"]))
    return saved.meta["step"]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 5 and 12."""
    folder = tmp_path_factory.mktemp("two")
    save(folder, 5, 12)
    return folder


@pytest.mark.parametrize("call", ["save", "wait_until_finished", "close"])
def test_a_full_disk_is_said_in_one_sentence(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", 1)

    def full(*_: object) -> None:
        raise ValueError("RESOURCE_EXHAUSTED: Failed to write 9 bytes: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints._saver, call, full)
        with pytest.raises(OSError) as raised:
            checkpoints.save(1, state(1), {"step": 1})
            checkpoints.close()
    message, status = cli.explained(raised.value)
    assert "No space left on device: " in message and message.endswith(
        "make room, then run it again"
    )
    assert status == cli.FAILED


def copied(two: Path, tmp_path: Path) -> Path:
    return shutil.copytree(two, tmp_path / "copy")


def all_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_the_newest_few_are_kept(tmp_path: Path) -> None:
    assert restored(tmp_path) is None
    save(tmp_path, 3, 7, 12, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["12", "7"]
    assert restored(tmp_path) == 12


def test_another_mesh_restores_what_one_saved(tmp_path: Path) -> None:
    def on(devices: int) -> TrainState:
        mesh = make_mesh(1, devices, 1)
        whole = jnp.arange(32.0).reshape(8, 4)
        cut = jax.device_put(whole, NamedSharding(mesh, P("fsdp")))
        return TrainState(jnp.int32(1), {"kernel": cut}, {})

    checkpoints = Checkpoints(tmp_path, 1)
    checkpoints.save(1, on(4), {"step": 1})
    checkpoints.close()
    again, like = Checkpoints(tmp_path, 1), on(2)
    saved = again.find()
    assert saved is not None
    found = again.restore(saved, like).params["kernel"]
    assert found.sharding == like.params["kernel"].sharding
    np.testing.assert_array_equal(found, like.params["kernel"])


def test_no_flipped_bit_goes_unnoticed(two: Path, tmp_path: Path) -> None:
    newest = copied(two, tmp_path) / "12"
    rng = np.random.default_rng(0)
    for path in all_files(newest):
        whole = path.read_bytes()
        for bit in rng.integers(0, 8 * len(whole), 20):
            flipped = bytearray(whole)
            flipped[bit // 8] ^= 1 << bit % 8
            path.write_bytes(flipped)
            assert damage(newest) is not None, (path, bit)
        path.write_bytes(whole)
    assert damage(newest) is None


def shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@each_row("spoil", [Path.unlink, shorten, lambda path: os.truncate(path, 0)])
def test_the_newest_intact_one_is_used(
    spoil: Callable[[Path], None], two: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied(two, tmp_path)
    for path in all_files(folder / "12"):
        whole = path.read_bytes()
        if not whole and spoil is not Path.unlink:
            continue
        spoil(path)
        found = Checkpoints(folder, 9).find()
        assert found is not None and found.meta == {"step": 5}
        error = capsys.readouterr().err
        assert error.startswith(f"checkpoint {folder / '12'} is skipped: ") and "SHA256" in error
        if path.name != checkpoint.CHECKSUMS:
            assert path.relative_to(folder / "12").as_posix() in error
        path.write_bytes(whole)
    assert restored(folder) == 12


def test_nothing_intact_is_an_error_that_says_what_to_do(two: Path, tmp_path: Path) -> None:
    folder = copied(two, tmp_path)
    for name in ("5", "12"):
        shorten(folder / name / checkpoint.META)
    with pytest.raises(ValueError, match=f"no checkpoint in {folder} is intact; put an undamaged"):
        Checkpoints(folder, 9).find()


@each_row(
    ("keep", "steps", "left"),
    [
        (9, (9,), ["5", "9"]),
        (9, (9, 12), ["12", "5", "9"]),
        (2, (20,), ["20", "5"]),
        (2, (9, 12), ["12", "9"]),
    ],
)
def test_a_damaged_newer_one_makes_room_and_counts_for_nothing(
    keep: int, steps: tuple[int, ...], left: list[str], two: Path, tmp_path: Path
) -> None:
    """The run that goes on from an older one may save at the same step once more."""
    folder = copied(two, tmp_path)
    shorten(folder / "12" / checkpoint.META)
    checkpoints = Checkpoints(folder, keep)
    assert (saved := checkpoints.find()) is not None and saved.meta == {"step": 5}
    for step in steps:
        checkpoints.save(step, state(step), {"step": step})
    checkpoints.close()
    assert sorted(path.name for path in folder.iterdir()) == left
    assert restored(folder) == steps[-1]


def test_the_newest_that_says_what_it_is(two: Path, tmp_path: Path) -> None:
    folder = copied(two, tmp_path)
    assert (saved := newest_saved(folder)) is not None and saved.meta == {"step": 12}
    (folder / "12" / checkpoint.META).write_text("{")
    assert (saved := newest_saved(folder)) is not None and saved.folder == folder / "5"
    assert newest_saved(tmp_path / "absent") is None


def test_a_step_saved_again_is_there_all_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 12)
    seen = []
    rename = Path.rename

    def renaming(path: Path, to: Path) -> Path:
        seen.append(restored(tmp_path))
        return rename(path, to)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", renaming)
        save(tmp_path, 12, keep=1)
    assert seen and set(seen) == {12}
    assert restored(tmp_path) == 12 and len(list(tmp_path.iterdir())) == 1


class Killed(BaseException):
    """What stands for kill -9: nothing catches it."""


OPERATIONS = (
    (Path, "mkdir"), (Path, "rename"), (Path, "replace"), (shutil, "rmtree"), (files, "replace"),
    (os, "fsync"), (os, "rename"),
)  # fmt: skip


@contextmanager
def killed_at(last: int) -> Iterator[list[str]]:
    """Let no file operation from the last one on happen; yields the names of those tried."""
    tried: list[str] = []

    def stopping(name: str, work: Callable) -> Callable:
        def operation(*given, **named):
            # Between two waits for the disk nothing changes that a reader could see.
            if [*tried[-1:], name] != ["fsync", "fsync"]:
                tried.append(name)
            if len(tried) > last:
                raise Killed(name)
            return work(*given, **named)

        return operation

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in OPERATIONS:
            patch.setattr(owner, name, stopping(name, getattr(owner, name)))
        yield tried


def test_killed_at_any_moment_of_a_save_something_whole_is_left(two: Path, tmp_path: Path) -> None:
    for last in range(100):
        folder = shutil.copytree(two, tmp_path / str(last))
        checkpoints = Checkpoints(folder, 1)
        with killed_at(last) as tried:
            try:
                checkpoints.save(20, state(20), {"step": 20})
                checkpoints._wait()
            except BaseException:
                pass
        assert restored(folder) == (20 if (folder / "20").is_dir() else 12)
        # The run that goes on saves as if nothing had been.
        save(folder, 20, 30, keep=2)
        assert restored(folder) == 30 and len(list(folder.iterdir())) == 2
        if len(tried) <= last:
            break
    assert {"mkdir", "rename", "replace", "rmtree"} <= set(tried) and last > 8


def test_older_ones_go_when_the_new_one_is_on_the_disk(
    two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file of it, and the names of files and of the folder itself."""
    folder, synced, removed = copied(two, tmp_path), set(), []
    fsync, rmtree = os.fsync, shutil.rmtree

    def noting(opened: int) -> None:
        fsync(opened)
        synced.add(os.fstat(opened).st_ino)

    def removing(path: Path, *given, **named) -> None:
        removed.append(path)
        new = folder / "20"
        needed = [folder, new, *new.rglob("*")]
        assert len(needed) > 5 and {path.stat().st_ino for path in needed} <= synced
        rmtree(path, *given, **named)

    monkeypatch.setattr(os, "fsync", noting)
    monkeypatch.setattr(shutil, "rmtree", removing)
    save(folder, 20, keep=1)
    assert len(removed) == 2 and restored(folder) == 20


def test_a_first_save_that_was_never_finished_is_no_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 4)
    (tmp_path / "4").rename(tmp_path / "4.partial")
    assert restored(tmp_path) is None


def test_the_checksums_are_those_of_sha256sum(two: Path) -> None:
    lines = (two / "12" / checkpoint.CHECKSUMS).read_text().splitlines()
    names = [path.relative_to(two / "12").as_posix() for path in all_files(two / "12")]
    assert sorted([line[66:] for line in lines] + [checkpoint.CHECKSUMS]) == sorted(names)
    assert all(line[64:66] == "  " for line in lines)
