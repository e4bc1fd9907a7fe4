"""What ``pyproject.toml`` cannot say: where commands lie in a wheel, and an index's README.

``train/``, ``infer/`` and ``configs/`` are folders of the checkout, and too common as names to
install: the wheel holds them as ``longspec_jax.train`` and so on. They import each other
relatively.
"""

import re
import tomllib
from pathlib import Path

from setuptools import find_packages, setup

LIBRARY, COMMANDS = "longspec_jax", ("train", "infer", "configs")
ROOT = Path(__file__).resolve().parent
RELATIVE = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)")


def for_an_index(readme: str, source: str | None) -> str:
    """A README whose relative links lead to the repository.

    Args:
      readme: Markdown with links relative to the checkout.
      source: address of the repository; without one a link becomes its text, and a picture goes.
    """

    def absolute(link: re.Match[str]) -> str:
        picture, text, target = link.groups()
        if source is None:
            return "" if picture else text
        return (
            f"{picture}[{text}]({source.rstrip('/')}/{'raw' if picture else 'blob'}/main/{target})"
        )

    return RELATIVE.sub(absolute, readme)


if __name__ == "__main__":
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    readme = (ROOT / "README.md").read_text()
    moved = find_packages(include=[part for name in COMMANDS for part in (name, f"{name}.*")])
    setup(
        packages=find_packages(include=[LIBRARY, f"{LIBRARY}.*"])
        + [f"{LIBRARY}.{package}" for package in moved],
        package_dir={f"{LIBRARY}.{name}": name for name in COMMANDS},
        long_description=for_an_index(readme, project["urls"].get("Source")),
        long_description_content_type="text/markdown",
    )
