"""Chat messages, checked, and their text by a Jinja template with bounds on its size and time.

A chat template comes from the hub with a tokenizer, so it is untrusted. Jinja2's sandbox keeps it
from files and from Python's internals, as it does in transformers; ordinary templates give the same
text as there. The bounds here stop a template that loops or grows without end. They are checked
between Python's instructions: a single call of C code, such as one ``replace``, runs to its end.
"""

import functools
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import FrameType
from typing import Any

from jinja2 import TemplateError, ext, nodes, parser
from jinja2.compiler import CodeGenerator, Frame
from jinja2.filters import do_indent
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from longspec_jax.checks import shown

CONTENT = 'text, or a list of parts {"type": "text", "text": ...}'
SECONDS = 5.0
"""Longest time of one rendering; ordinary templates take milliseconds."""
CHARACTERS = 2**26
"""Longest text that a template takes or makes, well over ten million tokens; also its largest
number."""
EXPONENT = 64
"""Largest power."""
UNBOUNDED = frozenset(
    "center encode expandtabs format format_map ljust rjust round to_bytes translate urlize "
    "wordwrap zfill".split()
)
"""Methods of texts and numbers, and filters, that are refused: their results are as large as a
number says, or their time grows faster than the text."""


def plain_messages(
    messages: Any, where: str = "", shown: Callable[[Any], str] = shown
) -> list[dict[str, Any]]:
    """The messages, each with its content as one text; parts of text are joined.

    Args:
      messages: what the caller gave.
      where: the file or option that holds them; error messages begin with it.
      shown: writes a value for an error message.

    Raises:
      ValueError: for anything but a list of messages with role and content.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(
            f"{where or 'messages'} must be a list of objects with role and content, at least one, "
            f"got {shown(messages)}"
        )
    prefix = f"{where}: " if where else ""
    return [
        _Message(f"{prefix}message {index}", shown).plain(message)
        for index, message in enumerate(messages)
    ]


@dataclass(frozen=True)
class _Message:
    """One message of a conversation."""

    name: str
    shown: Callable[[Any], str]

    def plain(self, message: Any) -> dict[str, Any]:
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise ValueError(f"{self.name} must have role and content, got {self.shown(message)}")
        role = message["role"]
        if not isinstance(role, str):
            raise ValueError(f"{self.name}: the role must be text, got {self.shown(role)}")
        others = {key: value for key, value in message.items() if value is not None}
        return {**others, "content": self._text(message["content"])}

    def _text(self, content: Any) -> str:
        if isinstance(content, str):
            return content
        if isinstance(content, list | tuple) and content:
            return "".join(map(self._part, content))
        raise ValueError(f"{self.name}: the content must be {CONTENT}, got {self.shown(content)}")

    def _part(self, part: Any) -> str:
        is_text = isinstance(part, Mapping) and part.get("type") == "text"
        text = part.get("text") if is_text else None
        if isinstance(text, str):
            return text
        raise ValueError(
            f'{self.name}: a part of the content must be {{"type": "text", "text": ...}}, got '
            f"{self.shown(part)}; images and sound are not supported"
        )


VICUNA_TEMPLATE = (
    "{{ bos_token }}"
    "{% if messages[0]['role'] == 'system' %}"
    "{% set system = messages[0]['content'] %}{% set turns = messages[1:] %}"
    "{% else %}"
    "{% set system = 'A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user\\'s questions.' %}"
    "{% set turns = messages %}"
    "{% endif %}"
    "{{ system }}"
    "{% for turn in turns %}"
    "{% if turn['role'] == 'user' %}{{ ' ' if loop.first else '' }}{{ 'USER: ' + turn['content'] }}"
    "{% else %}{{ ' ASSISTANT: ' + turn['content'] + eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ ' ASSISTANT:' }}{% endif %}"
)
"""Vicuna v1.1, for tokenizers that come without a template; a Jinja string."""


def render_chat(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], template: str | None = None
) -> str:
    """The text of a conversation, up to where the assistant's answer begins.

    It is the text of ``tokenizer.apply_chat_template``, which also holds the special tokens.

    Args:
      tokenizer: a transformers tokenizer.
      messages: ``{"role": ..., "content": ...}`` of every turn; the content is text, or a list of
        parts ``{"type": "text", "text": ...}``.
      template: a Jinja template instead of the tokenizer's own, or the name of one of its own.

    Raises:
      ValueError: for messages or a template that are none, and for a template that cannot render
        the messages or exceeds a bound.
    """
    variables = {
        **getattr(tokenizer, "special_tokens_map", {}),
        "messages": plain_messages(messages),
        "tools": None,
        "documents": None,
        "add_generation_prompt": True,
    }
    source = _template(tokenizer, template)
    try:
        return render(source, variables)
    except Exception as error:  # A template is a program: it may raise anything.
        raise ValueError(
            f"the chat template cannot render these messages: {error} ({type(error).__name__}); "
            "pass another one as chat_template=, or the prompt as text"
        ) from error


def _template(tokenizer: Any, template: str | None) -> str:
    """The Jinja text of a template: given, named, or the tokenizer's own."""
    if template is not None and not isinstance(template, str):
        raise ValueError(f"chat_template must be a Jinja template as text, got {shown(template)}")
    if template is None and not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "messages need a chat template and this tokenizer has none; pass chat_template= (a "
            "Jinja string such as longspec_jax.generation.chat.VICUNA_TEMPLATE), or pass the "
            "prompt as text"
        )
    return tokenizer.get_chat_template(template)


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
    """The value, once all that it holds was visited, which takes time that is bounded.

    Python's own way of writing a list cannot be stopped. One that holds another twice, which holds
    another twice, and so on, takes little memory and endless time.
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
    _require_at_most(EXPONENT, _size(indent or 0))
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
            _require_at_most(EXPONENT, _size(right))
        elif operator == "*":
            _require_at_most(CHARACTERS, _size(left) * _size(right))
        elif operator == "%" and isinstance(left, str) and re.search(r"[0-9]{5}|\*", left):
            raise TemplateError(f"a field of the format {shown(left)} is too wide, or computed")
        result = super().call_binop(context, operator, left, right)
        _require_at_most(CHARACTERS, _size(result))
        return result
