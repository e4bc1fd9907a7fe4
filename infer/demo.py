"""The demo's folder, for what must know it before the library's slow imports."""

from pathlib import Path

import longspec_jax

DEMO = Path(longspec_jax.__file__).parent / "demo"
NAME = "demo"
"""How ``--target`` names the demo."""


def list_prompts() -> None:
    """Print the sample prompts."""
    for path in sorted(DEMO.glob("prompts/*.txt")):
        print(f"{path}  ({path.stat().st_size:,} bytes)")
