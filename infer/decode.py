"""Decode prompts with speculation, show what the draft gave, and compare with plain decoding.

    python -m infer.decode
    python -m infer.decode --target=FOLDER --draft=FOLDER --prompt_file=report.txt --json=out.json

Without arguments the embedded demo model completes a held-out document. ``--help`` lists the rest.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from longspec_jax import cli

if TYPE_CHECKING:
    from .prompts import Prompt
    from .session import Session

# Everything else is imported where it is needed, so that Ctrl-C is answered from the start, --help
# is quick and a typing error is refused before the library's slow imports.


def main(argv: Sequence[str] | None = None, end: Callable[[int], object] | None = None) -> int:
    """Run the command; the exit status. ``end`` ends the process after a signal, in tests."""
    return cli.run(lambda: _run(argv, end), argv)


def _run(argv: Sequence[str] | None, end: Callable[[int], object] | None) -> int:
    """Read and check the arguments, before anything slow, and do what they say."""
    from . import arguments as arguments_lib

    arguments = arguments_lib.parser().parse_args(argv)
    arguments_lib.check(arguments_lib.models_of(arguments), compare=bool(arguments.compare))
    prompts = arguments_lib.named_prompts(arguments)
    arguments_lib.check_filters(arguments, prompts)
    return _decode(DecodeRun(arguments, prompts), end)


class DecodeRun:
    """A request, and how far it has got."""

    def __init__(self, arguments: argparse.Namespace, prompts: "Sequence[Prompt]"):
        from longspec_jax.status_line import StatusLine

        from .journal import Journal
        from .output import STDOUT
        from .screen import Screen, wants_color

        # With JSON on standard output, everything meant for reading goes to standard error.
        out = sys.stderr if arguments.json == STDOUT else sys.stdout
        self.status = StatusLine(sys.stderr)
        self.screen = Screen(wants_color(out), out, self.status)
        self.journal = Journal()
        self._arguments, self._prompts = arguments, prompts
        self._session: Session | None = None

    def work(self) -> None:
        """Load, check and decode, saying on the screen what is under way."""
        self.status.show("starting")
        from .models import load_named, start_devices

        start_devices()
        from .arguments import models_of
        from .session import Session

        spec = load_named(models_of(self._arguments), self.status)
        self._session = Session(spec, self._arguments, self.screen, self.journal)
        self._session.decode(self._prompts)

    def write(self, interrupted: bool = False) -> bool:
        """Write the numbers if they are wanted; whether they are where they were wanted."""
        from .output import write

        path, session = self._arguments.json, self._session
        if path is None:
            return True
        nothing = {"interrupted": interrupted, "rows": []}
        return write(path, nothing if session is None else session.as_json(interrupted))

    def print_left(self, how: str) -> None:
        """Print how far a run has got that was ``interrupted``, or ``failed``."""
        if self._session is not None:
            self._session.print_left(how)

    def save(self) -> None:
        """Keep what there is of a run that a signal has stopped."""
        self.journal.close()
        self.write(interrupted=True)  # First: a stopped terminal blocks whatever prints.
        self.screen.close()
        self.print_left("interrupted")
        print("interrupted", file=sys.stderr)


def _decode(run: DecodeRun, end: Callable[[int], object] | None) -> int:
    """Decode, and lose nothing if that ends early; returns the exit status."""
    try:
        cli.run_in_thread(run.work)
        return cli.OK if run.write() else cli.FAILED
    except KeyboardInterrupt as stop:
        return cli.leave(stop, run.save, end)
    except BrokenPipeError:
        run.journal.close()
        run.write(interrupted=True)
        raise
    except Exception:
        run.journal.close()
        if run.journal.outcomes:
            run.write(interrupted=True)
            run.print_left("failed")
        raise
    finally:
        run.screen.close()


if __name__ == "__main__":
    sys.exit(main())
