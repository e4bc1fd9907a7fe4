"""Needle documents, and rounds whose outcome is forced: what is asked is what is counted."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer.bench import __main__ as bench
from infer.bench import needle as bench_needle
from infer.bench.forced import Verdict, forced
from infer.haystack import DIGITS, SENTENCE, needle_document
from longspec_jax.config import TreeConfig
from longspec_jax.decoding.target import CachedTarget
from longspec_jax.drafters.base import Params
from longspec_jax.drafters.small_lm.drafter import SmallLMDrafter
from longspec_jax.drafters.small_lm.load import SmallLMOptions
from longspec_jax.embedded import DEMO
from longspec_jax.models.target import Target
from longspec_jax.ops.attention.reference import causal_attention
from tests.kit import random_target, tiny_target_config

on_the_demo = pytest.mark.skipif(not DEMO.is_dir(), reason="the demo model is not in this checkout")
TEXTS = ["one line\nanother line\n" * 9, "prose without an end. " * 7, "x\n" * 50]


def characters(text: str) -> list[int]:
    """A token for every character."""
    return [*map(ord, text)]


def text_of(tokens: list[int]) -> str:
    return "".join(map(chr, tokens))


@pytest.mark.parametrize("depth", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("length", [180, 1000])
def test_a_document_holds_its_needle_once_and_asks_for_it(length: int, depth: float) -> None:
    """Of exactly the length, however short the texts are, at a line's end near the depth."""
    document = needle_document(characters, TEXTS, length, depth, seed=3)
    text, code = text_of(document.tokens), text_of(document.answer)
    assert len(text) == length and len(code.strip()) == DIGITS and code.strip().isdigit()
    assert text.count(code) == 1
    question = text.rpartition("\n")[2]
    assert text.count(question) == 2 and f"{question}{code}\n" in text
    assert text.index(question) == document.place + 1
    assert document.place == 0 or text[document.place - 1] == "\n"
    # A text without line ends may have moved it.
    assert abs(document.place - depth * (length - 2 * len(question) - 20)) <= 160


def test_a_document_follows_from_its_seed() -> None:
    one, same, other = (needle_document(characters, TEXTS, 400, 0.5, seed) for seed in (1, 1, 2))
    assert one == same and one.answer != other.answer
    assert SENTENCE.partition("{")[0] in text_of(other.tokens)


def test_what_leaves_no_room_is_refused() -> None:
    with pytest.raises(ValueError, match="60 tokens leave no room around a needle of"):
        needle_document(characters, TEXTS, 60, 0.5, 0)
    with pytest.raises(ValueError, match="are empty; name files"):
        needle_document(characters, ["", ""], 400, 0.5, 0)


CONFIG = tiny_target_config()
PARAMS = random_target(CONFIG)
TEXT = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (3, 90)).astype(np.int32)


@jax.jit
def dense() -> jax.Array:
    """Log-probabilities behind every token of the texts, from one causal pass."""
    positions = jnp.broadcast_to(jnp.arange(TEXT.shape[1]), TEXT.shape)
    model, variables = Target(CONFIG), {"params": PARAMS}
    output: Any = model.apply(
        variables, jnp.asarray(TEXT), positions, lambda layer, q, k, v: causal_attention(q, k, v)
    )
    logits: Any = model.apply(variables, output.hidden, method="unembed")
    return jax.nn.log_softmax(logits)


def verdicts(**options: int) -> tuple[Verdict, Verdict]:
    """The target drafts for itself, over all or a part of its own cache."""
    working = SmallLMOptions(**options).working_cache(CONFIG)
    drafter = SmallLMDrafter(CONFIG, TreeConfig((1,)), working=working)
    models = CachedTarget(CONFIG), drafter, Params(PARAMS, PARAMS)
    return forced(*models, TEXT[:, :80], TEXT[:, 80:], chunk=72)


def test_forced_tokens_are_judged_as_by_one_pass_over_the_text() -> None:
    """By the target, and by a draft that sees as much; one that sees less thinks otherwise."""
    logs = np.asarray(dense())[:, 79:-1]
    expected = np.take_along_axis(logs, TEXT[:, 80:, None], axis=2)[..., 0]
    draft, target = verdicts()
    np.testing.assert_allclose(target.log_probabilities, expected, atol=2e-4)
    np.testing.assert_allclose(draft.log_probabilities, expected, atol=2e-4)
    np.testing.assert_array_equal(target.right, logs.argmax(axis=2) == TEXT[:, 80:])
    part, again = verdicts(working=32, chunk=8)
    np.testing.assert_array_equal(again.log_probabilities, target.log_probabilities)
    assert np.abs(part.log_probabilities - expected).min(axis=1).max() > 1e-3


def test_what_is_told_of_verdicts() -> None:
    """Shares of all tokens and of whole codes; what stands behind a short code is not counted."""
    [one, two] = (needle_document(characters, TEXTS, 400, depth, 5) for depth in (0.2, 0.8))
    two = replace(two, answer=two.answer[:3])
    right = np.ones((2, len(one.answer)), bool)
    right[0, 1] = right[1, 5] = False
    logs = np.log(np.where(right, 0.5, 0.25))
    row = bench_needle.describe("full", 400, [one, two], Verdict(right, logs), [0.2, 0.8])
    assert row["accuracy"] == pytest.approx(11 / 12) and row["found"] == 0.5
    assert row["accuracy_by_depth"] == {"0.2": pytest.approx(8 / 9), "0.8": 1.0}
    assert row["perplexity"] == pytest.approx(2 ** (13 / 12))


@on_the_demo
def test_the_demo_finds_needles(tmp_path: Path, capsys) -> None:
    """Which are hidden in a text of the user's own."""
    file, text = tmp_path / "rows.json", tmp_path / "text.py"
    text.write_text("def add(a, b):\n    return a + b\n\n\n" * 9)
    options = ["--contexts=400", "--depths=0.2,0.6", "--needles=1", "--caches=streaming,retrieval"]
    more = [f"--texts={text}", f"--json={file}", "--working=128"]
    assert bench.main(["needle", *options, *more]) == 0
    rows = {row["cache"]: row for row in json.loads(file.read_text())["rows"]}
    assert [*rows] == ["target", "streaming", "retrieval"]
    assert rows["retrieval"]["accuracy"] > rows["streaming"]["accuracy"]
    assert all(row["documents"] == 2 for row in rows.values())
    assert "retrieval           400 tokens:" in capsys.readouterr().out


@on_the_demo
@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--contexts=16384", "--contexts=16384: the target was made for 16384 positions"),
        ("--drafter=ngram", "ngram keeps no cache of which it could read a part"),
        ("--texts=nowhere.txt", "nowhere.txt"),
    ],
)
def test_what_cannot_be_asked_is_refused(option: str, words: str, capsys) -> None:
    assert bench.main(["needle", "--contexts=300", option]) in (1, 2)
    assert words in capsys.readouterr().err
