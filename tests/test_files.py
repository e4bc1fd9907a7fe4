"""Files are written whole or not at all."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from longspec_jax import files
from tests.kit import each_row


def test_a_file_is_made_and_replaced(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    files.replace(file, b"one")
    assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~_mask()
    file.chmod(0o640)
    files.replace(file, b"two")
    assert file.read_bytes() == b"two" and stat.S_IMODE(file.stat().st_mode) == 0o640
    assert list(tmp_path.iterdir()) == [file]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    file, link = tmp_path / "there" / "x", tmp_path / "link"
    link.symlink_to(file)
    files.replace(link, b"one")
    assert link.is_symlink() and file.read_bytes() == b"one"


@each_row("error", [OSError("the disk is full"), KeyboardInterrupt()])
@each_row("step", ["fsync", "chmod", "replace"])
def test_what_fails_leaves_the_file_before(tmp_path: Path, monkeypatch, step, error) -> None:
    def fail(*_, **__) -> None:
        raise error

    file = tmp_path / "x"
    file.write_text("before")
    monkeypatch.setattr(os, step, fail)
    with pytest.raises(type(error)):
        files.replace(file, b"after")
    assert file.read_text() == "before" and list(tmp_path.iterdir()) == [file]
    with pytest.raises(FileNotFoundError):
        files.replace(tmp_path / "none" / "x", b"")


def test_many_may_write_one_file(tmp_path: Path) -> None:
    """Each writes the whole of its own."""
    file, texts = tmp_path / "x", [bytes([letter]) * 100_000 for letter in b"abcdefgh"]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda text: files.replace(file, text), texts))
    assert file.read_bytes() in texts and list(tmp_path.iterdir()) == [file]


def _mask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_file_that_is_read_only_is_not_replaced(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "out.json"
    path.touch()
    monkeypatch.setattr(files.os, "access", lambda path, mode: mode != os.W_OK)
    with pytest.raises(ValueError, match="out.json is read-only; name another file"):
        files.writable(path, str(path))


def test_a_folder_that_cannot_be_written_is_noticed(tmp_path: Path, monkeypatch) -> None:
    def refuse(*_, **__) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "touch", refuse)
    with pytest.raises(ValueError, match=r"x cannot be written \(Permission denied\)"):
        files.writable(tmp_path / "x", "x")
