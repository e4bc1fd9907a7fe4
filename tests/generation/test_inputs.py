"""Prompts in, token ids out: every form a caller may have gives the same ids."""

import copy
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from longspec_jax.generation.inputs import check_positions, to_prompt, to_prompts
from tests.infer.toys import toy_tokenizer
from tests.kit import each_row

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


@each_row(
    "inputs",
    [
        TEXTS,
        IDS,
        [np.asarray(row) for row in IDS],
        padded(),
        {"input_ids": IDS},
        [[{"role": "user", "content": text}] for text in TEXTS],
    ],
)
def test_batches(inputs) -> None:
    rows = to_prompts(inputs, chatty(), 17)
    assert [row.tolist() for row in rows] == IDS
    assert all(row.dtype == np.int32 for row in rows)


@each_row(
    "inputs",
    [
        TEXTS[0],
        IDS[0],
        np.asarray(IDS[0]),
        np.asarray([IDS[0]]),
        [{"role": "user", "content": TEXTS[0]}],
    ],
)
def test_single_rows(inputs) -> None:
    [row] = to_prompts(inputs, chatty(), 17)
    assert row.tolist() == IDS[0]


MESSAGES = [{"role": "user", "content": "ab"}]
NESTED: list = []
for _ in range(50_000):
    NESTED = [NESTED]
IDS_AND_MASKS = [
    ([1, 2, 3], [1, 1]),
    ([1, 2, 3], [[1, 1, 1], [1, 1, 1]]),
    ([[1, 2, 3], [1, 2, 3]], [1, 1, 1]),
    ([[1, 2, 3]], [[[1, 1, 1]]]),
    ([1, 2, 3], [1, 2, 1]),
    ([1, 2, 3], ["a", "b", "c"]),
    ([1, 2, 3], [None, 1, 1]),
    ([1, 2, 3], [[1], 1, [1]]),
    ([1, 2, 3], 3),
    ([1, 2, 3], "111"),
]


@each_row(
    ("inputs", "message"),
    [
        ([1.5, 2.5], "list of token ids, got 1.5"),
        (np.zeros((1, 2, 3), int), r"shape \[P\] or \[B, P\], got \(1, 2, 3\)"),
        (np.asarray(3), r"shape \[P\] or \[B, P\], got \(\)"),
        (np.asarray([0.5]), "list of token ids"),
        ({"ids": [1]}, "needs 'input_ids'"),
        ({3: [1]}, "needs 'input_ids'"),
        ([1, -1], "token id -1 is outside"),
        ([1, 17], "token id 17 is outside the target's vocabulary of 17"),
        ([4_294_967_301], "token id 4294967301 is outside"),
        ([10**30], f"token id {10**30} is outside"),
        (np.asarray([4_294_967_301]), "token id 4294967301 is outside"),
        (np.asarray([2**63], np.uint64), "token id 9223372036854775808 is outside"),
        ([1, True], "list of token ids"),
        ([1, None], "list of token ids"),
        ([1, "a"], "list of token ids"),
        ([1, 2.0], "list of token ids"),
        ([[[1, 2], [3]], [4]], "^row 0: a row must be text, messages or a list of token ids"),
        ({"input_ids": [[[1, 2], [3]]]}, "^a row must be text"),
        ([{"input_ids": [1]}, {"input_ids": [2]}], "message 0 must have role and content"),
        (b"ab", "cannot read a prompt from bytes"),
        ([b"ab"], "list of token ids"),
        (None, "cannot read a prompt from NoneType"),
        ({1, 2}, "cannot read a prompt from set"),
        ([None], "list of token ids, got None"),
        (["ab", None], "^row 1: a row must be text"),
        (["ab", ""], "^row 1: the prompt is empty"),
        ([], "no prompts"),
        ("", "^the prompt is empty"),
        ([[]], "^the prompt is empty"),
        ({"input_ids": []}, "no prompts"),
        ({"input_ids": [[1], 3], "attention_mask": [[1], [1]]}, "^row 1: a row must be text"),
        ({"input_ids": [1, 2], "attention_mask": [0, 0]}, "^the prompt is empty"),
        ("a\ud800b", "a lone surrogate, .* at character 1"),
        (["ab", "\udfff"], "^row 1: the text has a lone surrogate"),
        ([{"role": "user", "content": "a \ud800"}], "a lone surrogate, .* at character 2"),
        (NESTED, "got a list that is nested too deeply to show"),
        ([{"role": "user", "content": NESTED}], "content must be .* got a list that is nested too"),
        ([[{"role": "user", "content": None}], MESSAGES], "^row 0: message 0: the content must be"),
        *(
            ({"input_ids": ids, "attention_mask": mask}, "attention_mask|cannot read")
            for ids, mask in IDS_AND_MASKS
        ),
    ],
)
def test_refusals(inputs, message) -> None:
    with pytest.raises(ValueError, match=message):
        to_prompts(inputs, chatty(), 17)


