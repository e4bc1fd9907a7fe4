"""The persistent compilation cache of the commands."""

import os
from pathlib import Path


def enable_cache(folder: str | None = None) -> Path | None:
    """Keep compiled programs between runs, so that the second start is quick.

    Args:
      folder: where to keep them; ``off`` for nowhere. If absent, ``JAX_COMPILATION_CACHE_DIR``, or a
        folder in the user's cache.

    Returns:
      The folder in use.
    """
    import jax

    if folder == "off":
        return None
    chosen = folder or os.environ.get("JAX_COMPILATION_CACHE_DIR")
    path = Path(chosen).expanduser() if chosen else _default()
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    return path


def _default() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "longspec_jax" / "compiled"
