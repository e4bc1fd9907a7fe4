"""Jinja templates from the hub, rendered in a sandbox with bounds on their size and time.

A chat template comes with a tokenizer, so it is untrusted. Jinja2's sandbox keeps it from files and
from Python's internals, as it does in transformers, and ordinary templates give the same text as
there. The bounds here stop a template that loops or grows without end.

Time is checked between Python's instructions. A single call of C code runs to its end, and keeps
all other threads waiting, so no value may be large: neither a text nor what would be written of a
list. A list that holds a list twice, which holds a list twice, and so on, is small in memory but
endless to write, to compare and to hash. Values are measured where they are made: by operators, by
brackets, by filters and by calls. Filters and methods whose results are larger than their operands
are checked before they begin.
"""

import functools
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MappingView, Set
from datetime import datetime
from types import FrameType
from typing import Any

from jinja2 import TemplateError, ext, nodes, parser
from jinja2.compiler import CodeGenerator, Frame
from jinja2.filters import do_indent
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from longspec_jax.checks import shown

SECONDS = 5.0
"""Longest time of one rendering on a processor; ordinary templates take milliseconds."""
CHARACTERS = 2**26
"""Longest text that a template takes or makes, well over ten million tokens; also its largest
number."""
ITEM = 64
"""What every value counts beside its characters: its bytes, and the time that it takes."""
ESCAPED = 10
"""Most characters that a filter or ``repr`` writes for one."""
BITS = 1024
"""Of a number: division takes the time of both lengths' product."""
SMALL = 64
"""Largest exponent, and largest indentation of JSON."""
UNBOUNDED = frozenset(
    "center encode expandtabs format format_map ljust rjust round to_bytes translate urlize "
    "wordwrap zfill".split()
)
"""Methods of texts and numbers, and filters, that are refused: their results are as large as a
number says, or their time grows faster than the text."""
ITEMISING = "groupby list max min slice sort unique".split()
"""Filters that make values of the characters of a text."""
WRITING = "capitalize lower striptags title trim truncate upper wordcount".split()
"""Filters that write a value that is no text."""
ESCAPING = "e escape forceescape pprint string tojson urlencode xmlattr".split()
"""Filters that may write several characters for one."""
SEARCHING = "lstrip rfind rindex rpartition rsplit rstrip strip".split()
"""Methods of texts that may take the time of both lengths' product."""


