"""The commands are named as they were typed."""

import tomllib
from pathlib import Path

from longspec_jax.commands import SCRIPTS, command_name

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


def test_a_command_is_named_as_it_was_typed() -> None:
    assert command_name("infer", "decode") == "python -m infer.decode"
    assert command_name("longspec_jax.infer", "decode") == "longspec-decode"
    assert command_name("infer.bench") == "python -m infer.bench"
    assert command_name("longspec_jax.infer.bench") == "longspec-bench"


def test_every_script_is_installed() -> None:
    for script, point in PROJECT["scripts"].items():
        module, _, function = point.partition(":")
        assert function == "main"
        name = module.removeprefix("longspec_jax.").removesuffix(".__main__")
        assert SCRIPTS[name] == script
    assert set(PROJECT["scripts"]) == set(SCRIPTS.values())
