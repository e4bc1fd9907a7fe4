"""The demo in the command's words."""

from longspec_jax.embedded import DEMO


def list_prompts() -> None:
    """Print the sample prompts."""
    for path in sorted(DEMO.glob("prompts/*.txt")):
        print(f"{path}  ({path.stat().st_size:,} bytes)")
