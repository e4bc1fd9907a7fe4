"""Prompts as the release asks them, and what is left out."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infer.eval.config import EvalConfig
from infer.eval.prompts import Asked, PreparedTask, Target, longspec_prompt, prepare
from infer.eval.tasks import DEPTHS, DIGITS, SENTENCE, SUITE, TASKS, Sample, needle_document
from longspec_jax.embedded import DEMO
from longspec_jax.loading import load_tokenizer
from tests.kit import each_row

on_the_demo = pytest.mark.skipif(not DEMO.is_dir(), reason="the demo model is not in this checkout")
POSITIONS = 4000


class Characters:
    """A tokenizer with a token for every character, and one that begins a text."""

    chat_template: str | None = None
    begins = "\x01"

    def __init__(self, *symbols: str):
        self.symbols = symbols

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [*map(ord, self.begins * add_special_tokens + text)]}

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        text = "".join(map(chr, tokens))
        return text.replace(self.begins, "") if skip_special_tokens else text

    def get_vocab(self) -> dict[str, int]:
        return dict.fromkeys(self.symbols, 0)


TARGET = Target(Characters(), 2**20, POSITIONS)
CONFIG = EvalConfig(task=["lcc"], out=Path("unused"), min_prompt=0)


def release(task: str, asked: Sample, config: EvalConfig = CONFIG, target: Target = TARGET) -> str:
    """What the release asks."""
    return text_of(longspec_prompt(config, target, TASKS[task], asked))


def text_of(found: Asked) -> str:
    assert not found.refusal
    return "".join(map(chr, found.tokens))


def sample(context: str = "CONTEXT", question: str = "INPUT") -> Sample:
    return Sample("1", (), {"context": context, "input": question, "problem": context})


def test_the_release_asks_in_one_text_of_its_own_format() -> None:
    """As its evaluation script writes it (LongSpec, ``inference_long-bench.py``)."""
    assert release("gov_report", sample()) == (
        "\x01<s>system\nYou are a helpful assistant</s>\n<s>user\nYou are given a report by a "
        "government agency. Write a one-page summary of the report.\n\nReport:\nCONTEXT\n\nNow, "
        "write a one-page summary of the report.</s>\n<s>assistant\nSummary:"
    )
    query = release("qmsum", sample())
    assert query.endswith("\n\nQuery: INPUT</s>\n<s>assistant\nAnswer:")
    code = release("repobench-p", sample())
    assert code.endswith("below. \nCONTEXTNow, complete the code given.</s>\n<s>assistant\n")
    assert "INPUT" not in code  # The release leaves it out.


def test_qwen_is_asked_in_chatml() -> None:
    """Problems of AIME are short, and the lower bound is not for them."""
    target = Target(Characters("<|im_start|>"), 2**20, POSITIONS)
    assert release("aime24", sample(), replace(CONFIG, min_prompt=None), target) == (
        "\x01<|im_start|>system\nYou are a helpful assistant<|im_end|>\n<|im_start|>user\nCONTEXT"
        "<|im_end|>\n<|im_start|>assistant\n"
    )


@each_row(
    ("length", "refusal"),
    [
        (1200, "no more than 1200 tokens"),
        (1201, ""),
        (2000, ""),
        (2001, "more than 2000 tokens"),
    ],
)
def test_the_release_skips_prompts_out_of_its_bounds(length: int, refusal: str) -> None:
    empty = release("lcc", sample(""))
    usual = replace(CONFIG, min_prompt=None)
    found = longspec_prompt(usual, TARGET, TASKS["lcc"], sample("x" * (length - len(empty))))
    assert len(found.tokens) == length
    assert found.refusal.startswith(refusal) and bool(found.refusal) is bool(refusal)


def prepared(
    name: str, path: Path | None = None, target: Any = None, **options: Any
) -> PreparedTask:
    """The prompts of a task, from a file of its own."""
    data = [] if path is None else [("", path)]
    config = EvalConfig(task=[name], out=Path("unused"), data=data, **options)
    return prepare(name, config, target or TARGET)


def written(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_what_is_left_out_is_counted(tmp_path: Path) -> None:
    rows = [{"context": "x" * size, "_id": str(size)} for size in (10, 1500, 3000)]
    path = written(tmp_path / "lcc.jsonl", *rows)
    found = prepared("lcc", path)
    [prompt] = found.prompts
    assert prompt.sample == "1500" and prompt.new_tokens == 1024
    assert [(each.sample, each.reason.split(" tokens")[0]) for each in found.skipped] == [
        ("10", "no more than 1200"),
        ("3000", "more than 2000"),
    ]
    short = prepared("lcc", path, samples=1, max_new_tokens=7)
    assert [each.sample for each in short.prompts] == ["1500"] and short.prompts[0].new_tokens == 7
    with pytest.raises(ValueError, match="all 3 samples are skipped .* --max_prompt change"):
        prepared("lcc", path, max_prompt=3)


def test_prompts_of_a_length_that_is_asked_for_are_too_long_by_that() -> None:
    with pytest.raises(
        ValueError, match="leave no room in .* positions.; name a shorter --context"
    ):
        prepared("needle", context=[POSITIONS + 1])


def test_new_tokens_fit_the_targets_range(tmp_path: Path) -> None:
    path = written(tmp_path / "lcc.jsonl", {"context": "x" * 3800})
    found = prepared("lcc", path, max_prompt=3990)
    [prompt] = found.prompts
    assert len(prompt.tokens) + prompt.new_tokens == POSITIONS
    longer = written(tmp_path / "longer.jsonl", {"context": "x" * 4000})
    with pytest.raises(ValueError, match="leave no room in 4000 positions"):
        prepared("lcc", longer, max_prompt=9999)


def test_books_are_cut_to_every_context(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", {"text": "y" * 300}, {"text": "z" * 150})
    found = prepared("pg19", path, context=[130, 200])
    assert [each.sample for each in found.prompts] == ["0 to 130", "0 to 200", "1 to 130"]
    assert [len(each.tokens) for each in found.prompts] == [131, 201, 131]
    assert {each.new_tokens for each in found.prompts} == {256}


def test_prompts_of_a_users_file(tmp_path: Path) -> None:
    rows = [
        {"prompt": "text", "answers": ["a"]},
        {"input_ids": [5, 6], "id": "mine", "references": "r"},
        {"messages": [{"role": "user", "content": "hello"}]},
    ]
    path = written(tmp_path / "a.jsonl", *rows)
    found = prepared("jsonl", path, prompt_style="longspec", max_new_tokens=5).prompts
    assert [each.sample for each in found] == ["0", "mine", "2"]
    assert [each.references for each in found] == [("a",), ("r",), ()]
    assert found[1].tokens == [5, 6]
    for prompt in (found[0], found[2]):
        assert "<s>user" in "".join(map(chr, prompt.tokens))


@each_row(
    ("rows", "words"),
    [
        (
            [{"text": "x"}],
            "line 1 needs exactly one of prompt, messages and input_ids; it has text",
        ),
        ([{"prompt": "x", "input_ids": [1]}], "needs exactly one of"),
        ([{"prompt": ""}], "line 1: the prompt is empty"),
        ([{"input_ids": []}], r"input_ids=\[\] must be a list of at least 1 items"),
        ([{"input_ids": "ab cd"}], "line 1: input_ids='ab cd' must be a list"),
        ([{"messages": "hello"}], "line 1"),
        ([{"prompt": "x", "id": 1}, {"prompt": "y", "id": 1}], "two samples have the id '1'"),
    ],
)
def test_rows_that_cannot_be_asked(tmp_path: Path, rows: list[dict], words: str) -> None:
    path = written(tmp_path / "a.jsonl", *rows)
    with pytest.raises(ValueError, match=words):
        prepared("jsonl", path)


def test_problems_of_2024_are_chosen_by_their_ids(tmp_path: Path) -> None:
    """Of the usual dataset, which has three years; another file is taken whole."""
    rows = [{"id": number, "problem": f"p{number}", "answer": 7} for number in range(90)]
    path = written(tmp_path / "a.jsonl", *rows)
    found = prepared("aime24", path).prompts
    assert [each.sample for each in found] == [str(number) for number in range(60, 90)]
    assert found[0].references == ("7",)
    few = written(tmp_path / "few.jsonl", *rows[:3])
    assert len(prepared("aime24", few).prompts) == 3


@on_the_demo
def test_the_suite_asks_for_what_is_there() -> None:
    """Every prompt is as long as was asked for or shorter; copies and codes are in the prompt."""
    context = 512
    tokenizer = load_tokenizer(DEMO / "target")
    for name, make in SUITE.items():
        found = list(make(tokenizer, context))
        assert len(found) == len(DEPTHS) == len({each.name for each in found})
        for each in found:
            assert context / 2 < len(each.prompt) <= context
            [reference] = each.references
            prompt = tokenizer.decode(each.prompt)
            assert reference.strip()
            if name in ("demo_copy", "demo_needle"):
                assert reference in prompt, (name, each.name)


@on_the_demo
def test_needles_lie_in_a_users_text(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a line of hay\n" * 99)
    tokenizer = load_tokenizer(DEMO / "target")
    target = Target(tokenizer, 4096, 16384)
    found = prepared("needle", text, target, context=[200, 300]).prompts
    assert [len(each.tokens) for each in found] == [200] * 4 + [300] * 4
    for prompt in found:
        assert prompt.references[0] in tokenizer.decode(prompt.tokens)
        assert "a line of hay" in tokenizer.decode(prompt.tokens)


@on_the_demo
@each_row("context", [4_000, 131_072])
def test_passages_are_copied_at_contexts_longer_than_the_documents(context: int) -> None:
    found = list(SUITE["demo_copy"](load_tokenizer(DEMO / "target"), context))
    assert len(found) == len(DEPTHS)
    assert all(each.references[0] and len(each.prompt) <= context for each in found)


TEXTS = ["one line\nanother line\n" * 9, "prose without an end. " * 7, "x\n" * 50]


@each_row("depth", [0.0, 0.4, 1.0])
@each_row("length", [180, 1000])
def test_a_document_holds_its_needle_once_and_asks_for_it(length: int, depth: float) -> None:
    """Of exactly the length, however short the texts are, at a line's end near the depth."""
    tokens, code = needle_document(Characters(), TEXTS, length, depth, seed=3)
    text = "".join(map(chr, tokens))
    assert len(text) == length and len(code) == DIGITS and code.isdigit()
    assert text.count(code) == 1
    question = text.rpartition("\n")[2]
    assert text.count(question) == 2 and f"{question} {code}\n" in text
    place = text.index(question) - 1
    assert place == 0 or text[place - 1] == "\n"
    # A text without line ends may have moved it.
    assert abs(place - depth * (length - 2 * len(question) - 20)) <= 160


def test_a_needle_follows_from_its_seed() -> None:
    one, same, other = (needle_document(Characters(), TEXTS, 400, 0.5, seed) for seed in (1, 1, 2))
    assert one == same and one[1] != other[1]
    assert SENTENCE.partition("{")[0] in "".join(map(chr, other[0]))
    with pytest.raises(ValueError, match="60 tokens leave no room around a needle of"):
        needle_document(Characters(), TEXTS, 60, 0.5, 0)
    with pytest.raises(ValueError, match="are empty; name files"):
        needle_document(Characters(), ["", ""], 400, 0.5, 0)