def render(template: str, variables: Mapping[str, Any]) -> str:
    """The text of a template.

    Raises:
      Exception: what the template raises; a ``jinja2.TemplateError`` where it exceeds a bound.
    """
    contents = (message["content"] for message in variables.get("messages", ()))
    _require_at_most(CHARACTERS, sum(map(len, (template, *contents))))
    begun, deadline = time.thread_time(), time.monotonic() + SECONDS

    def check_time(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal deadline
        if time.monotonic() > deadline:
            # A busy machine is not the template's fault. This clock is slow to read.
            left = SECONDS - (time.thread_time() - begun)
            if left <= 0:
                raise TemplateError(f"it was stopped after {SECONDS:g} seconds")
            deadline = time.monotonic() + left
        return None if frame.f_code in _SHORT else check_time

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


def _weight(value: Any, most: int) -> int:
    """Characters of a value and of all that it holds, as often as it holds it, and its items.

    Raises:
      TemplateError: as soon as they are more than ``most``.
    """
    size, waiting = 0, [value]
    while waiting:
        one = waiting.pop()
        size += ITEM
        inner: Any = ()
        if isinstance(one, str):
            size += len(one)
        elif isinstance(one, dict | Mapping):
            inner = (*one.keys(), *one.values())
        elif isinstance(one, list | tuple | range | MappingView | Set):
            inner = one
        elif isinstance(one, Namespace):
            raise TemplateError("a namespace is no value of a list and has no text")
        # Before they are looked at: they may be many.
        _require_at_most(most, size + ITEM * len(inner))
        waiting += inner
    return size


def _size(value: Any) -> float:
    """A number as it is, of a text its length, of anything else that holds values its weight."""
    if isinstance(value, int | float):
        return abs(value)
    if isinstance(value, str):
        return len(value)
    return _weight(value, CHARACTERS) if hasattr(value, "__len__") else 0


_SHORT = {one.__code__ for one in (_weight, _size, _require_at_most)}
"""Of functions within which no time is checked: they end soon."""


def _held(value: Any) -> Any:
    """A value that is not too large; of an iterator, whose values are not known, a list."""
    if isinstance(value, Iterator) and not isinstance(value, LoopContext):
        found, size = [], 0
        for one in value:
            found.append(one)
            size += _weight(one, CHARACTERS)
            _require_at_most(CHARACTERS, size)
        return found
    if isinstance(value, int):
        _require_at_most(BITS, value.bit_length())
    elif not isinstance(value, float):
        _require_at_most(CHARACTERS, _size(value))
    return value


def _written(value: Any) -> Any:
    """A value that is short enough to write."""
    if not isinstance(value, str | int | float):
        _weight(value, CHARACTERS // ESCAPED)
    return value


def _joined(pieces: Iterable[Any]) -> str:
    kept, size = [], 0
    for piece in pieces:
        kept.append(str(_written(piece)))
        size += len(kept[-1])
        _require_at_most(CHARACTERS, size)
    return "".join(kept)


def _check_join(values: Any, separator: Any = "", attribute: Any = None) -> None:
    _require_at_most(CHARACTERS, _itemised(values) + len(str(separator)) * len(values))


def _check_replace(text: Any, old: Any, new: Any, count: Any = None) -> None:
    text, old, new = str(_written(text)), str(_written(old)), str(_written(new))
    _require_at_most(CHARACTERS, len(text) + text.count(old) * len(new))


def _check_batch(values: Any, linecount: Any, fill_with: Any = None) -> None:
    _require_at_most(CHARACTERS, _itemised(values) + ITEM * _size(linecount))


def _check_sum(values: Any, attribute: Any = None, start: Any = 0) -> None:
    """Refuse many lists: each sum copies those before."""
    numbers = isinstance(start, int | float)
    _require_at_most(CHARACTERS, _itemised(values) * (1 if numbers else len(values)))


def _itemised(values: Any, *_: Any, **__: Any) -> int:
    """The weight of values; characters of a text are values too."""
    size = _weight(values, CHARACTERS) + (ITEM * len(values) if isinstance(values, str) else 0)
    _require_at_most(CHARACTERS, size)
    return size


def _check_written(value: Any, *_: Any, **__: Any) -> None:
    _written(value)


def _check_escaped(value: Any, *_: Any, **__: Any) -> None:
    _weight(value, CHARACTERS // ESCAPED)


CHECKS: dict[str, Callable[..., object]] = {
    "batch": _check_batch,
    "join": _check_join,
    "replace": _check_replace,
    "sum": _check_sum,
    **dict.fromkeys(ITEMISING, _itemised),
    **dict.fromkeys(WRITING, _check_written),
    **dict.fromkeys(ESCAPING, _check_escaped),
}
"""What checks the operands of filters before they begin."""


def _bounded(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose operands and results are not too large."""
    first = 1 if hasattr(work, "jinja_pass_arg") else 0  # The context is no operand.
    check = CHECKS.get(name)

    @functools.wraps(work)
    def bounded(*args: Any, **named: Any) -> Any:
        own = [_held(one) if isinstance(one, Iterator) else one for one in args[first:]]
        if check is not None:
            check(*own, **named)
        result = work(*args[:first], *own, **named)
        same = isinstance(result, Iterator) or any(result is one for one in own)
        return result if same else _held(result)

    return bounded


def _check_method(text: str, name: str, args: tuple[Any, ...]) -> None:
    """Refuse a method of a text whose result would be too large, or which would take too long."""
    if name == "join" and args:
        _check_join(args[0], text)
    elif name == "replace" and len(args) > 1:
        _check_replace(text, args[0], args[1])
    elif name in SEARCHING and args:
        _require_at_most(CHARACTERS * SMALL, len(text) * _size(args[0] or ""))
    if name in ("split", "rsplit", "splitlines"):
        separator = args[0] if args and isinstance(args[0], str) else None
        pieces = text.count(separator) if separator else len(text) // 2
        _require_at_most(CHARACTERS, len(text) + ITEM * pieces)


def _indented(text: str, width: int | str = 4, *options: bool, **named: bool) -> str:
    _require_at_most(CHARACTERS, _size(width) * (1 + text.count("\n")))
    return do_indent(text, width, *options, **named)


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, **options: Any) -> str:
    """JSON as it is: jinja2's own filter escapes what has a meaning in HTML."""
    _require_at_most(SMALL, _size(indent or 0))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _strftime_now(form: str) -> str:
    _require_at_most(CHARACTERS // ITEM, len(form))
    return datetime.now().strftime(form)


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
    """Has the environment join the operands of ``~``, and measure what stands in brackets."""

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._measured(super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._measured(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._measured(super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def _measured(self, visit: Callable[..., None], node: nodes.Expr, frame: Frame) -> None:
        self.write("environment.held(")
        visit(node, frame)
        self.write(")")

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
    held = staticmethod(_held)
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, ext.loopcontrols],
            finalize=_written,
        )
        self.filters |= {"tojson": _tojson, "indent": _indented}
        self.filters = {
            name: _bounded(name, one) for name, one in self.filters.items() if name not in UNBOUNDED
        }
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "namespace": _Namespace,
            "dict": lambda *args, **values: dict(*args, **values),
        }
        del self.globals["lipsum"]

    def wrap_str_format(self, value: Any) -> None:
        """No wrapper: :meth:`is_safe_attribute` refuses ``format`` as it does ``ljust``."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        refused = attr in UNBOUNDED and isinstance(obj, str | bytes | int | float)
        return not refused and super().is_safe_attribute(obj, attr, value)

    def call(self, context: Any, obj: Any, /, *args: Any, **named: Any) -> Any:
        """Call a method, a macro or a global, and measure what it makes."""
        given = tuple(_held(one) if isinstance(one, Iterator) else one for one in args)
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            _check_method(owner, obj.__name__, given)
        elif isinstance(obj, Macro) and (obj.catch_varargs or obj.catch_kwargs):
            _held([*given, *named.values()])
        result = super().call(context, obj, *given, **named)
        return result if isinstance(result, Iterator) else _held(result)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            _require_at_most(SMALL, _size(right))
        elif operator == "*":
            _require_at_most(CHARACTERS, _size(left) * _size(right))
        elif operator == "%" and isinstance(left, str):
            if re.search(r"[0-9]{5}|\*", left):
                raise TemplateError(f"a field of the format {shown(left)} is too wide, or computed")
            _require_at_most(CHARACTERS, 10**4 * left.count("%"))
            _written(right)
        result = super().call_binop(context, operator, left, right)
        _require_at_most(CHARACTERS, _size(result))
        return result
