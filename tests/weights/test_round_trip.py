"""transformers → ours → transformers, bit for bit: dtypes, several files and pickles."""

import json

import jax
import numpy as np

from longspec_jax.sharding import make_mesh
from longspec_jax.weights.hf import load_target, save_target
from tests.kit import each_row
from tests.models.families import load, make_model, torch, transformers


def _assert_same_state(actual, expected):
    actual, expected = actual.state_dict(), expected.state_dict()
    assert set(actual) == set(expected)
    for name in expected:
        assert torch.equal(actual[name], expected[name]), name


def test_bfloat16(tmp_path):
    model = make_model("qwen2-yarn").bfloat16()
    model.save_pretrained(tmp_path / "theirs")
    config, params = load_target(tmp_path / "theirs")
    assert config.dtype == "bfloat16"
    save_target(tmp_path / "ours", config, params)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert again.dtype == torch.bfloat16
    _assert_same_state(again, model)


def test_several_files_through_eight_devices(tmp_path):
    model = make_model("llama3", vocab_size=104)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="40KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    config, params = load_target(tmp_path / "theirs", mesh=make_mesh(fsdp=4, tp=2))
    save_target(tmp_path / "ours", config, params)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    _assert_same_state(again, model)


@each_row("shards", [1, 3])
def test_pickled_target(tmp_path, shards):
    """Vicuna and LongChat are stored like this, rotary frequencies next to the weights."""
    model, _, expected = load("llama-linear", tmp_path / "safetensors")
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(3)
    folder = tmp_path / "pickled"
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(folder)
    if shards == 1:
        torch.save(state, folder / "pytorch_model.bin")
    else:
        names = list(state)
        weight_map = {name: f"pytorch_model-{i % shards}.bin" for i, name in enumerate(names)}
        for file in set(weight_map.values()):
            torch.save({n: state[n] for n in names if weight_map[n] == file}, folder / file)
        index = json.dumps({"weight_map": weight_map})
        (folder / "pytorch_model.bin.index.json").write_text(index)
    _, params = load_target(folder)
    jax.tree.map(np.testing.assert_array_equal, params, expected)
