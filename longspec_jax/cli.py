"""What all commands share: arguments, refusals, exit statuses, and how a command is stopped.

It imports little, so that ``--help`` and a typing error are answered before the library's slow
imports, and Ctrl-C is answered from the start.

Lists have one syntax: an option that takes several values is given once for each
(``--context=4096 --context=32768``). See :func:`several`.
"""

import argparse
import contextlib
import errno
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from longspec_jax import files
from longspec_jax.checks import Each, Maybe, OneOf, Rule, Text, Truth, Whole, nearest, shown
from longspec_jax.config.names import MESH_AXES
from longspec_jax.config.tree import TreeConfig
from longspec_jax.schema import RENAMED, Option

SCRIPTS = {
    "infer.chat": "longspec-chat",
    "infer.decode": "longspec-decode",
    "infer.eval": "longspec-eval",
    "infer.report": "longspec-report",
    "infer.serve": "longspec-serve",
    "train.prepare": "longspec-prepare",
    "train.questions": "longspec-questions",
    "train.regenerate": "longspec-regenerate",
    "train.run": "longspec-train",
    "train.vocabulary": "longspec-vocabulary",
}
"""Module of the checkout to the script that ``pyproject.toml`` installs."""
OK, FAILED, BAD_INPUT = 0, 1, 2
INTERRUPTED, READER_GONE = 130, 141
"""Exit statuses as shells have them: 128 and the number of SIGINT or SIGPIPE."""
DISK_FULL = errno.ENOSPC, errno.EDQUOT
USER_ERRORS = (ValueError, OSError, NotImplementedError, MemoryError)
"""What a user can mend: printed as one message, with status 2."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
QUIET = {
    # transformers warns of long texts, which we refuse, and that PyTorch is missing, which we
    # do not need.
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    # XLA asks for a bug report where a compilation takes minutes. Its errors reach Python anyway.
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
"""Environment variables that keep libraries quiet, where the user has not set them."""
STACK_BYTES = 64 * 2**20
"""Stack of the working thread: tracing nests deeply, and threads have less than a process."""
_STEERING = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n\r"}
"""Control characters, of which escape sequences are made, as what stands for the unreadable."""
PATIENCE = 1.5
"""Seconds that a stopped command has to save and print before its process ends."""


def command_name(package: str | None, module: str = "") -> str:
    """How a user types a command: a module of ``__package__``, or the package itself.

    A checkout runs ``python -m infer.decode``. An installation has the same file below the
    library's name, and a script for it.
    """
    dotted = ".".join(filter(None, (package, module)))
    name = dotted.removeprefix("longspec_jax.")
    return SCRIPTS[name] if name != dotted else f"python -m {name}"


# Running, failing and stopping.


class Stopped(KeyboardInterrupt):
    """SIGTERM or SIGHUP: handled as Ctrl-C, with an exit status of its own."""

    def __init__(self, number: int):
        """Stop because of this signal."""
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number


class Closed(Exception):
    """The run has been stopped: raised in the thread that still works on it."""


def status_of(stop: KeyboardInterrupt) -> int:
    """The exit status after Ctrl-C (130), SIGTERM (143) or SIGHUP (129)."""
    return stop.status if isinstance(stop, Stopped) else INTERRUPTED


def run(work: Callable[[], int], argv: Sequence[str] | None = None) -> int:
    """Run a command, and turn whatever it raises into one message and a status.

    Args:
      work: the command; returns the exit status.
      argv: its arguments, those of the process if absent; ``--traceback`` among them prints
        Python's traceback before the message of an error.

    Returns:
      The exit status: that of the work, 2 for bad input, 1 for a failure while running, 130 after
      Ctrl-C, 143 after SIGTERM, 129 after SIGHUP, 141 if nobody reads the output.
    """
    _open_streams()
    quiet_libraries()
    shows_traceback = "--traceback" in (sys.argv if argv is None else argv)
    with stop_signals():
        try:
            return work()
        except KeyboardInterrupt as stop:
            say("interrupted")
            return status_of(stop)
        except BrokenPipeError:  # As in ``| head``: nothing is wrong.
            _discard_output()
            return READER_GONE
        except Exception as error:
            return fail(error, shows_traceback)


def quiet_libraries() -> None:
    """Set what keeps libraries quiet; before they are imported, and before there are threads."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)


