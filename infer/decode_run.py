"""The run of ``python -m infer.decode`` behind its arguments, and how it is left early."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from . import interruption
from .boundary import INTERRUPTED
from .display import Screen, wants_color
from .journal import Journal
from .output_file import STDOUT, OutputFile
from .prompt_files import Prompt
from .surroundings import prepare_environment, start_devices
from .wording import command_words

if TYPE_CHECKING:  # Slow to import, and imported where the screen says so.
    from .session import Session


class DecodeRun:
    """A request, and how far it has got."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        prompts: Sequence[Prompt],
        output: OutputFile | None,
    ):
        """Begin with nothing loaded.

        Args:
          arguments: of the command, checked.
          prompts: the prompts they name.
          output: where the numbers go, if anywhere.
        """
        # With JSON on standard output, everything meant for reading goes to standard error.
        out = sys.stderr if arguments.json == STDOUT else sys.stdout
        self.screen = Screen(wants_color(arguments.color, out), out)
        self.journal = Journal()
        self._arguments, self._prompts = arguments, prompts
        self._output = output
        self._session: Session | None = None

    def work(self) -> None:
        """Load, check and decode, saying on the screen what is under way."""
        self.screen.status("starting")
        prepare_environment(self._arguments.compilation_cache)
        start_devices()
        from longspec_jax.compilation import keep_programs

        from .models import check_devices, fetch, load
        from .session import Session

        check_devices()
        self.screen.clear_status()  # What follows says of itself where it keeps and fetches things.
        keep_programs()
        target, drafts = fetch(self._arguments)
        self.screen.status("loading the models")
        with command_words():
            spec = load(self._arguments, target, drafts)
        tree = self._arguments.tree
        self._session = Session(spec, self._arguments, tree, self.screen, self.journal)
        self._session.decode(self._prompts)

    def write(self, interrupted: bool = False) -> bool:
        """Write the numbers if they are wanted; whether they are where they were wanted."""
        if self._output is None:
            return True
        if self._session is None:
            return self._output.write({"interrupted": interrupted, "rows": []})
        return self._output.write(self._session.as_json(interrupted))

    def print_left(self, how: str) -> None:
        """Say how far a run has got that was ``interrupted``, or ``failed``."""
        if self._session is not None:
            self._session.print_left(how)


def decode(
    arguments: argparse.Namespace,
    prompts: Sequence[Prompt],
    output: OutputFile | None,
    end: Callable[[int], object] | None,
) -> int:
    """Do what the arguments say; returns the exit status.

    Args:
      arguments: of the command, checked.
      prompts: the prompts they name; none for the demo's.
      output: where the numbers go, if anywhere.
      end: ends the process after Ctrl-C.
    """
    run = DecodeRun(arguments, prompts, output)
    try:
        interruption.run_interruptibly(run.work)
        return 0 if run.write() else 1
    except BrokenPipeError:
        run.journal.close()
        run.write(interrupted=True)
        raise
    except KeyboardInterrupt:
        return _leave(run, end)
    except Exception:  # Whatever ended the run: what it had measured is not lost.
        run.journal.close()
        if run.journal.outcomes:
            run.write(interrupted=True)
            run.print_left("failed")
        raise
    finally:
        run.screen.close()


def _leave(run: DecodeRun, end: Callable[[int], object] | None) -> int:
    """Keep what there is, and end within moments whatever the work is inside of."""
    if end is None:
        interruption.prepare_to_leave(INTERRUPTED)
    run.journal.close()
    run.write(interrupted=True)  # First: a terminal that was stopped takes nothing, and its lock.
    run.screen.close()
    run.print_left("interrupted")
    print("interrupted", file=sys.stderr)
    (end or interruption.end_now)(INTERRUPTED)
    return INTERRUPTED
