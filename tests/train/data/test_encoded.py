"""Tokens kept on disk: of these data and no others, masks and all."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longspec_jax.sharding import make_mesh
from tests.train.tiny import run_of, source_of, write_documents
from train.data.rows import Rows
from train.data.tokens import EncodedTurn, load_tokenizer, read_encoded, write_encoded


def rows_of(target: Path, files: Path, workdir: Path, **options: Any) -> Rows:
    config = run_of(accept_rows=1, files=str(files), answer_room=8, **options)
    return source_of(config, target, workdir).split(config.stages[0], make_mesh(1, 1, 1))[0]


def held(rows: Rows) -> list[tuple[list[int], list[float], int]]:
    made = [rows[index] for index in range(len(rows))]
    return [(tokens.tolist(), weights.tolist(), length) for tokens, weights, length in made]


def test_packed_rows_keep_their_masks(target: Path, tmp_path: Path) -> None:
    files = tmp_path / "a.jsonl"
    words = [(f"why {index}?", f"so {index}.") for index in range(40)]
    lines = [json.dumps({"problem": ask, "qwq": answer}) for ask, answer in words]
    files.write_text("\n".join([*lines[:20], json.dumps({"text": "plain"}), *lines[20:]]))
    tokenizer = load_tokenizer(target)
    learned = {}
    for mask in (False, True):
        rows = rows_of(target, files, tmp_path, pack=True, mask_prompts=mask)
        assert len(rows) > 20 and all(length == 24 for *_, length in held(rows))
        told = [tokens[weights > 0] for tokens, weights, _ in (rows[i] for i in range(len(rows)))]
        learned[mask] = tokenizer.decode(np.concatenate(told))
    assert learned[False].count("<s>user") > 20 and "why" in learned[False]
    assert learned[True].count("<s>assistant\nso") > 20 and "<|bos|>plain<|eos|>" in learned[True]
    assert "why" not in learned[True] and "helpful" not in learned[True] + learned[False]
    # The same tokens, whatever is learned of them.
    assert len(list(tmp_path.glob("tokens-*"))) == 1


def test_tokens_of_other_data_are_never_used(target: Path, tmp_path: Path) -> None:
    files = write_documents(tmp_path / "a.jsonl", 30)
    first = held(rows_of(target, files, tmp_path, pack=True))
    assert held(rows_of(target, files, tmp_path, pack=True)) == first
    # The same name, the same size.
    files.write_text(files.read_text().replace("draft", "tiger"))
    second = held(rows_of(target, files, tmp_path, pack=True))
    assert second != first
    assert held(rows_of(target, files, tmp_path, pack=True, turn="{role}: {content}")) != second
    assert len(list(tmp_path.glob("tokens-*"))) == 3


def test_a_killed_writer_leaves_nothing_to_be_read(tmp_path: Path) -> None:
    documents = [
        [EncodedTurn(np.asarray([1, 2, 3]), "user"), EncodedTurn(np.asarray([4]), "assistant")],
        [EncodedTurn(np.asarray([], np.int32), "")],
        [EncodedTurn(np.asarray([5, 6]), "")],
    ]

    def broken() -> Any:
        yield documents[0]
        raise KeyboardInterrupt

    folder = tmp_path / "tokens"
    with pytest.raises(KeyboardInterrupt):
        write_encoded(folder, broken(), 9, str)
    assert not folder.exists()
    write_encoded(folder, documents, 9, lambda: "skipped 1 row")
    made = read_encoded(folder)
    assert len(made) == 3 and made.skipped == "skipped 1 row" and made.tokens.dtype == np.uint16
    for index, turns in enumerate(documents):
        assert [(ids.tolist(), role) for ids, role in made[index]] == [
            (ids.tolist(), role) for ids, role in turns
        ]
