"""SmolLM2-135M from its GGUF file: text, tokens, drafters, server, quantisation and training."""

import json
from dataclasses import replace

import numpy as np
import pytest

from longspec_jax import PLAIN, LongSpec
from longspec_jax.drafters.draft import Target
from longspec_jax.loading import choose_drafts
from longspec_jax.weights.gguf.file import read_gguf
from tests.real.kit import document, greedy, model_file, oracle, prompts, serving
from tests.weights.gguf.tokens import SENTENCES, joined_by_rank, pieces_of_code

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]
NEW = 16
LONGSPEC = "smollm2-longspec"


@pytest.fixture(scope="module")
def spec():
    return LongSpec.from_pretrained(model_file("smollm2"), dtype="float32")


@pytest.fixture(scope="module")
def reference():
    return oracle("smollm2")


@pytest.fixture(scope="module")
def rows(spec):
    return prompts(spec.tokenizer)


@pytest.fixture(scope="module")
def plain(spec, rows):
    """Plain decoding of all prompts in one batch."""
    return spec.generate(rows, max_new_tokens=NEW, eos_token_id=[], tree=PLAIN, output_logits=True)


def test_text_and_logits_are_transformers(plain, rows, reference):
    """Token for token, in a batch of twenty prompts of different lengths."""
    for index, (prompt, found) in enumerate(zip(rows, plain.sequences, strict=True)):
        tokens, logits = greedy(reference, prompt, NEW)
        assert list(found) == tokens, index
        np.testing.assert_allclose(plain.logits[index], logits, atol=2e-3)


@pytest.mark.slow
def test_a_long_document(spec, reference):
    tokens = spec.tokenizer(document(40_000))["input_ids"][:6000]
    assert len(tokens) == 6000
    result = spec.generate([tokens], max_new_tokens=16, eos_token_id=[], tree=PLAIN)
    assert list(result.sequences[0]) == greedy(reference, tokens, 16)[0]


def drafted(spec, *names):
    """The model with these drafts."""
    target = Target(spec.target_config, spec.target_params, spec.tokenizer)
    return replace(spec, draft=[one.load(target) for one in choose_drafts(names, {})])


@pytest.mark.parametrize(
    ("drafts", "tree"),
    [
        ([LONGSPEC], "4,4,4@12"),
        (["ngram"], "none@12~4"),
        (["suffix"], "none@12~4"),
        (["streaming"], "chain:2"),
        ([LONGSPEC, "ngram"], "4,4@12~6"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, list) else value,
)
def test_every_drafter_gives_the_plain_text(spec, rows, plain, drafts, tree):
    """One prompt of every kind, and one more."""
    options = {"max_new_tokens": NEW, "eos_token_id": []}
    found = drafted(spec, *drafts).generate(rows[::4], tree=tree, **options)
    assert found.sequences == plain.sequences[::4]
    assert found.stats.acceptance_length > 1.1


def test_a_draft_that_was_trained_for_twenty_steps(spec, rows, plain, tmp_path):
    """It learns, loads and drafts; what little it has learned changes no token."""
    from train import run

    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"text": document(20_000)}) + "\n")
    options = {
        "target": model_file("smollm2"),
        "dtype": "float32",
        "data.files": text,
        "draft.init": "",
        "log_every": 1,
        "stages.answers.seq_len": 64,
        "stages.answers.batch": 1,
        "stages.answers.learning_rate": 1e-3,
        "stages.answers.max_offset": 0,
        "stages.answers.max_seconds": 0,
        "stages.answers.steps": 20,
        "accept_rows": 1,
        "accept_seq_len": 64,
    }
    given = [f"--config.{name}={value}" for name, value in options.items()]
    workdir = tmp_path / "run"
    assert run.main(["--config=smollm2:answers", f"--workdir={workdir}", *given]) == 0
    records = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    losses = [record["loss"] for record in records if "loss" in record]
    assert len(losses) == 20 and losses[-1] < losses[0]
    found = drafted(spec, str(workdir / "draft")).generate(
        rows[:2], max_new_tokens=NEW, eos_token_id=[], tree="2,2@4"
    )
    assert found.sequences == plain.sequences[:2]


def test_tokenizer_chat_and_stops(spec):
    """200 texts by the published rules, in plain Python; the template; what ends a text."""
    texts = [*SENTENCES, *pieces_of_code(180)]
    keys = read_gguf(model_file("smollm2")).metadata.values
    for text, expected in zip(texts, joined_by_rank(keys, texts), strict=True):
        assert spec.tokenizer(text)["input_ids"] == expected, text
        assert spec.tokenizer.decode(expected) == text
    assert spec.stop_tokens == (2, 0)
    rendered = spec.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert rendered.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert spec.precision == "float32, dequantised from Q4_1 and Q8_0"


def test_server_with_the_openai_client(plain, rows, spec):
    typed = f"--draft={LONGSPEC}", "--tree=2,2@4", "--max_num_seqs=1", "--max_model_len=256"
    asked = {"model": "smollm2", "max_tokens": NEW, "temperature": 0}
    messages = [{"role": "user", "content": "What is a prime number? Give examples."}]
    with serving("smollm2", *typed) as client:
        completion = client.completions.create(prompt=rows[0], **asked)
        chat = client.chat.completions.create(messages=messages, **asked)
    expected, answer = (spec.tokenizer.decode(plain.sequences[row]) for row in (0, 15))
    assert expected.startswith(completion.choices[0].text)
    assert chat.choices[0].message.content == answer


def test_quantised_copy(spec, tmp_path):
    """The folder that ``contrib.quantise`` writes loads, with about the same perplexity."""
    from contrib.quantise import quantise

    quantise(model_file("smollm2"), "w4a16", tmp_path / "w4")
    copy = LongSpec.from_pretrained(tmp_path / "w4", dtype="float32")
    text = document(2_000)
    tokens = spec.tokenizer(text)["input_ids"][:384]
    assert copy.tokenizer(text)["input_ids"] == spec.tokenizer(text)["input_ids"]
    assert copy.stop_tokens == spec.stop_tokens
    losses = []
    for one in (spec, copy):
        [scores] = one.generate(
            tokens, tree=PLAIN, max_new_tokens=1, prompt_logprobs=0
        ).prompt_logprobs
        losses.append(-np.mean([score.logprob for score in scores[1:]]))
    assert 0.5 < losses[0] < 4.0
    assert losses[0] - 0.1 < losses[1] < losses[0] + 0.6
