"""Prompts in, token ids out: every form a caller may have gives the same ids."""

import copy
from typing import Any

import numpy as np
import pytest

from longspec_jax.generation.inputs import to_prompts
from tests.infer.toys import toy_tokenizer

TEXTS = ["ab cd gh é", "fgh €€ abc"]
IDS = [toy_tokenizer()(text)["input_ids"] for text in TEXTS]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def chatty() -> Any:
    """The toy's tokenizer with a chat template of its own."""
    tokenizer = copy.copy(toy_tokenizer())
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def padded() -> dict[str, np.ndarray]:
    ids, mask = np.zeros((2, 19), np.int64), np.zeros((2, 19), np.int64)
    for row, tokens in enumerate(IDS):
        ids[row, 19 - len(tokens) :], mask[row, 19 - len(tokens) :] = tokens, 1
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize(
    "inputs",
    [
        TEXTS,
        IDS,
        [np.asarray(row) for row in IDS],
        padded(),
        {"input_ids": IDS},
        [[{"role": "user", "content": text}] for text in TEXTS],
    ],
    ids=["text", "lists", "arrays", "padded", "encoding", "messages"],
)
def test_batches(inputs) -> None:
    rows = to_prompts(inputs, chatty(), 17)
    assert [row.tolist() for row in rows] == IDS
    assert all(row.dtype == np.int32 for row in rows)


@pytest.mark.parametrize(
    "inputs",
    [
        TEXTS[0],
        IDS[0],
        np.asarray(IDS[0]),
        np.asarray([IDS[0]]),
        [{"role": "user", "content": TEXTS[0]}],
    ],
    ids=["text", "list", "array", "row", "messages"],
)
def test_single_rows(inputs) -> None:
    [row] = to_prompts(inputs, chatty(), 17)
    assert row.tolist() == IDS[0]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([1.5, 2.5], "list of token ids, got 1.5"),
        (np.zeros((1, 2, 3), int), r"shape \[P\] or \[B, P\], got \(1, 2, 3\)"),
        ({"ids": [1]}, "needs 'input_ids'"),
        ([1, -1], "token id -1 is outside"),
    ],
)
def test_refusals(inputs, message) -> None:
    with pytest.raises(ValueError, match=message):
        to_prompts(inputs, toy_tokenizer(), 17)
