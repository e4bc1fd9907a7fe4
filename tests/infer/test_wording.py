"""Messages of the library in the words of the command."""

import pytest

from infer.wording import command_words, in_command_words
from longspec_jax.checks import Refused
from tests.kit import each_row

FILE = ["batch.jsonl, line 1", "batch.jsonl, line 4"]


@each_row(
    ("said", "rows", "expected"),
    [
        (Refused("temperature", -1, ">= 0", 0), ["prompt"], "--temperature=-1 must be >= 0"),
        (Refused("seed", 5, "0", 1), FILE, "--seed=5 of batch.jsonl, line 4 must be 0"),
        (Refused("draft_options", 3, "0"), [], "--draft_option=3 must be 0"),
        (Refused("draft_options: dtype", 3, "text"), [], "--draft_option: dtype=3 must be text"),
        (ValueError("stop_strings holds 99 texts"), [], "--stop holds 99 texts"),
        (ValueError("row 0: the prompt is empty"), ["a.txt"], "a.txt: the prompt is empty"),
        (ValueError("row 1: a prompt of 9"), FILE, "batch.jsonl, line 4: a prompt of 9"),
        (ValueError("row 7: no such"), FILE, "row 7: no such"),
        (ValueError("shorten it or max_new_tokens"), [], "shorten it or max_new_tokens"),
    ],
)
def test_words(said, rows, expected) -> None:
    assert in_command_words(said, rows) == expected


def test_kinds_of_errors_stay() -> None:
    for kind in (ValueError, MemoryError, NotImplementedError, FileNotFoundError):
        with pytest.raises(kind, match="top_k=1"), command_words():
            raise kind("top_k=1")
    with pytest.raises(ValueError, match="top_k=1"), command_words():
        raise UnicodeDecodeError("utf-8", b"a", 0, 1, "top_k=1")
    with pytest.raises(KeyError), command_words():
        raise KeyError("a defect is no bad input")


@each_row("said", ["row 0: token id 9 is outside", "token id 9 is outside"])
def test_what_is_about_one_prompt_begins_with_it(said) -> None:
    with pytest.raises(ValueError, match="^a.txt: token id 9 is outside$"):
        with command_words(["a.txt"], of="a.txt"):
            raise ValueError(said)
