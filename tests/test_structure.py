"""Imports point one way: axes, config, ops, models, drafters, decoding, api, commands."""

import ast
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from tests.kit import each_row

ROOT = Path(__file__).parents[1]
LIBRARY = "longspec_jax"

ALLOWED: dict[str, set[str]] = {
    "axes": set(),
    "checks": set(),
    "cli": {"checks", "config", "extras", "files", "schema"},
    "commands": set(),
    "config": {"checks", "schema"},
    "embedded": set(),
    "extras": set(),
    "files": set(),
    "recipes": set(),
    "released": set(),
    "schema": {"checks"},
    "sharding": {"axes", "config"},
    "status_line": set(),
    "ops": {"axes", "config", "files"},
    "models": {"axes", "config", "ops"},
    "drafters": {"axes", "checks", "config", "ops", "models", "schema", "sharding"},
    "compilation": {"files"},
    "decoding": {"axes", "config", "ops", "models", "drafters", "sharding"},
    "weights": {
        "axes",
        "checks",
        "compilation",
        "config",
        "extras",
        "files",
        "models",
        "ops",
        "released",
        "schema",
        "sharding",
    },
    "loading": {"axes", "checks", "config", "drafters", "generation", "models", "ops", "weights"},
    "generation": {
        "axes",
        "checks",
        "compilation",
        "config",
        "extras",
        "files",
        "ops",
        "models",
        "drafters",
        "decoding",
        "provenance",
        "schema",
    },
}
"""What each part of the library may import besides itself; parts not listed may import all."""
LOADERS = {"checkpoints", "load"}
"""What reads weights among the drafters; all else is handed them."""
ENTRY = {
    "train": {"infer", "configs", "benchmarks", "contrib"},
    "infer": {"train", "configs", "benchmarks", "contrib"},
    "configs": {"train", "infer", "configs", "benchmarks", "contrib"},
    "benchmarks": {"configs"},
    "contrib": {"configs", "benchmarks"},
}
"""What the commands must not import; a configuration is loaded by its path, so none imports
another. Benchmarks and contrib stay out of the wheel and may import all that is in it."""
FOREIGN = {"absl", "ml_collections", "orbax", "optax", "datasets", "torch", "jax_triton"}
"""Packages the library never imports at module level."""


@cache
def imports(path: Path) -> list[tuple[str, bool]]:
    """Dotted names a file imports, and whether at module level.

    The commands import each other relatively, so that a wheel can hold them under the library's
    name.
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
    for folder in (LIBRARY, "train", "infer", "configs", "benchmarks", "contrib")
    for path in (ROOT / folder).rglob("*.py")
)


@each_row("path", FILES)
def test_imports_point_one_way(path: Path) -> None:
    relative = path.relative_to(ROOT).with_suffix("").parts
    for name, top in imports(path):
        package = name.split(".")[0]
        # A wheel holds the commands there, a checkout does not.
        assert not name.startswith(tuple(f"{LIBRARY}.{folder}." for folder in ENTRY)), name
        if relative[0] == LIBRARY:
            assert package not in {*ENTRY, "tests"}, name
            assert not (top and package in FOREIGN), f"{name} must be imported lazily"
            own = relative[1]
            if package == LIBRARY and own in ALLOWED:
                loads = own == "drafters" and bool(LOADERS & {*relative[2:]})
                allowed = {own, *ALLOWED[own], *({"weights"} if loads else ())}
                assert part(name) in allowed, f"{own} must not import {name}"
        else:
            assert package not in ENTRY[relative[0]] | {"tests"}, name
        if relative[0] == "configs" and package == LIBRARY:
            assert part(name) in {"config", "embedded", "recipes"}, (
                f"configs must not import {name}"
            )


def module_name(path: Path) -> str:
    """``longspec_jax.ops.attention.tiles`` of the file so called; a folder's is its package."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported_files(path: Path, known: dict[str, Path]) -> set[str]:
    """The files of the project that a file imports anywhere, inside functions too."""
    found = set()
    for name, _ in imports(path):
        while name not in known and "." in name:
            name = name.rpartition(".")[0]
        found |= {name} & known.keys()
    return found - {module_name(path)}


@cache
def graph_of_files() -> dict[str, set[str]]:
    """What imports what, of all files but the configurations."""
    known = {
        module_name(path): path for path in FILES if path.relative_to(ROOT).parts[0] != "configs"
    }
    return {name: imported_files(path, known) for name, path in known.items()}


def test_no_file_imports_itself_by_way_of_others() -> None:
    """Not even inside functions: of two files one can always be read without the other."""
    TopologicalSorter(graph_of_files()).prepare()  # Its error names the circle.


IMPLEMENTATION = re.compile(r"_(pallas|mosaic|xla|triton)$")


def test_implementations_do_not_know_each_other() -> None:
    """Who chooses or combines them imports them; what they share has a file of its own."""
    for name, others in graph_of_files().items():
        if name.startswith(f"{LIBRARY}.ops.") and IMPLEMENTATION.search(name):
            assert not set(filter(IMPLEMENTATION.search, others)), name


def test_the_test_reads_files() -> None:
    """Guards against a moved folder turning the checks above into nothing."""
    graph = graph_of_files()
    assert f"{LIBRARY}.ops.attention.prefix_mosaic" in graph[f"{LIBRARY}.ops.attention.kernels"]
    for folder in ("train", "infer"):  # Whose imports of each other are relative.
        mine = {name: others for name, others in graph.items() if name.startswith(f"{folder}.")}
        assert sum(any(other in mine for other in others) for others in mine.values()) > 5
    assert len(FILES) > 20
    found = imports(ROOT / LIBRARY / "decoding" / "round.py")
    assert ("longspec_jax.drafters.tree.Tree", True) in found


def test_one_file_calls_kernels_for_triton() -> None:
    """It refuses arrays that their offsets do not reach."""
    calls = [path.stem for path in FILES if "pallas_call(" in path.read_text()]
    assert calls == ["triton_launch"]
