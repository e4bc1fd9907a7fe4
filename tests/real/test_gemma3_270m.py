"""Gemma 3 270M from its GGUF file: windows, norms with a one, and a vocabulary of 262,144."""

import numpy as np
import pytest

from longspec_jax import PLAIN, LongSpec
from longspec_jax.loading import choose_drafts
from longspec_jax.weights.gguf.file import read_gguf
from tests.real.kit import document, greedy, model_file, oracle, prompts
from tests.weights.gguf.tokens import SENTENCES, joined_by_scores, pieces_of_code

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]
NEW = 16


def test_text_and_tokens():
    """Twenty prompts, and one beyond two windows, token for token."""
    spec = LongSpec.from_pretrained(model_file("gemma3-270m"), dtype="float32")
    rows = prompts(spec.tokenizer, chats=False)
    assert all(row[0] == spec.tokenizer.bos_token_id for row in rows)
    long = spec.tokenizer(document(8_000))["input_ids"][:1200]
    assert len(long) == 1200
    options = dict(max_new_tokens=NEW, eos_token_id=[], tree=PLAIN)
    results = [spec.generate(each, output_logits=True, **options) for each in (rows, [long])]
    found = [row for each in results for row in each.sequences]
    logits = [row for each in results for row in each.logits]
    texts = [*SENTENCES, *pieces_of_code(180)]
    keys = read_gguf(model_file("gemma3-270m")).metadata.values
    for text, expected in zip(texts, joined_by_scores(keys, texts), strict=True):
        assert spec.tokenizer(text)["input_ids"] == [2, *expected], text
        assert spec.tokenizer.decode(expected) == text
    assert spec.stop_tokens == (1, 106)
    drafted = LongSpec(spec.target_config, spec.target_params, ngram(), spec.tokenizer).generate(
        rows[:4], max_new_tokens=NEW, eos_token_id=[], tree="4,4,4@8"
    )
    del spec
    model = oracle("gemma3-270m")
    for index, prompt in enumerate([*rows, long]):
        tokens, expected = greedy(model, prompt, NEW)
        assert list(found[index]) == tokens, index
        np.testing.assert_allclose(logits[index], expected, atol=2e-3)
        if index < 4:
            assert list(drafted.sequences[index]) == tokens


def ngram():
    return choose_drafts(["ngram"], {})[0].options
