"""What a caller gives: prompts as text, chat messages or token ids, and their options, checked.

Rows keep their own length: nothing is padded or truncated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import jax
import numpy as np

from longspec_jax.checks import (
    GenerationConfig,
    Tokenizer,
    as_plain,
    first_line,
    is_whole,
    require_tokenizer,
    shown,
)
from longspec_jax.decoding.rows import Request
from longspec_jax.generation.chat import render_chat
from longspec_jax.generation.models import Models
from longspec_jax.generation.options import (
    GenerateOptions,
    given_option,
    resolve,
    sequences_per_prompt,
)
from longspec_jax.generation.stops import stop_strings
from longspec_jax.generation.text import RowText

SHORT = 8
"""Characters per position up to which a text is tokenised without a check of its length."""
Inputs: TypeAlias = Any
"""Text, chat messages (``[{"role": ..., "content": ...}, ...]``), token ids, or a list of one of
these for a batch; also what a transformers tokenizer returns (``input_ids``,
``attention_mask``)."""

Prompts: TypeAlias = tuple[np.ndarray, ...]
"""Token ids of every row, int32, not empty."""


class Batch(NamedTuple):
    """The rows of a call."""

    prompts: Prompts
    request: Request
    """Options of all rows, on the host."""
    stop_strings: tuple[tuple[str, ...], ...] = ()
    """Of every row; empty where no row has any."""
    tokenizer: Tokenizer | None = None
    """A transformers tokenizer, or None for no text."""

    def text(self, row: int) -> RowText | None:
        """The text of a row before its first token; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        stops = self.stop_strings[row] if self.stop_strings else ()
        return RowText(self.tokenizer, self.prompts[row].tolist(), stops)

    def repeated(self, count: int) -> "Batch":
        """Every row ``count`` times, one after the other; the seed of the ``i``-th is ``i`` higher.

        Seeds begin again at 0 after the largest.
        """
        request = jax.tree.map(lambda leaf: np.repeat(leaf, count, axis=0), self.request)
        more = np.tile(np.arange(count, dtype=np.uint32), len(self.prompts))
        sampling = replace(request.sampling, seed=request.sampling.seed + more)
        return self._replace(
            prompts=tuple(prompt for prompt in self.prompts for _ in range(count)),
            request=replace(request, sampling=sampling),
            stop_strings=tuple(strings for strings in self.stop_strings for _ in range(count)),
        )


def read_batch(
    models: Models,
    inputs: Inputs,
    generation_config: GenerationConfig | None,
    options: GenerateOptions,
    *,
    chat_template: str | None = None,
    max_tokens: int | None = None,
) -> Batch:
    """Read and check what a caller gave.

    Args:
      models: with their tokenizer, stop tokens and sizes.
      inputs: see :data:`Inputs`.
      generation_config: a transformers ``GenerationConfig``, or None.
      options: keyword arguments of the call; they win over the configuration.
      chat_template: a Jinja template for messages instead of the tokenizer's own.
      max_tokens: of a row, prompt and new ones; the target's positions if absent.

    Raises:
      TypeError, ValueError, NotImplementedError: as in :func:`to_prompts`,
        :func:`~longspec_jax.generation.options.resolve`,
        :func:`~longspec_jax.generation.stops.stop_strings` and :func:`check_positions`.
    """
    most = models.target_config.max_positions if max_tokens is None else max_tokens
    vocab_size = models.target_config.vocab_size
    prompts = to_prompts(inputs, models.tokenizer, vocab_size, chat_template, most)
    lengths = list(map(len, prompts))
    request = resolve(options, generation_config, lengths, models.stop_tokens, vocab_size)
    check_positions(lengths, np.asarray(request.max_new_tokens), most)
    given = given_option(options, generation_config, "stop_strings")
    stops = () if given is None else stop_strings(given, len(prompts))
    if any(stops) and models.tokenizer is None:
        raise ValueError(
            "stop_strings are searched in the text, and without a tokenizer there is none; pass "
            "tokenizer= to from_pretrained, or the ids of stop tokens as eos_token_id="
        )
    batch = Batch(prompts, request, stops if any(stops) else (), models.tokenizer)
    wanted = given_option(options, generation_config, "num_return_sequences")
    count = sequences_per_prompt(wanted, request)
    return batch if count == 1 else batch.repeated(count)


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


def to_prompts(
    inputs: Inputs,
    tokenizer: Tokenizer | None,
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
    prompts = []
    for row, item in enumerate(items):
        try:
            prompts += [_prompt(item, tokenizer, vocab_size, chat_template, max_positions)]
        except ValueError as error:
            where = f"row {row}: " if len(items) > 1 else ""
            raise ValueError(f"{where}{error}") from error
    return tuple(prompts)


def encode_chat(
    tokenizer: Tokenizer | None,
    messages: Sequence[Mapping[str, Any]],
    template: str | None = None,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, object] | None = None,
    max_positions: int | None = None,
) -> list[int]:
    """Token ids of a conversation.

    Arguments and errors as in :func:`~longspec_jax.generation.chat.render_chat` and
    :func:`encode_text`.
    """
    text = render_chat(require_tokenizer(tokenizer), messages, template, tools, variables)
    return encode_text(tokenizer, text, special=False, max_positions=max_positions)


