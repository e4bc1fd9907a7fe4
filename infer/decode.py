"""Decode prompts with speculation, show what the draft contributed, and compare with plain decoding.

    python -m infer.decode
    python -m infer.decode --target=FOLDER --draft=FOLDER --prompt_file=report.txt --json=out.json

Without arguments the embedded demo model completes a held-out document. ``--help`` lists the rest.
"""

import io
import os
import sys
from collections.abc import Callable, Sequence

# Everything else is imported where it is needed, so that Ctrl-C finds someone to answer, --help is
# quick and a typing error is refused before the library's slow imports.

USER_ERRORS = (ValueError, OSError, NotImplementedError, MemoryError)
INTERRUPTED, READER_GONE = 130, 141
"""Exit statuses as shells have them: 128 and the number of SIGINT or SIGPIPE."""


def main(argv: Sequence[str] | None = None, end: Callable[[int], object] | None = None) -> int:
    """Run the command.

    Args:
      argv: the arguments; those of the process if absent.
      end: ends the process after Ctrl-C, when the work cannot be waited for; by its id if absent.

    Returns:
      The exit status: 0, 2 for bad input, 1 for a failure while running, 130 after Ctrl-C.
    """
    try:
        return _run(argv, end)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # As in ``| head``: nobody reads on, and nothing is wrong.
        _discard_output()
        return READER_GONE
    except Exception as error:  # The boundary to the shell: one message and a status.
        return _failed(error, "--traceback" in (sys.argv if argv is None else argv))


def _run(argv: Sequence[str] | None, end: Callable[[int], object] | None) -> int:
    """Read and check the arguments, before anything slow, and do what they say."""
    from . import arguments as arguments_lib
    from . import contradictions, demo
    from .output_file import OutputFile

    try:
        arguments = arguments_lib.parser().parse_args(argv)
    finally:
        sys.stdout.flush()  # The text of --help, before the interpreter finds its reader gone.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # A model may say what a terminal cannot show.
    if arguments.list:
        demo.list_prompts()
        sys.stdout.flush()
        return 0
    contradictions.check(arguments)
    prompts = arguments_lib.named_prompts(arguments)
    contradictions.check_rows(arguments, prompts)
    output = None
    if arguments.json is not None:
        output = OutputFile.tried(arguments.json, arguments_lib.inputs(arguments))

    from .decoding import decode

    return decode(arguments, prompts, output, end)


def _failed(error: Exception, shows_traceback: bool) -> int:
    """Say what went wrong, in one message; returns the exit status."""
    if shows_traceback:
        import traceback

        traceback.print_exception(error)
    bad_input = isinstance(error, USER_ERRORS)
    in_words = bad_input or isinstance(error, FloatingPointError)  # A model that overflows.
    label = "error" if in_words else f"failed while running: {type(error).__name__}"
    print(f"{label}: {error}", file=sys.stderr)
    try:
        sys.stdout.flush()
    except OSError:
        _discard_output()
    return 2 if bad_input else 1


def _discard_output() -> None:
    """Write to nowhere from now on, so that the interpreter's own last flush is quiet, too."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


if __name__ == "__main__":
    sys.exit(main())
