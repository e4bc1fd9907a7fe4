"""The file of the numbers: refused before the run, whole after it, rescued if it fails."""

import errno
import json
import math
from argparse import ArgumentTypeError

import pytest

from infer import output
from infer.output import output_file, write

OLD = '{"header": {}}'


def test_a_file_that_holds_no_results_is_not_replaced(tmp_path) -> None:
    """What an earlier run has written is, and so is an empty file."""
    path = tmp_path / "out.json"
    for foreign in ("{}", '{"name": 1}', "text", "[1]", "\x89PNG"):
        path.write_text(foreign)
        with pytest.raises(ArgumentTypeError, match="out.json is there and holds no results"):
            output_file(str(path))
        assert path.read_text() == foreign
    for own in ("", OLD, '{\n  "interrupted": true, "rows": []}', '{"headers": []}'):
        path.write_text(own)
        assert write(output_file(str(path)), {"header": 1})


def test_a_trial_leaves_nothing_behind(tmp_path) -> None:
    path = tmp_path / "out.json"
    assert output_file(str(path)) == path
    assert not list(tmp_path.iterdir())
    assert write(path, {"header": "é"})
    assert json.loads(path.read_text("utf-8")) == {"header": "é"}
    path.chmod(0o640)
    before = path.read_text()
    assert output_file(str(path)) == path and path.read_text() == before
    assert write(path, {"header": "new"}) and path.stat().st_mode & 0o777 == 0o640
    assert [item.name for item in tmp_path.iterdir()] == ["out.json"]


def test_numbers_are_rescued(tmp_path, monkeypatch, capsys) -> None:
    """The disk may have filled during the run, and the temporary folder with it."""
    path = tmp_path / "out.json"
    path.write_text(OLD)
    assert output_file(str(path)) == path

    def full(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(output.files, "temporary", full)
    monkeypatch.setattr(output.tempfile, "tempdir", str(tmp_path))
    assert not write(path, {"a": 1}) and path.read_text() == OLD
    [rescued] = tmp_path.glob("longspec_*.json")
    said = capsys.readouterr().err
    assert json.loads(rescued.read_text()) == {"a": 1}
    assert f"No space left on device; the numbers are in {rescued}" in said

    monkeypatch.setattr(output.tempfile, "NamedTemporaryFile", full)
    assert not write(path, {"a": 1})
    said = capsys.readouterr().err
    assert json.loads(said.split("the numbers follow\n")[1]) == {"a": 1}


def test_numbers_that_are_no_json_are_rescued(tmp_path, monkeypatch, capsys) -> None:
    path = tmp_path / "out.json"
    monkeypatch.setattr(output.tempfile, "tempdir", str(tmp_path))
    values = {"gap": math.inf, "what": {1}}
    assert not write(output_file(str(path)), values) and not path.exists()
    [rescued] = tmp_path.glob("longspec_*.json")
    assert json.loads(rescued.read_text()) == {"gap": math.inf, "what": "{1}"}
    said = capsys.readouterr().err
    assert f"--json {path}: not all of it can be written as JSON: " in said and str(rescued) in said


def test_half_characters_are_escaped(tmp_path) -> None:
    """From the name of a file that is not UTF-8."""
    path = tmp_path / "out.json"
    write(output_file(str(path)), {"name": "a\udcff"})
    assert json.loads(path.read_text("utf-8")) == {"name": "a\udcff"}
