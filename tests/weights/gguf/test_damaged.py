"""Damaged, hostile and other GGUF files are refused in a sentence, and no byte is believed."""

import struct
from pathlib import Path

import numpy as np
import pytest

from longspec_jax.weights.gguf.file import read_gguf
from longspec_jax.weights.hf import load_target
from longspec_jax.weights.hub import local_model
from tests.kit import each_row
from tests.weights.gguf.files import write_gguf

KEYS = {
    "block_count": 1,
    "context_length": 64,
    "embedding_length": 32,
    "feed_forward_length": 32,
    "attention.head_count": 2,
    "attention.head_count_kv": 1,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
SHAPES = {
    "token_embd": (7, 32),
    "output_norm": (32,),
    "blk.0.attn_norm": (32,),
    "blk.0.ffn_norm": (32,),
    "blk.0.attn_q": (32, 32),
    "blk.0.attn_k": (16, 32),
    "blk.0.attn_v": (16, 32),
    "blk.0.attn_output": (32, 32),
    "blk.0.ffn_gate": (32, 32),
    "blk.0.ffn_up": (32, 32),
    "blk.0.ffn_down": (32, 32),
}

GEMMA4 = {"attention.sliding_window_pattern": [False], "attention.key_length_swa": 16}

NONE: dict = {}


def write(path: Path, architecture="llama", keys=NONE, tensors=NONE, tokenizer=None, types=None):
    """A model of one layer; ``keys`` and ``tensors`` replace its own, None leaves one out."""
    draw = np.random.default_rng(0)
    shapes = {name: shape for name, shape in (SHAPES | tensors).items() if shape}
    all_keys = {key: value for key, value in (KEYS | keys).items() if value is not None}
    weights = ((f"{name}.weight", draw.normal(size=shape)) for name, shape in shapes.items())
    kinds = types or (lambda name, weights: "Q8_0" if weights.ndim > 1 else "F32")
    write_gguf(path, architecture, all_keys, weights, kinds, tokenizer)
    return path


@pytest.fixture
def file(tmp_path):
    return write(tmp_path / "model.gguf")


@each_row(
    ("changes", "message"),
    [
        (dict(architecture="qwen1"), "the architecture 'qwen1' is not read from GGUF files; llama"),
        (dict(architecture="clip"), "what a model sees with .mmproj., without a language model"),
        (dict(architecture="eagle3"), "a draft without its target"),
        (dict(architecture="gemma4-assistant"), "a draft that reads its target's keys"),
        (dict(architecture="gemma4"), "pattern=None must be true or false for each layer"),
        (dict(architecture="gemma4", keys=GEMMA4), "rope_freqs.weight must be numbers of 1, and"),
        (dict(tensors={"token_embd": None}), "without embeddings or .*: a part of a model"),
        (dict(keys={"attention.clamp_kqv": 8.0}), "llama.attention.clamp_kqv=8.0 is a key of the"),
        (dict(keys={"expert_count": 8}), "expert_count=8 is not supported, only 0"),
        (dict(keys={"rope.scaling.type": "dynamic", "rope.scaling.factor": 2.0}), "only none, lin"),
        (dict(keys={"attention.value_length": 8}), "value_length=8 is not supported, only 16"),
        (dict(keys={"block_count": "one"}), "num_hidden_layers='one' must be a whole number"),
        (dict(keys={"block_count": 500}), "num_hidden_layers=500, but the weights next to it hold"),
        (dict(keys={"attention.head_count": [2, 4]}), "all layers are alike"),
        (dict(keys={"vocab_size": 8}), "vocab_size=8 must be 7, the rows of token_embd"),
        (
            dict(tensors={"blk.0.attn_gate": (32, 32)}),
            "no rule of the architecture llama names blk",
        ),
        (dict(tensors={"blk.0.attn_q": (48, 32)}), r"q_proj.weight is \(48, 32\), must be"),
        (dict(tensors={"blk.0.attn_v": None}), "missing model.layers.0.self_attn.v_proj.weight"),
        (dict(types=lambda name, weights: "F64"), "number 28, which is"),
    ],
)
def test_other_models_are_refused_by_name(tmp_path, changes, message):
    path = write(tmp_path / "model.gguf", **changes)
    with pytest.raises(ValueError, match=message) as error:
        load_target(path, dtype="float32")
    assert str(error.value).startswith((str(path), "the tensors of"))
    assert len(str(error.value)) < 700


def test_values_that_are_not_finite_are_refused(tmp_path):
    path = write(tmp_path / "model.gguf")
    stored = read_gguf(path).tensors["blk.0.ffn_up.weight"]
    content = bytearray(path.read_bytes())
    content[stored.start : stored.start + 2] = np.float16(np.inf).tobytes()
    path.write_bytes(content)
    with pytest.raises(ValueError, match="mlp.up_proj.weight holds NaN or infinite values"):
        load_target(path, dtype="float32")


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, b"GGML", "is not a GGUF file: it begins with b'GGML'"),
        (0, b"version https", "git-lfs pointer"),
        (4, struct.pack("<I", 1), "is of version 1, not 2 or 3"),
        (4, struct.pack(">I", 3), "is of the other byte order"),
        (8, struct.pack("<Q", 2**60), "ends within its header, before .* tensors"),
        (16, struct.pack("<Q", 2**63), "ends within its header, before .* keys"),
        (24, struct.pack("<Q", 2**62), "has a text of 4611686018427387904 bytes"),
    ],
)
def test_hostile_headers(file, at, value, message):
    content = bytearray(file.read_bytes())
    content[at : at + len(value)] = value
    file.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_gguf(file)


