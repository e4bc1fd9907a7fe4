"""Chat messages, checked: every one with a role, and with its content as one text.

Quick to import: the command refuses what is none before the library's slow imports.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longspec_jax.checks import shown

CONTENT = 'text, or a list of parts {"type": "text", "text": ...}'


def plain_messages(
    messages: Any, where: str = "", shown: Callable[[Any], str] = shown
) -> list[dict[str, Any]]:
    """The messages with every content as one text; parts of text are joined.

    Args:
      messages: what was given.
      where: the place it was written at, which begins what is said of it.
      shown: writes a value as the user knows it.

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
        said = (
            part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        )
        if isinstance(said, str):
            return said
        raise ValueError(
            f'{self.name}: a part of the content must be {{"type": "text", "text": ...}}, got '
            f"{self.shown(part)}; there are no models of images or sound here"
        )
