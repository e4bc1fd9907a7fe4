"""Chat styles and prompt files."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from infer import prompts
from tests.infer.toys import toy_tokenizer

CHAT = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
]


def byte_tokenizer(*special: str, bos: str | None = None) -> PreTrainedTokenizerFast:
    """All bytes and some special tokens; a beginning token is added as Llama's tokenizers do."""
    symbols = pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {symbol: index for index, symbol in enumerate([*sorted(symbols), *special])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if bos:
        backend.post_processor = TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, vocabulary[bos])]
        )
    roles = dict(bos_token=bos, eos_token="</s>" if "</s>" in special else None)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        additional_special_tokens=list(special),
        **{name: token for name, token in roles.items() if token},
    )


LLAMA = byte_tokenizer("<s>", "</s>", bos="<s>")


def test_vicuna() -> None:
    system = {"role": "system", "content": "Be brief."}
    found = LLAMA.decode(prompts.encode_vicuna(LLAMA, [system, *CHAT]))
    assert found == "<s>Be brief. USER: Hi ASSISTANT: Hello</s>USER: Bye ASSISTANT:"
    found = LLAMA.decode(prompts.encode_vicuna(LLAMA, CHAT))
    assert found.startswith("<s>A chat between a curious user and an artificial intelligence")
    assert found.endswith(
        "answers to the user's questions. USER: Hi ASSISTANT: Hello</s>USER: Bye ASSISTANT:"
    )


def test_release_style_begins_every_turn_afresh() -> None:
    found = LLAMA.decode(prompts.encode_release(LLAMA, CHAT[:1]))
    assert found == (
        "<s><s>system\nYou are a helpful assistant</s>\n<s><s>user\nHi</s>\n<s><s>assistant\n"
    )


def test_release_style_is_chatml_for_qwen() -> None:
    qwen = byte_tokenizer("<|im_start|>", "<|im_end|>")
    found = qwen.decode(prompts.encode_release(qwen, CHAT[:1]))
    assert found == (
        "<|im_start|>system\nYou are a helpful assistant<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_text_stays_text_unless_a_style_is_chosen() -> None:
    assert LLAMA.decode(prompts.encode(LLAMA, 999, "Hi")) == "<s>Hi"
    assert prompts.encode(LLAMA, 999, "Hi", "longspec") == prompts.encode_release(LLAMA, CHAT[:1])
    assert prompts.encode(LLAMA, 999, [3, 4]) == [3, 4]
    with pytest.raises(ValueError, match="one prompt is needed here"):
        prompts.encode(LLAMA, 999, [[3, 4], [5]])
    with pytest.raises(ValueError, match="a prompt of 801 characters cannot fit: .*_positions=100"):
        prompts.encode(LLAMA, 999, "a" * 801, max_positions=100)


def test_native_template() -> None:
    with pytest.raises(ValueError, match="no chat template; choose --prompt_style vicuna"):
        prompts.encode(LLAMA, 999, CHAT)
    templated = byte_tokenizer()
    templated.chat_template = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    assert templated.decode(prompts.encode(templated, 999, CHAT)) == "[Hi][Hello][Bye]"


def test_toy_has_no_template() -> None:
    with pytest.raises(ValueError, match="no chat template"):
        prompts.encode(toy_tokenizer(), 17, CHAT)
