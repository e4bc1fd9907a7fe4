"""Mutations of the project that its tests must notice: see ``__main__.py``."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("mutations.toml")


@dataclass(frozen=True)
class Mutation:
    """One way to break the project."""

    name: str
    file: str
    """Of the checkout."""
    old: str
    """Occurs once in the file."""
    new: str
    tests: list[str]
    """Files, or single tests, one of which must fail."""

    def check_fits(self, root: Path = ROOT) -> None:
        """Raise if the text is not there exactly once, or a test file is missing."""
        found = (root / self.file).read_text().count(self.old)
        if found != 1:
            raise ValueError(
                f"{LIST.name}: {self.name!r} replaces a text that occurs {found} times in "
                f"{self.file}, and must occur once: the code has changed, so adapt the entry"
            )
        for test in self.tests:
            if not (root / test.partition("::")[0]).is_file():
                raise ValueError(f"{LIST.name}: {self.name!r} names {test}, which is no file")

    def apply(self, root: Path) -> None:
        """Break a copy of the checkout."""
        self.check_fits(root)
        path = root / self.file
        path.write_text(path.read_text().replace(self.old, self.new))


def mutations() -> list[Mutation]:
    """All of them."""
    return [Mutation(**entry) for entry in tomllib.loads(LIST.read_text())["mutation"]]
