"""Configurations are found by name from anywhere, and a user's own file wins."""

import sys
from pathlib import Path

import pytest
from absl import flags

from train import arguments, config_file, run
from train.arguments import parse

OWN = """
from longspec_jax.recipes import paper_config

def get_config(variant="short"):
    return paper_config("mine", variant, target="a/b", long_length=99, max_offset=7, seed=5)
"""


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["vicuna7b", "vicuna7b.py", "configs/vicuna7b.py"])
def test_the_projects_own_are_found_by_name(name: str) -> None:
    assert config_file.find(name) == config_file.BUNDLED / "vicuna7b.py"
    found = parse([f"--config={name}:long", "--config.seed=3"])
    assert found.config["stages"].keys() == {"long"} and found.config["seed"] == 3
    assert found.workdir == Path("runs/vicuna7b-long")


@pytest.mark.parametrize("name", ["vicuna7b.py", "configs/vicuna7b.py", "vicuna7b"])
def test_a_file_of_the_user_wins(name: str, empty_folder: Path) -> None:
    file = empty_folder / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(OWN)
    assert parse(["--config", name]).config["seed"] == 5


def test_folders_of_the_same_name_are_no_configurations(empty_folder: Path) -> None:
    (empty_folder / "demo").mkdir()
    (empty_folder / "configs").mkdir()
    assert parse(["--config=demo:tiny"]).config["dtype"] == "float32"


def test_a_file_anywhere_is_built_from_the_library(empty_folder: Path) -> None:
    home = empty_folder / "elsewhere"
    home.mkdir()
    (home / "mine.py").write_text(OWN)
    found = parse([f"--config={home}/mine.py:sft", "--config.draft.window=9"])
    assert found.config["draft"]["init"] == "runs/mine-long/draft"
    assert found.config["draft"]["window"] == 9
    assert found.workdir == Path("runs/mine-sft")


@pytest.mark.parametrize(
    "name", ["absent", "other/vicuna7b.py", "configs/absent.py", "__init__", ""]
)
def test_unknown_names_are_answered_with_the_known_ones(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main([f"--config={name}"]) == run.BAD_INPUT
    error = capsys.readouterr().err
    if name:
        assert f"no configuration file {name!r}; the project's own are demo, llama31_8b" in error
    else:
        assert "--config=FILE is missing" in error


BROKEN = {
    "no function": ("x = 1", "has no attribute 'get_config'"),
    "syntax": ("def", "cannot be loaded: SyntaxError"),
    "no such module": ("import absent_module", "No module named 'absent_module'"),
    "nothing": ("def get_config(variant): pass", "get_config of mine.py returned NoneType"),
    "no variants": ("def get_config(): pass", "takes 0 positional arguments"),
    "refused": ("def get_config(variant): raise ValueError('never')", "train.run: never"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_named_with_its_fault(
    name: str, empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, sentence = BROKEN[name]
    (empty_folder / "mine.py").write_text(text)
    assert run.main(["--config=mine.py:small"]) == run.BAD_INPUT
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1
    assert "mine.py" in error or name == "refused"


RECORD = """
from __future__ import annotations
from dataclasses import dataclass
from longspec_jax.recipes import paper_config

def get_config(variant="short"):
    @dataclass
    class Choice:
        seed: int = 5
    seed = Choice().seed
    return paper_config("mine", variant, target="a/b", long_length=9, max_offset=7, seed=seed)
"""


def test_a_configuration_leaves_no_module_behind(empty_folder: Path) -> None:
    """Its module is known while it is loaded and called, as dataclasses need, and no longer."""
    (empty_folder / "mine.py").write_text(RECORD)
    assert parse(["--config=mine.py"]).config["seed"] == 5
    (empty_folder / "bad.py").write_text("x = 1")
    with pytest.raises(ValueError, match="get_config"):
        parse(["--config=bad.py"])
    assert not [name for name in sys.modules if name.startswith("longspec_configuration")]


@pytest.mark.parametrize("argv", [["--config.target=x"], ["--config.target", "x"], []])
def test_overrides_of_nothing(argv: list[str]) -> None:
    with pytest.raises(ValueError, match="--config=FILE is missing; try --config=demo"):
        parse(argv)


@pytest.mark.parametrize("error", [KeyError(), AttributeError(), flags.Error(), ValueError("\n")])
def test_an_error_without_words_is_a_sentence(error: Exception, monkeypatch) -> None:
    def fail(*given):
        raise error

    monkeypatch.setattr(arguments, "_flags", fail)
    with pytest.raises(ValueError, match=rf"cannot be read \({type(error).__name__}\); see --help"):
        parse(["--config=demo"])


def test_the_resolved_configuration_is_whole_or_old(empty_folder: Path, monkeypatch) -> None:
    """A disk that fills while it is written leaves what was there."""
    work = empty_folder / "work"
    work.mkdir()
    (work / "config.json").write_text("old")
    write = Path.write_text

    def full(self, text, *options):
        write(self, text[:9])
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert run.main(["--config=demo:tiny", f"--workdir={work}"]) == run.BAD_INPUT
    assert (work / "config.json").read_text() == "old"
