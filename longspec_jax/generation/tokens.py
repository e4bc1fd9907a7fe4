"""Token ids of a text."""

from typing import Any


def encode_text(tokenizer: Any, text: str, *, special: bool = True) -> list[int]:
    """Token ids of a text.

    Args:
      tokenizer: a transformers tokenizer.
      text: what to tokenise.
      special: add what the tokenizer puts around a text, such as a beginning-of-text token.

    Raises:
      ValueError: for half of a surrogate pair, which no UTF-8 text and no tokenizer can hold.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text has a lone surrogate, {text[error.start]!r}, at character {error.start}, "
            "which is no character; read the text as UTF-8, or replace what cannot be read "
            "(errors='replace')"
        ) from error
    return tokenizer(text, add_special_tokens=special)["input_ids"]
