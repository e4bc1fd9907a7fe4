"""Chat messages to text, by a chat template.

Quick to import: the commands refuse bad messages before the library's slow imports.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from longspec_jax.checks import Tokenizer, shown

OPEN_THOUGHT = re.compile(r"(<(?:\w+:)?think(?:ing)?>|\[THINK\])\s*\Z", re.IGNORECASE)
"""What a template ends a prompt with that begins the model's reasoning."""
THOUGHT_TOKENS = 16
"""At the end of a prompt, among which it lies."""
CONTENT = 'text, or a list of parts {"type": "text", "text": ...}'


def plain_messages(
    messages: object, where: str = "", shown: Callable[[Any], str] = shown
) -> list[dict[str, Any]]:
    """The messages, each with its content as one text; fields that are None are left out.

    Args:
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
        _plain(f"{prefix}message {index}", message, shown) for index, message in enumerate(messages)
    ]


def _plain(name: str, message: object, shown: Callable[[Any], str]) -> dict[str, Any]:
    """One message with its content as text; errors begin with its name."""
    calls = isinstance(message, Mapping) and bool(message.get("tool_calls"))
    needed = {"role"} if calls else {"role", "content"}
    if not isinstance(message, Mapping) or not needed <= set(message):
        raise ValueError(f"{name} must have role and content, got {shown(message)}")
    role, content = message["role"], message.get("content")
    if content is None and calls:
        content = ""
    if not isinstance(role, str):
        raise ValueError(f"{name}: the role must be text, got {shown(role)}")
    if not isinstance(content, str | list | tuple) or not (content or content == ""):
        raise ValueError(f"{name}: the content must be {CONTENT}, got {shown(content)}")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    for part in parts:
        is_text = isinstance(part, Mapping) and part.get("type") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            raise ValueError(
                f'{name}: a part of the content must be {{"type": "text", "text": ...}}, got '
                f"{shown(part)}; images and sound are not supported"
            )
    others = {key: value for key, value in message.items() if value is not None}
    return {**others, "content": "".join(part["text"] for part in parts)}


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
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    template: str | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, object] | None = None,
) -> str:
    """The text of a conversation, up to where the assistant's answer begins.

    It is the text of ``tokenizer.apply_chat_template``, which also holds the special tokens.

    Args:
      messages: ``{"role": ..., "content": ...}`` of every turn; the content is text, or a list of
        parts ``{"type": "text", "text": ...}``. Calls of tools may stand instead.
      template: a Jinja template instead of the tokenizer's own, or the name of one of its own.
      tools: what the model may call, as objects of JSON.
      variables: more of the template's, such as ``enable_thinking``.

    Raises:
      ValueError: if messages or template are not valid, or the template cannot render the messages
        or exceeds a bound.
    """
    variables = {
        **(variables or {}),
        **getattr(tokenizer, "special_tokens_map", {}),
        "messages": plain_messages(messages),
        "tools": [*tools] or None,
        "documents": None,
        "add_generation_prompt": True,
    }
    source = template_of(tokenizer, template, tools)
    from longspec_jax.generation.template import render  # Late: jinja2 is slow to import.

    try:
        return render(source, variables)
    except Exception as error:
        remedy = "pass another one as chat_template=, or the prompt as text"
        if "system" in str(error).lower():
            remedy = f"write the system message into the first message of the user, or {remedy}"
        raise ValueError(
            f"the chat template cannot render these messages: {error}; {remedy}"
        ) from error


def open_thought(decode: Callable[[list[int]], str], prompt: Sequence[int]) -> str | None:
    """What the end of a prompt begins the model's reasoning with; None if it does not.

    Args:
      decode: the text of tokens, special ones included.
      prompt: the tokens of the messages.
    """
    opened = OPEN_THOUGHT.search(decode([*map(int, prompt[-THOUGHT_TOKENS:])]))
    return None if opened is None else opened[1]


def check_no_open_thought(decode: Callable[[list[int]], str], prompt: Sequence[int]) -> None:
    """Refuse a grammar after messages whose template has begun the model's reasoning.

    Args:
      decode: the text of tokens, special ones included.
      prompt: the tokens of the messages.

    Raises:
      ValueError: says how the prompt ends.
    """
    if (opened := open_thought(decode, prompt)) is not None:
        raise ValueError(
            f"the chat template ends the prompt with {opened}, so that a form (response_format, "
            "grammar=) would bind the model's reasoning and not its answer; leave the form out, "
            "use a template that does not open the reasoning, or pass the prompt as text"
        )


def template_of(
    tokenizer: Tokenizer, template: str | None, tools: Sequence[Mapping[str, Any]] = ()
) -> str:
    """The Jinja text of a template: given, named, or the tokenizer's own.

    Args:
      tools: a tokenizer may have a template of its own for messages with some.
    """
    if template is not None and not isinstance(template, str):
        raise ValueError(f"chat_template must be a Jinja template as text, got {shown(template)}")
    if template is None and not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "messages need a chat template and this tokenizer has none; pass chat_template= (a "
            "Jinja string such as longspec_jax.generation.chat.VICUNA_TEMPLATE), or pass the "
            "prompt as text"
        )
    return tokenizer.get_chat_template(template, [*tools] or None)
