"""Configurations are found, overridden, checked, and become frozen dataclasses."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from configs import demo, vicuna7b
from longspec_jax import cli
from longspec_jax.checks import Maybe, Refused, Rule
from longspec_jax.config.layers import LinearRopeScaling
from longspec_jax.schema import Section, options
from tests.kit import each_row
from tests.refusals import wrong
from train import arguments, run
from train.arguments import from_config, parse
from train.config import DraftSettings, MeshConfig, RunConfig, StageConfig, TargetConfig
from train.drafts.kinds import LongSpecSettings


def values() -> dict[str, Any]:
    return demo.get_config("tiny").to_dict()


def changed(path: str, value: Any) -> dict[str, Any]:
    """The values with one that is different."""
    whole = values()
    *parents, last = path.split(".")
    node = whole
    for parent in parents:
        node = node[parent]
    node[last] = value
    return whole


def test_the_run_is_frozen_hashable_and_typed() -> None:
    run = from_config(values())
    assert hash(run) == hash(from_config(values()))
    assert run.pretraining is not None and isinstance(run.pretraining.shape, TargetConfig)
    # A ConfigDict sorts its keys; stages run from short to long rows.
    assert [stage.name for stage in run.stages] == ["short", "long"]
    assert run.data.corpus is not None and run.data.corpus.held_out == ("attrs", "jinja2")
    whole = values()
    whole["optimizer"]["clip"] = 2
    assert isinstance(from_config(whole).optimizer.clip, float)


def test_nested_shapes_convert() -> None:
    nested = values()
    nested["pretraining"]["shape"]["rope_scaling"] = None
    assert from_config(nested).pretraining.shape.rope_scaling is None  # type: ignore[union-attr]
    nested["pretraining"]["shape"]["rope_scaling"] = {"factor": 2.0}
    shape = from_config(nested).pretraining.shape  # type: ignore[union-attr]
    assert shape.rope_scaling == LinearRopeScaling(2.0)


def leaves(kind: Any, given: Any, path: str = "") -> Iterator[tuple[str, Rule]]:
    """The fields of a section and of those within it, as they are typed, and their rules."""
    for name, one in options(kind).items():
        rule = one.rule.rule if isinstance(one.rule, Maybe) else one.rule
        if not isinstance(rule, Section):
            yield path + name, one.rule
        elif isinstance(given.get(name), dict) and rule.kind is not TargetConfig:
            settings = LongSpecSettings if rule.kind is DraftSettings else rule.kind
            yield from leaves(settings, given[name], f"{path}{name}.")


def fields() -> dict[str, Rule]:
    """Every field of a run that trains its target, those of one stage among them."""
    stage = {f"stages.short.{name}": one.rule for name, one in options(StageConfig).items()}
    return {**dict(leaves(RunConfig, values())), **stage}


FIELDS = {name: rule for name, rule in fields().items() if name != "stages.short.name"}
assert {"seed", "mesh.tp", "data.corpus.held_out", "draft.window", "log.wandb"} <= FIELDS.keys()


@each_row("path", FIELDS)
def test_a_value_that_breaks_the_rule_of_its_field(path: str) -> None:
    """Refused with field and value, before anything runs."""
    for value in wrong(FIELDS[path]):
        with pytest.raises(Refused) as refused:
            from_config(changed(path, value))
        assert refused.value.name.startswith(f"--config.{path}") and "\n" not in str(refused.value)


def test_a_missing_field_is_named() -> None:
    whole = values()
    del whole["stages"]["short"]["seq_len"], whole["stages"]["short"]["batch"]
    with pytest.raises(ValueError, match="config.stages.short lacks seq_len, batch"):
        from_config(whole)


def test_local_files_replace_hub_data() -> None:
    config = vicuna7b.get_config("short")
    assert config.data.hub
    config.data.files = "x.jsonl"
    assert from_config(config.to_dict()).data.files == "x.jsonl"


def test_one_mesh_axis_takes_what_is_left() -> None:
    assert MeshConfig(1, -1, 2).resolve(8) == (1, 4, 2)
    assert MeshConfig(2, 2, 2).resolve(8) == (2, 2, 2)
    with pytest.raises(ValueError, match="only one mesh axis may be -1"):
        MeshConfig(-1, -1, 1).resolve(8)


OWN = """
from longspec_jax.recipes import paper_config

def get_config(variant="short"):
    return paper_config("mine", variant, target="a/b", long_length=2048, max_offset=7, seed=5)
