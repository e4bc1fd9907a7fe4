"""Messages of the library in the words of the command."""

import pytest

from infer.wording import command_words, in_command_words

FILE = ["batch.jsonl, line 1", "batch.jsonl, line 4"]


@pytest.mark.parametrize(
    ("said", "rows", "expected"),
    [
        ("temperature=-1 of row 0 must be >= 0", ["prompt"], "--temperature=-1 must be >= 0"),
        ("seed=5 of row 1 must", FILE, "--seed=5 of batch.jsonl, line 4 must"),
        ("row 0: the prompt is empty", ["report.txt"], "report.txt: the prompt is empty"),
        (
            "row 1: a prompt of 9 tokens and max_new_tokens=5 reach; lower max_new_tokens",
            FILE,
            "batch.jsonl, line 4: a prompt of 9 tokens and --max_new_tokens=5 reach; lower "
            "--max_new_tokens",
        ),
        ("row 7: no such", FILE, "row 7: no such"),
        ("draft_options=3 must be", [], "--draft_option=3 must be"),
        ("draft_options: dtype=3 must", [], "--draft_option: dtype=3 must"),
        ("draft_revision='v' is", [], "--draft_revision='v' is"),
        ("choose another implementation", [], "choose another --attention"),
        ("choose implementation='xla'", [], "choose --attention='xla'"),
        ("revision='x' chooses a revision", [], "--revision='x' chooses a revision"),
        ("without draft_vocabulary.safetensors", [], "without draft_vocabulary.safetensors"),
        ("at a temperature above 0", [], "at a temperature above 0"),
        ("--max_new_tokens=5 is typed", [], "--max_new_tokens=5 is typed"),
        ("shorten the prompt or max_new_tokens", [], "shorten the prompt or --max_new_tokens"),
    ],
)
def test_words(said, rows, expected) -> None:
    assert in_command_words(said, rows) == expected


def test_kinds_of_errors_stay() -> None:
    for kind in (ValueError, MemoryError, NotImplementedError, FileNotFoundError):
        with pytest.raises(kind, match="--top_k=1"), command_words():
            raise kind("top_k=1")
    with pytest.raises(ValueError, match="--top_k=1"), command_words():
        raise UnicodeDecodeError("utf-8", b"a", 0, 1, "top_k=1")
    with pytest.raises(KeyError), command_words():
        raise KeyError("a defect is no bad input")


@pytest.mark.parametrize("said", ["row 0: token id 9 is outside", "token id 9 is outside"])
def test_what_is_about_one_prompt_begins_with_it(said) -> None:
    with pytest.raises(ValueError, match="^a.txt: token id 9 is outside$"):
        with command_words(["a.txt"], of="a.txt"):
            raise ValueError(said)
