"""Only the target loads from a checkpoint of a model that also sees."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from longspec_jax.config.layers import QueryScaling, YarnRopeScaling
from longspec_jax.weights.hf import load_target, save_target
from tests.decoding.layers import GEMMA4
from tests.kit import each_row, random_target, tiny_target_config

CONFIG = tiny_target_config(
    architecture="Ministral3ForCausalLM",
    rope_scaling=YarnRopeScaling.usual(4.0, 32),
    max_positions=128,
    query_scaling=QueryScaling(0.1, 32),
)


MISTRAL = CONFIG, "Mistral3ForConditionalGeneration"


@each_row(
    ("config", "outer", "inside", "beside"),
    [
        (*MISTRAL, "language_model.{}", "vision_tower.patch_conv.weight"),
        (*MISTRAL, "model.language_model.{}", "vision_tower.patch_conv.weight"),
        *(
            (GEMMA4.config, "Gemma4ForConditionalGeneration", "model.language_model.{}", name)
            for name in ("model.embed_vision.embedding_projection.weight", "model.audio_tower.w")
        ),
    ],
)
def test_only_tensors_of_the_target_are_read(tmp_path, config, outer, inside, beside):
    params = random_target(config)
    save_target(tmp_path, config, params)
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["architectures"]
    whole = dict(architectures=[outer], text_config=raw)
    (tmp_path / "config.json").write_text(json.dumps(whole))
    tensors = load_file(tmp_path / "model.safetensors")
    if inside.startswith("model."):
        named = {f"model.language_model.{n.removeprefix('model.')}": t for n, t in tensors.items()}
        if not config.tied_embeddings:
            named["lm_head.weight"] = named.pop("model.language_model.lm_head.weight")
    else:
        named = {inside.format(name): tensor for name, tensor in tensors.items()}
    seen = {beside: np.zeros(3, np.float32)}
    save_file(named | seen, tmp_path / "model.safetensors")
    again, found = load_target(tmp_path)
    assert again == config
    jax.tree.map(np.testing.assert_array_equal, found, params)


def test_keys_of_a_layer_that_reads_others_are_dropped(tmp_path):
    """Gemma 4's published files hold them. Of any other layer such a tensor is refused."""
    config, params = GEMMA4.config, random_target(GEMMA4.config)
    save_target(tmp_path, config, params)
    file = tmp_path / "model.safetensors"
    tensors, more = load_file(file), "model.layers.{}.self_attn.v_proj.weight"
    save_file(tensors | {more.format(5): np.zeros((16, 36), np.float32)}, file)
    jax.tree.map(np.testing.assert_array_equal, load_target(tmp_path)[1], params)
    save_file(tensors | {more.format(3): np.zeros((16, 36), np.float32)}, file)
    with pytest.raises(ValueError, match="unexpected model.layers.3.self_attn.v_proj.weight"):
        load_target(tmp_path)
