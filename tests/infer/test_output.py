"""The file of the numbers: refused before the run, whole after it, rescued if it fails."""

import errno
import json
import math
import os
from pathlib import Path

import pytest

from infer import output
from infer.output import OutputFile

OLD = '{"header": {}}'


def test_a_file_that_holds_no_results_is_not_replaced(tmp_path) -> None:
    """What an earlier run has written is, and so is an empty file."""
    path = tmp_path / "out.json"
    for foreign in ("{}", '{"name": 1}', "text", "[1]", "\x89PNG"):
        path.write_text(foreign)
        with pytest.raises(ValueError, match="--json .*out.json is there and holds no results"):
            OutputFile.tried(str(path), [])
        assert path.read_text() == foreign
    for own in ("", OLD, '{\n  "interrupted": true, "rows": []}', '{"headers": []}'):
        path.write_text(own)
        assert OutputFile.tried(str(path), []).write({"header": 1})


def test_a_trial_leaves_nothing_behind(tmp_path) -> None:
    path = tmp_path / "out.json"
    found = OutputFile.tried(str(path), [])
    assert not list(tmp_path.iterdir())
    assert found.write({"header": "é"})
    assert json.loads(path.read_text("utf-8")) == {"header": "é"}
    path.chmod(0o640)
    before = path.read_text()
    assert OutputFile.tried(str(path), []).path == path and path.read_text() == before
    assert found.write({"header": "new"}) and path.stat().st_mode & 0o777 == 0o640
    assert [item.name for item in tmp_path.iterdir()] == ["out.json"]


def test_a_new_file_has_the_permissions_of_any_other(tmp_path) -> None:
    (tmp_path / "other").touch()
    OutputFile.tried(str(tmp_path / "out"), []).write({})
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_inputs_are_refused_by_any_name(tmp_path) -> None:
    """Links of both kinds, other spellings, and everything in a model's folder."""
    model, prompt = tmp_path / "model", tmp_path / "prompt.txt"
    model.mkdir()
    prompt.write_text("ab")
    (model / "config.json").write_text("{}")
    (tmp_path / "soft").symlink_to(prompt)
    os.link(prompt, tmp_path / "hard")
    os.link(model / "config.json", tmp_path / "config")
    inputs = [("--prompt_file", prompt), ("--target", model), ("--draft", Path("owner/name"))]
    spellings = ["prompt.txt", "soft", "hard", "config", "model/config.json"]
    spellings += [
        "model/tokenizer.json",
        "model/model-00002-of-00003.safetensors",
    ]  # Not there yet.
    for name in (*spellings, "model/../prompt.txt"):
        with pytest.raises(ValueError, match=f"--json .*{name} is an input of this run"):
            OutputFile.tried(str(tmp_path / name), inputs)
    assert prompt.read_text() == "ab" and (model / "config.json").read_text() == "{}"
    for name in ("models.json", "model/out.json"):
        for _ in range(2):  # The second time over what the first has left.
            assert OutputFile.tried(str(tmp_path / name), inputs).write({"header": {}})


def test_the_folder_one_is_in_is_no_input(tmp_path, monkeypatch) -> None:
    """``--target . --json out.json``; what lies deeper is not looked at."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(Path, "rglob", None)
    assert OutputFile.tried("out.json", [("--target", Path("."))]).write({})
    with pytest.raises(
        ValueError, match=r"--json config.json is an input of this run \(--target \.\)"
    ):
        OutputFile.tried("config.json", [("--target", Path("."))])


def test_a_link_stays_a_link(tmp_path) -> None:
    (tmp_path / "real.json").write_text(OLD)
    (tmp_path / "link.json").symlink_to("real.json")
    OutputFile.tried(str(tmp_path / "link.json"), []).write({"a": 1})
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "real.json").read_text()) == {"a": 1}


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("absent/out.json", FileNotFoundError, "its folder does not exist; make it first"),
        (".", IsADirectoryError, "cannot be written: it is a folder"),
        ("/dev/full", OSError, "--json /dev/full cannot be written: No space left on device"),
        ("a" * 300, OSError, "cannot be written: File name too long"),
        ("file/out.json", NotADirectoryError, "cannot be written: Not a directory"),
    ],
)
def test_what_cannot_be_written(tmp_path, name, error, message) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(error, match=message):
        OutputFile.tried(str(tmp_path / name), [])


def test_a_device_is_written_to_and_not_replaced(tmp_path) -> None:
    assert OutputFile.tried("/dev/null", []).write({"a": 1})
    assert not Path("/dev/null").is_file()


def test_numbers_are_rescued(tmp_path, monkeypatch, capsys) -> None:
    """The disk may have filled during the run, and the temporary folder with it."""
    path = tmp_path / "out.json"
    path.write_text(OLD)
    found = OutputFile.tried(str(path), [])

    def full(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(output.files, "beside", full)
    monkeypatch.setattr(output.tempfile, "tempdir", str(tmp_path))
    assert not found.write({"a": 1}) and path.read_text() == OLD
    [rescued] = tmp_path.glob("longspec_*.json")
    said = capsys.readouterr().err
    assert json.loads(rescued.read_text()) == {"a": 1}
    assert f"No space left on device; the numbers are in {rescued}" in said

    monkeypatch.setattr(output.tempfile, "NamedTemporaryFile", full)
    assert not found.write({"a": 1})
    said = capsys.readouterr().err
    assert json.loads(said.split("the numbers follow\n")[1]) == {"a": 1}


def test_numbers_that_are_no_json_are_rescued(tmp_path, monkeypatch, capsys) -> None:
    path = tmp_path / "out.json"
    monkeypatch.setattr(output.tempfile, "tempdir", str(tmp_path))
    values = {"gap": math.inf, "what": {1}}
    assert not OutputFile.tried(str(path), []).write(values) and not path.exists()
    [rescued] = tmp_path.glob("longspec_*.json")
    assert json.loads(rescued.read_text()) == {"gap": math.inf, "what": "{1}"}
    said = capsys.readouterr().err
    assert f"--json {path}: not all of it can be written as JSON: " in said and str(rescued) in said


@pytest.mark.parametrize("step", ["fsync", "replace", "chmod"])
def test_no_half_file_stays_behind_on_an_interrupt(tmp_path, monkeypatch, step) -> None:
    def leave(*args, **options):
        raise KeyboardInterrupt

    path = tmp_path / "out.json"
    path.write_text(OLD)
    found = OutputFile.tried(str(path), [])
    monkeypatch.setattr(os, step, leave)
    with pytest.raises(KeyboardInterrupt):
        found.write({"a": 1})
    assert list(tmp_path.iterdir()) == [path] and path.read_text() == OLD


def test_half_characters_are_escaped(tmp_path) -> None:
    """From the name of a file that is not UTF-8."""
    path = tmp_path / "out.json"
    OutputFile.tried(str(path), []).write({"name": "a\udcff"})
    assert json.loads(path.read_text("utf-8")) == {"name": "a\udcff"}


def test_standard_output(capsys) -> None:
    assert OutputFile.tried("-", []).write({"a": 1})
    assert json.loads(capsys.readouterr().out) == {"a": 1}