def test_a_tokenizer_that_panics_is_a_refusal() -> None:
    """A pattern such as (a+)+$ of a tokenizer.json does: Rust's panic is no Exception."""
    panic = type("PanicException", (BaseException,), {})
    tokenizer = Mock(side_effect=panic("Onig: retry-limit"))
    with pytest.raises(ValueError, match=r"gave up on this text \(Onig: retry-limit\)"):
        to_prompts("ab", tokenizer, 17)


@each_row("inputs", [TEXTS[0], TEXTS, IDS[0], [MESSAGES, TEXTS[0]]])
def test_a_template_is_for_messages(inputs) -> None:
    with pytest.raises(
        ValueError, match="chat_template= makes a prompt of chat messages, and this"
    ):
        to_prompts(inputs, chatty(), 17, TEMPLATE)


@each_row("special", [True, False])
def test_a_text_that_cannot_fit_is_not_tokenised(special) -> None:
    """The longest token of the toy has 5 characters, ``<end>``; 8 for each position may pass."""
    tokenizer = chatty()
    assert max(map(len, tokenizer.get_vocab())) == 5

    def of(characters: int) -> Any:
        text = "a" * characters
        return ["ab", text if special else [{"role": "user", "content": text}]]

    assert [len(row) for row in to_prompts(of(800), tokenizer, 17, max_positions=100)] == [2, 800]
    tokenizer.__class__ = type("Untouched", (type(tokenizer),), {"__call__": untouched})
    with pytest.raises(ValueError, match="^row 1: a prompt of 801 characters cannot fit: .*=100"):
        to_prompts(of(801), tokenizer, 17, max_positions=100)


def untouched(tokenizer: Any, text: str, **options: Any) -> Any:
    assert len(text) < 800
    return {"input_ids": [1]}


def test_one_prompt_is_not_several() -> None:
    assert to_prompt({"input_ids": [[1, 2]]}, None, 17).tolist() == [1, 2]
    with pytest.raises(ValueError, match="one prompt is needed here, and .* holds 2"):
        to_prompt({"input_ids": [[1, 2], [3]]}, None, 17)


@each_row(
    ("lengths", "new", "message"),
    [
        ([3], [10**9], "^a prompt of 3 .*; lower max_new_tokens to at most 97$"),
        ([3, 4], [9, 97], "^row 1: .*to at most 96, or shorten the prompt to at most 3 tokens$"),
        ([100], [9], "; shorten the prompt to at most 91 tokens$"),
        ([100], [100], "; shorten the prompt and lower max_new_tokens to 100 tokens in all$"),
        ([99], [100], "; lower max_new_tokens to at most 1$"),
    ],
)
def test_positions(lengths, new, message) -> None:
    with pytest.raises(ValueError, match=message):
        check_positions(lengths, np.asarray(new), 100)
    check_positions(lengths, np.asarray([1] * len(new)), 101)
