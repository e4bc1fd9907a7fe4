"""The corpus of installed distributions: licences, cleaning, duplicates, held-out text."""

import json
from dataclasses import replace
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

from tests.kit import each_row
from train.config import CorpusConfig
from train.data import corpus
from train.data.tokens import read_tokens, train_tokenizer


def metadata(**fields: Any) -> Any:
    message = Message()
    for name, value in fields.items():
        for each in value if isinstance(value, list) else [value]:
            message[name.replace("_", "-")] = each
    return message


OSI = "License :: OSI Approved :: "


@each_row(
    ("fields", "licence"),
    [
        ({"License_Expression": "MIT"}, "MIT"),
        ({"License_Expression": "Apache-2.0 AND BSD-3-Clause"}, "Apache-2.0 AND BSD-3-Clause"),
        ({"License_Expression": "MIT OR GPL-2.0-only"}, None),
        ({"License_Expression": "(MIT) AND MPL-2.0"}, None),
        ({"License_Expression": "MIT", "Classifier": OSI + "GNU General Public"}, "MIT"),
        ({"Classifier": OSI + "MIT License"}, "MIT License"),
        ({"Classifier": [OSI + "BSD License", OSI + "GNU Lesser GPL"]}, None),
        ({"Classifier": OSI + "Mozilla Public License 2.0 (MPL 2.0)"}, None),
        ({"Classifier": "License :: Other/Proprietary License"}, None),
        ({"Classifier": "License :: OSI Approved", "License": "BSD 3-Clause"}, "BSD 3-Clause"),
        ({"License": "Apache 2.0"}, "Apache 2.0"),
        ({"License": "MIT\nwith a long text behind"}, "MIT"),
        ({"License": "LGPLv3"}, None),
        ({"License": "free for non-commercial use"}, None),
        ({"License": "UNKNOWN"}, None),
        ({}, None),
    ],
)
def test_only_permissive_licences_count(fields: dict[str, Any], licence: str | None) -> None:
    assert corpus.permissive_licence(metadata(Name="x", **fields)) == licence
    assert corpus.permissive_licence(metadata(Name="nvidia-x", **fields)) is None


CODE = "".join(
    f"def function_{chr(97 + i)}(argument, another):\n    return argument\n\n" for i in range(9)
)


@each_row(
    ("path", "text", "kept"),
    [
        ("a.py", CODE, True),
        ("LICENSE.md", CODE, False),
        ("../a.py", CODE, False),
        ("a.py", CODE[:200], False),
        ("a.py", "# Automatically generated\n" + CODE, False),
        ("a.py", CODE + "x" * 601, False),
        ("a.py", "0123456789 " * 60 + "\n", False),
        ("a.py", CODE + "é" * 40, False),
        ("a.py", CODE + "<|eos|>", False),
        ("a.py", CODE + CODE.replace("function", "other") * 800, False),
    ],
)
def test_files_no_person_wrote_are_dropped(path: str, text: str, kept: bool) -> None:
    cleaned = corpus.clean_text(path, text.replace("\n", "\r\n").encode())
    assert cleaned == (text if kept else None)
    assert corpus.clean_text("a.py", b"\xff\xfe" + CODE.encode()) is None


def origin(root: Path, name: str, **files: str) -> Any:
    """A distribution of some files."""
    (root / name).mkdir()
    for file, text in files.items():
        (root / name / f"{file}.py").write_text(text)
    paths = tuple(f"{file}.py" for file in sorted(files))
    return corpus._Origin(name, "1.0", "MIT", root / name, (*paths, "absent.py"))


def variant(word: str) -> str:
    return CODE.replace("function", word)


