"""Transformers as a peer: what is timed is decoding."""

import pytest

torch = pytest.importorskip("torch", reason="transformers' models are PyTorch's")

from benchmarks.arguments import SHAPES  # noqa: E402
from benchmarks.peers import hugging_face  # noqa: E402


def test_the_timed_step_decodes_as_without_a_cache() -> None:
    """What is timed is decoding: the cache holds the prompt, and positions count on."""
    from transformers import StaticCache

    model = hugging_face.random_model(SHAPES["tiny"], "cpu")
    cache = StaticCache(config=model.config, max_cache_len=64)
    tokens = torch.zeros((2, 1), dtype=torch.long)
    torch.manual_seed(1)
    text = torch.cat([torch.randint(model.config.vocab_size, (2, 37)), tokens], 1)
    torch.manual_seed(1)
    with torch.no_grad():
        hugging_face.prefill(model, cache, context=37, batch=2, chunk=16)
        assert int(cache.get_seq_length()) == 37
        step = hugging_face.greedy_step(model, cache, compiled=False)
        for position in range(37, 45):
            tokens = step(tokens, torch.full((1, 1), position))
            assert torch.equal(tokens, model(text).logits[:, -1:].argmax(-1))
            text = torch.cat([text, tokens], 1)
