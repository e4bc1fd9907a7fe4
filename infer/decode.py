"""Decode prompts with speculation, show what the draft gave, and compare with plain decoding.

    python -m infer.decode
    python -m infer.decode --target=FOLDER --drafter=FOLDER --prompt_file=report.txt --json=out.json

Without arguments the embedded demo model completes a held-out document. ``--help`` lists the rest.
"""

import io
import sys
from collections.abc import Callable, Sequence

from . import boundary

# Everything else is imported where it is needed, so that Ctrl-C finds someone to answer, --help is
# quick and a typing error is refused before the library's slow imports.


def main(argv: Sequence[str] | None = None, end: Callable[[int], object] | None = None) -> int:
    """Run the command.

    Args:
      argv: the arguments; those of the process if absent.
      end: ends the process after Ctrl-C, when the work cannot be waited for; by its id if absent.

    Returns:
      The exit status: 0, 2 for bad input, 1 for a failure while running, 130 after Ctrl-C.
    """
    shows_traceback = "--traceback" in (sys.argv if argv is None else argv)
    return boundary.run(lambda: _run(argv, end), shows_traceback)


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

    from .decode_run import decode

    return decode(arguments, prompts, output, end)


if __name__ == "__main__":
    sys.exit(main())
