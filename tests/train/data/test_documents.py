"""Documents: every row format of the paper's data, templates, loss masks, files of all kinds."""

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from longspec_jax.recipes import CHATML_TURN, LLAMA_TURN, base_config
from tests.kit import each_row
from train.config import DataConfig
from train.data.documents import BadRows, Turn, to_turns
from train.data.loading import Documents, data_digest
from train.data.rows import DocumentRows, Row, cut_turns
from train.data.tokens import encode, read_encoded, train_tokenizer, write_encoded

SYSTEM = ("system", "You are a helpful assistant")
PARALLEL = {"article": ["one", "two"], "abstract": ["1", "2"]}
SUMMARISE = "Please summarize the following article: "


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def asked(*texts: str) -> list[tuple[str, str]]:
    """Questions and answers after the usual system prompt."""
    return [SYSTEM, *zip(("user", "assistant") * (len(texts) // 2), texts, strict=True)]


ROWS: dict[str, tuple[dict[str, Any], list[tuple[str, str]]]] = {
    "target": ({"target": "a text", "source": "x"}, [("", "a text")]),
    "text": ({"text": "a {text}", "source": "code"}, [("", "a {text}")]),
    "article": ({"article": "long", "abstract": "short"}, asked(f"{SUMMARISE}long", "short")),
    "articles": (PARALLEL, asked(f"{SUMMARISE}one", "1", f"{SUMMARISE}two", "2")),
    "conversation": (
        {"conversation": [turn("user", "hi"), turn("assistant", "!")]},
        [("user", "hi"), ("assistant", "!")],
    ),
    "messages": (
        {
            "prompt": "hi",
            "messages": [turn("system", "be"), turn("user", "hi"), turn("assistant", "!")],
        },
        [("system", "be"), ("user", "hi"), ("assistant", "!")],
    ),
    "sharegpt": (
        {
            "id": 3,
            "conversations": [
                {"from": "human", "value": "hi", "role": None},
                {"from": "gpt", "value": "!"},
                turn("user", "more"),
            ],
        },
        [("user", "hi"), ("assistant", "!"), ("user", "more")],
    ),
    "reasoning": ({"problem": "1+1", "qwq": "2"}, asked("1+1", "2")),
    "report": (
        {"report": "R", "summary": "S"},
        asked(
            "You are given a report by a government agency. Write a one-page summary of the "
            "report.\n\nReport:\nR\n\nNow, write a one-page summary of the report.",
            "Summary: S",
        ),
    ),
    "news": (
        {"document": "N", "summary": "S"},
        asked(
            "You are given several news passages. Write a one-page summary of all news."
            "\n\nNews:\nN\n\nNow, write a one-page summary of all the news.",
            "Summary: S",
        ),
    ),
    "meeting": (
        {"transcript": "T", "summary": "S"},
        asked("You are given a meeting transcript. Write a summary of the transcript.\n\nT", "S"),
    ),
    "code": (
        {"prefix": "def f({x}):", "suffix": "return {x}"},
        asked(
            "Please complete the code given below.\ndef f({x}):\nNow, complete the code given.",
            "return {x}",
        ),
    ),
}


@each_row("kind", ROWS)
def test_every_row_format_becomes_its_turns(kind: str) -> None:
    row, turns = ROWS[kind]
    assert [(turn.role, turn.content) for turn in to_turns(row)] == turns
    # A table of mixed rows fills the fields a row does not have with nulls.
    absent = {name: None for other, _ in ROWS.values() for name in other}
    assert to_turns({**absent, **row}) == to_turns(row)


@each_row(
    ("row", "sentence"),
    [
        ({"body": "x"}, "fields .'body'.; known formats: conversation; abstract"),
        ({"text": 5}, "text holds a value of type int"),
        ({"conversation": []}, "conversation holds no turns"),
        ({"conversation": [{"role": "human", "content": "x"}]}, "role 'human'; roles are system"),
        ({"conversation": [{"role": "user"}]}, "type NoneType where text belongs"),
        ({"article": ["a", "b"], "abstract": ["a"]}, "2 articles and 1 abstracts"),
        ({"article": 5, "abstract": ["a"]}, "article holds a value of type int where a list"),
        ({"problem": 5, "qwq": "x"}, "problem holds a value of type int where text belongs"),
        ({"problem": "x", "qwq": ["x"]}, "qwq holds a value of type list where text belongs"),
        ({"text": "x\ud800"}, "text holds half a surrogate pair"),
        ({"messages": "x"}, "messages holds a value of type str where a list belongs"),
        (
            {"messages": ["x"]},
            "messages holds a value of type str where a turn belongs, .*role.*from",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role 'tool'; roles are system, user"),
        ({"messages": [{"role": "user", "content": [1]}]}, "messages's content holds .* type list"),
        ({"messages": []}, "messages holds no turns"),
        ({"conversations": [{"from": "x", "value": "y"}]}, "from 'x'; froms are human, gpt"),
        ({"conversations": [{"from": "gpt"}]}, "conversations's value holds .* type NoneType"),
        ({"conversations": [{}]}, "role None; roles are system, user, assistant"),
    ],
)
def test_rows_that_mean_nothing_are_refused(row: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        to_turns(row)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(["to be or not to be, that is the question"] * 3, 280)


def settings(**overrides: Any) -> DataConfig:
    values = base_config().data.to_dict()
    return DataConfig(**{**values, "files": "x.jsonl", **overrides})


def documents_of(**overrides: Any) -> Documents:
    return Documents(settings(**overrides), BadRows(0))


def cut(turns: list[Turn], tokenizer: Any, data: DataConfig, length: int) -> Row:
    return cut_turns(next(encode([turns], tokenizer, data.turn)), data, length)


def learned(turns: list[Turn], tokenizer: Any, length: int = 500, **overrides: Any) -> str:
    """The text of the tokens that are learned."""
    tokens, weights, _ = cut(turns, tokenizer, settings(**overrides), length)
    assert tokens.dtype == np.int32 and weights.dtype == np.float32 and set(weights) <= {0.0, 1.0}
    return tokenizer.decode(tokens[weights > 0])


def test_plain_text_is_learned_whole_with_its_end(tokenizer: Any) -> None:
    for mask_prompts in (False, True):
        text = learned([Turn("to be")], tokenizer, mask_prompts=mask_prompts)
        assert text == "<|bos|>to be<|eos|>"


def test_questions_are_learned_until_the_last_stage_and_system_prompts_never(
    tokenizer: Any,
) -> None:
    turns = to_turns({"problem": "why?", "qwq": "so"})
    both = learned(turns, tokenizer)
    assert both == "<|bos|><s>user\nwhy?</s>\n<|bos|><s>assistant\nso</s>\n"
    assert learned(turns, tokenizer, mask_prompts=True) == "<|bos|><s>assistant\nso</s>\n"


@each_row(
    ("turn", "written"),
    [
        (LLAMA_TURN, "<s>user\na {b}</s>\n"),
        (CHATML_TURN, "<|im_start|>user\na {b}<|im_end|>\n"),
        ('{"{role}": {content}}', '{"user": a {b}}'),
    ],
)
def test_turns_are_written_by_the_template(turn: str, written: str, tokenizer: Any) -> None:
    assert learned([Turn("a {b}", "user")], tokenizer, turn=turn) == "<|bos|>" + written


def test_a_masked_question_leaves_room_for_the_answer(tokenizer: Any) -> None:
    turns = [Turn("q" * 400, "user"), Turn("a" * 10, "assistant")]
    data = settings(mask_prompts=True, answer_room=60)
    tokens, weights, _ = cut(turns, tokenizer, data, 100)
    assert weights.tolist().index(1.0) == 100 - 60
    assert "aaaaaaaaaa</s>" in tokenizer.decode(tokens[weights > 0])
    # Where prompts are learned, nothing is shortened but the row itself.
    tokens, weights, _ = cut(turns, tokenizer, settings(), 100)
    assert len(tokens) == 100 and weights.all()


def test_lines_of_mixed_formats(tmp_path: Path, tokenizer: Any) -> None:
    # Line separators of Unicode are no line ends.
    rows = [*(row for row, _ in ROWS.values()), {"text": "one\u2028line"}]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n\n  \n")
    documents = documents_of(files=str(tmp_path / "*.jsonl"))
    assert list(documents) == [to_turns(row) for row in rows]
    write_encoded(tmp_path / "tokens", encode(documents, tokenizer, settings().turn), 280, str)
    encoded = read_encoded(tmp_path / "tokens")
    made = DocumentRows(encoded, settings(), 40, tokenizer.pad_token_id)
    for index in range(len(made)):
        tokens, weights, _ = made[index]
        assert tokens.shape == weights.shape == (40,)
    tokens, weights, length = made[0]
    assert length == (tokens != tokenizer.pad_token_id).sum() < 40
    assert set(tokens[weights == 0]) == {tokenizer.pad_token_id} and weights[-1] == 0


def test_files_of_several_kinds_follow_each_other(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("first\nparagraph\n\n\n\nsecond\n")
    rows = json.dumps([{"text": "third"}, {"text": "fourth"}], indent=1)
    (tmp_path / "b.json").write_text(rows, encoding="utf-8-sig")
    (tmp_path / "b_lines.json").write_text('{"text": "fifth"}\n')
    table = datasets.Dataset.from_list([{"problem": "p", "qwq": "q"}])
    table.to_parquet(str(tmp_path / "c.parquet"))
    files = f"{tmp_path}/a.txt, {tmp_path}/b*.json, {tmp_path}/c.*"
    contents = [turns[-1].content for turns in documents_of(files=files)]
    assert contents == ["first\nparagraph", "second", "third", "fourth", "fifth", "q"]
    packed = list(documents_of(files=files, pack=True).texts())
    assert packed[0] == (tmp_path / "a.txt").read_text() and packed[-1].endswith("\n\np\n\nq")


@each_row(
    ("name", "content", "sentence"),
    [
        ("a.jsonl", "", "a.jsonl holds no documents"),
        ("a.json", "[1]", "row 1 of .*a.json: the line must be one JSON object, got 1"),
        ("a.json", "[{", "a.json cannot be read"),
        ("a.json", "[" * 100_000, "a.json cannot be read .maximum recursion depth"),
        ("a.txt", " \n\n \n", "a.txt holds no documents"),
        ("a.csv", "a,b", "a.csv cannot be read .the file is of no known kind"),
        ("a.parquet", "not parquet", "a.parquet cannot be read"),
    ],
)
def test_unreadable_files_are_refused(
    name: str, content: str, sentence: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=sentence):
        list(documents_of(files=str(tmp_path / name)))


def test_absent_files_and_hub_data_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no file matches .*absent"):
        list(documents_of(files=str(tmp_path / "absent*.jsonl")))
    for hub in ("owner/absent", "owner/absent/rows.jsonl"):
        with pytest.raises(ValueError, match=f"the data of {hub} cannot be read"):
            list(documents_of(files="", hub=hub))
        with pytest.raises(ValueError, match=f"the data of {hub} cannot be read"):
            data_digest(settings(files="", hub=hub))
