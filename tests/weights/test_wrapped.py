"""The target inside a checkpoint of a model that also sees loads alone."""

import json

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

from longspec_jax.config.layers import QueryScaling, YarnRopeScaling
from longspec_jax.weights.hf import load_target, save_target
from tests.kit import each_row, random_target, tiny_target_config

CONFIG = tiny_target_config(
    architecture="Ministral3ForCausalLM",
    rope_scaling=YarnRopeScaling.usual(4.0, 32),
    max_positions=128,
    query_scaling=QueryScaling(0.1, 32),
)


@each_row("inside", ["language_model.{}", "model.language_model.{}"])
def test_tensors_of_the_target_alone_are_read(tmp_path, inside):
    params = random_target(CONFIG)
    save_target(tmp_path, CONFIG, params)
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["architectures"]
    outer = dict(architectures=["Mistral3ForConditionalGeneration"], text_config=raw)
    (tmp_path / "config.json").write_text(json.dumps(outer))
    tensors = load_file(tmp_path / "model.safetensors")
    if inside.startswith("model."):
        named = {f"model.language_model.{n.removeprefix('model.')}": t for n, t in tensors.items()}
        named["lm_head.weight"] = named.pop("model.language_model.lm_head.weight")
    else:
        named = {inside.format(name): tensor for name, tensor in tensors.items()}
    seen = {"vision_tower.patch_conv.weight": np.zeros(3, np.float32)}
    save_file(named | seen, tmp_path / "model.safetensors")
    config, found = load_target(tmp_path)
    assert config == CONFIG
    jax.tree.map(np.testing.assert_array_equal, found, params)
