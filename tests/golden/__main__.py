"""Records and compares; see the package."""

import argparse
import fnmatch
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import tests.conftest  # noqa: F401  # Before jax: the devices and the compiler's options of the tests.

PARTS = "tokens", "digests", "training"


def main() -> int:
    """The exit status: 1 where an entry differs."""
    parser = argparse.ArgumentParser("python -m tests.golden", description=__doc__)
    parser.add_argument("work", choices=("record", "compare"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=PARTS, action="append")
    parser.add_argument("--names", default="*", help="pattern of the entries' names")
    given = parser.parse_args()
    models, differ = given.folder / "models", 0
    if given.work == "record" and not models.exists():
        from tests.golden.models import write_models

        models.mkdir(parents=True)
        write_models(models)
    for part in given.only or PARTS:
        file = given.folder / f"{part}.json"
        known = json.loads(file.read_text()) if file.exists() else {}

        def wanted(name: str, known: dict[str, Any] = known) -> bool:
            """Whether an entry, or a group of them, is recorded, or has been."""
            recorded = given.work == "record" or any(each.startswith(name) for each in known)
            return recorded and fnmatch.fnmatch(name, given.names)

        count = 0
        for name, entry in import_module(f"tests.golden.{part}").recorded(models, wanted):
            entry, count = json.loads(json.dumps(entry)), count + 1
            if given.work == "record":
                known[name] = entry
                file.write_text(json.dumps(known, indent=0))
            elif known.get(name) != entry:
                differ += 1
                print(f"{part}: {name} differs\n  was {known.get(name)}\n  is  {entry}")
        print(f"{part}: {count} entries, {differ} differ so far", file=sys.stderr)
    return int(differ > 0)


sys.exit(main())
