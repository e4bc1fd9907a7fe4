"""What a command sets in its environment before the library is imported."""

import os


def prepare_environment(cache: str | None) -> None:
    """Keep transformers quiet, and say where programs are kept.

    Args:
      cache: a folder or ``off``; what the environment says if absent.
    """
    # It warns of texts beyond a tokenizer's range, for one, which is for us to refuse.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if cache is not None:
        os.environ["LONGSPEC_CACHE"] = cache