def say(message: str) -> None:
    """Print a message on standard error, unless it is gone with its terminal."""
    with contextlib.suppress(OSError):
        print(harmless(message), file=sys.stderr, flush=True)


def harmless(text: str) -> str:
    """A text without what steers a terminal: a model's files and its answers are others' words."""
    return text.translate(_STEERING)


def fail(error: Exception, shows_traceback: bool = False) -> int:
    """Print what went wrong in one message; returns the exit status."""
    if shows_traceback:
        import traceback

        traceback.print_exception(error)
    message, status = explained(error)
    say(message)
    try:
        sys.stdout.flush()
    except OSError:
        _discard_output()
    return status


def explained(error: Exception) -> tuple[str, int]:
    """The message of an error, and its exit status."""
    if isinstance(error, ModuleNotFoundError):
        from longspec_jax.extras import missing_extra

        if missing := missing_extra(error):
            return f"error: {missing}", BAD_INPUT
    if isinstance(error, MemoryError) and not str(error):
        return "error: out of memory; ask for less, or use a machine with more", BAD_INPUT
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        file = f": {error.filename}" if error.filename else ""
        return f"failed while running: {error.strerror}{file}; make room, then run it again", FAILED
    first = next(iter(str(error).splitlines()), "")
    if isinstance(error, USER_ERRORS) and first:
        return f"error: {error}", BAD_INPUT
    if isinstance(error, FloatingPointError):  # A model that overflows.
        return f"error: {error}", FAILED
    name = type(error).__name__
    return f"failed while running: {name}{': ' if first else ''}{first}", FAILED


@contextlib.contextmanager
def stop_signals() -> Iterator[None]:
    """Raise :class:`Stopped` on SIGTERM and SIGHUP, unless they are ignored, as under ``nohup``."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:
                before[number] = signal.signal(number, _stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(number: int, frame: object) -> NoReturn:
    raise Stopped(number)


def run_in_thread(work: Callable[[], None]) -> None:
    """Run work that a signal can end at any moment, also inside a compiler.

    Python handles signals in the main thread, between two of its own instructions: not inside a
    compiler, nor while it waits for a device. The work therefore has a thread of its own, and the
    main thread only waits.

    Raises:
      KeyboardInterrupt: on a signal; the work may go on until :func:`leave` ends the process.
      Exception: whatever the work raises.
    """
    raised: list[BaseException] = []
    done = threading.Event()

    def target() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised again below.
            raised.append(error)
        finally:
            done.set()

    before = threading.stack_size(STACK_BYTES)
    try:
        threading.Thread(target=target, name="work", daemon=True).start()
    finally:
        threading.stack_size(before)
    while not done.wait(0.5):
        pass
    if raised:
        raise raised[0]


def leave(
    stop: KeyboardInterrupt, save: Callable[[], None], end: Callable[[int], object] | None = None
) -> int:
    """Save what there is, and end the process within moments, whatever the work is inside of.

    Args:
      save: saves and prints what there is. It has :data:`PATIENCE` seconds, and further signals
        are ignored.
      end: ends the process with a status, in tests; ``os._exit`` if absent, because an ordinary
        exit would wait for the work.

    Returns:
      The exit status, where ``end`` returns.
    """
    status = status_of(stop)
    if end is None:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        timer = threading.Timer(PATIENCE, os._exit, [status])  # A full pipe would block for ever.
        timer.daemon = True
        timer.start()
    with contextlib.suppress(OSError):  # The terminal may be gone.
        save()
    (end or _end_now)(status)
    return status


def _end_now(status: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status)


def _open_streams() -> None:
    """Replace standard streams that are closed (``>&-``) by empty ones."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # Models write what a terminal cannot show.


