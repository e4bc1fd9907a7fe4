"""A sandbox in which a chat template cannot run for ever, nor fill the memory.

A template comes with a tokenizer, from wherever that came from. transformers renders it in jinja2's
sandbox, which keeps it from files and from Python; loops inside loops and strings that double stay
possible. Here every turn of a loop, every call and every filter looks at the clock, and whatever
could make a small value large is measured first. Ordinary templates render to the same text.
"""

import contextvars
import functools
import json
import math
import re
import string
import time
import types
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, ext, nodes, parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

SECONDS = 5.0
"""What rendering one conversation may take; ordinary templates take milliseconds."""
CHARACTERS = 2**26
"""What all strings made on the way, and any one list, may hold: well over ten million tokens."""
BITS = 2**16
"""The largest whole number."""
FORM = 2**20
"""Characters of a format string, each of whose fields takes time."""
PERCENT = re.compile(
    r"%(?:\([^()]*\))?[#0\- +]*(?P<width>\*|[0-9]*)(?:\.(?P<precision>\*|[0-9]*))?"
    r"[hlL]?(?P<kind>.?)",
    re.DOTALL,
)
"""A field as ``%`` reads it. What follows the key may all be absent, so that nothing is tried twice
and the fields of a text are found in time linear in it."""
SIZED = {
    "ljust",
    "rjust",
    "center",
    "zfill",
    "expandtabs",
    "to_bytes",
    "indent",
    "batch",
    "slice",
    "tojson",
    "round",
}
"""Methods and filters whose result is as large as a number says."""


class TooCostlyError(TemplateError):
    """A template asked for more time or text than a prompt could need."""


def render(template: str, variables: Mapping[str, Any]) -> str:
    """The text of a template.

    Raises:
      jinja2.TemplateError: for what jinja2 cannot read or render, for what the template raises
        itself, and, as a ``TooCostlyError``, for one that is stopped.
    """
    token = _USED.set(_Used(time.monotonic() + SECONDS))
    try:
        return _compile(template).render(variables)
    finally:
        _USED.reset(token)


@functools.lru_cache(maxsize=16)
def _compile(template: str) -> Any:
    return _Environment().from_string(template)


class _Used:
    """What one rendering has taken so far."""

    def __init__(self, deadline: float):
        self._deadline = deadline
        self._characters = 0

    def look_at_the_clock(self) -> None:
        if time.monotonic() > self._deadline:
            raise TooCostlyError(f"it was stopped after {SECONDS:g} seconds")

    def add(self, characters: int) -> None:
        self._characters += characters
        require_small(self._characters)


_USED: contextvars.ContextVar[_Used] = contextvars.ContextVar("used")


def require_small(characters: float) -> None:
    """Refuse text that no prompt could need."""
    if characters > CHARACTERS:
        raise TooCostlyError(f"it was stopped at a text of more than {CHARACTERS} characters")


