"""Talk with a target in a terminal, its accepted draft tokens in colour.

    python -m infer.chat --target FOLDER --draft FOLDER
    python -m infer.chat < questions.txt

Without arguments the embedded demo model goes on with what you write. ``--help`` lists the rest.
"""

import argparse
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from longspec_jax import cli

if TYPE_CHECKING:
    from .conversation import Conversation

# Everything else is imported where it is needed, so that Ctrl-C is answered from the start, --help
# is quick and a typing error is refused before the library's slow imports.

COMMANDS = """\
/file PATH  put a text file before your next message
/forget N   drop the N oldest turns
/reset      begin a new conversation
/exit       leave, as Ctrl-D does
/help       show this
//TEXT      send /TEXT itself
Ctrl-C ends an answer. What there is of it stays in the conversation."""
EPILOG = f"""\
In a conversation:

{COMMANDS}

Without a terminal every line of standard input is a turn, and standard output is the answers.

Exit status: 0, 2 for a request or a line that cannot be met, 1 for a failure while running, 130
after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP.
"""
DRAFT_HELP = "Several propose into one tree, and prompt lookup with them. Plain decoding if absent"
PROMPT = "> "


def main(argv: Sequence[str] | None = None, end: Callable[[int], object] | None = None) -> int:
    """Run the command.

    Args:
      argv: the arguments; those of the process if absent.
      end: ends the process after a signal, in tests.

    Returns:
      The exit status: 0, 2 for bad input, 1 for a failure while running, 130 after Ctrl-C, 143
      after SIGTERM, 129 after SIGHUP.
    """
    return cli.run(lambda: _run(argv, end), argv)


def parser() -> argparse.ArgumentParser:
    """The command's parser."""
    from longspec_jax.config.serving import OPTIONS

    from . import arguments as arguments_lib

    result = cli.Parser(
        prog=cli.command_name(__package__, "chat"),
        description="Talk with a target: its own text, several tokens per pass.",
        epilog=EPILOG,
    )
    models = arguments_lib.add_models(result, DRAFT_HELP)
    arguments_lib.add_trees(models, "the first draft's default tree")
    group = result.add_argument_group("conversation")
    group.add_argument("--system", type=cli.any_text, help="the system message")
    arguments_lib.add_style(group)
    length = replace(
        OPTIONS["max_model_len"],
        default=None,
        about="tokens of the whole conversation, for which memory is taken; 16384 if absent, or as "
        "many as the target has positions",
    )
    cli.add_options(group, {"max_model_len": length})
    arguments_lib.add_sampling(result)
    cli.add_traceback(result.add_argument_group("output"))
    return result


def _run(argv: Sequence[str] | None, end: Callable[[int], object] | None) -> int:
    """Read and check the arguments, before anything slow, and talk."""
    from . import arguments as arguments_lib

    arguments = parser().parse_args(argv)
    arguments_lib.check(arguments_lib.models_of(arguments))
    arguments_lib.check_filters(arguments, [])
    chat = Chat(arguments)
    try:
        cli.run_in_thread(chat.load)
        return chat.talk()
    except KeyboardInterrupt as stop:
        return cli.leave(stop, chat.leave, end)
    finally:
        chat.screen.close()