def encode_text(
    tokenizer: Tokenizer | None,
    text: str,
    *,
    special: bool = True,
    max_positions: int | None = None,
) -> list[int]:
    """Token ids of a text.

    Args:
      special: add what the tokenizer puts around a text, such as a beginning-of-text token.
      max_positions: of the target; a text that cannot fit is refused before it is tokenised, which
        may take minutes. Unchecked if absent.

    Raises:
      ValueError: without a tokenizer, for a text that is too long, and for half of a surrogate
        pair, which no UTF-8 text and no tokenizer can hold, and where a pattern of the tokenizer
        finds no end.
    """
    tokenizer = require_tokenizer(tokenizer)
    if max_positions is not None and len(text) > SHORT * max_positions:
        _check_characters(tokenizer, len(text), max_positions)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text has a lone surrogate, {text[error.start]!r}, at character {error.start}, "
            "which is not a character; read the text as UTF-8, or replace what cannot be read "
            "(errors='replace')"
        ) from error
    try:
        return tokenizer(text, add_special_tokens=special)["input_ids"]
    except BaseException as error:  # A panic of Rust is no Exception, and has no class to import.
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(
            f"the tokenizer gave up on this text ({first_line(error)}); shorten it, or use a "
            "tokenizer.json whose patterns take less"
        ) from error


def _check_characters(tokenizer: Tokenizer, characters: int, max_positions: int) -> None:
    """Refuse a text of more characters than all positions hold, were every token the longest."""
    longest = max(map(len, tokenizer.get_vocab()))
    if characters > longest * max_positions:
        raise ValueError(
            f"a prompt of {characters} characters cannot fit: the target has "
            f"max_positions={max_positions}, and the longest token of its tokenizer has {longest} "
            f"characters; shorten the prompt to far less than {longest * max_positions} characters"
        )


def to_prompt(
    inputs: Inputs,
    tokenizer: Tokenizer | None,
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


def is_chat(item: object) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    """Whether a row is a list of chat messages."""
    return isinstance(item, Sequence) and bool(item) and isinstance(item[0], Mapping)


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
            f"a mapping of {sorted(map(str, batch))} is not a prompt: it needs 'input_ids', or "
            "wrap a chat message in a list"
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


def _kept(row: object, mask: object) -> object:
    """The tokens of a row whose mask is 1; a row that is not a list of tokens is refused later."""
    row, mask = as_plain(row), as_plain(mask)
    if not isinstance(row, Sequence):
        return row
    if not isinstance(mask, Sequence) or [entry in (0, 1) for entry in mask] != [True] * len(row):
        raise ValueError(
            f"attention_mask must hold a 0 or a 1 for each of the {len(row)} tokens of a row, got "
            f"{shown(mask)}; pass both as the tokenizer returned them"
        )
    return [token for token, kept in zip(row, mask, strict=True) if kept]


def _prompt(
    item: object,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    chat_template: str | None,
    max_positions: int | None,
) -> np.ndarray:
    """Token ids of one row as int32; what does not fit is refused before it would be cut off."""
    tokens = item
    if is_chat(item):
        tokens = encode_chat(tokenizer, item, chat_template, max_positions=max_positions)
    elif chat_template is not None:
        raise ValueError(
            "chat_template= makes a prompt of chat messages, and this prompt has none; pass "
            '[{"role": "user", "content": ...}], or leave out the template'
        )
    elif isinstance(item, str):
        tokens = encode_text(tokenizer, item, max_positions=max_positions) if item else []
    ids = as_plain(tokens)
    listed = isinstance(ids, Sequence) and not isinstance(ids, str | bytes | bytearray)
    # The types are few and the tokens many: a prompt may have a hundred thousand.
    if not (listed and (set(map(type, ids)) <= {int} or all(map(is_whole, ids)))):
        raise ValueError(
            f"a row must be text, messages or a list of token ids, got {shown(tokens)}"
        )
    if not ids:
        raise ValueError("the prompt is empty; pass at least one token")
    ids = list(map(int, ids))
    if min(ids) < 0 or max(ids) >= vocab_size:
        outside = next(token for token in ids if not 0 <= token < vocab_size)
        raise ValueError(
            f"token id {outside} is outside the target's vocabulary of {vocab_size}; tokenise with "
            "the tokenizer that belongs to this target"
        )
    return np.asarray(ids, np.int32)
