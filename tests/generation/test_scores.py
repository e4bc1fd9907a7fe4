"""Scores and logits of emitted tokens are those of transformers' ``generate``."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    SequenceBiasLogitsProcessor,
)

from longspec_jax import PLAIN, LongSpec
from longspec_jax.decoding.adjustments import AdjustmentOptions
from longspec_jax.generation import scores
from tests.infer.toys import toy_spec

VOCABULARY, NEW = 97, 11
PROMPTS = [[5, 9, 2, 9, 5, 9, 2], list(range(3, 90))]
"""The second one is longer than a chunk."""


@pytest.fixture(scope="module")
def theirs() -> Any:
    """A random model, whose distributions are far from uniform."""
    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads: Any = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=VOCABULARY, initializer_range=0.4, **sizes, **heads)
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def spec(theirs: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LongSpec]:
    """The same model, loaded, with prompt lookup."""
    folder: Path = tmp_path_factory.mktemp("target")
    theirs.save_pretrained(folder)
    loaded = LongSpec.from_pretrained(folder, "ngram", dtype="float32", tree=(2, 2))
    yield replace(loaded, prefill_chunk=64)


def ours(spec: LongSpec, **options: Any) -> Any:
    """Both of all rows, of a speculative call."""
    both = {"output_scores": True, "output_logits": True}
    return spec.generate(PROMPTS, max_new_tokens=NEW, eos_token_id=[], **both, **options)


def by_transformers(model: Any, tokens: list[int], **options: Any) -> tuple[Any, Any]:
    """Scores and logits ``[V]`` after some tokens, by a call for one token."""
    config = GenerationConfig(max_new_tokens=1, return_dict_in_generate=True, pad_token_id=0)
    config.update(output_scores=True, output_logits=True, **options)
    found = model.generate(torch.tensor([tokens]), config)
    return found.scores[0][0].numpy(), found.logits[0][0].numpy()


SAMPLED = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02}


@pytest.mark.parametrize(
    "options",
    [{}, {"repetition_penalty": 1.7}, {**SAMPLED, "repetition_penalty": 1.3}, {"temperature": 1.0}],
    ids=["greedy", "penalty", "all", "sampled"],
)
def test_they_are_those_of_transformers(theirs: Any, spec: LongSpec, options: Any) -> None:
    """Call after call for one token, so that its draws are ours."""
    result, others = ours(spec, seed=[3, 4], **options), dict(options)
    if "temperature" in options:
        others = {"do_sample": True, "top_k": 0, **options}
    for row, prompt in enumerate(PROMPTS):
        assert result.scores[row].shape == result.logits[row].shape == (NEW, VOCABULARY)
        assert result.scores[row].dtype == result.logits[row].dtype == np.float32
        for step in range(NEW):
            behind = [*prompt, *result.sequences[row][:step]]
            score, logit = by_transformers(theirs, behind, **others)
            np.testing.assert_allclose(result.logits[row][step], logit, atol=1e-4)
            np.testing.assert_allclose(result.scores[row][step], score, atol=1e-4)
        assert np.isneginf(result.scores[row]).any() == ("top_k" in options)


def test_plain_decoding_has_the_same_and_neighbours_change_nothing(spec: LongSpec) -> None:
    options: Any = {"temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.6, "seed": [1, 2]}
    options["logit_bias"] = {7: 2.5}
    drafted, plain = ours(spec, **options), ours(spec, tree=PLAIN, **options)
    assert drafted.sequences == plain.sequences
    waiting = ours(replace(spec, max_num_seqs=1), **options)
    for row in range(len(PROMPTS)):
        for other in (plain, waiting):
            assert np.array_equal(drafted.scores[row], other.scores[row])
            assert np.array_equal(drafted.logits[row], other.logits[row])


def test_biases_and_penalties_count_the_tokens_before(spec: LongSpec) -> None:
    """By NumPy and by transformers' processor of biases."""
    penalties: Any = {"presence_penalty": 0.6, "frequency_penalty": 0.3}
    result = ours(spec, logit_bias={7: 2.5, 9: -3.0}, **penalties)
    bias: Any = SequenceBiasLogitsProcessor([[[7], 2.5], [[9], -3.0]])
    for row, prompt in enumerate(PROMPTS):
        for step in range(NEW):
            emitted = list(result.sequences[row][:step])
            count = np.bincount(np.asarray(emitted, int), minlength=VOCABULARY)
            logits = torch.from_numpy(result.logits[row][step : step + 1].copy())
            biased = bias(torch.tensor([[*prompt, *emitted]]), logits)[0].numpy()
            expected = biased - 0.3 * count - 0.6 * (count > 0)
            np.testing.assert_allclose(result.scores[row][step], expected, atol=1e-5)


def test_they_hold_the_log_probabilities_and_end_with_the_row(spec: LongSpec) -> None:
    """One of the two alone; a row that stops early; slices shorter than the text."""
    free = spec.generate(PROMPTS, max_new_tokens=NEW, eos_token_id=[])
    stop = free.sequences[0][4]
    options: Any = {"max_new_tokens": NEW, "eos_token_id": [stop], "logprobs": 0}
    result = spec.generate(PROMPTS, output_logits=True, **options)
    assert result.scores == () and len(result.sequences[0]) <= 5
    for row, tokens in enumerate(result.sequences):
        total = jax.nn.log_softmax(result.logits[row])
        own = [float(total[step, token]) for step, token in enumerate(tokens)]
        assert len(result.logits[row]) == len(tokens)
        assert own == pytest.approx([one.logprob for one in result.logprobs[row]], abs=1e-4)


def test_texts_are_cut_into_chunks_and_slices(
    spec: LongSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ours(spec, repetition_penalty=1.2)
    monkeypatch.setattr(scores, "SLICE", 3)
    cut = ours(replace(spec, prefill_chunk=32), repetition_penalty=1.2)
    for row in range(len(PROMPTS)):
        np.testing.assert_allclose(cut.scores[row], whole.scores[row], atol=1e-4)
        np.testing.assert_allclose(cut.logits[row], whole.logits[row], atol=1e-4)


def test_what_the_host_cannot_hold_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scores, "free_host_bytes", lambda: 4 * 17 * 60)
    spec, begun = toy_spec(), []
    listen: Any = {"on_activity": begun.append, "max_new_tokens": 31}
    with pytest.raises(MemoryError, match="output_scores.*31 new tokens times 17.*lower max_new_t"):
        spec.generate([1, 2], output_scores=True, output_logits=True, **listen)
    assert not begun
    request = spec._prepare([1, 2], None, {"max_new_tokens": 30}, False)[1].request
    assert isinstance(request.adjustments, AdjustmentOptions | None)
    scores.check_host(2, request, 17)


def test_they_are_options_of_generate_only(spec: LongSpec) -> None:
    with pytest.raises(NotImplementedError, match="generate.. itself takes output_scores="):
        spec.stream([1, 2], output_scores=True)  # pyright: ignore[reportCallIssue] - refused
    wrong: Any = "yes"
    with pytest.raises(ValueError, match="output_scores='yes' must be True or False"):
        spec.generate([1, 2], output_scores=wrong)
