"""The wheel: one installed name, and commands that work next to whatever files a user has."""

import configparser
import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.children import environment

pytest.importorskip("setuptools", "77", reason="building a wheel needs setuptools")
pytestmark = [pytest.mark.slow, pytest.mark.multiproc]

ROOT = Path(__file__).parents[1]
FOLDERS = ("longspec_jax", "train", "infer", "configs")
FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
HOSTILE = ("train.py", "infer/__init__.py", "configs/__init__.py", "configs/common.py", "setup.py")
OWN = """
from longspec_jax.recipes import paper_config

def get_config(variant="short"):
    return paper_config("mine", variant, target="a/b", long_length=99, max_offset=7)
"""


def run(
    command: list[str], folder: Path, *import_from: Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    given = environment(*import_from, PYTHONDONTWRITEBYTECODE="1", **variables)
    return subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, because setuptools leaves what it builds next to the sources."""
    folder = tmp_path_factory.mktemp("sources")
    ignore = shutil.ignore_patterns("__pycache__")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    for name in FILES:
        shutil.copy(ROOT / name, folder)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    built = run([*pip, "--wheel-dir", "dist", "."], folder)
    assert built.returncode == 0, built.stderr
    [path] = (folder / "dist").glob("*.whl")
    return path


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What pip would make of the wheel."""
    folder = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A user's folder whose files have the names of the checkout's."""
    for name in HOSTILE:
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text("raise SystemExit('a user file was imported')\n")
    return tmp_path


def script(site: Path, name: str) -> list[str]:
    """A console script as pip writes it, with the user's folder on the path besides."""
    entries = configparser.ConfigParser()
    [file] = site.glob("*.dist-info/entry_points.txt")
    entries.read(file)
    module, _, function = entries["console_scripts"][name].partition(":")
    code = f"import sys; from {module} import {function}; sys.exit({function}())"
    return [sys.executable, "-c", code]


def test_licences_and_a_readme_for_an_index_are_in_it(site: Path) -> None:
    """The demo's prompts are other people's texts; links relative to a checkout lead nowhere."""
    [information] = site.glob("*.dist-info")
    licences = {path.name for path in (information / "licenses").rglob("*") if path.is_file()}
    assert licences == {"LICENSE", "LICENSES.md"}
    metadata = (information / "METADATA").read_text()
    assert "# longspec_jax" in metadata
    links = re.findall(r"\]\(([^)\s]+)\)", metadata)
    assert links and all(link.startswith(("https://", "#")) for link in links)


def test_links_of_the_readme_lead_to_the_repository() -> None:
    spec = importlib.util.spec_from_file_location("building", ROOT / "setup.py")
    assert spec and spec.loader
    building = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(building)
    readme = "![speed](docs/s.svg) [docs](docs/x.md#a) [paper](https://arxiv.org) [here](#a)"
    at_home = building.for_an_index(readme, "https://forge.example/me/it/")
    assert at_home == (
        "![speed](https://forge.example/me/it/raw/main/docs/s.svg) "
        "[docs](https://forge.example/me/it/blob/main/docs/x.md#a) "
        "[paper](https://arxiv.org) [here](#a)"
    )
    assert building.for_an_index(readme, None) == " docs [paper](https://arxiv.org) [here](#a)"


def test_one_name_is_installed(site: Path) -> None:
    [info] = site.glob("*.dist-info")
    assert (info / "top_level.txt").read_text().split() == ["longspec_jax"]
    assert {path.name for path in site.iterdir()} == {"longspec_jax", info.name}
    assert "License-Expression: MIT" in (info / "METADATA").read_text()


def test_no_file_is_left_out(site: Path) -> None:
    library, *commands = FOLDERS
    expected = {path.relative_to(ROOT / library) for path in (ROOT / library).rglob("*.py")}
    expected |= {
        path.relative_to(ROOT) for name in commands for path in (ROOT / name).rglob("*.py")
    }
    installed = site / library
    assert {path.relative_to(installed) for path in installed.rglob("*.py")} == expected
    assert (installed / "py.typed").is_file()
    for path in (ROOT / library / "demo").rglob("*.*"):
        assert (installed / path.relative_to(ROOT / library)).is_file()
    for path in (ROOT / "infer" / "report").glob("page.*"):
        assert (installed / path.relative_to(ROOT)).is_file()


@pytest.mark.parametrize(
    "name",
    [
        "longspec-chat",
        "longspec-decode",
        "longspec-prepare",
        "longspec-questions",
        "longspec-regenerate",
        "longspec-report",
        "longspec-vocabulary",
    ],
)
def test_scripts_answer_from_anywhere(name: str, site: Path, hostile: Path) -> None:
    asked = run([*script(site, name), "--help"], hostile, site)
    assert asked.returncode == 0 and asked.stdout.startswith("usage: "), asked.stderr


def test_the_demo_decodes_beside_hostile_files(
    site: Path, hostile: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    given = ["--prompt", "def f(x):", "--max_new_tokens", "8", "--no-compare", "--tree", "1"]
    cache = tmp_path_factory.mktemp("cache")
    decoded = run(
        [*script(site, "longspec-decode"), *given], hostile, site, XDG_CACHE_HOME=str(cache)
    )
    assert decoded.returncode == 0, decoded.stderr
    assert "tokens" in decoded.stdout
    left = {str(path.relative_to(hostile)) for path in hostile.rglob("*") if path.is_file()}
    assert left == set(HOSTILE)


def test_training_finds_configurations_and_the_users_own(site: Path, hostile: Path) -> None:
    (hostile / "configs" / "mine.py").write_text(OWN)
    for given, sentence in {
        "--config=vicuna7b:huge": "vicuna7b has no variant 'huge'; choose one of all, short",
        "--config=configs/vicuna7b.py:huge": "vicuna7b has no variant 'huge'",
        "--config=configs/mine.py:huge": "mine has no variant 'huge'",
        "--config=absent": "no configuration file 'absent'; the project's own are demo, ",
    }.items():
        ended = run([*script(site, "longspec-train"), given], hostile, site)
        assert ended.returncode == 2 and ended.stderr.startswith("error: "), ended.stderr
        assert sentence in ended.stderr and ended.stderr.count("\n") == 1
