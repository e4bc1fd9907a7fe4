"""Every value of a model's files, replaced by every wrong one: refused or harmless."""

import dataclasses
import json
import math
from contextlib import ExitStack

import numpy as np
import pytest
from safetensors.numpy import save_file

from longspec_jax.config.target import TargetConfig
from longspec_jax.drafters.checkpoints import longspec as checkpoint
from longspec_jax.weights import hf_config
from longspec_jax.weights.checkpoint import open_tensors
from longspec_jax.weights.hf import load_stop_tokens, load_target, save_target
from longspec_jax.weights.json_files import JsonObject, read_json
from tests.kit import each_row, random_target, tiny_target_config
from tests.weights import test_hf_config as hf

WRONG = (None, "", "x", "4", -1, 0, 1.5, math.nan, math.inf, 1e308)
WRONG += ([], [1], {}, {"x": 1}, True, 2**70)
LINEAR = {"type": "linear", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", **hf.LLAMA3}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 512,
    "attention_factor": 1.1,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": True,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
}
LONGROPE = {
    "original_max_position_embeddings": 512,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0, 1.5, 2.0],
        "long_factor": [1.0, 2.0, 4.0],
    },
}
ABSENT = "rope_scaling", "rope_parameters", "rope_condense_ratio", "partial_rotary_factor"
ABSENT += "auto_map", "quantization_config", "dtype", "sliding_window"
BASE = hf.BASE | {
    **dict.fromkeys(ABSENT),
    "head_dim": 6,
    "max_sequence_length": 1024,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "eos_token_id": [2, 3],
    "use_sliding_window": False,
    "longspec_window": 512,
}
FILES = {
    "plain": BASE,
    "linear": BASE | {"rope_scaling": LINEAR},
    "llama3": BASE | {"rope_scaling": LLAMA3},
    "five": BASE | {"rope_theta": None, "rope_parameters": LLAMA3 | {"rope_theta": 5e5}},
    "window": BASE
    | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": True},
    "mistral": BASE | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"},
    "yarn": BASE | {"rope_scaling": YARN},
    "phi3": BASE | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"} | LONGROPE,
    "smollm3": BASE
    | {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "no_rope_layers": [1, 0],
        "no_rope_layer_interval": 2,
    },
    "granite": BASE
    | {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "shared_intermediate_size": 53,
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.1,
        "logits_scaling": 8.0,
        "residual_multiplier": 0.2,
        "layer_types": ["attention", "full_attention"],
        "num_local_experts": 0,
        "position_embedding_type": "rope",
    },
    "by type": BASE | {"architectures": None, "head_dim": None},
}
TARGET = tiny_target_config()
PARTS = ("rope_scaling", "rope_parameters")


def _mutations(values):
    """Every key, and every key of an object inside, with every wrong value."""
    for key in values:
        for wrong in WRONG:
            yield key, wrong, values | {key: wrong}
        if isinstance(values[key], dict):
            for inner in values[key]:
                for wrong in WRONG:
                    yield inner, wrong, values | {key: values[key] | {inner: wrong}}


def _target(raw):
    stop = hf_config.stop_tokens(raw)
    assert all(type(token) is int and 0 <= token < 2**31 for token in stop)
    return hf_config.target_config(raw)


def _draft(raw):
    return checkpoint.draft_config(raw, TARGET)


@each_row("read", [_target, _draft])
@each_row("name", FILES)
def test_every_key_with_every_wrong_value(name, read):
    """The outcome is an error in a sentence, or a configuration of sound numbers.

    The sentence names file, key and value, and has a remedy.
    """
    refused = 0
    for key, wrong, values in _mutations(FILES[name]):
        try:
            config = read(JsonObject(values, "model/config.json"))
        except (ValueError, NotImplementedError) as error:
            message = str(error)
            shown = wrong not in (None, "") and not isinstance(wrong, list | dict)
            assert message.startswith("model/config.json") and key in message, (key, error)
            assert not shown or repr(wrong) in message, (wrong, error)
            assert "; " in message and len(message) < 700, error
            refused += 1
        else:
            _check_sound(config)
    assert refused > 100


def _check_sound(config):
    """Whole sizes and finite numbers, of exactly these types."""
    for field in dataclasses.fields(config):
        match value := getattr(config, field.name):
            case bool() | str() | None:
                pass
            case int():
                assert 0 < value < 2**31, (field.name, value)
            case float():
                assert 0 < value <= 1e30, (field.name, value)
            case tuple():
                for part in value:
                    is_number = isinstance(part, int | float)
                    assert is_number and part >= 0 or _check_sound(part) is None, (field.name, part)
            case _:
                _check_sound(value)
    if isinstance(config, TargetConfig):
        assert type(config.tied_embeddings) is bool


