"""Token ids of prompts given as text, chat messages or token ids, one row or many.

Rows keep their own length: nothing is padded or truncated.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from longspec_jax.checks import as_plain, is_whole, shown
from longspec_jax.generation.chat import render_chat

Inputs: TypeAlias = Any
"""Text, chat messages (``[{"role": ..., "content": ...}, ...]``), token ids, or a list of one of
these for a batch; also what a transformers tokenizer returns (``input_ids``,
``attention_mask``)."""

Prompts: TypeAlias = tuple[np.ndarray, ...]
"""Token ids of every row, int32, not empty."""
SHORT = 8
"""Characters per position up to which a text is tokenised without a check of its length."""


def to_prompts(
    inputs: Inputs,
    tokenizer: Any,
    vocab_size: int,
    chat_template: str | None = None,
    max_positions: int | None = None,
) -> Prompts:
    """Tokenise the inputs and check every row.

    Args:
      inputs: see :data:`Inputs`.
      tokenizer: a transformers tokenizer, or None if the inputs are token ids.
      vocab_size: width of the target's logits; every token id lies below.
      chat_template: a Jinja template for messages instead of the tokenizer's own.
      max_positions: of the target; a text that cannot fit is refused before it is tokenised, which
        may take minutes. Unchecked if absent.

    Raises:
      ValueError: for no rows, an empty row, an id outside the vocabulary, a text that is too long,
        text without a tokenizer or chat template that could turn it into ids, or a chat template
        without messages.
    """
    items = _rows(inputs)
    if not items:
        raise ValueError("no prompts: the batch is empty; pass at least one prompt")
    where = [f"row {row}: " if len(items) > 1 else "" for row in range(len(items))]
    rows = []
    for prefix, item in zip(where, items, strict=True):
        try:
            ids = _token_ids(item, tokenizer, chat_template, max_positions)
            rows.append(_checked(ids, vocab_size))
        except ValueError as error:
            raise ValueError(f"{prefix}{error}") from error
    return tuple(rows)


def to_prompt(
    inputs: Inputs,
    tokenizer: Any,
    vocab_size: int,
    chat_template: str | None = None,
    max_positions: int | None = None,
) -> np.ndarray:
    """The token ids of a single row; arguments and errors as in :func:`to_prompts`.

    Raises:
      ValueError: also for more than one row.
    """
    row, *others = to_prompts(inputs, tokenizer, vocab_size, chat_template, max_positions)
    if others:
        raise ValueError(
            f"one prompt is needed here, and {shown(inputs)} holds {1 + len(others)}; make each a "
            "row of its own"
        )
    return row


def _rows(inputs: Inputs) -> list[Any]:
    """Split the inputs into one item per row."""
    if isinstance(inputs, Mapping):
        return _unpadded(inputs)
    if isinstance(inputs, str):
        return [inputs]
    if hasattr(inputs, "ndim"):
        if inputs.ndim not in (1, 2):
            raise ValueError(f"token ids must have shape [P] or [B, P], got {inputs.shape}")
        return [inputs] if inputs.ndim == 1 else list(inputs)
    if isinstance(inputs, bytes | bytearray) or not isinstance(inputs, Sequence):
        raise ValueError(
            f"cannot read a prompt from {type(inputs).__name__}; pass text, chat messages or token "
            "ids"
        )
    if inputs and (is_whole(inputs[0]) or isinstance(inputs[0], Mapping)):
        return [inputs]
    return list(inputs)


def _unpadded(batch: Mapping[str, Any]) -> list[Any]:
    """The rows of a tokenizer's output, without the padding its attention mask marks."""
    if "input_ids" not in batch:
        raise ValueError(
            f"a mapping of {sorted(map(str, batch))} is no prompt: it needs 'input_ids', or wrap a "
            "chat message in a list"
        )
    rows = _rows(batch["input_ids"])
    if batch.get("attention_mask") is None:
        return rows
    masks = _rows(batch["attention_mask"])
    if len(masks) != len(rows):
        raise ValueError(
            f"attention_mask has {len(masks)} rows for {len(rows)} of input_ids; pass both as the "
            "tokenizer returned them"
        )
    return [_kept(row, mask) for row, mask in zip(rows, masks, strict=True)]


def _kept(row: Any, mask: Any) -> Any:
    """The tokens of a row whose mask is 1; a row that is no list of tokens is refused later."""
    row, mask = as_plain(row), as_plain(mask)
    if not isinstance(row, Sequence):
        return row
    if not isinstance(mask, Sequence) or [entry in (0, 1) for entry in mask] != [True] * len(row):
        raise ValueError(
            f"attention_mask must hold a 0 or a 1 for each of the {len(row)} tokens of a row, got "
            f"{shown(mask)}; pass both as the tokenizer returned them"
        )
    return [token for token, kept in zip(row, mask, strict=True) if kept]


