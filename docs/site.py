"""What ``mkdocs build`` adds to the pages: the API, the commands' options, links to the checkout.

A page asks by ``<!-- generated: api -->`` or ``<!-- generated: options -->``. Names come from
``longspec_jax.__all__``, options from ``--help``, so that neither is written down a second time.
"""

import ast
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GENERATED = re.compile(r"<!-- generated: (\w+) -->")
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """The page with what it asks for, and with links that work outside the checkout."""
    folder = (ROOT / "docs" / page.file.src_uri).parent
    linked = LINK.sub(lambda found: _link(found, folder, config.repo_url), markdown)
    return GENERATED.sub(lambda found: {"api": api, "options": options}[found[1]](), linked)


def api() -> str:
    """A directive of mkdocstrings for every public name."""
    return "\n\n".join(f"::: longspec_jax.{name}" for name in public_names())


def public_names() -> list[str]:
    """The names of ``longspec_jax``, read without importing jax."""
    tree = ast.parse((ROOT / "longspec_jax" / "__init__.py").read_text())
    [names] = (
        [ast.literal_eval(key) for key in node.value.keys if key is not None]
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Dict)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id == "_CONTENTS"
    )
    return names


def options() -> str:
    """What every command prints for ``--help``."""
    from longspec_jax.cli import SCRIPTS

    with ThreadPoolExecutor(max_workers=2) as pool:
        texts = pool.map(_help, SCRIPTS)
    sections = [
        f"## {script}\n\nIn a checkout `python -m {module}`.\n\n```text\n{text}\n```"
        for (module, script), text in zip(SCRIPTS.items(), texts, strict=True)
    ]
    return "\n\n".join(sections)


def _help(module: str) -> str:
    command = [sys.executable, "-m", module, "--help"]
    environment = os.environ | {"COLUMNS": "96", "JAX_PLATFORMS": "cpu"}
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if not found.stdout:
        raise RuntimeError(f"python -m {module} --help printed nothing: {found.stderr}")
    return found.stdout.strip().replace("```", "'''")


def _link(found: re.Match[str], folder: Path, repository: str | None) -> str:
    """A link that leaves ``docs/`` leads to the repository, or becomes its text without one."""
    text, target = found.groups()
    if "://" in target or target.startswith(("#", "mailto:")):
        return found[0]
    name, _, anchor = target.partition("#")
    path = (folder / name).resolve()
    if path.is_relative_to(ROOT / "docs"):
        return found[0]
    if not repository:
        return text
    place = path.relative_to(ROOT).as_posix() + (f"#{anchor}" if anchor else "")
    return f"[{text}]({repository.rstrip('/')}/blob/main/{place})"
