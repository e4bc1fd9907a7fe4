"""From a prompt to its tokens, in a chat style if one is chosen.

Three styles turn a conversation into tokens: the tokenizer's own chat template, Vicuna v1.1's, and
the one the published LongSpec drafts were trained and evaluated with, which is neither (it is the
one to use when reproducing their acceptance).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from longspec_jax.generation.chat import VICUNA_TEMPLATE, render_chat
from longspec_jax.generation.inputs import encode_text, require_tokenizer, to_prompt

from .prompt_files import check_messages

RELEASE_SYSTEM = "You are a helpful assistant"
Messages = Sequence[Mapping[str, str]]
Encode = Callable[[Any, Messages], list[int]]


def encode_native(tokenizer: Any, messages: Messages) -> list[int]:
    """The tokenizer's own template; refuses a tokenizer that has none."""
    if not getattr(require_tokenizer(tokenizer), "chat_template", None):
        raise ValueError(
            "the target's tokenizer has no chat template; choose --prompt_style vicuna or "
            "longspec, or pass the whole prompt as text"
        )
    return _apply(tokenizer, messages, None)


def encode_vicuna(tokenizer: Any, messages: Messages) -> list[int]:
    """Vicuna v1.1's format."""
    return _apply(require_tokenizer(tokenizer), messages, VICUNA_TEMPLATE)


def release_turns(tokenizer: Any, messages: Messages) -> list[str]:
    """The turns of :func:`encode_release` as text, the opening of the answer last."""
    vocabulary = require_tokenizer(tokenizer).get_vocab()
    opening, closing = ("<s>", "</s>")
    if "<|im_start|>" in vocabulary:
        opening, closing = ("<|im_start|>", "<|im_end|>")
    if messages[0]["role"] != "system":
        messages = [{"role": "system", "content": RELEASE_SYSTEM}, *messages]
    turns = [f"{opening}{turn['role']}\n{turn['content']}{closing}\n" for turn in messages]
    return [*turns, f"{opening}assistant\n"]


def encode_release(tokenizer: Any, messages: Messages) -> list[int]:
    """The LongSpec release's format: ChatML for Qwen, its own ``<s>role`` turns for all others.

    Every turn is tokenised by itself with special tokens on, as the release does: a Llama tokenizer
    then begins every turn with its beginning-of-text token.
    """
    turns = release_turns(tokenizer, messages)
    return [token for turn in turns for token in tokenizer(turn)["input_ids"]]


STYLES: dict[str, Encode] = {
    "native": encode_native,
    "vicuna": encode_vicuna,
    "longspec": encode_release,
}


def encode(
    tokenizer: Any,
    vocab_size: int,
    item: Any,
    style: str | None = None,
    max_positions: int | None = None,
) -> list[int]:
    """Token ids of one prompt.

    Args:
      tokenizer: a transformers tokenizer, or None if the item is token ids.
      vocab_size: width of the target's logits.
      item: text, chat messages or token ids.
      style: a name from ``STYLES``; text then is a user's message. Without one, text stays as it is
        and messages take the tokenizer's own template.
      max_positions: of the target; plain text that cannot fit is refused before it is tokenised.
    """
    if style is not None and isinstance(item, str):
        if not item:
            raise ValueError("the prompt is empty; pass at least one character")
        item = [{"role": "user", "content": item}]
    if isinstance(item, Sequence) and item and isinstance(item[0], Mapping):
        item = STYLES[style or "native"](tokenizer, check_messages(item))
    prompt = item if item else [[]]
    return to_prompt(prompt, tokenizer, vocab_size, max_positions=max_positions).tolist()


def _apply(tokenizer: Any, messages: Messages, template: str | None) -> list[int]:
    return encode_text(tokenizer, render_chat(tokenizer, messages, template), special=False)
