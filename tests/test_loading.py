"""Tokenizers of a target: damaged ones are refused by file, and code of theirs is never run."""

import functools
import json
import os
import shutil
import sys
import threading
import time
from pathlib import Path

import jax
import pytest

from longspec_jax import loading
from longspec_jax.embedded import DEMO
from longspec_jax.loading import check_weights_fit, load_tokenizer, load_with_tokenizer
from longspec_jax.models.target import Target
from longspec_jax.weights.hf_config import target_config
from longspec_jax.weights.json_files import read_json
from tests.children import ran
from tests.kit import each_row
from tests.vicuna import save_sentences
from train.data.tokens import load_tokenizer as load_for_training

ADVICE = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")
LOADERS = pytest.mark.parametrize("load", [load_tokenizer, load_for_training])


@pytest.fixture
def folder(tmp_path):
    """The demo's tokenizer and configuration."""
    for name in FILES:
        shutil.copy(DEMO / "target" / name, tmp_path / name)
    return tmp_path


@pytest.mark.multiproc
@each_row(
    ("script", "printed"),
    [
        # The notice that models will not be available is left out here, and told to other users.
        (f"import os; load_tokenizer(folder); print(os.environ.get({ADVICE!r}))", "None"),
        # Importing PyTorch takes longer than all else that a small model needs to begin.
        (
            "import sys; load_tokenizer(folder)\n"
            "print('transformers' in sys.modules, 'torch' in sys.modules)",
            "True False",
        ),
        # A second call after a refused target meets the first one's import of transformers.
        (
            "from concurrent.futures import ThreadPoolExecutor\n"
            "with ThreadPoolExecutor(2) as pool:\n"
            "    print(len([*pool.map(load_tokenizer, [folder] * 2)]))",
            "2",
        ),
    ],
)
def test_a_process_loads_its_first_tokenizer_without_torch(
    folder: Path, monkeypatch: pytest.MonkeyPatch, script: str, printed: str
) -> None:
    monkeypatch.delenv(ADVICE, raising=False)  # The commands, which other tests run, keep it.
    head = f"from longspec_jax.loading import load_tokenizer\nfolder = {str(folder)!r}\n"
    ended = ran("-c", head + script, TRANSFORMERS_VERBOSITY="warning")
    assert ended.printed == f"{printed}\n" and "PyTorch" not in ended.errors, ended


