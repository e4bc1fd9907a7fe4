"""Regenerated rows: the target's own answers, in order, none lost and none twice."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from longspec_jax import PLAIN, LongSpec, cli
from tests.train.tiny import save_tiny_target
from train import regenerate, regeneration
from train.data.documents import to_turns
from train.data.tokens import load_tokenizer
from train.regeneration import seed_of

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
NEW = 6
SEED = 2


def chat(*questions: str, system: str = "") -> dict[str, Any]:
    """A row of another's words; every question has an answer that must not be kept."""
    turns = [{"role": "system", "content": system}] * bool(system)
    for question in questions:
        turns += [{"role": "user", "content": question}, {"role": "assistant", "content": "no"}]
    return {"messages": turns}


ROWS = [
    chat("the tree", "one pass", "why"),
    {"conversations": [{"from": "human", "value": "tokens?"}]},
    chat("the draft proposes", system="a target"),
    {"text": "the draft proposes a tree of tokens and the target checks it"},
    chat("in one pass " * 30),
    {"prompt": "checks"},
    chat("a", "and the target checks it in one pass and in one pass and in one pass " * 9),
    {"prompt": [{"role": "user", "content": "it"}], "chosen": "x"},
]
LEFT_OUT = 4
ALL = {"system", "user", "assistant"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny_target(tmp_path_factory.mktemp("tiny") / "target")
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    # Of many tokens that end an answer some are drawn.
    stops = {"eos_token_id": [*range(1, 304, 4)]}
    (folder / "generation_config.json").write_text(json.dumps(stops))
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def given(target: Path, data: Path, out: str = "out.jsonl", **options: Any) -> list[str]:
    values = dict(
        target=target, files=data, out=data.parent / out, max_new_tokens=NEW, temperature=1.0,
        seed=SEED, prefix_tokens=5, max_num_seqs=2, dtype="float32",
    )  # fmt: skip
    return [f"--{name}={value}" for name, value in {**values, **options}.items()]


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def expected(target: Path) -> list[dict[str, Any]]:
    return one_by_one(target)


def one_by_one(target: Path) -> list[dict[str, Any]]:
    """The same rows, answer by answer, without slots, waves or a draft."""
    spec = LongSpec.from_pretrained(target, dtype="float32")
    tokenizer, rows = spec.tokenizer, []
    for number, row in enumerate(ROWS):
        said, complete, turns = [], True, row.get("messages") or row.get("conversations") or []
        asked = row.get("prompt", "")
        if isinstance(asked, str):
            turns = turns or [{"role": "user", "content": asked}]
        else:
            turns = asked
        if "text" in row:
            ids = tokenizer(row["text"])["input_ids"][:5]
            tokens = answer(spec, ids, seed_of(SEED, number, 1))
            text = tokenizer.decode([*ids, *tokens], skip_special_tokens=True)
            rows.append({"row": number, "complete": ends(spec, tokens), "text": text})
            continue
        for turn in turns:
            role = {"human": "user"}.get(turn.get("from"), turn.get("role"))
            if role == "assistant":
                continue
            said.append({"role": role, "content": turn.get("content", turn.get("value"))})
            if role != "user":
                continue
            prompt = tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
            ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
            if len(ids) > 96 - NEW:
                said.pop()
                break
            answered = sum(turn["role"] == "assistant" for turn in said)
            tokens = answer(spec, ids, seed_of(SEED, number, answered))
            text = tokenizer.decode(tokens, skip_special_tokens=True).strip()
            said.append({"role": "assistant", "content": text})
            if not (complete := ends(spec, tokens)):
                break
        if said:
            rows.append({"row": number, "complete": complete, "messages": said})
    return rows


def answer(spec: LongSpec, ids: list[int], seed: int) -> list[int]:
    made = spec.generate([ids], tree=PLAIN, max_new_tokens=NEW, temperature=1.0, seed=seed)
    return list(made.sequences[0])


def ends(spec: LongSpec, tokens: list[int]) -> bool:
    return tokens[-1] in spec.stop_tokens


def test_the_target_answers_every_question_as_it_would_alone(
    target: Path, data: Path, expected: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert regenerate.main(given(target, data)) == 0
    said = capsys.readouterr()
    made = rows_of(data.parent / "out.jsonl")
    assert made == expected
    assert [row["row"] for row in made] == [n for n in range(len(ROWS)) if n != LEFT_OUT]
    assert "left out 1 without room for an answer within --max_row_tokens=96" in said.out
    assert "tokens/s" in said.err and f"rows of {len(ROWS)}" in said.err
    assert {row["complete"] for row in made} == {True, False}
    assert max(len(row.get("messages", ())) for row in made) == 6  # A question after an answer.
    assert "ended 1 before a question without room" in said.out and "cut " in said.out
    for row in made:  # Training reads them, answers and all.
        assert {turn.role for turn in to_turns(row)} in ({""}, {"user", "assistant"}, ALL)


@pytest.mark.parametrize(
    ("left", "options"),
    [
        pytest.param(0.0, dict(max_num_seqs=3), marks=pytest.mark.full),
        pytest.param(0.4, dict(max_num_seqs=1), marks=pytest.mark.full),
        (0.99, dict(draft="ngram", tree="chain:2")),
    ],
)
def test_a_killed_run_goes_on_and_the_rows_are_the_same(
    left: float,
    options: dict[str, Any],
    target: Path,
    data: Path,
    expected: list[dict[str, Any]],
) -> None:
    """Wherever its file ends, however many rows are answered together, whatever drafts."""
    whole = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in expected).encode()
    out = data.parent / "out.jsonl"
    settings = given(target, data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regeneration.Answering, "run", interrupted)
        assert regenerate.main(settings) == cli.INTERRUPTED
    out.write_bytes(whole[: int(left * len(whole))])
    assert regenerate.main(given(target, data, **options)) == 0
    assert out.read_bytes() == whole


def interrupted(*_: Any) -> Any:
    raise KeyboardInterrupt


def test_a_complete_file_is_left_alone(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "chats.jsonl"
    data.write_text(json.dumps(ROWS[5]) + "\n")
    out = tmp_path / "out.jsonl"
    assert regenerate.main(given(target, data)) == 0
    before = out.read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regeneration, "LongSpec", None)  # The target is not even loaded.
        assert regenerate.main(given(target, data)) == 0
    assert "has 1 rows and is complete" in capsys.readouterr().out and out.read_bytes() == before


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "other settings": (dict(seed=99), f"other settings: --seed=99 (was {SEED}); repeat them"),
    "an input": (dict(out="chats.jsonl"), "is one of the --files; name another file"),
    "somebody's file": (dict(out="mine.jsonl"), "was not written by this command"),
    "a device": (dict(out="/dev/full"), "/dev/full is a device and no file"),
    "no folder": (dict(out="absent/out.jsonl"), "its folder does not exist"),
    "no room": (dict(max_new_tokens=96), "--max_row_tokens=96 has no room for prompts next to"),
    "too long": (dict(max_row_tokens=97), "--max_row_tokens=97 is more than the target was made"),
    "text": (dict(prefix_tokens=0), "line 4 of"),
    "no file": (dict(files="absent.jsonl"), "no file matches 'absent.jsonl'"),
    "no text": (dict(chat_template=sys.executable), f"--chat_template={sys.executable} is not UTF"),
    "no target": (dict(target="absent/folder/x"), "is not a folder; name a folder with"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_sentence(
    name: str, target: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (data.parent / "mine.jsonl").write_text("{}\n")
    (data.parent / "out.jsonl").write_text('{"row": 0}\n')
    options, sentence = MISTAKES[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regeneration, "LongSpec", None)
        settings = {"--seed": SEED}
        patch.setattr(regeneration, "_settings", lambda given, *_: {"--seed": given.seed})
        (data.parent / "out.jsonl.settings").write_text(json.dumps(settings))
        assert regenerate.main(given(**{"target": target, "data": data, **options})) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.startswith("error: ") and error.count("\n") == 1


def test_a_conversation_needs_a_template(
    target: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = shutil.copytree(target, tmp_path / "bare")
    for path in bare.glob("chat_template*"):
        path.unlink()
    settings = json.loads((bare / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (bare / "tokenizer_config.json").write_text(json.dumps(settings))
    assert regenerate.main(given(bare, data)) == 2
    assert "row 1 is a conversation, and the tokenizer of" in (said := capsys.readouterr().err)
    assert "give --chat_template=FILE" in said
    (tmp_path / "template.jinja").write_text("{{ messages[9]['content'] + none }}")
    given_one = given(bare, data, chat_template=tmp_path / "template.jinja")
    assert regenerate.main(given_one) == 2
    assert "row 1 of the rows that can be read: the chat template cannot" in capsys.readouterr().err
    # Within the budget such rows are left out; the text needs no template.
    assert regenerate.main([*given_one, "--max_bad_rows=7"]) == 0
    assert [row["row"] for row in rows_of(data.parent / "out.jsonl")] == [3]
    assert "skipped 7 rows that cannot be used" in capsys.readouterr().out


def test_numbers_are_refused_as_they_are_typed(capsys: pytest.CaptureFixture[str]) -> None:
    for option, words in {
        "max_num_seqs=0": "must be a whole number from 1",
        "temperature=hot": "must be a number, >= 0",
        "tree=x": "tree",
    }.items():
        assert regenerate.main(["--target=x", "--files=x", "--out=x", f"--{option}"]) == 2
        assert words in capsys.readouterr().err
