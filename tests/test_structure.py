"""Imports point one way: axes, config -> ops -> models -> drafters -> decoding -> api -> commands."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIBRARY = "longspec_jax"

ALLOWED: dict[str, set[str]] = {
    "axes": set(),
    "checks": set(),
    "commands": set(),
    "config": {"checks"},
    "embedded": set(),
    "extras": set(),
    "files": set(),
    "recipes": set(),
    "sharding": {"axes", "config"},
    "sizes": set(),
    "ops": {"axes", "config"},
    "models": {"axes", "config", "ops"},
    "drafters": {"axes", "config", "ops", "models"},
    "compilation": set(),
    "decoding": {"axes", "config", "ops", "models", "drafters", "sharding"},
    "weights": {"axes", "checks", "config", "models", "drafters", "sharding"},
    "loading": {"axes", "checks", "config", "ops", "models", "generation", "sizes", "weights"},
    "generation": {
        *{"axes", "checks", "compilation", "config", "files", "ops", "models", "drafters"},
        *{"decoding", "sizes"},
    },
}
"""What each part of the library may import besides itself; parts not listed may import all."""
ENTRY = {
    "train": {"infer", "configs"},
    "infer": {"train", "configs"},
    "configs": {"train", "infer", "configs"},
}
"""What the commands must not import; a configuration is loaded by its path, so none imports another."""
FOREIGN = {"absl", "ml_collections", "orbax", "optax", "datasets", "torch", "jax_triton"}
"""Packages the library never imports at module level."""


def imports(path: Path) -> list[tuple[str, bool]]:
    """Dotted names a file imports, and whether at module level.

    The commands import each other relatively, so that a wheel can hold them under the library's name.
    """
    folders = path.relative_to(ROOT).parts[:-1]
    relative = folders[0] in ENTRY and folders[0] != "configs"
    tree = ast.parse(path.read_text())
    found = []
    for node in ast.walk(tree):
        top = node in tree.body
        if isinstance(node, ast.Import):
            found += [(alias.name, top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 or relative, f"{path}: relative import"
            assert node.level <= len(folders), (
                f"{path}: a wheel holds the commands one folder deeper"
            )
            from_folders = folders[: len(folders) + 1 - node.level] if node.level else ()
            module = ".".join(filter(None, [*from_folders, node.module]))
            assert node.level or module.split(".")[0] != folders[0] or not relative, module
            found += [(f"{module}.{alias.name}", top) for alias in node.names]
    return found


def part(dotted: str) -> str:
    return dotted.split(".")[1]


FILES = sorted(
    path
    for folder in (LIBRARY, "train", "infer", "configs")
    for path in (ROOT / folder).rglob("*.py")
)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    relative = path.relative_to(ROOT).with_suffix("").parts
    for name, top in imports(path):
        package = name.split(".")[0]
        # A wheel holds the commands there, a checkout does not.
        assert not name.startswith(tuple(f"{LIBRARY}.{folder}." for folder in ENTRY)), name
        if relative[0] == LIBRARY:
            assert package not in {"train", "infer", "configs", "tests"}, name
            assert not (top and package in FOREIGN), f"{name} must be imported lazily"
            own = relative[1]
            if package == LIBRARY and own in ALLOWED:
                assert part(name) in {own, *ALLOWED[own]}, f"{own} must not import {name}"
        else:
            assert package not in ENTRY[relative[0]] | {"tests"}, name
        if relative[0] == "configs" and package == LIBRARY:
            assert part(name) in {"config", "recipes"}, f"configs must not import {name}"


def test_the_test_reads_files() -> None:
    """Guards against a moved folder turning the check above into nothing."""
    assert len(FILES) > 20
    verify = imports(ROOT / LIBRARY / "decoding" / "verify.py")
    assert ("longspec_jax.drafters.tree.Tree", True) in verify
