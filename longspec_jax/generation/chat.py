"""Chat messages to token ids, by the template that comes with a tokenizer or another one."""

from collections.abc import Mapping, Sequence
from typing import Any

from longspec_jax.checks import shown
from longspec_jax.generation import template_sandbox
from longspec_jax.generation.messages import plain_messages
from longspec_jax.generation.tokens import encode_text

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
) -> list[int]:
    """Token ids of a conversation, up to where the assistant's answer begins.

    The ids are those of ``tokenizer.apply_chat_template``, but a template that would run for ever,
    or fill the memory, is stopped.

    Args:
      tokenizer: a transformers tokenizer.
      messages: ``{"role": ..., "content": ...}`` of every turn; the content is text, or a list of
        parts ``{"type": "text", "text": ...}``.
      template: a Jinja template instead of the tokenizer's own, or the name of one of its own.

    Raises:
      ValueError: for what is no conversation, no template, or a template that cannot render it.
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
        text = template_sandbox.render(source, variables)
    except Exception as error:  # A template raises what Python raises: its author wrote a program.
        raise ValueError(
            f"the chat template cannot render these messages: {error} ({type(error).__name__}); "
            "pass another one as chat_template=, or the prompt as text"
        ) from error
    return encode_text(tokenizer, text, special=False)


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