def test_no_text_comes_twice_and_held_out_text_never_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vendored = variant("held_out_name") + "# vendored\n"
    origins = [
        origin(tmp_path, "held", a=variant("held_out_name")),
        origin(tmp_path, "one", a=variant("first_name"), b=variant("first_name") + "  \n"),
        origin(tmp_path, "two", a=variant("first_name"), b=vendored, c=variant("second_name")),
        origin(tmp_path, "big", a=variant("third_name"), b=variant("fourth_name")),
    ]
    monkeypatch.setattr(corpus, "installed_origins", lambda: origins)
    room = len(variant("fourth_name")) + 9
    config = CorpusConfig(("held", "absent"), 300, 0, room, 1000)
    corpus.build_corpus(config, tmp_path / "out")
    texts = list(corpus.read_texts(tmp_path / "out" / "train.jsonl"))
    assert texts == [variant("first_name"), variant("second_name"), variant("third_name")]
    held = list(corpus.read_texts(tmp_path / "out" / "heldout.jsonl"))
    assert held == [variant("held_out_name")]
    sources = json.loads((tmp_path / "out" / "sources.json").read_text())
    assert [(s["name"], s["files"], s["held_out"]) for s in sources] == [
        ("held", 1, True), ("one", 1, False), ("two", 1, False), ("big", 1, False),
    ]  # fmt: skip
    assert sources[1]["bytes"] == len(texts[0].encode())
    with pytest.raises(ValueError, match="none of the held-out distributions"):
        corpus.build_corpus(CorpusConfig(("absent",), 300, 0, room, 9), tmp_path / "no")


def test_what_is_there_is_used_if_it_is_of_the_same_settings_and_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origins = [origin(tmp_path, each, a=variant(f"{each}_name")) for each in ("held", "one")]
    monkeypatch.setattr(corpus, "installed_origins", lambda: origins)
    usual = CorpusConfig(("held",), 300)

    def prepared(**changes: Any) -> tuple[Path, Path]:
        config = replace(usual, **changes)
        return corpus.prepare_corpus(config, tmp_path, tmp_path / "target", lambda values: None)

    class Killed:
        def save_pretrained(self, folder: Path) -> None:
            folder.mkdir()
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(corpus, "train_tokenizer", lambda *_: Killed())
        with pytest.raises(KeyboardInterrupt):
            prepared()
    assert not (tmp_path / "tokenizer").exists()
    made = prepared()
    assert prepared() == made
    for name, was in (("max_bytes", 0), ("vocab_size", 300), ("tokenizer_bytes", 40_000_000)):
        said = rf"with other settings: {name}=299 \(was {was}\); repeat"
        with pytest.raises(ValueError, match=said):
            prepared(**{name: 299})
    train_tokenizer(["other words"], 300).save_pretrained(tmp_path / "target")
    with pytest.raises(ValueError, match="is another tokenizer than that of .*target"):
        prepared()
    made[0].write_bytes(b"{")
    with pytest.raises(ValueError, match=f"{made[0]} is damaged; remove {made[0]}, and the same"):
        read_tokens(made[0])
    texts = made[0].with_name("train.jsonl")
    texts.write_text("{")
    with pytest.raises(ValueError, match=f"{texts} is damaged; remove {texts.parent}, and the"):
        list(corpus.read_texts(texts))


def test_the_standard_library_is_listed_without_its_tests() -> None:
    library = corpus._standard_library()
    assert "json/decoder.py" in library.files and library.licence == "PSF-2.0"
    assert not any("test" in Path(file).parts for file in library.files)


def test_tokens_are_kept_under_what_they_are_of(tmp_path: Path) -> None:
    def written(folder: Path, text: str, merges: str) -> str:
        (folder / "corpus").mkdir(parents=True)
        (folder / "tokenizer").mkdir()
        (folder / "corpus" / "train.jsonl").write_text(text)
        (folder / "tokenizer" / "tokenizer.json").write_text(merges)
        file = corpus.tokens_file(folder / "corpus", "train", folder / "tokenizer")
        assert file.parent == folder / "corpus" and file.name.startswith("train-")
        return file.name

    first = written(tmp_path / "a", "{}", "x")
    assert written(tmp_path / "b", "{}", "x") == first
    assert written(tmp_path / "c", "[]", "x") != first != written(tmp_path / "d", "{}", "y")