def _discard_output() -> None:
    """Write to nowhere from now on, so that the interpreter's last flush raises nothing."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


# Parsers.


@dataclass(frozen=True)
class ByMachine:
    """A default for accelerators and another for CPUs; :func:`settled` chooses."""

    accelerator: object
    cpu: object

    def __str__(self) -> str:
        """For ``--help``."""
        return f"default {typed(self.accelerator)}, on a CPU {typed(self.cpu)}"


def settled(arguments: argparse.Namespace, cpu: bool) -> argparse.Namespace:
    """The arguments with the defaults of this machine."""
    result = argparse.Namespace()
    for name, value in vars(arguments).items():
        if isinstance(value, ByMachine):
            value = value.cpu if cpu else value.accelerator
        setattr(result, name, value)
    return result


class _Help(argparse.RawDescriptionHelpFormatter):
    """Help that shows every default, and which options are repeated."""

    def _get_help_string(self, action: argparse.Action) -> str:
        words = [action.help or ""]
        default = action.default
        if isinstance(default, ByMachine):
            words.append(str(default))
        elif action.nargs != 0 and default not in (None, argparse.SUPPRESS, [], ""):
            words.append(f"default {typed(default)}")
        if isinstance(action, Several):
            words.append("repeat for several")
        return "; ".join(filter(None, words)).replace("%", "%%")


class Parser(argparse.ArgumentParser):
    """A parser that raises what is wrong, takes names in full, and suggests the nearest one."""

    def __init__(self, **options: Any):
        """Bind the options of ``argparse``."""
        super().__init__(**{"allow_abbrev": False, "formatter_class": _Help, **options})

    def format_help(self) -> str:
        """The help, which names other commands as they are typed here."""
        text = super().format_help()
        if self.prog in SCRIPTS.values():
            for module, script in SCRIPTS.items():
                text = text.replace(f"python -m {module}", script)
        return text

    def error(self, message: str) -> NoReturn:
        """Raise the message, which begins with the option as it is typed."""
        raise ValueError(f"{message.removeprefix('argument ')} (--help lists the options)")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Write out ``--help`` first: the interpreter would find a closed pipe too late."""
        sys.stdout.flush()
        super().exit(status, message)

    # The stubs have overloads of which this is neither.
    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """The arguments, all of which must be known.

        Raises:
          ValueError: for a mistake, with the nearest option if there is one.
        """
        found, unknown = super().parse_known_args(args, namespace or argparse.Namespace())
        if unknown:
            self.error(self._about_unknown(unknown[0]))
        return found, unknown

    def _about_unknown(self, word: str) -> str:
        name = word.partition("=")[0]
        if not name.startswith("-"):
            return f"unexpected argument {shown(word)}"
        dashes = "--no-" if name.startswith("--no-") else "--"
        new = f"{dashes}{RENAMED.get(name.removeprefix(dashes), '')}"
        if new in self._option_string_actions:
            return f"option {name} is {new} now"
        close = nearest(name, self._option_string_actions)
        hint = f"; did you mean {close}?" if close else ""
        return f"unknown option {name:.60}{hint}"


class Several(argparse.Action):
    """Collects the values of an option that is repeated; the first replaces the default."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        """Add the value."""
        found = getattr(namespace, self.dest)
        before = [] if found is self.default else found
        setattr(namespace, self.dest, [*before, *(values or ())])


def several(convert: Callable[[str], Any], commas: bool = False) -> dict[str, Any]:
    """What ``add_argument`` takes for an option that is given once for each of its values.

    Args:
      commas: whether a comma may also stand between values, as in commands of earlier releases.
        Only for values that hold no comma themselves.
    """

    def items(text: str) -> list[Any]:
        return [convert(part) for part in (text.split(",") if commas else [text])]

    return {"action": Several, "type": items}


def add_traceback(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add ``--traceback``, which :func:`run` looks for."""
    parser.add_argument(
        "--traceback", action="store_true", help="show Python's traceback on errors"
    )


