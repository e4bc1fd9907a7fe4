"""Qwen2.5-Coder-1.5B from its GGUF file, whose output is its own though the model ties it."""

from dataclasses import replace

import numpy as np
import pytest

from longspec_jax import PLAIN, LongSpec
from longspec_jax.drafters.draft import Target
from longspec_jax.loading import choose_drafts
from longspec_jax.weights.gguf.file import read_gguf
from tests.real.kit import CHATS, CODE, document, greedy, model_file, oracle
from tests.weights.gguf.tokens import SENTENCES, joined_by_rank, pieces_of_code

pytestmark = [pytest.mark.real, pytest.mark.timeout(3600)]
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
    """Four prompts, one of them long, token for token; 6 GB for each of the two models."""
    spec = LongSpec.from_pretrained(model_file("qwen-coder"), dtype="float32")
    assert spec.stop_tokens == (151645, 151643)
    tokenizer = spec.tokenizer
    rows = [tokenizer(text)["input_ids"] for text in (*CODE[:2], document(2_000))]
    message = [{"role": "user", "content": CHATS[0]}]
    chat = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    rows.append(tokenizer(chat)["input_ids"])
    options = {"max_new_tokens": NEW, "eos_token_id": []}
    result = spec.generate(rows, tree=PLAIN, output_logits=True, **options)
    target = Target(spec.target_config, spec.target_params, spec.tokenizer)
    spec = replace(spec, draft=[one.load(target) for one in choose_drafts(["ngram"], {})])
    assert spec.generate(rows, tree="none@6~3", **options).sequences == result.sequences
    del spec, target
    model = oracle("qwen-coder")
    for index, prompt in enumerate(rows):
        tokens, logits = greedy(model, prompt, NEW)
        assert list(result.sequences[index]) == tokens, index
        np.testing.assert_allclose(result.logits[index], logits, atol=2e-3)