class _Generation(ext.Extension):
    """The tag that marks the assistant's text for training; here it changes nothing."""

    tags = {"generation"}

    def parse(self, parser: parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _ChatNamespace(Namespace):
    """A namespace without the underscored names that lead to Python's own machinery."""

    def __init__(*args: Any, **values: Any) -> None:  # ``self`` may be a name of the template's.
        namespace, given = args[0], dict(*args[1:], **values)
        for name in given:
            _check_public(name)
        Namespace.__init__(namespace, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def _check_public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise TemplateError(f"a namespace cannot hold the underscored name {name!r}")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it stands: jinja2's own filter escapes what has a meaning in HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _Environment(ImmutableSandboxedEnvironment):
    """What transformers gives chat templates, measured."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, ext.loopcontrols],
            finalize=_measured,
        )
        self.filters["tojson"] = _tojson
        self.filters = {name: _watched(name, one) for name, one in self.filters.items()}
        self.filters["measured"] = _measured
        for name in ("urlize", "wordwrap"):  # Slow on long text, and nothing for a prompt.
            del self.filters[name]
        del self.globals["lipsum"]
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": lambda form: datetime.now().strftime(form),
            "namespace": _ChatNamespace,
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Watch().visit(super()._parse(source, name, filename))

    def turn(self, characters: int) -> None:
        """A turn of a loop begins, which writes this many characters of the template's own."""
        used = _USED.get()
        used.look_at_the_clock()
        used.add(characters)

    def call(self, context: Any, function: Any, *args: Any, **values: Any) -> Any:
        method = getattr(function, "__wrapped__", function)  # The sandbox wraps str.format.
        owner = getattr(method, "__self__", None)
        builtin = isinstance(method, types.BuiltinMethodType) and not isinstance(owner, Mapping)
        if builtin or isinstance(owner, str):  # Text marked as safe has methods written in Python.
            args = _check_growth(method.__name__, owner, args, values)
        return _measured(super().call(context, function, *args, **values))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _check_operands(operator, left, right)
        return _measured(super().call_binop(context, operator, left, right))


class _Watch(NodeTransformer):
    """Puts a look at the clock into every loop, and measures what an expression puts together."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        written = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        turn = nodes.Call(
            nodes.EnvironmentAttribute("turn"), [nodes.Const(written)], [], None, None
        )
        node.body.insert(0, nodes.ExprStmt(turn).set_lineno(node.lineno))
        return node

    def _measure(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        if getattr(node, "ctx", "load") != "load":
            return node  # The names on the left of an assignment.
        return nodes.Filter(node, "measured", [], [], None, None).set_lineno(node.lineno)

    visit_Concat = visit_List = visit_Tuple = visit_Dict = _measure


def _watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that looks at the clock and measures what it is given and what it makes."""

    @functools.wraps(function)
    def call(*args: Any, **values: Any) -> Any:
        # jinja2 gives some filters its context or environment first.
        skip = int(hasattr(function, "jinja_pass_arg"))
        first, rest = args[skip], args[skip + 1 :]
        if name == "join" and not hasattr(first, "__len__"):
            first = list(first)
        if name == "format":
            _check_percent(str(first), values or rest)
        else:
            rest = _check_growth(name, first, rest, values)
        return _measured(function(*args[:skip], first, *rest, **values))

    return call


def _check_growth(name: str, owner: Any, args: Iterable[Any], values: Mapping[str, Any]) -> Any:
    """Refuse a method or filter that would make far more than it was given; its arguments."""
    args = tuple(list(one) if isinstance(one, types.GeneratorType) else one for one in args)
    if name == "format":
        _check_format(owner, [*args, *values.values()])
    elif name == "format_map":
        _check_format(owner, [one for arg in args for one in _parts(arg)])
    elif name == "replace" and isinstance(owner, str) and len(args) > 1:
        require_small(len(owner) + owner.count(str(args[0])) * len(str(args[1])))
    elif name == "translate":
        require_small(len(owner) * sum(map(_extent, args)))
    elif name == "join":
        words = owner if not isinstance(owner, str) or not args else args[0]
        longest = max((len(one) for one in (owner, *args) if isinstance(one, str)), default=0)
        require_small(_extent(words) + longest * len(words))
    elif name in SIZED:
        given = [abs(one) for one in (*args, *values.values()) if isinstance(one, int)]
        require_small(max(given, default=0) * max(1, _extent(owner)))
    return args


def _check_operands(operator: str, left: Any, right: Any) -> None:
    """Refuse an operation whose result would be far larger than its operands."""
    numbers = isinstance(left, int) and isinstance(right, int)
    if operator == "**" and numbers:
        bits = left.bit_length() * abs(right)
        if bits > BITS:
            raise TooCostlyError(f"it was stopped at a number of {bits} bits")
    elif operator == "*" and not numbers:
        times, repeated = (left, right) if isinstance(left, int) else (right, left)
        require_small(_extent(repeated) * (times if isinstance(times, int) else 1))
    elif operator == "%" and isinstance(left, str | bytes):
        _check_percent(left if isinstance(left, str) else left.decode("latin-1"), right)


def _check_percent(form: str, values: Any) -> None:
    """Refuse ``form % values`` if it would be large; read field by field, as ``%`` reads it."""
    _require_short(form)
    fields = [field for field in PERCENT.finditer(form) if field["kind"] != "%"]
    # A key that holds parentheses of its own is read as a field of the kind "(".
    if any("*" in (field["width"], field["precision"]) or field["kind"] == "(" for field in fields):
        raise TooCostlyError("it was stopped at a format whose fields are computed")
    widths = (digits or "0" for field in fields for digits in field.group("width", "precision"))
    _check_fields(form, len(fields), widths, _parts(values))


def _check_format(form: str, values: Iterable[Any]) -> None:
    """Refuse ``form.format(...)`` if it would be large; read as ``format`` itself reads it."""
    _require_short(form)
    specs = [spec for _, name, spec, _ in string.Formatter().parse(form) if name is not None]
    if any("{" in (spec or "") for spec in specs):
        raise TooCostlyError("it was stopped at a format whose fields are computed")
    widths = (digits for spec in specs for digits in re.findall(r"\d+", spec or ""))
    _check_fields(form, len(specs), widths, values)


def _require_short(form: str) -> None:
    if len(form) > FORM:
        raise TooCostlyError(f"it was stopped at a format of more than {FORM} characters")


def _check_fields(form: str, count: int, widths: Iterable[str], values: Iterable[Any]) -> None:
    """Refuse a format with so many fields, of these widths, each of which may hold any value."""
    padded = sum(int(digits) if len(digits) < 10 else math.inf for digits in widths)
    require_small(len(form) + padded + count * max(map(_extent, values), default=0))


def _parts(value: Any) -> Iterable[Any]:
    """What a format may name of its one argument."""
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, tuple) else (value,)


def _measured(value: Any) -> Any:
    """The value, once the clock was looked at and its size found to be reasonable."""
    used = _USED.get()
    used.look_at_the_clock()
    if isinstance(value, str):
        used.add(len(value))
    else:
        require_small(_extent(value))
    return value


def _extent(value: Any) -> int:
    """Characters of a value written out, roughly; what is held twice counts twice."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, int):
        bits = value.bit_length()
        if bits > BITS:
            raise TooCostlyError(f"it was stopped at a number of {bits} bits")
        return 1 + bits // 3
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if not isinstance(value, list | tuple | set):
        return 0
    extent = len(value)
    for one in value:
        extent += _extent(one)
        require_small(extent)
    _USED.get().look_at_the_clock()
    return extent
