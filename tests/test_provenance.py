"""The head of every file of results says what is needed to measure again."""

import json
import platform
import subprocess
from pathlib import Path

import pytest

from longspec_jax import provenance as head

OPEN_MODULE = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n"
    "GCC version:  gcc version 13.3.0\n"
)
OLD_MODULE = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun  6 22:20:39 2023\n"


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=x", "-c", "user.email=x@y"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working tree with one commit that holds the module."""
    monkeypatch.delenv("LONGSPEC_COMMIT", raising=False)
    (tmp_path / "provenance.py").write_text("1\n")
    monkeypatch.setattr(head, "__file__", str(tmp_path / "provenance.py"))
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    return tmp_path


def test_changed_files_of_the_commit_are_said(tree: Path) -> None:
    clean = head.provenance("cpu")
    assert len(clean["commit"]) == 40 and clean["dirty"] is False
    (tree / "new.json").write_text("what was just measured")
    assert head.provenance("cpu")["dirty"] is False
    (tree / "provenance.py").write_text("2\n")
    assert head.provenance("cpu")["dirty"] is True


def test_what_is_unknown_is_null(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGSPEC_COMMIT", "abc")
    assert (head.provenance("cpu")["commit"], head.provenance("cpu")["dirty"]) == ("abc", None)
    monkeypatch.delenv("LONGSPEC_COMMIT")
    git(tree, "rm", "-q", "--cached", "provenance.py")
    assert head._checked_out() == (None, None)
    monkeypatch.setattr(head, "DRIVER", tree / "absent")
    found = head.provenance("cpu")
    assert (found["commit"], found["dirty"], found["driver"]) == ("unknown", None, None)


def test_machine_and_versions_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"flax": "0.12.8", "nvidia-cudnn-cu13": "9.20.0.48", "jax-cuda13-plugin": "0.12.0.1"}
    monkeypatch.setattr(head, "version", versions.get)
    monkeypatch.setattr(head, "PROCESSORS", tmp_path / "cpuinfo")
    monkeypatch.setattr(head, "DRIVER", tmp_path / "version")
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: AMD EPYC 9654\nflags : fpu\n")
    for module, version in ((OPEN_MODULE, "580.95.05"), (OLD_MODULE, "535.54.03")):
        (tmp_path / "version").write_text(module)
        assert head.provenance("NVIDIA H100")["driver"] == version
    found = json.loads(json.dumps(head.provenance("NVIDIA H100")))
    assert found["cpu"].startswith("AMD EPYC 9654, ") and found["device"] == "NVIDIA H100"
    missing = dict.fromkeys(set(head.PACKAGES) - versions.keys())
    assert found["versions"] == {"python": platform.python_version(), **versions, **missing}
