"""Jinja templates from the hub, rendered by processes with bounds on their time and memory.

A chat template comes with a tokenizer, so it is untrusted. Jinja2's sandbox keeps it from files and
from Python's internals, as it does in transformers, and templates give the same text as there. What
loops or grows without end is ended by the operating system: a process that renders may take
:data:`SECONDS` of a processor and :data:`BYTES` of memory, and holds nothing else. It renders one
template after another. After one that met a bound it has ended, and the next call starts another.

This file is also the program of these processes, which import only jinja2.
"""

import atexit
import functools
import json
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, ext, nodes, parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

SECONDS = 5.0
"""Longest time of one rendering on a processor; ordinary templates take milliseconds."""
BYTES = 2**30
"""Most memory of a process that renders, the conversation and the text included."""
CHARACTERS = 2**26
"""Longest text that a template takes or makes, well over ten million tokens."""
LONGEST_ERROR = 1000
"""Characters of a template's own error that are passed on."""

_idle: list[subprocess.Popen[bytes]] = []
"""Processes that wait for a template."""


def render(template: str, variables: Mapping[str, Any]) -> str:
    """The text of a template.

    Args:
      template: the Jinja template.
      variables: what it may name, as JSON has values.

    Raises:
      TypeError: for variables that JSON has no value for.
      TemplateError: with what the template raises and its type, or the bound that it exceeds.
    """
    contents = (message["content"] for message in variables.get("messages", ()))
    _check_size(sum(map(len, (template, *contents))))
    asked = {"template": template, "variables": {**variables}, "seconds": SECONDS}
    process = _process()
    try:
        answer = _answer(process, json.dumps(asked).encode())
    except BaseException:
        process.kill()
        _end(process)
        raise
    _idle.append(process)
    if "text" not in answer:
        raise TemplateError(answer["error"])
    return answer["text"]


def _check_size(characters: int) -> None:
    if characters > CHARACTERS:
        raise TemplateError(f"it was stopped at a text beyond {CHARACTERS} characters")


def _process() -> subprocess.Popen[bytes]:
    """A process that waits for a template, only for this thread."""
    while _idle:
        try:
            process = _idle.pop()
        except IndexError:  # Another thread took it.
            break
        if process.poll() is None:
            return process
        _end(process)
    command = [sys.executable, "-I", __file__]
    # Of a session of its own: Ctrl-C in a terminal is not its business.
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _answer(process: subprocess.Popen[bytes], asked: bytes) -> dict[str, str]:
    """What a process says to a line; raises TemplateError if it ended instead."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(asked + b"\n")
        process.stdin.flush()
        line = process.stdout.readline()
    except BrokenPipeError:
        line = b""
    if line:
        return json.loads(line)
    status = process.wait()
    if status == -signal.SIGPROF:
        raise TemplateError(f"it was stopped after {SECONDS:g} seconds")
    raise TemplateError(f"it ended its process (exit status {status})")


@atexit.register
def _end_all() -> None:
    while _idle:
        _end(_idle.pop())


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let a process end, which it does where nobody can ask any more."""
    with process:
        pass


class _Namespace(Namespace):
    """A namespace without underscored names, which lead to Python's internals."""

    def __init__(*args: Any, **values: Any) -> None:  # A template may use the name ``self``.
        Namespace.__init__(args[0])
        for name, value in {**dict(*args[1:]), **values}.items():
            args[0][name] = value

    def __setitem__(self, name: str, value: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise TemplateError(f"a namespace cannot hold the underscored name {name!r}")
        super().__setitem__(name, value)


class _Generation(ext.Extension):
    """The tag that marks the assistant's text for training; it has no effect here."""

    tags = {"generation"}

    def parse(self, parser: parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is, with transformers' options: jinja2's own filter escapes for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> Template:
    """A template in what transformers gives chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "namespace": _Namespace,
    }
    return environment.from_string(template)


def _rendered(asked: dict[str, Any]) -> dict[str, str]:
    """The text, or what went wrong."""
    try:
        text = _compiled(asked["template"]).render(asked["variables"])
        _check_size(len(text))
        return {"text": text}
    except MemoryError:
        return {"error": f"it was stopped at {BYTES} bytes"}
    except Exception as error:  # A template is a program: it may raise anything.
        return {"error": f"{str(error)[:LONGEST_ERROR]} ({type(error).__name__})"}


def _serve() -> None:
    """Answer every line of standard input: the program of a process."""
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        # Time of a processor, since a busy machine is not the template's fault. It ends the
        # process wherever it is.
        signal.setitimer(signal.ITIMER_PROF, asked["seconds"])
        answer = json.dumps(_rendered(asked))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(answer, flush=True)


if __name__ == "__main__":
    _serve()
