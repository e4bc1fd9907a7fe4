"""The demo that comes with the package: a small target, its draft and sample prompts.

Quick to import: what is refused before the library's slow imports must know where it lies.
"""

import functools
from pathlib import Path
from typing import Any

DEMO = Path(__file__).parent / "demo"
"""Folders of the models, and ``prompts`` that were held out from their training."""
DEMO_NAME = "demo"
"""What commands call its target, and the draft of it."""
DRAFTS = {DEMO_NAME: DEMO / "draft", "demo_small_lm": DEMO / "small_lm"}
"""What was trained to draft for the demo's target: a LongSpec draft, and a small language model."""


def demo_target() -> Path:
    """The folder of the demo's target.

    Raises:
      FileNotFoundError: if the package came without it.
    """
    if not (DEMO / "target").is_dir():
        raise FileNotFoundError(
            f"the demo model is missing from {DEMO}; reinstall the package, or make one with "
            "longspec-train --config=demo (python -m train.run in a checkout)"
        )
    return DEMO / "target"


def demo_drafts(draft: object) -> Any:
    """The drafts that an argument names, one or several, with folders in place of the demo's names.

    Anything that is not a name of the demo's drafts is left as it is.
    """
    if isinstance(draft, list | tuple):
        return [demo_drafts(each) for each in draft]
    return DRAFTS[draft] if isinstance(draft, str) and draft in DRAFTS else draft


@functools.cache
def demo_prompts() -> dict[str, str]:
    """The sample prompts that come with the package, held out from the demo's training."""
    return {path.stem: path.read_text("utf-8") for path in sorted(DEMO.glob("prompts/*.txt"))}