def test_weights_are_read_while_the_tokenizer_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits until the other has begun, and the environment stays as it is."""
    before = dict(os.environ)
    begun = threading.Barrier(2)

    def tokenizer(source: str, revision: str | None) -> str:
        begun.wait(timeout=30)
        assert os.environ == before
        return f"tokenizer of {source} at {revision}"

    def target(source: str, dtype: str, **options: object) -> tuple[str, object]:
        begun.wait(timeout=30)
        return dtype, options

    monkeypatch.setattr(loading, "load_tokenizer", tokenizer)
    monkeypatch.setattr(loading, "load_target", target)
    loaded = load_with_tokenizer("here", "float32", revision="main")
    options = {"mesh": None, "revision": "main", "kv_dtype": None, "adapter": None}
    assert loaded == ("float32", options, "tokenizer of here at main")


def test_a_given_tokenizer_is_taken_and_none_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "load_tokenizer", None)
    monkeypatch.setattr(loading, "load_target", lambda *_, **options: ("config", options))
    how = {"revision": "main", "kv_dtype": "fp8", "adapter": "there"}
    given = load_with_tokenizer("here", "float32", tokenizer="mine", **how)
    assert given == ("config", {"mesh": None, **how}, "mine")


def test_a_refused_target_does_not_wait_for_its_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = threading.Event()

    def target(source: str, dtype: str, **options: object) -> None:
        raise ValueError("no such architecture")

    monkeypatch.setattr(loading, "load_tokenizer", lambda *_: refused.wait(timeout=30))
    monkeypatch.setattr(loading, "load_target", target)
    start = time.monotonic()
    with pytest.raises(ValueError, match="no such architecture"):
        load_with_tokenizer("here", "float32")
    refused.set()
    assert time.monotonic() - start < 20


def test_a_damaged_tokenizer_is_refused_beside_good_weights(folder) -> None:
    shutil.copy(DEMO / "target" / "model.safetensors", folder)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json: the tokenizer cannot be read"):
        load_with_tokenizer(folder, "float32")


@pytest.mark.parametrize("text", ["import os", " Grüße, 東京 \n\t<|eos|>x", ""])
def test_a_generic_tokenizer_is_the_automatic_one(folder, text) -> None:
    from transformers import AutoTokenizer

    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert type(ours) is type(theirs) and len(ours) == len(theirs)
    assert ours(text).input_ids == theirs(text).input_ids
    assert ours.decode(ours(text).input_ids) == theirs.decode(theirs(text).input_ids)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "vocab_size", "chat_template"):
        assert getattr(ours, name) == getattr(theirs, name)


def _edit(path, **values) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def _evil(folder) -> None:
    """Code that leaves a trace if it runs."""
    (folder / "evil.py").write_text(
        "import pathlib\npathlib.Path(__file__).with_name('ran').touch()\n"
        f"pathlib.Path({str(folder / 'ran')!r}).touch()\nclass Evil: pass\nEvil2 = Evil\n"
    )


CODE = {
    "slow": {"AutoTokenizer": ["evil.Evil", None]},
    "fast": {"AutoTokenizer": [None, "evil.Evil"]},
    "old": ["evil.Evil", None],
    "text": "evil.Evil",
}


@pytest.mark.parametrize(
    ("code", "known", "load"),
    [*((code, True, load_tokenizer) for code in CODE), ("fast", False, load_for_training)],
)
def test_code_of_a_tokenizer_is_refused(folder, monkeypatch, code, known, load) -> None:
    """Nobody is asked, whatever they would answer."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    _evil(folder)
    name = "PreTrainedTokenizerFast" if known else "Evil"
    _edit(folder / "tokenizer_config.json", auto_map=CODE[code], tokenizer_class=name)
    message = "tokenizer_config.json: auto_map=.*evil.Evil.* never run.*pass tokenizer="
    with pytest.raises(ValueError, match=message):
        load(folder)
    assert not (folder / "ran").exists()


@LOADERS
@pytest.mark.parametrize("model_type", ["llama", "evil"])
def test_code_of_a_configuration_is_not_run(folder, monkeypatch, model_type, load) -> None:
    """The tokenizer loads without it; the target with such a file is refused."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    _evil(folder)
    auto_map = {"AutoConfig": "evil.Evil", "AutoTokenizer": ["evil.Evil", None]}
    _edit(folder / "config.json", auto_map=auto_map, model_type=model_type)
    assert load(folder)("import os").input_ids
    assert not (folder / "ran").exists()
    with pytest.raises(ValueError, match="config.json: auto_map=.*never run.*remove the entry"):
        target_config(read_json(folder / "config.json"), "float32")


def test_an_unknown_class_without_code_is_its_tokenizer_json(folder) -> None:
    _edit(folder / "tokenizer_config.json", tokenizer_class="EvilTokenizer")
    expected = load_tokenizer(DEMO / "target")("import os").input_ids
    assert load_tokenizer(folder)("import os").input_ids == expected


DAMAGED = {
    "cut": ("tokenizer.json", lambda p: p.write_text(p.read_text()[:1000])),
    "empty": ("tokenizer.json", lambda p: p.write_text("")),
    "object": ("tokenizer.json", lambda p: p.write_text("{}")),
    "list": ("tokenizer.json", lambda p: p.write_text("[1]")),
    "bytes": ("tokenizer.json", lambda p: p.write_bytes(b"\xff\xfe\x00" * 99)),
    "missing": ("tokenizer.json", lambda p: p.unlink()),
    "version": ("tokenizer.json", lambda p: _edit(p, version="x")),
    "added": ("tokenizer.json", lambda p: _edit(p, added_tokens=None)),
    "model": ("tokenizer.json", lambda p: _edit(p, model={"type": "BPE"})),
    "settings cut": ("tokenizer_config.json", lambda p: p.write_text("{")),
    "settings list": ("tokenizer_config.json", lambda p: p.write_text("[]")),
    "class": ("tokenizer_config.json", lambda p: _edit(p, tokenizer_class=5)),
    "classes": ("tokenizer_config.json", lambda p: _edit(p, tokenizer_class=["x"])),
    "token": ("tokenizer_config.json", lambda p: _edit(p, bos_token=7)),
    "length": ("tokenizer_config.json", lambda p: _edit(p, model_max_length="x")),
    "range": ("config.json", lambda p: _edit(p, initializer_range="x")),
    "id": ("config.json", lambda p: _edit(p, bos_token_id="x")),
    "eps": ("config.json", lambda p: _edit(p, rms_norm_eps="x")),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files_are_named(folder, case) -> None:
    name, damage = DAMAGED[case]
    if name == "config.json":  # Which is read for a class that depends on the model.
        _edit(folder / "tokenizer_config.json", tokenizer_class="EvilTokenizer")
    damage(folder / name)
    with pytest.raises(ValueError) as error:
        load_tokenizer(folder)
    assert str(error.value).startswith(str(folder / name)), error.value
    assert "download it again" in str(error.value) or "correct it" in str(error.value)


@pytest.fixture
def vicuna(tmp_path):
    """A folder in Vicuna's form, and what sentencepiece makes of its file."""
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"})
    )
    return tmp_path, save_sentences(tmp_path)