"""


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@each_row("name", ["vicuna7b", "vicuna7b.py", "configs/vicuna7b.py"])
def test_the_projects_own_are_found_by_name(name: str) -> None:
    assert arguments.find(name) == arguments.BUNDLED / "vicuna7b.py"
    found = parse([f"--config={name}:long", "--config.seed=3"])
    assert [stage.name for stage in found.config.stages] == ["long"] and found.config.seed == 3
    assert found.workdir == Path("runs/vicuna7b-long")


@pytest.mark.parametrize("name", ["vicuna7b.py", "configs/vicuna7b.py", "vicuna7b"])
def test_a_file_of_the_user_wins(name: str, empty_folder: Path) -> None:
    file = empty_folder / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(OWN)
    assert parse(["--config", name]).config.seed == 5


def test_folders_of_the_same_name_are_no_configurations(empty_folder: Path) -> None:
    (empty_folder / "demo").mkdir()
    (empty_folder / "configs").mkdir()
    assert parse(["--config=demo:tiny"]).config.dtype == "float32"


def test_a_file_anywhere_is_built_from_the_library(empty_folder: Path) -> None:
    home = empty_folder / "elsewhere"
    home.mkdir()
    (home / "mine.py").write_text(OWN)
    found = parse([f"--config={home}/mine.py:sft", "--config.draft.window=9"])
    draft = found.config.draft
    assert isinstance(draft, LongSpecSettings)
    assert (draft.init, draft.window) == ("runs/mine-long/draft", 9)
    assert found.workdir == Path("runs/mine-sft")


@each_row("name", ["absent", "other/vicuna7b.py", "configs/absent.py", "__init__", ""])
def test_unknown_names_are_answered_with_the_known_ones(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main([f"--config={name}"]) == cli.BAD_INPUT
    error = capsys.readouterr().err
    if name:
        assert f"no configuration file {name!r}; the project's own are demo, gpt_oss_20b" in error
    else:
        assert "--config=FILE is missing" in error


BROKEN = {
    "no function": ("x = 1", "has no attribute 'get_config'"),
    "syntax": ("def", "cannot be loaded: SyntaxError"),
    "no such module": ("import absent_module", "No module named 'absent_module'"),
    "nothing": ("def get_config(variant): pass", "get_config of mine.py returned NoneType"),
    "no variants": ("def get_config(): pass", "takes 0 positional arguments"),
    "refused": ("def get_config(variant): raise ValueError('never')", "error: never"),
}


@each_row("name", BROKEN)
def test_a_broken_file_is_named_with_its_fault(
    name: str, empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, sentence = BROKEN[name]
    (empty_folder / "mine.py").write_text(text)
    assert run.main(["--config=mine.py:small"]) == cli.BAD_INPUT
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
    return paper_config("mine", variant, target="a/b", long_length=2048, max_offset=7, seed=seed)
"""


def test_a_configuration_leaves_no_module_behind(empty_folder: Path) -> None:
    """Its module is known while it is loaded and called, as dataclasses need, and no longer."""
    (empty_folder / "mine.py").write_text(RECORD)
    assert parse(["--config=mine.py"]).config.seed == 5
    (empty_folder / "bad.py").write_text("x = 1")
    with pytest.raises(ValueError, match="get_config"):
        parse(["--config=bad.py"])
    assert not [name for name in sys.modules if name.startswith("longspec_configuration")]


@each_row("argv", [["--config.target=x"], ["--config.target", "x"], []])
def test_overrides_of_nothing(argv: list[str]) -> None:
    with pytest.raises(ValueError, match="--config=FILE is missing; try --config=demo"):
        parse(argv)


@each_row(
    ("typed", "field", "value"),
    [
        (["--config.seed=7"], "seed", 7),
        (["--config.seed", "7"], "seed", 7),
        (["--config.seed=3", "--config.seed=7"], "seed", 7),
        (["--config.optimizer.clip=2"], "optimizer.clip", 2.0),
        (["--config.mesh.data", "-1"], "mesh.data", -1),
        (["--config.draft.anchor_offset=false"], "draft.anchor_offset", False),
        (["--noconfig.draft.anchor_offset"], "draft.anchor_offset", False),
        (["--config.log.tensorboard"], "log.tensorboard", True),
        (["--config.data.corpus.held_out=attrs,yaml"], "data.corpus.held_out", ("attrs", "yaml")),
        (["--config.export=a=b, c"], "export", "a=b, c"),
        (["--config.export="], "export", ""),
        (["--config.pretraining.shape.rope_theta=5e5"], "pretraining.shape.rope_theta", 5e5),
        (["--config.features.folder=x"], "features.folder", "x"),
    ],
)
def test_an_override_has_the_type_of_its_field(typed: list[str], field: str, value: Any) -> None:
    found: Any = parse(["--config=demo:tiny", *typed]).config
    for name in field.split("."):
        found = getattr(found, name)
    assert found == value and type(found) is type(value)


