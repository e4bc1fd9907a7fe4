"""From a corpus to a table next to the draft, through the command."""

import json
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest

from longspec_jax.drafters.checkpoints.longspec import save_draft
from longspec_jax.drafters.checkpoints.vocabulary import FILE, load_draft_vocabulary
from longspec_jax.drafters.longspec import DraftConfig
from longspec_jax.weights.hf import save_target
from tests.kit import each_row, random_draft, random_target, tiny_target_config
from train import vocabulary
from train.data.tokens import train_tokenizer

TEXTS = ["the cat sat on the mat", "the dog sat", "a mat"]
STOP = 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A target with its tokenizer, a draft, and a corpus."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = train_tokenizer(TEXTS, 270)
    config = tiny_target_config(vocab_size=len(tokenizer) + 3)
    save_target(folder / "target", config, random_target(config), stop_tokens=(STOP,))
    tokenizer.save_pretrained(folder / "target")
    draft = DraftConfig.for_target(config)
    save_draft(folder / "draft", draft, random_draft(draft), target=config)
    (folder / "empty").mkdir()
    lines = [json.dumps({"text": text}) for text in TEXTS]
    (folder / "corpus.jsonl").write_text("\n".join(lines))
    return folder


def arguments(folder: Path, **changed: str) -> list[str]:
    values = {"target": f"{folder}/target", "draft": f"{folder}/draft"}
    values |= {"files": f"{folder}/corpus.jsonl", **changed}
    return [f"--{name}={value}" for name, value in values.items()]


def test_the_table_orders_tokens_by_count(folder: Path, capsys) -> None:
    assert vocabulary.main(arguments(folder)) == 0
    tokenizer = vocabulary.load_tokenizer(folder / "target")
    size = len(tokenizer) + 3
    table = load_draft_vocabulary(folder / "draft", size, size).tolist()
    counts = np.bincount(
        [i for text in TEXTS for i in tokenizer(text)["input_ids"]], minlength=size
    )
    special = sorted({*tokenizer.all_special_ids, STOP})
    assert table[: len(special)] == special
    assert [counts[i] for i in table[len(special) :]] == sorted(
        (counts[i] for i in range(size) if i not in special), reverse=True
    )
    printed = capsys.readouterr().out
    assert f"3 documents, {counts.sum() + 3} tokens" in printed  # An end after every document.
    assert f"--draft_option=vocabulary={size}: 100.00% of the corpus" in printed


def test_a_size_keeps_the_beginning(folder: Path, capsys) -> None:
    assert vocabulary.main(arguments(folder, size="20")) == 0
    [written] = [line for line in capsys.readouterr().out.splitlines() if FILE in line]
    assert written.endswith(f"{FILE}: 20 tokens")


BAD = {
    "draft": (dict(draft="absent"), "absent is not a folder; the table is saved next to"),
    "no draft": (dict(draft="{folder}/empty"), "empty holds no draft for this target: "),
    "a target": (dict(draft="{folder}/target"), "it is a whole language model"),
    "target": (dict(target="absent"), "absent is not a folder"),
    "files": (dict(files="absent.jsonl"), "no file matches 'absent.jsonl'"),
    "size": (dict(size="3"), "a draft vocabulary of 3 tokens is out of range"),
}


@each_row("case", BAD)
def test_bad_input_is_one_sentence(folder: Path, case: str, capsys) -> None:
    changed, message = BAD[case]
    changed = {name: value.format(folder=folder) for name, value in changed.items()}
    assert vocabulary.main(arguments(folder, **changed)) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ") and message in printed.err


def test_a_tokenizer_larger_than_the_target_is_refused(folder: Path) -> None:
    tokenizer = vocabulary.load_tokenizer(folder / "target")
    with pytest.raises(ValueError, match="and the target has 9; use the tokenizer"):
        vocabulary.count_tokens(TEXTS, tokenizer, 9)


def test_without_the_extra_it_says_what_to_type(folder: Path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert vocabulary.main(arguments(folder)) == 2
    assert "packages that are not installed (tqdm): pip install" in capsys.readouterr().err


def test_the_help_shows_a_command_that_is_taken() -> None:
    shown = next(line for line in (vocabulary.__doc__ or "").splitlines() if "train.voc" in line)
    options = vocabulary._parser().parse_args(shlex.split(shown)[3:])
    assert (options.target, options.draft) == ("TARGET", "FOLDER")
