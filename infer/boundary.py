"""The boundary between a command and its shell: one message, one status, whatever happens within.

It imports next to nothing, so that Ctrl-C finds someone to answer, ``--help`` is quick and a typing
error is refused before the library's slow imports.
"""

import argparse
import os
import sys
from collections.abc import Callable
from typing import NoReturn

USER_ERRORS = (ValueError, OSError, NotImplementedError, MemoryError)
FAILED, BAD_INPUT = 1, 2
INTERRUPTED, READER_GONE = 130, 141
"""Exit statuses as shells have them: 128 and the number of SIGINT or SIGPIPE."""


class Parser(argparse.ArgumentParser):
    """A parser that takes names in full and raises what is wrong instead of printing its usage."""

    def __init__(self, **options: object):
        """Bind the options of ``argparse``."""
        super().__init__(**{"allow_abbrev": False, **options})  # pyright: ignore[reportArgumentType]

    def error(self, message: str) -> NoReturn:
        """Raise the message, which begins with the option as it is typed."""
        raise ValueError(f"{message.removeprefix('argument ')} (--help lists the options)")


def run(work: Callable[[], int], shows_traceback: bool) -> int:
    """Run a command.

    Args:
      work: the command; returns the exit status.
      shows_traceback: whether Python's traceback is printed before the message of an error.

    Returns:
      The exit status: that of the work, 2 for bad input, 1 for a failure while running, 130 after
      Ctrl-C, 141 if nobody reads the output any more.
    """
    try:
        return work()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # As in ``| head``: nobody reads on, and nothing is wrong.
        _discard_output()
        return READER_GONE
    except Exception as error:
        return _failed(error, shows_traceback)


def _failed(error: Exception, shows_traceback: bool) -> int:
    """Say what went wrong, in one message; returns the exit status."""
    if shows_traceback:
        import traceback

        traceback.print_exception(error)
    message, status = _words(error)
    print(message, file=sys.stderr)
    try:
        sys.stdout.flush()
    except OSError:
        _discard_output()
    return status


def _words(error: Exception) -> tuple[str, int]:
    """An error as a message, and the exit status it stands for."""
    if isinstance(error, ModuleNotFoundError):
        from longspec_jax.extras import missing_extra

        if missing := missing_extra(error):
            return f"error: {missing}", BAD_INPUT
    if isinstance(error, USER_ERRORS):
        # Python itself raises a MemoryError without a message.
        return f"error: {str(error) or 'not enough memory'}", BAD_INPUT
    if isinstance(error, FloatingPointError):  # A model that overflows.
        return f"error: {error}", FAILED
    [first, *_] = [*str(error).splitlines(), ""]
    return f"failed while running: {type(error).__name__}: {first}", FAILED


def _discard_output() -> None:
    """Write to nowhere from now on, so that the interpreter's own last flush is quiet, too."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