@each_row(
    ("typed", "sentence"),
    [
        ("--config.seed=x", "^--config.seed='x' must be a whole number"),
        ("--config.seed=1.0", "^--config.seed='1.0' must be a whole number"),
        ("--config.seed", "^--config.seed='true' must be a whole number"),
        ("--config.sed=1", "^--config: unknown option 'sed'; did you mean 'seed'[?]$"),
        ("--config.seed.x=1", "^--config.seed={'x': '1'} must be a whole number"),
        (
            "--config.draft.windo=1",
            "^--config.draft: unknown option 'windo'; did you mean 'window'",
        ),
        ("--config.drft.window=1", "^--config: unknown option 'drft'; did you mean 'draft'[?]$"),
        ("--config.draft.anchor_offset=maybe", "'maybe' must be True or False$"),
        ("--config.draft.kind=eagle", "^--config.draft.kind='eagle' must be one of longspec"),
        ("--config.data=x", "^--config.data='x' must be a section"),
        ("--config.stages.short.batch=0", "^--config.stages.short.batch=0 must be a whole number"),
        ("--config.stages.short.name=x", "stages.short.name: a stage has the name of its section"),
    ],
)
def test_an_override_that_is_none(typed: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        parse(["--config=demo:tiny", typed])


def test_an_override_leaves_no_field_behind_that_refers_to_another(empty_folder: Path) -> None:
    file = empty_folder / "mine.py"
    file.write_text(
        "from configs import demo\n\n\ndef get_config(variant=''):\n"
        "    config = demo.get_config('tiny')\n"
        "    config.seed = config.stages.short.get_ref('batch')\n    return config\n"
    )
    parsed = parse([f"--config={file}"]).config
    assert parsed.seed == parsed.stages[0].batch
    with pytest.raises(ValueError, match="get_ref. would not follow --config.stages.short.batch"):
        parse([f"--config={file}", "--config.stages.short.batch=4"])


ODD: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("mesh.data", "mesh.fsdp", "mesh.tp"), (0, -2, "x", None, 1.0)),
    "data.turn": ("", "{role} says", 3),
    "draft.kind": ("", "eagle", None),
    "dtype": ("int8", "float16"),
    "data": (5,),
    "data.corpus.held_out": ("attrs",),
    "stages": (5, {"short": 5}),
}
"""Values that break a rule of its own, by field."""


@each_row("path", ODD)
def test_values_out_of_range_are_refused_by_name(path: str) -> None:
    """With field, value and rule, before anything runs."""
    for value in ODD[path]:
        with pytest.raises(Refused) as refused:
            from_config(changed(path, value))
        assert str(refused.value).startswith(f"--config.{path}={value!r} must be ")


def test_shapes_of_a_target_are_refused_with_their_place() -> None:
    for name, value in {"num_layers": 0, "vocab_size": -1, "max_positions": 0}.items():
        path = f"pretraining.shape.{name}"
        with pytest.raises(ValueError, match=f"--config.{path}={value} must be"):
            from_config(changed(path, value))
    with pytest.raises(ValueError, match="must be at most --config.pretraining.shape.max_pos"):
        from_config(changed("pretraining.stages.long.seq_len", 512))
    with pytest.raises(ValueError, match="a run needs stages"):
        from_config({**changed("stages", {}), "pretraining": None, "target": "x"})


@each_row(
    ("given", "sentence"),
    [
        (["--process=1"], "--process=1 needs --coordinator=HOST:PORT"),
        (["--processes=2"], "--processes=2 needs --coordinator=HOST:PORT"),
        (["--coordinator=nohost", "--processes=2", "--process=0"], "=nohost must be HOST:PORT"),
        (["--coordinator=a:0", "--processes=2", "--process=0"], "=a:0 must be HOST:PORT"),
        (["--coordinator=a:99999", "--processes=2", "--process=0"], "must be HOST:PORT"),
        (["--coordinator=a:1", "--processes=2", "--process=2"], "--process=2 of --processes=2"),
        (["--coordinator=a:1"], "--coordinator needs --processes=N and --process=I"),
        (["--coordinator=a:1", "--processes=2"], "--coordinator needs --processes=N"),
        (["--coordinator=a:1", "--processes=0"], "--processes: 0 must be a whole number"),
        (["--coordinator=a:1", "--distributed"], "two ways to join"),
    ],
)
def test_processes_that_cannot_be_joined(given: list[str], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        parse(["--config=demo:tiny", *given])
