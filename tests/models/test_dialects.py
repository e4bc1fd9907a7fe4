"""Files in other dialects mean what transformers 5 reads in them: the same logits."""

import json
import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from longspec_jax.decoding.target import TargetModel
from longspec_jax.weights.hf import load_target, load_target_config, target_bytes
from tests.kit import each_row
from tests.models.families import LLAMA3, YARN, make_model, torch, transformers

pytestmark = pytest.mark.full

LENGTH = 44
"""Longer than the range before a scaling, which is 32 or 64 tokens with a factor."""


def _without(values: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in keys}


ROPES: dict[str, tuple[str, dict[str, Any]]] = {
    "default in the scaling": (
        "llama3",
        dict(rope_scaling=dict(rope_type="default", rope_theta=5e5)),
    ),
    "llama3 in the scaling": ("llama3", dict(rope_scaling=LLAMA3)),
    "linear, old name of the type": (
        "llama3",
        dict(rope_scaling=dict(type="linear", factor=4.0, rope_theta=5e5)),
    ),
    "yarn in the scaling": ("llama3", dict(rope_scaling=YARN | dict(rope_theta=5e5))),
    "range beside llama3": (
        "llama3",
        dict(
            rope_scaling=_without(LLAMA3, "original_max_position_embeddings"),
            original_max_position_embeddings=16,
        ),
    ),
    "a share in the scaling": (
        "glm4",
        dict(
            rope_scaling=dict(rope_type="default", rope_theta=5e5, partial_rotary_factor=0.25),
        ),
    ),
    "base in the scaling of some layers": (
        "gemma3",
        dict(
            rope_scaling=dict(rope_type="linear", factor=8.0, rope_theta=5e5),
            rope_local_base_freq=2e4,
        ),
    ),
}


def _edit(folder: Path, *removed: str, **values: Any) -> None:
    file = folder / "config.json"
    raw = _without(json.loads(file.read_text()), *removed)
    file.write_text(json.dumps(raw | values))


def _logits(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Logits after the last token: ours and transformers'."""
    tokens = np.random.default_rng(3).integers(3, 97, (1, LENGTH))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    with torch.no_grad():
        expected = model(torch.from_numpy(tokens)).logits.numpy()[0, -1]
    config, params = load_target(folder, dtype="float32")
    target = TargetModel(config)
    last = jnp.asarray([LENGTH - 1])
    prefill = jax.jit(target.prefill_chunk)
    cache = target.allocate(1, LENGTH)
    found = prefill(params, cache, jnp.asarray(tokens), jnp.asarray([0]), last)
    return np.asarray(found[0][0]), expected


@each_row("case", ROPES)
def test_a_scaling_that_holds_the_base(case: str, tmp_path: Path) -> None:
    family, rope = ROPES[case]
    make_model(family).save_pretrained(tmp_path)
    _edit(tmp_path, "rope_parameters", **rope)
    found, expected = _logits(tmp_path)
    assert np.abs(expected).max() > 0.5, "logits near zero would prove nothing"
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.fixture
def both(tmp_path: Path) -> Path:
    """A model whose file ties the tables, and whose weights have two that differ."""
    make_model("llama3").save_pretrained(tmp_path)
    _edit(tmp_path, tie_word_embeddings=True)
    return tmp_path


def test_a_stored_head_that_differs_is_not_tied(
    both: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Transformers 5 says so as well."""
    with (
        pytest.warns(UserWarning, match=r"config.json: tie_word_embeddings=true.*stored head"),
        caplog.at_level(logging.WARNING),
    ):
        found, expected = _logits(both)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    config = load_target_config(both)
    assert not config.tied_embeddings
    table = config.vocab_size * config.model_width * 4
    before = target_bytes(both, dtype="float32")
    _edit(both, tie_word_embeddings=False)
    assert load_target_config(both) == config
    assert target_bytes(both, dtype="float32") == before > table


def test_a_stored_head_that_is_the_table_is_tied(both: Path) -> None:
    """As pickles always hold it; and a head that is stored alone is the table."""
    file = both / "model.safetensors"
    tensors = load_file(file)
    head = tensors["lm_head.weight"]
    same = tensors | {"model.embed_tokens.weight": head.copy()}
    save_file(same, file, metadata={"format": "pt"})
    config, params = load_target(both)
    assert config.tied_embeddings and "head" not in params
    found, expected = _logits(both)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    del same["model.embed_tokens.weight"]
    save_file(same, file, metadata={"format": "pt"})
    _, alone = load_target(both)
    jax.tree.map(np.testing.assert_array_equal, alone, params)
    found, expected = _logits(both)
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_an_index_that_names_the_absent_head_of_a_tied_model(tmp_path: Path) -> None:
    """A model that needs it is refused for lack of it."""
    make_model("llama-tied").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    _, expected = load_target(tmp_path)
    part = tmp_path / "model-00001-of-00001.safetensors"
    (tmp_path / "model.safetensors").rename(part)
    names = [*tensors, "lm_head.weight"]
    index = {"weight_map": dict.fromkeys(names, part.name)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    _, found = load_target(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    _edit(tmp_path, tie_word_embeddings=False)
    with pytest.raises(ValueError, match="missing lm_head.weight"):
        load_target(tmp_path)