def test_a_tokenizer_of_sentencepiece_alone(vicuna) -> None:
    """The first target of README has no tokenizer.json."""
    folder, pieces = vicuna
    tokenizer = load_tokenizer(folder)
    assert len(tokenizer) == pieces.get_piece_size()
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    for text in ("Hello world", "Grüße, 東京 \n\t x", "a  b", "12345", "USER: hi ASSISTANT:", ""):
        found = tokenizer(text).input_ids
        assert found == [1, *pieces.encode(text)], text
        assert tokenizer.decode(found, skip_special_tokens=True).removeprefix(" ") == text


@pytest.mark.parametrize("absent", ["sentencepiece", "google.protobuf"])
def test_readers_of_sentencepiece_that_are_absent_are_named(vicuna, monkeypatch, absent) -> None:
    folder, _ = vicuna

    def refuse(*args, **options) -> None:
        raise ValueError("`tiktoken` is required to read a `tiktoken` file.")

    class Unreadable:
        from_pretrained = refuse

    monkeypatch.setattr(loading, "_imported", lambda name: Unreadable)
    monkeypatch.setitem(sys.modules, absent, None)
    package = absent.removeprefix("google.")
    words = rf"tokenizer\.model: .* not installed: pip install {package}$"
    with pytest.raises(ValueError, match=words):
        load_tokenizer(folder)


def test_a_damaged_tokenizer_of_sentencepiece_is_named(vicuna) -> None:
    folder, _ = vicuna
    file = folder / "tokenizer.model"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"tokenizer\.model: .* cannot be read.*again") as error:
        load_tokenizer(folder)
    assert "tiktoken" not in str(error.value)


def test_a_tokenizer_that_is_newer_than_the_packages(folder) -> None:
    """Its reader says that nothing matched; another download would not."""
    file = folder / "tokenizer.json"
    raw = json.loads(file.read_text())
    file.write_text(json.dumps(raw | {"model": raw["model"] | {"type": "Newer"}}))
    with pytest.raises(ValueError, match="pip install --upgrade transformers tokenizers"):
        load_tokenizer(folder)


def test_no_tokenizer(folder) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert load_tokenizer(folder) is None
    with pytest.raises(ValueError, match="comes without a tokenizer; put tokenizer.json"):
        load_for_training(folder)


def test_room_for_the_weights(monkeypatch) -> None:
    """The table of names counts the bytes that the model's own initialisation would take."""
    config = target_config(read_json(DEMO / "target" / "config.json"), "float32")
    init = functools.partial(Target(config).init, method="initialize")
    tree = jax.eval_shape(init, jax.random.key(0), jax.ShapeDtypeStruct((1, 2), "int32"))
    needed = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
    monkeypatch.setattr(loading, "free_bytes", lambda: needed)
    check_weights_fit(DEMO / "target", "float32")
    monkeypatch.setattr(loading, "free_bytes", lambda: needed - 1)
    with pytest.raises(MemoryError, match=" MB in float32 and .* MB are free on the device"):
        check_weights_fit(DEMO / "target", "float32")