@each_row(
    ("values", "message"),
    [
        ({"num_hidden_layers": 10**9}, "must be a whole number from 1 to 1024"),
        ({"architectures": "LlamaForCausalLM"}, "must be a list of texts"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps=nan is not a finite number"),
        ({"head_dim": 7}, "head_width=7 must be even.*head_dim"),
        ({"auto_map": {"AutoModel": "a.B"}}, "code that comes with a model is never run"),
        (
            {"head_dim": None, "num_attention_heads": 5},
            "num_attention_heads=5 must divide hidden_size=36",
        ),
        (
            {"max_position_embeddings": 2**30, "rope_scaling": LINEAR},
            "max_position_embeddings=1073741824 times the factor 4",
        ),
    ],
)
def test_refusals_name_the_file_and_the_rule(tmp_path, values, message):
    """Sizes that do not go together, and what is wrong by itself in words of its own."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(BASE | values))
    with pytest.raises(ValueError, match=f"^{path}: .*{message}"):
        _target(read_json(path))


@each_row("file", ["config.json", "generation_config.json"])
@each_row("wrong", [101, -1, "</s>", 2.0, True, [2, None], [2**70], math.nan])
def test_stop_tokens_are_tokens(tmp_path, file, wrong):
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    values = BASE if file == "config.json" else {}
    (tmp_path / file).write_text(json.dumps(values | {"eos_token_id": wrong}))
    with pytest.raises(ValueError) as error:
        load_stop_tokens(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / file}: eos_token_id=")
    if wrong is not math.nan:
        assert "whole numbers from 0 to 100" in str(error.value)


NO_OBJECT = "is not valid JSON|holds .+, must hold an object"
NO_JSON: list[tuple[str | bytes, str]] = [
    *((text, NO_OBJECT) for text in ("", "{", "[]", "5", "null", '"x"')),
    *((text, "is not valid JSON") for text in ("\ufeff{}", "9" * 5000, b"\xff\xfe\x00")),
    *((text * 50_000, "is not valid JSON") for text in ("{{", "[[", '{"a": ')),
    # The documentation tells to edit it, so a comma too many is no damage of a download.
    ('{"rope_theta": 5e5,}', "correct what was changed in it, or download it again"),
    # Readers disagree about which one counts.
    ('{"a": 1, "b": 2, "a": 1}', "is not valid JSON .the key 'a' is given 2 times"),
    ('{"c": [{"a": 1, "a": 2}]}', "is not valid JSON .the key 'a' is given 2 times"),
    *(
        (f'{{"a": [0, {number}]}}', r": a.1=\S+ is not a finite number")
        for number in ("NaN", "1e999", "-Infinity")
    ),
]


@each_row(("text", "message"), NO_JSON)
def test_files_that_are_no_json_objects(tmp_path, text, message):
    path = tmp_path / "config.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=f"config.json.*({message})"):
        read_json(path)


def test_more_layers_than_the_files_hold(tmp_path):
    """Refused before a table of them is made; a few more are reported tensor by tensor."""
    config = tiny_target_config()
    save_target(tmp_path, config, random_target(config))
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"num_hidden_layers": 1000}))
    message = (
        r"config.json: num_hidden_layers=1000, but .* hold 21 tensors of 2 layers; use the file"
    )
    with pytest.raises(ValueError, match=message):
        load_target(tmp_path)


OUTSIDE = ("../model.safetensors", "/etc/passwd", "/tmp/model.safetensors", "a/model.safetensors")
ODD = (
    "",
    ".",
    "..",
    "..\\model.safetensors",
    "C:model.safetensors",
    "x\0.safetensors",
    "config.json",
)
TYPES = (5, None, ["model.safetensors"], True, {"file": "model.safetensors"})


@each_row("name", [*OUTSIDE, *ODD, *TYPES, "pytorch_model.bin", "\ud800.safetensors"])
def test_an_index_stays_in_its_folder(tmp_path, name):
    """What it names outside exists and would load."""
    folder = tmp_path / "model"
    (folder / "a").mkdir(parents=True)
    for place in (tmp_path, folder / "a"):
        save_file({"secret": np.zeros(3, np.float32)}, place / "model.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"secret": name}}))
    with (
        ExitStack() as stack,
        pytest.raises(ValueError, match="must be the plain name of a .safet"),
    ):
        open_tensors(folder, stack)
    with ExitStack() as stack, pytest.raises(ValueError) as error:
        open_tensors(folder, stack)
    assert str(error.value).startswith(f"{index}, weight_map: secret=")


@each_row("value", ["x", 5, ["model.safetensors"], True])
def test_a_weight_map_that_is_none(tmp_path, value):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": value}))
    with ExitStack() as stack, pytest.raises(ValueError, match="weight_map=.* must be an object"):
        open_tensors(tmp_path, stack)


def test_an_index_of_pickles_names_pickles(tmp_path):
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"secret": "/etc/passwd"}}))
    with ExitStack() as stack, pytest.raises(ValueError, match="plain name of a .bin file"):
        open_tensors(tmp_path, stack)


def test_shards_may_be_links(tmp_path):
    """As in the hub's cache, where a snapshot is links to blobs outside of it."""
    blob = tmp_path / "blob"
    save_file({"a": np.zeros(3, np.float32)}, blob)
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (folder / "model-00001-of-00001.safetensors").symlink_to("../blob")
    weight_map = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(weight_map))
    with ExitStack() as stack:
        assert set(open_tensors(folder, stack)) == {"a"}
