"""The rows of a call: prompts and generation options, read and checked together."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from longspec_jax.decoding.rows import Request
from longspec_jax.generation.inputs import Inputs, Prompts, to_prompts
from longspec_jax.generation.options import GenerateOptions, resolve


class Batch(NamedTuple):
    """What a call's programs take as data."""

    prompts: Prompts
    request: Request
    """Options of all rows, on the host."""


def read_batch(
    inputs: Inputs,
    options: GenerateOptions,
    generation_config: Any,
    *,
    tokenizer: Any,
    vocab_size: int,
    max_positions: int,
    stop_tokens: Sequence[int],
    chat_template: str | None = None,
) -> Batch:
    """Read and check what a caller gave.

    Args:
      inputs: see :data:`~longspec_jax.generation.inputs.Inputs`.
      options: keyword arguments of the call.
      generation_config: a transformers ``GenerationConfig``, or None.
      tokenizer: a transformers tokenizer, or None if the inputs are token ids.
      vocab_size: width of the target's logits.
      max_positions: most tokens of a row, prompt and new ones.
      stop_tokens: what ends a row unless the caller says otherwise.
      chat_template: a Jinja template for messages instead of the tokenizer's own.

    Raises:
      TypeError, ValueError, NotImplementedError: as of
        :func:`~longspec_jax.generation.inputs.to_prompts`,
        :func:`~longspec_jax.generation.options.resolve` and :func:`check_positions`.
    """
    prompts = to_prompts(inputs, tokenizer, vocab_size, chat_template, max_positions)
    lengths = list(map(len, prompts))
    found = resolve(options, generation_config, lengths, stop_tokens, vocab_size)
    check_positions(lengths, found.max_new_tokens, max_positions)
    return Batch(prompts, found.request())


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