def test_truncated_files(file):
    """At every length, without a long wait or a large allocation."""
    content = file.read_bytes()
    for length in [*range(0, 2000, 13), len(content) - 1]:
        file.write_bytes(content[:length])
        with pytest.raises(ValueError, match="model.gguf"):
            load_target(file, dtype="float32")


def test_damaged_bytes_load_or_are_refused(file):
    """A header with any byte changed is refused in a sentence, or means what it says."""
    content, draw, refused = file.read_bytes(), np.random.default_rng(1), 0
    header = min(tensor.start for tensor in read_gguf(file).tensors.values())
    for at in draw.choice(header, 400, replace=False):
        damaged = bytearray(content)
        damaged[at] = draw.integers(256)
        file.write_bytes(damaged)
        try:
            load_target(file, dtype="float32")
        except (ValueError, FileNotFoundError) as error:
            refused += 1
            assert "model.gguf" in str(error)
    assert refused > 200


def split(folder: Path, count: int = 2) -> list[Path]:
    """A model in several files, as ``llama-gguf-split`` writes them."""
    names = [*SHAPES]
    parts = []
    for index in range(count):
        own = {name: None for name in names if names.index(name) % count != index}
        keys = {} if index == 0 else dict.fromkeys(KEYS)
        parts.append(
            write(
                folder / f"model-{index + 1:05}-of-{count:05}.gguf",
                keys=keys,
                tensors=own,
                tokenizer={"split.count": count, "split.no": index},
            )
        )
    return parts


def test_split_files_are_read_as_one(tmp_path, file):
    (tmp_path / "split").mkdir()
    parts = split(tmp_path / "split")
    for source in (parts[1], tmp_path / "split"):
        config, params = load_target(source, dtype="float32")
        assert config == load_target(file, dtype="float32")[0]
    parts[1].unlink()
    with pytest.raises(FileNotFoundError, match="model-00002-of-00002.gguf is missing; put all"):
        load_target(parts[0], dtype="float32")


def test_a_part_under_another_name(tmp_path):
    path = split(tmp_path)[0].rename(tmp_path / "model.gguf")
    with pytest.raises(ValueError, match="split.count=2 says how many files.*keep the names"):
        load_target(path, dtype="float32")


def test_a_folder_of_one_file(tmp_path, file):
    """What a model sees with, and a tokenizer or a configuration, do not count."""
    (tmp_path / "mmproj-model.gguf").touch()
    (tmp_path / "config.json").write_text("{}")
    assert local_model(tmp_path) == file
    assert load_target(tmp_path, dtype="float32")[0].num_layers == 1
    write(tmp_path / "other.gguf")
    with pytest.raises(ValueError, match="has 2 GGUF files.*name one of them: .*/model.gguf"):
        local_model(tmp_path)


def test_no_other_package_is_needed(file, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    assert load_target(file, dtype="float32")[0].num_layers == 1
