"""Jinja templates from the hub, rendered in a sandbox with bounds on their size and time.

A chat template comes with a tokenizer, so it is untrusted. Jinja2's sandbox keeps it from files and
from Python's internals, as it does in transformers, and ordinary templates give the same text as
there. The bounds here stop a template that loops or grows without end. They are checked between
Python's instructions: a single call of C code, such as one ``replace``, runs to its end.
"""

import functools
import json
import re
import sys
import time
from collections.abc import Iterable, Mapping
from datetime import datetime
from types import FrameType
from typing import Any

from jinja2 import TemplateError, ext, nodes, parser
from jinja2.compiler import CodeGenerator, Frame
from jinja2.filters import do_indent
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from longspec_jax.checks import shown

SECONDS = 5.0
"""Longest time of one rendering; ordinary templates take milliseconds."""
CHARACTERS = 2**26
"""Longest text that a template takes or makes, well over ten million tokens; also its largest
number."""
SMALL = 64
"""Largest exponent, and largest indentation of JSON."""
UNBOUNDED = frozenset(
    "center encode expandtabs format format_map ljust rjust round to_bytes translate urlize "
    "wordwrap zfill".split()
)
"""Methods of texts and numbers, and filters, that are refused: their results are as large as a
number says, or their time grows faster than the text."""


def render(template: str, variables: Mapping[str, Any]) -> str:
    """The text of a template.

    Raises:
      Exception: what the template raises; a ``jinja2.TemplateError`` where it exceeds a bound.
    """
    contents = (message["content"] for message in variables.get("messages", ()))
    _require_at_most(CHARACTERS, sum(map(len, (template, *contents))))
    deadline = time.monotonic() + SECONDS

    def check_time(frame: FrameType, event: str, argument: Any) -> Any:
        if time.monotonic() > deadline:
            raise TemplateError(f"it was stopped after {SECONDS:g} seconds")
        return check_time

    before = sys.gettrace()
    sys.settrace(check_time)  # Called before every line of Python, the template's and jinja2's.
    try:
        return _compile(template).render(variables)
    finally:
        sys.settrace(before)


@functools.lru_cache(maxsize=16)
def _compile(template: str) -> Any:
    return _Environment().from_string(template)


def _require_at_most(most: int, size: float) -> None:
    if size > most:
        raise TemplateError(f"it was stopped at a text or number beyond {most}")


def _size(value: Any) -> float:
    """A number as it is, of anything else its length."""
    if isinstance(value, int | float):
        return abs(value)
    return len(value) if hasattr(value, "__len__") else 0


def _walked(value: Any) -> Any:
    """The value, after a visit of all that it holds, which can be stopped; ``repr`` cannot.

    A list that holds a list twice, which holds a list twice, and so on, is small in memory but
    endless to write.
    """
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Mapping):
            waiting += one.values()
        elif isinstance(one, list | tuple | set):
            waiting += one
    return value


def _joined(pieces: Iterable[Any]) -> str:
    kept, size = [], 0
    for piece in pieces:
        kept.append(str(_walked(piece)))
        size += len(kept[-1])
        _require_at_most(CHARACTERS, size)
    return "".join(kept)


def _indented(text: str, width: int | str = 4, *options: bool, **named: bool) -> str:
    _require_at_most(CHARACTERS, _size(width) * (1 + text.count("\n")))
    return do_indent(text, width, *options, **named)


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, **options: Any) -> str:
    """JSON as it is: jinja2's own filter escapes what has a meaning in HTML."""
    _require_at_most(SMALL, _size(indent or 0))
    return json.dumps(_walked(value), ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


class _Namespace(Namespace):
    """A namespace without underscored names, which lead to Python's internals."""

    def __init__(*args: Any, **values: Any) -> None:  # A template may use the name ``self``.
        Namespace.__init__(args[0])
        for name, value in dict(*args[1:], **values).items():
            args[0][name] = value

    def __setitem__(self, name: str, value: Any) -> None:
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


class _Compiler(CodeGenerator):
    """Has the environment join the operands of ``~``."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat((")
        for operand in node.nodes:
            self.visit(operand, frame)
            self.write(", ")
        self.write("))")


class _Environment(ImmutableSandboxedEnvironment):
    """What transformers gives chat templates, with bounds on texts and numbers."""

    code_generator_class = _Compiler
    concat = staticmethod(_joined)
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, ext.loopcontrols],
            finalize=_walked,
        )
        self.filters |= {"tojson": _tojson, "indent": _indented}
        self.filters = {name: one for name, one in self.filters.items() if name not in UNBOUNDED}
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": lambda form: datetime.now().strftime(form),
            "namespace": _Namespace,
            "dict": lambda *args, **values: dict(*args, **values),
        }
        del self.globals["lipsum"]

    def wrap_str_format(self, value: Any) -> None:
        """No wrapper: :meth:`is_safe_attribute` refuses ``format`` as it does ``ljust``."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        refused = attr in UNBOUNDED and isinstance(obj, str | bytes | int | float)
        return not refused and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            _require_at_most(SMALL, _size(right))
        elif operator == "*":
            _require_at_most(CHARACTERS, _size(left) * _size(right))
        elif operator == "%" and isinstance(left, str) and re.search(r"[0-9]{5}|\*", left):
            raise TemplateError(f"a field of the format {shown(left)} is too wide, or computed")
        result = super().call_binop(context, operator, left, right)
        _require_at_most(CHARACTERS, _size(result))
        return result