def typed(value: object) -> str:
    """A value as a user types it; those of a list with commas between them."""
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return "/".join(map(typed, value))
    if isinstance(value, list):
        return ", ".join(map(typed, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


# Values, as ``type=`` of ``add_argument``.

_AXIS = re.compile(rf"({'|'.join(MESH_AXES)})=([1-9]\d{{0,5}})")
MESH_GRAMMAR = f"sizes of the axes {', '.join(MESH_AXES)}, such as tp=2 or data=2,tp=4"
TREE_GRAMMAR = (
    "chain:4 for a single branch of four tokens, or the widths of the tree's levels such as "
    "4,16,16,16,16, which is 4,16x4; @64 after it verifies only the best 64 nodes by the draft's "
    "own score, the root included; +0.7 after that stops growing when a level adds at most 0.7 "
    "expected tokens (OPT-Tree: 16x10@50+0.7); chain:16/4,8 is a tree at the end of a chain, for "
    "drafts with retrieve=N"
)


def value(allowed: Rule) -> Callable[[str], Any]:
    """A value that keeps a rule, as it was typed: nothing is rounded or cast."""

    def read(text: str) -> Any:
        found = allowed.of_text(text)
        if words := allowed.refusal(found):
            written = shown(text) if isinstance(found, str) else f"{text.strip():.40}"
            raise argparse.ArgumentTypeError(f"{written} must be {words}")
        return found

    return read


COUNT = value(Whole())
"""A whole number from 1."""


def add_options(
    group: argparse._ActionsContainer, declared: Mapping[str, Option], **defaults: object
) -> None:
    """Add a flag for each declared option, ``--name``, with its rule, default and sentence.

    Args:
      group: a parser, or a group of its options.
      declared: options by name.
      **defaults: other defaults than the declared ones.
    """
    for name, option in declared.items():
        rule = option.rule.rule if isinstance(option.rule, Maybe) else option.rule
        flag, default = f"--{name}", defaults.get(name, option.default)
        if isinstance(rule, Truth):
            switch = "store_true" if default is False else argparse.BooleanOptionalAction
            group.add_argument(flag, default=default, help=option.about, action=switch)
        elif isinstance(rule, Each):
            group.add_argument(
                flag, default=default, help=option.about, **several(value(rule.item))
            )
        else:
            group.add_argument(flag, default=default, help=option.about, type=value(rule))


def word(text: str) -> str:
    """Text that is not empty."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the value is empty; leave the option out instead")
    return text


any_text = value(Text(1))
"""Text of any characters, spaces and line feeds too, but not empty."""


def one_of(known: Sequence[str]) -> Callable[[str], str]:
    """A name out of several."""
    return value(OneOf(tuple(known)))


def path(text: str) -> str:
    """A file or folder, or a model of the hub; ``~`` is expanded as in a shell."""
    try:
        return str(files.expanded(text)) if word(text).startswith("~") else text
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def file_path(text: str) -> Path:
    """A file or folder on this machine."""
    return Path(path(text))


def result_file(text: str) -> Path:
    """A JSON file of results that can be written, and that replaces no other kind of file."""
    try:
        return files.writable(file_path(text), text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def mesh(text: str) -> dict[str, int]:
    """The axes of a mesh and their sizes."""
    axes: dict[str, int] = {}
    for part in text.split(","):
        match = _AXIS.fullmatch(part.strip())
        if match is None or match[1] in axes:
            raise argparse.ArgumentTypeError(f"{text!r:.60} must be {MESH_GRAMMAR}, each axis once")
        axes[match[1]] = int(match[2])
    return axes


def tree(text: str) -> TreeConfig:
    """A tree, every part of which has an effect."""
    try:
        found = TreeConfig.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if found.budget is not None and found.budget > found.num_proposed:
        shape = replace(found, budget=None)
        raise argparse.ArgumentTypeError(
            f"@{found.budget} is more nodes than the tree {shape} has: {found.num_proposed} with "
            f"its root; write {shape} to verify all of them, or a larger tree"
        )
    if found.threshold is not None and found.num_levels < 2:
        shape = replace(found, threshold=None)
        raise argparse.ArgumentTypeError(
            f"+{found.threshold:g} chooses among the levels below the first, and the tree {shape} "
            f"has none; write {shape}, or a deeper tree"
        )
    return found


def draft_option(text: str) -> tuple[str, Any]:
    """An option of a draft: its name, and its value, which is true where none is given."""
    name, equals, value = word(text).partition("=")
    if not equals:
        return name, True
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return name, kind(value)
    return name, {"true": True, "false": False}.get(value.lower(), value)


def as_options(pairs: Sequence[tuple[str, Any]] | None) -> dict[str, Any]:
    """The options of a draft by name.

    Raises:
      ValueError: for one that is given twice.
    """
    options: dict[str, Any] = {}
    for name, value in pairs or ():
        if name in options:
            raise ValueError(f"--draft_option {name} is given twice; name it once")
        options[name] = value
    return options


def counted(count: int, thing: str) -> str:
    """``1 node``, ``2 nodes``."""
    return f"{count} {thing}{'s' * (count != 1)}"
