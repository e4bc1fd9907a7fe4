"""The output file: one writer, whole lines, and where to continue."""

import os
from pathlib import Path

import pytest

from train.regeneration import Output, check_no_input


def test_one_file_has_one_writer(tmp_path: Path) -> None:
    output = Output(tmp_path / "out.jsonl", {})
    with pytest.raises(ValueError, match="another process is writing"):
        Output(tmp_path / "out.jsonl", {})
    output.append([{"row": 4}])
    output.close()
    again = Output(tmp_path / "out.jsonl", {})
    assert (again.rows, again.next_row) == (1, 5)
    again.close()
    (tmp_path / "out.jsonl").write_text('{"row": 4}\n{"other": 1}\n')
    with pytest.raises(ValueError, match="this command did not write the last line of"):
        Output(tmp_path / "out.jsonl", {})


def test_a_line_that_was_cut_off_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    rows = [{"row": row, "text": "é" * row} for row in range(4)]
    output = Output(path, {"--seed": 1})
    output.append(rows[:2])
    output.append([])
    output.append(rows[2:])
    output.close()
    whole = path.read_bytes()
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        output = Output(path, {"--seed": 1})
        assert output.rows == output.next_row == whole[:length].count(b"\n")
        output.append(rows[output.next_row :])
        output.close()
        assert path.read_bytes() == whole


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    output = Output(path, {"--seed": 1, "--top_k": 0})
    output.append([{"row": 0}])
    output.close()
    with pytest.raises(ValueError, match="other settings: --seed=2 .was 1.; repeat them"):
        Output(path, {"--seed": 2, "--top_k": 0})
    (tmp_path / "out.jsonl.settings").unlink()
    with pytest.raises(ValueError, match="out.jsonl.settings is missing or damaged"):
        Output(path, {"--seed": 1, "--top_k": 0})


def test_an_input_by_any_name_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text("{}\n")
    os.link(file, tmp_path / "hard.jsonl")
    (tmp_path / "soft.jsonl").symlink_to(file)
    for name in ("chats.jsonl", "hard.jsonl", "soft.jsonl", "../" + tmp_path.name + "/chats.jsonl"):
        with pytest.raises(ValueError, match="is one of the --files"):
            check_no_input(tmp_path / name, [file])
    check_no_input(tmp_path / "other.jsonl", [file])
