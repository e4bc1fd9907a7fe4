"""Qwen2.5-Coder-1.5B from its GGUF file, whose output is its own though the model ties it."""

import pytest

from longspec_jax import PLAIN, LongSpec
from longspec_jax.weights.gguf.file import read_gguf
from tests.real.kit import CHATS, CODE, greedy, model_file, oracle
from tests.weights.gguf.tokens import SENTENCES, joined_by_rank, pieces_of_code

pytestmark = pytest.mark.real
NEW = 12


def test_tokenizer_and_chat():
    """200 texts by the published rules, in plain Python."""
    from longspec_jax.loading import load_tokenizer

    tokenizer = load_tokenizer(model_file("qwen-coder"))
    texts = [*SENTENCES, *pieces_of_code(180)]
    keys = read_gguf(model_file("qwen-coder")).metadata.values
    for text, expected in zip(texts, joined_by_rank(keys, texts), strict=True):
        assert tokenizer(text)["input_ids"] == expected, text
    assert tokenizer.eos_token == "<|im_end|>" and len(tokenizer) == 151665


@pytest.mark.slow
def test_text_is_transformers():
    """Four prompts, token for token; 6 GB for each of the two models."""
    spec = LongSpec.from_pretrained(model_file("qwen-coder"), dtype="float32")
    assert spec.stop_tokens == (151645, 151643)
    tokenizer = spec.tokenizer
    rows = [tokenizer(text)["input_ids"] for text in CODE[:3]]
    message = [{"role": "user", "content": CHATS[0]}]
    chat = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    rows.append(tokenizer(chat)["input_ids"])
    result = spec.generate(rows, max_new_tokens=NEW, eos_token_id=[], tree=PLAIN)
    del spec
    model = oracle("qwen-coder")
    for index, prompt in enumerate(rows):
        assert list(result.sequences[index]) == greedy(model, prompt, NEW)[0], index
