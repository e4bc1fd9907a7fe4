"""Prompts from whatever a caller has: text, chat messages or token ids, one row or many.

Rows keep their own length; nothing is padded, truncated or skipped here.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

Inputs: TypeAlias = Any
"""Text, chat messages (``[{"role": ..., "content": ...}, ...]``), token ids, or a list of one of
these for a batch; also what a transformers tokenizer returns (``input_ids``, ``attention_mask``)."""

Prompts: TypeAlias = tuple[np.ndarray, ...]
"""Token ids of every row, int32, not empty."""


def to_prompts(
    inputs: Inputs, tokenizer: Any, vocab_size: int, chat_template: str | None = None
) -> Prompts:
    """Tokenise the inputs and check every row.

    Args:
      inputs: see :data:`Inputs`.
      tokenizer: a transformers tokenizer, or None if the inputs are token ids.
      vocab_size: width of the target's logits; every token id lies below.
      chat_template: a Jinja template for messages instead of the tokenizer's own.

    Raises:
      ValueError: for no rows, an empty row, an id outside the vocabulary, or text without a
        tokenizer or chat template that could turn it into ids.
    """
    rows = tuple(_encode(row, tokenizer, chat_template) for row in _rows(inputs))
    if not rows:
        raise ValueError("no prompts: the batch is empty; pass at least one prompt")
    for index, row in enumerate(rows):
        _check_row(index, row, vocab_size)
    return rows


def _rows(inputs: Inputs) -> list[Any]:
    """Split the inputs into one item a row."""
    if isinstance(inputs, Mapping):
        return _unpadded(inputs)
    if isinstance(inputs, str):
        return [inputs]
    if hasattr(inputs, "ndim"):
        if inputs.ndim not in (1, 2):
            raise ValueError(f"token ids must have shape [P] or [B, P], got {inputs.shape}")
        return [inputs] if inputs.ndim == 1 else list(inputs)
    if not isinstance(inputs, Sequence):
        raise ValueError(
            f"cannot read a prompt from {type(inputs).__name__}; pass text, chat messages or token ids"
        )
    if inputs and (_is_token(inputs[0]) or isinstance(inputs[0], Mapping)):
        return [inputs]
    return list(inputs)


def _unpadded(batch: Mapping[str, Any]) -> list[Any]:
    """The rows of a tokenizer's output, without the padding its attention mask marks."""
    if "input_ids" not in batch:
        raise ValueError(
            f"a mapping of {sorted(batch)} is no prompt: it needs 'input_ids', or wrap a chat "
            "message in a list"
        )
    rows = _rows(batch["input_ids"])
    if "attention_mask" not in batch:
        return rows
    masks = _rows(batch["attention_mask"])
    return [np.asarray(row)[np.asarray(mask, bool)] for row, mask in zip(rows, masks, strict=True)]


def _encode(row: Any, tokenizer: Any, chat_template: str | None) -> np.ndarray:
    """Token ids of one row."""
    if isinstance(row, str):
        ids = require_tokenizer(tokenizer)(row)["input_ids"] if row else []
    elif isinstance(row, Sequence) and row and isinstance(row[0], Mapping):
        ids = _encode_messages(row, require_tokenizer(tokenizer), chat_template)
    else:
        ids = row
    ids = np.asarray(ids)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(f"a row must be text, messages or a list of token ids, got {row!r:.80}")
    return ids.astype(np.int32)


def _encode_messages(messages: Any, tokenizer: Any, chat_template: str | None) -> Any:
    """Token ids of a conversation, up to where the assistant's answer begins."""
    if chat_template is None and not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "messages need a chat template and this tokenizer has none; pass chat_template= (a Jinja "
            "string such as longspec_jax.infer.prompts.VICUNA_TEMPLATE), or pass the prompt as text"
        )
    return tokenizer.apply_chat_template(
        list(messages),
        chat_template=chat_template,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
    )


def check_positions(lengths: Sequence[int], new_tokens: np.ndarray, max_positions: int) -> None:
    """Refuse rows that would leave the positions the target was made for."""
    for row, (length, new) in enumerate(zip(lengths, new_tokens.tolist(), strict=True)):
        if length + new > max_positions:
            room = max_positions - length
            remedy = f"lower max_new_tokens to at most {room}, or " if room > 0 else ""
            raise ValueError(
                f"row {row}: a prompt of {length} tokens and max_new_tokens={new} reach position "
                f"{length + new}, and the target has max_positions={max_positions}; {remedy}shorten "
                f"the prompt to at most {max(0, max_positions - new)} tokens"
            )


def require_tokenizer(tokenizer: Any) -> Any:
    """Return the tokenizer, or say how to do without."""
    if tokenizer is None:
        raise ValueError(
            "text needs a tokenizer and none was found beside the target; pass tokenizer= to "
            "from_pretrained, or pass token ids"
        )
    return tokenizer


def _check_row(index: int, row: np.ndarray, vocab_size: int) -> None:
    if not row.size:
        raise ValueError(f"row {index}: the prompt is empty; pass at least one token")
    outside = row[(row < 0) | (row >= vocab_size)]
    if outside.size:
        raise ValueError(
            f"row {index}: token id {outside[0]} is outside the target's vocabulary of {vocab_size}; "
            "tokenise with the tokenizer that belongs to this target"
        )


def _is_token(item: Any) -> bool:
    return isinstance(item, int | np.integer) and not isinstance(item, bool)