def _token_ids(
    row: Any, tokenizer: Any, chat_template: str | None, max_positions: int | None
) -> Any:
    """Token ids of one row, not checked yet."""
    if isinstance(row, Sequence) and row and isinstance(row[0], Mapping):
        text = render_chat(require_tokenizer(tokenizer), row, chat_template)
        return encode_text(tokenizer, text, special=False, max_positions=max_positions)
    if chat_template is not None:
        raise ValueError(
            "chat_template= makes a prompt of chat messages, and this prompt is none; pass "
            '[{"role": "user", "content": ...}], or leave out the template'
        )
    if not isinstance(row, str):
        return row
    if not row:
        return []
    return encode_text(require_tokenizer(tokenizer), row, max_positions=max_positions)


def encode_text(
    tokenizer: Any, text: str, *, special: bool = True, max_positions: int | None = None
) -> list[int]:
    """Token ids of a text.

    Args:
      tokenizer: a transformers tokenizer.
      text: what to tokenise.
      special: add what the tokenizer puts around a text, such as a beginning-of-text token.
      max_positions: of the target, see :func:`to_prompts`.

    Raises:
      ValueError: for a text that is too long, and for half of a surrogate pair, which no UTF-8
        text and no tokenizer can hold.
    """
    if max_positions is not None and len(text) > SHORT * max_positions:
        _check_characters(tokenizer, len(text), max_positions)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text has a lone surrogate, {text[error.start]!r}, at character {error.start}, "
            "which is no character; read the text as UTF-8, or replace what cannot be read "
            "(errors='replace')"
        ) from error
    return tokenizer(text, add_special_tokens=special)["input_ids"]


def _check_characters(tokenizer: Any, characters: int, max_positions: int) -> None:
    """Refuse a text of more characters than all positions hold, were every token the longest."""
    longest = max(map(len, tokenizer.get_vocab()))
    if characters > longest * max_positions:
        raise ValueError(
            f"a prompt of {characters} characters cannot fit: the target has "
            f"max_positions={max_positions}, and the longest token of its tokenizer has {longest} "
            f"characters; shorten the prompt to far less than {longest * max_positions} characters"
        )


def _checked(ids: Any, vocab_size: int) -> np.ndarray:
    """Token ids as int32; what does not fit is refused before it would be cut off."""
    tokens: Any = as_plain(ids)
    listed = isinstance(tokens, Sequence) and not isinstance(tokens, str | bytes | bytearray)
    if not (listed and _are_integers(tokens)):
        raise ValueError(f"a row must be text, messages or a list of token ids, got {shown(ids)}")
    if not tokens:
        raise ValueError("the prompt is empty; pass at least one token")
    tokens = list(map(int, tokens))
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        outside = next(token for token in tokens if not 0 <= token < vocab_size)
        raise ValueError(
            f"token id {outside} is outside the target's vocabulary of {vocab_size}; tokenise with "
            "the tokenizer that belongs to this target"
        )
    return np.asarray(tokens, np.int32)


def check_positions(lengths: Sequence[int], new_tokens: np.ndarray, max_positions: int) -> None:
    """Refuse rows that would leave the positions the target was made for."""
    for row, (length, new) in enumerate(zip(lengths, new_tokens.tolist(), strict=True)):
        if length + new <= max_positions:
            continue
        where = f"row {row}: " if len(lengths) > 1 else ""
        lower = f"lower max_new_tokens to at most {max_positions - length}"
        shorten = f"shorten the prompt to at most {max_positions - new} tokens"
        remedies = [lower] * (length < max_positions) + [shorten] * (new < max_positions)
        both = f"shorten the prompt and lower max_new_tokens to {max_positions} tokens in all"
        raise ValueError(
            f"{where}a prompt of {length} tokens and max_new_tokens={new} reach position "
            f"{length + new}, and the target has max_positions={max_positions}; "
            f"{', or '.join(remedies) or both}"
        )


def require_tokenizer(tokenizer: Any) -> Any:
    """Return the tokenizer, or say how to do without."""
    if tokenizer is None:
        raise ValueError(
            "text needs a tokenizer and none was found beside the target; pass tokenizer= to "
            "from_pretrained, or pass token ids"
        )
    return tokenizer


def _are_integers(tokens: Sequence[Any]) -> bool:
    # The types are few and the tokens many: a prompt may have a hundred thousand.
    return set(map(type, tokens)) <= {int} or all(map(is_whole, tokens))
