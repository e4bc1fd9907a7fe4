"""What is asked of the hub: safetensors first, pickles only where there is nothing else."""

import errno
import fnmatch
from pathlib import Path

import pytest

from longspec_jax.weights import hub
from tests.kit import each_row

REPOSITORIES = {
    "both": ["model-00001-of-00002.safetensors", "pytorch_model.bin", "consolidated.safetensors"],
    "pickles": ["pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"],
    "trainer": ["draft_model_weights.pth", "optimizer.pth", "draft_vocabulary.safetensors"],
}
COMMON = ["config.json", "generation_config.json", "tokenizer.model", "tokenizer.json", "README.md"]
WANTED = {
    "both": ["model-00001-of-00002.safetensors"],
    "pickles": ["pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"],
    "trainer": ["draft_model_weights.pth", "draft_vocabulary.safetensors"],
}


@each_row("kind", REPOSITORIES)
def test_files_asked_for(tmp_path, monkeypatch, kind):
    revisions = []

    def download(name, revision, allow_patterns):
        revisions.append((name, revision))
        for file in REPOSITORIES[kind] + COMMON:
            if any(fnmatch.fnmatch(file, pattern) for pattern in allow_patterns):
                (tmp_path / file).touch()
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", download)
    assert hub.local_folder("owner/model", "abc123") == tmp_path
    assert set(revisions) == {("owner/model", "abc123")}
    found = {path.name for path in tmp_path.iterdir()}
    assert found == set(WANTED[kind]) | set(COMMON) - {"README.md"}


def test_a_folder_is_not_looked_up(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "snapshot_download", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "model").mkdir(parents=True)
    assert hub.local_folder("owner/model") == Path("owner/model")


@each_row("error", [OSError("no route\nto host"), ValueError("bad id")])
def test_failures_say_what_to_do(monkeypatch, error):
    def download(*args, **kwargs):
        raise error

    monkeypatch.setattr(hub, "snapshot_download", download)
    with pytest.raises(FileNotFoundError, match="(no route|bad id).*Check the name.*hf auth login"):
        hub.local_folder("owner/model")


def test_a_full_disk_is_no_wrong_name(monkeypatch):
    def download(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hub, "snapshot_download", download)
    with pytest.raises(FileNotFoundError, match="No space left.*: make room, or .* with HF_HOME"):
        hub.local_folder("owner/model")


NO_NAME = "a model is a folder or a hub id of the form owner/model"


@each_row(
    ("source", "kind", "words"),
    [
        # An empty name is not the folder one happens to be in.
        *((source, ValueError, NO_NAME) for source in ("", "  ", None, 5, ["owner/model"])),
        ("x" * 5000, FileNotFoundError, "is not a folder.*name a folder with"),
        ("o/" + "x" * 5000, FileNotFoundError, "is not a folder.*name a folder with"),
        ("a\0b", FileNotFoundError, "is not a folder.*name a folder with"),
        ("~nobody-of-this-name/model", FileNotFoundError, "~nobody-.*/model is not a folder"),
        ("https://huggingface.co/o/m/tree/main", FileNotFoundError, "name only the model: o/m$"),
    ],
)
def test_what_names_no_model_is_refused(source, kind, words):
    with pytest.raises(kind, match=words) as error:
        hub.local_folder(source)
    assert len(str(error.value)) < 300


def test_a_file_is_no_folder(tmp_path, monkeypatch):
    """Also where its path looks like a hub id."""
    monkeypatch.setattr(hub, "snapshot_download", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "model").touch()
    for source in ("owner/model", tmp_path / "owner" / "model"):
        with pytest.raises(
            NotADirectoryError, match="model is a file, not a folder; name the folder"
        ):
            hub.local_folder(source)


def test_home_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert hub.local_folder("~/model") == tmp_path / "model"
