"""What the library keeps between processes: compiled programs, and how fast trees turned out.

One folder in the user's cache, ``~/.cache/longspec_jax`` unless the environment says otherwise:
``LONGSPEC_CACHE`` names another one, and ``LONGSPEC_CACHE=off`` keeps nothing. Programs a caller
already keeps elsewhere (``JAX_COMPILATION_CACHE_DIR``, or jax's own option) stay there.

Programs that lie in the folder run in this process. So folders are made only for this user (mode
0700), and one that another user owns or may write to is not used.
"""

import functools
import os
import sys
from pathlib import Path

import jax

from longspec_jax.files import expanded, make_private, not_private

VARIABLE = "LONGSPEC_CACHE"
SLOW_TO_COMPILE = 0.5
"""Seconds; programs that compile faster are not worth a file."""


def cache_folder() -> Path | None:
    """The folder of everything that is kept; None if nothing is.

    Raises:
      ValueError: if the environment names a folder that others own or may write to.
    """
    folder = _folder()
    if folder is None or not (reason := not_private(folder)):
        return folder
    if os.environ.get(VARIABLE):
        raise ValueError(_refusal(folder, reason))
    return None


def _folder() -> Path | None:
    """The folder that the environment names, or the default one; its owner is not checked."""
    chosen = os.environ.get(VARIABLE)
    if chosen and chosen.lower() == "off":
        return None
    if chosen:
        return expanded(chosen)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "longspec_jax"
    try:
        return Path.home() / ".cache" / "longspec_jax"
    except RuntimeError:
        return None  # A user without a home, as in some containers.


def _refusal(folder: Path, reason: str) -> str:
    return (
        f"no compiled programs are kept in {folder} ({reason}): what others put there would run "
        f"here. Remove it, or set {VARIABLE} to a folder that does not exist, which is then made "
        "only for you, or to off"
    )


def keep_programs(folder: str | Path | None = None) -> Path | None:
    """Let jax keep compiled programs between processes, so that the second start is quick.

    A folder that the process has chosen before stays, and where none is wanted none is made. Where
    programs are kept, those that the process traces from then on do not name their source lines
    (``jax_traceback_in_locations_limit``).

    Args:
      folder: where to keep them; a folder below :func:`cache_folder` if absent.

    Returns:
      The folder in use, None for none.

    Raises:
      ValueError: if others own or may write to a folder that was named. Such a default one is not
        used, and a line says so.
    """
    in_use = jax.config.values["jax_compilation_cache_dir"]
    if in_use and folder is None:
        _forget_lines()
        return Path(in_use)
    if folder is not None:
        folders = [expanded(folder)]
    elif (kept := _folder()) is not None:
        folders = [kept, kept / "compiled"]
    else:
        return None
    for each in folders:
        if reason := not_private(each):
            if folder is not None or os.environ.get(VARIABLE):
                raise ValueError(_refusal(each, reason))
            print(f"longspec_jax: {_refusal(each, reason)}", file=sys.stderr)
            return None
    path = folders[-1]
    made = path.is_dir()
    try:
        make_private(path)
    except OSError as error:
        return _cannot_keep(path, error.strerror or str(error))
    if not os.access(path, os.W_OK | os.X_OK):
        return _cannot_keep(path, "Permission denied")
    if not made:
        print(
            "longspec_jax compiles at first calls, for up to a minute, and keeps the programs in "
            f"{path} for a quicker start next time ({VARIABLE}=off keeps none)",
            file=sys.stderr,
        )
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", SLOW_TO_COMPILE)
    _forget_lines()
    return path


@functools.cache
def _cannot_keep(path: Path, reason: str) -> None:
    """Said once: a command looks for the folder when it starts, and its model does again."""
    print(
        f"longspec_jax cannot keep compiled programs in {path} ({reason}), so that every start "
        f"compiles again; set {VARIABLE} to a folder that can be written to, or to off",
        file=sys.stderr,
    )


def _forget_lines() -> None:
    """Let programs be found again whatever was traced before them.

    A GPU kernel names the lines it was traced from, and those of a function that several kernels
    call by the first of them. A kept program is found by its text: in a second start, which may
    trace fewer programs, it would be compiled anew.
    """
    jax.config.update("jax_traceback_in_locations_limit", 0)