class Chat:
    """A conversation on a terminal, or from one stream to another."""

    def __init__(self, arguments: argparse.Namespace):
        """Begin with nothing loaded.

        Args:
          arguments: of the command, checked.
        """
        from longspec_jax.status_line import StatusLine

        from .screen import Screen, wants_color

        self._is_terminal = sys.stdin.isatty()
        self._status = StatusLine(sys.stderr)
        color = self._is_terminal and wants_color(sys.stdout)
        self.screen = Screen(color, sys.stdout, self._status)
        self._arguments = arguments
        self._refused, self._compiled = False, False
        self._files: list[str] = []
        """Texts of files that the next message begins with."""
        self._conversation: Conversation | None = None

    @property
    def conversation(self) -> "Conversation":
        """The conversation, once it is loaded."""
        assert self._conversation is not None, "loaded before the first turn"
        return self._conversation

    def load(self) -> None:
        """Load the models, and say what was loaded."""
        self._status.show("starting")
        from .models import load_named, start_devices

        start_devices()
        from .arguments import models_of
        from .conversation import Conversation

        spec = load_named(models_of(self._arguments), self._status)
        self._conversation = Conversation(spec, self._arguments)
        self._status.clear()
        if self._conversation.is_plain:
            cli.say(
                "note: this target has no chat template, so your lines and its text are one "
                "document that it goes on with; --prompt_style vicuna or longspec makes messages "
                "of them"
            )
        if self._is_terminal:
            legend = self.screen.legend()
            hint = "/help lists the commands; Ctrl-C ends an answer, Ctrl-D leaves"
            self.screen.line(f"{hint}. {legend}" if legend else hint)

    def talk(self) -> int:
        """Answer line after line; returns the exit status."""
        for line in self._lines():
            try:
                if line.startswith("/") and not line.startswith("//"):
                    if self._command(*line.split(maxsplit=1)):
                        break
                elif line.strip():
                    self._answer(line.removeprefix("/") if line.startswith("//") else line)
            except (ValueError, NotImplementedError, OSError) as error:
                if isinstance(error, BrokenPipeError):
                    raise
                cli.say(f"error: {error}")
                self._refused = True
        self.conversation.close()
        return cli.BAD_INPUT if self._refused and not self._is_terminal else cli.OK

    def leave(self) -> None:
        """Say that a signal has ended the conversation."""
        self.screen.close()
        self.screen.end_line()
        cli.say("interrupted")

    def _lines(self) -> Iterator[str]:
        """What the user writes."""
        if not self._is_terminal:
            yield from (line.rstrip("\r\n") for line in sys.stdin)
            return
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives input() editing and history.
        while True:
            try:
                yield input(PROMPT)
            except EOFError:
                self.screen.line()
                return
            except cli.Stopped:
                raise
            except KeyboardInterrupt:
                self.screen.line("\nCtrl-D or /exit leaves")

    def _command(self, name: str, rest: str = "") -> bool:
        """Do what a command says; returns whether it leaves.

        Raises:
          ValueError: for an unknown command, and for one that cannot be met.
        """
        match name:
            case "/exit":
                return True
            case "/help":
                self.screen.line(COMMANDS)
            case "/file":
                from .prompts import read_text

                if not rest.strip():
                    raise ValueError("/file needs the name of a file")
                self._files.append(read_text(rest.strip(), "/file"))
            case "/reset":
                self.conversation.turns.clear()
                self._files.clear()
            case "/forget":
                if not rest.strip().isdecimal():
                    raise ValueError("/forget needs the number of turns to drop, such as /forget 1")
                self.conversation.forget(int(rest))
            case _:
                raise ValueError(f"unknown command {name}; /help lists those there are")
        return False

    def _answer(self, line: str) -> None:
        """Show an answer, which Ctrl-C ends in a terminal.

        A thread of its own decodes, and this one waits for signals: a signal in the midst of a
        step would leave the engine in no usable state.
        """
        text = "\n\n".join([*self._files, line])
        self._files.clear()  # Also where they are too long.
        stop, begun, ended = threading.Event(), threading.Event(), threading.Event()
        failed = list[BaseException]()

        def work() -> None:
            begun.set()
            try:
                self._decode(text, stop)
            except BaseException as error:
                failed.append(error)
                raise
            finally:
                ended.set()

        try:
            what = "reading" if self._compiled else "compiling and reading"
            self._status.show(what, cli.counted(self.conversation.ask(text), "token"))
            cli.run_in_thread(work)
        except cli.Stopped:
            raise
        except KeyboardInterrupt:
            if not self._is_terminal:
                raise
            stop.set()
            if begun.is_set():
                ended.wait()  # For the end of a round, or of a compilation; Ctrl-C again leaves.
            if failed:
                raise failed[0] from None

    def _decode(self, text: str, stop: threading.Event) -> None:
        """Print an answer as it comes, and keep it."""
        from .conversation import Counts, Turn

        said, counts, begun = list[str](), Counts(), time.perf_counter()
        for output in self.conversation.outputs(stop):
            self.screen.pieces(output.pieces)
            said.append(output.text)
            begun = begun if counts.tokens else time.perf_counter()
            counts.add(output)
            self._compiled |= counts.rounds > 0
        seconds = time.perf_counter() - begun
        self._status.clear()
        self.screen.end_line()
        if counts.tokens:
            self.conversation.keep(Turn(text, "".join(said)))
        if self._is_terminal:
            how = " (ended by Ctrl-C)" if stop.is_set() else ""
            self.screen.dim(f"[{counts.described(seconds)}]{how}\n")
        elif not any(said):
            self.screen.line()  # An answer without text is one all the same.


if __name__ == "__main__":
    sys.exit(main())
