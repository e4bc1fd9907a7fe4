"""EAGLE-1 and 2: the layer by hand, of files as they are published."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.config.layers import LinearRopeScaling, Rotary
from longspec_jax.config.tree import PLAIN, TreeConfig
from longspec_jax.drafters.base import Committed, Features, Needs, Params
from longspec_jax.drafters.checkpoints.eagle import load
from longspec_jax.drafters.draft import Target
from longspec_jax.drafters.eagle import EagleConfig, EagleOptions, EagleParams
from longspec_jax.drafters.eagle3 import Eagle3Drafter
from longspec_jax.drafters.registry import EAGLE
from longspec_jax.loading import choose_drafts
from longspec_jax.models.layers import rotary_frequencies
from longspec_jax.models.target import head_of
from tests.decoding.lossless import CONFIG
from tests.drafters.eagle3.toys import sizes_for
from tests.drafters.kit import (
    Given,
    assert_holds,
    assert_partitioned,
    drawn,
    edit,
    llama_layer,
    publish,
)
from tests.kit import each_row, normal, random_target, relative_error, view_of

MODEL = random_target(CONFIG)
TARGET = Target(CONFIG, MODEL)


def config_for(target: Any, **fields: Any) -> EagleConfig:
    """A draft for a target, of other heads and another MLP than the target's."""
    features = {"features": (target.num_layers,), "normed_head": False}
    return EagleConfig(**sizes_for(target) | features | fields)


DRAFT = config_for(CONFIG)
VARIANTS: dict[str, tuple[EagleConfig, dict[str, Any]]] = {
    "usual": (
        config_for(CONFIG, rope_scaling=LinearRopeScaling(2.0)),
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
    ),
    "other biases": (
        config_for(
            CONFIG, fuse_bias=False, qkv_bias=True, num_kv_heads=4, rope_theta=5e5, norm_eps=1e-5
        ),
        {"rope_theta": 5e5},
    ),
}


def published(
    folder: Path, config: EagleConfig = DRAFT, own: bool = False, **raw: Any
) -> dict[str, np.ndarray]:
    """A draft as the authors leave it, with random tensors, which are returned.

    Args:
      own: whether an embedding of its own is stored.
      raw: other keys of ``config.json``.
    """
    width = config.model_width
    layer, keys = llama_layer(config)
    shapes = {f"layers.0.{name}": layer[name] for name in layer} | {"fc.weight": (width, 2 * width)}
    if config.fuse_bias:
        shapes["fc.bias"] = (width,)
    if own:
        shapes["embed_tokens.weight"] = (config.vocab_size, width)
    keys |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    keys |= {"bias": config.fuse_bias, "torch_dtype": "float16"}
    tensors = drawn(shapes)
    publish(folder, tensors, keys | raw)
    return tensors


def chain_by_hand(
    w: dict[str, np.ndarray],
    config: EagleConfig,
    tokens: list[int],
    hidden: np.ndarray,
    following: list[int],
) -> list[np.ndarray]:
    """The logits of a chain after a text, the whole sequence anew at every step.

    Args:
      w: the stored tensors, without the prefix of the layer.
      config: the draft's.
      tokens: of the text and the pending one.
      hidden: the target's states at all but the pending one.
      following: what the chain goes through.
    """
    heads, groups, wide = config.num_heads, config.num_heads // config.num_kv_heads, 8
    table, head = (np.asarray(t, np.float64) for t in (MODEL["embedding"], head_of(MODEL)))
    features, logits = list(hidden.astype(np.float64)), []
    scaling: Any = config.rope_scaling
    frequencies = rotary_frequencies(wide, Rotary(config.rope_theta, scaling)).astype(np.float64)

    def rotated(x: np.ndarray) -> np.ndarray:
        angles = np.arange(len(x))[:, None, None] * frequencies
        a, b = x[..., : wide // 2], x[..., wide // 2 :]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    for step in range(len(following) + 1):
        behind = [*tokens[1:], *following[:step]]
        both = np.concatenate([table[behind], np.stack(features)], axis=1)
        x = both @ w["fc.weight"].T + w.get("fc.bias", 0.0)
        q, k, v = (
            (
                x @ w[f"self_attn.{n}_proj.weight"].T + w.get(f"self_attn.{n}_proj.bias", 0.0)
            ).reshape(len(x), -1, wide)
            for n in "qkv"
        )
        q, k, v = rotated(q), rotated(k).repeat(groups, 1), v.repeat(groups, 1)
        scores = np.einsum("qnh,knh->nqk", q, k) / np.sqrt(wide)
        scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
        share = np.exp(scores - scores.max(axis=2, keepdims=True))
        share /= share.sum(axis=2, keepdims=True)
        out = np.einsum("nqk,knh->qnh", share, v).reshape(len(x), heads * wide)
        x = x + out @ w["self_attn.o_proj.weight"].T
        mean = (x**2).mean(axis=1, keepdims=True) + config.norm_eps
        normed = x / np.sqrt(mean) * w["post_attention_layernorm.weight"]
        gate = normed @ w["mlp.gate_proj.weight"].T
        up = gate / (1 + np.exp(-gate)) * (normed @ w["mlp.up_proj.weight"].T)
        y = (x + up @ w["mlp.down_proj.weight"].T)[-1]
        logits.append(head @ y)
        features.append(y)
    return logits


@partial(jax.jit, static_argnums=0)
def _chain(drafter: Eagle3Drafter, params: Params, text: Any, hidden: Any, following: Any) -> Any:
    """The logits of a chain after a text that comes in two blocks."""
    rows, length = text.shape[0], text.shape[1] - 1
    state, zeros = drafter.begin(params, rows, 16), jnp.zeros(rows, int)
    for first, last in ((0, 4), (4, length)):
        features = Features({drafter.config.features[0]: hidden[:, first:last]})
        block = Committed(text[:, first:last], zeros + first, zeros + last - first, features)
        state = drafter.extend(params, state, block)
    none, noise = jnp.zeros((rows, 1, 8, 8)), Given(following, [])
    drafter.propose(params, state, view_of(text[:, -1], zeros + length, none, none), noise)
    return jnp.stack(noise.heard)


@pytest.mark.parametrize("name", VARIANTS)
def test_chains_by_hand(name: str, tmp_path: Path) -> None:
    """From the stored tensors: layer, positions, and what is fed back; 8 bits compute nearly it."""
    config, raw = VARIANTS[name]
    tensors = published(tmp_path, config, **raw)
    params = load(tmp_path, TARGET).params
    random = np.random.default_rng(7)
    text = random.integers(0, CONFIG.vocab_size, (1, 9)).astype(np.int32)
    following = random.integers(0, CONFIG.vocab_size, (1, 3)).astype(np.int32)
    hidden = normal(8, 1, 8, CONFIG.model_width)
    drafter = Eagle3Drafter(config, TreeConfig((1, 1, 1)))
    found = _chain(drafter, Params(None, params), text, hidden, following)
    stored = {name.removeprefix("layers.0."): t.astype(float) for name, t in tensors.items()}
    expected = chain_by_hand(
        stored, config, text[0].tolist(), np.asarray(hidden[0]), following[0, :2].tolist()
    )
    np.testing.assert_allclose(found[:, 0], expected, atol=1e-4, rtol=1e-4)
    if name == "usual":
        rounded = _chain(drafter, Params(None, params.in_int8()), text, hidden, following)
        assert 0 < relative_error(rounded[0], found[0]) < 0.05


def test_what_it_needs() -> None:
    """The oldest entry of a window has the hidden state of the token before it."""
    drafter, hidden = Eagle3Drafter(DRAFT, window=6), (CONFIG.num_layers,)
    assert drafter.needs == Needs(hidden=hidden, recent=7)
    assert replace(drafter, sinks=2).needs == Needs(hidden=hidden, recent=7, first=3)


@each_row("own", [False, True])
@each_row("name", VARIANTS)
def test_files_as_published(name: str, own: bool, tmp_path: Path) -> None:
    config, raw = VARIANTS[name]
    tensors = published(tmp_path, config, own, **raw)
    [chosen] = choose_drafts([tmp_path], {"window": 64})
    assert chosen.kind is EAGLE
    draft = load(tmp_path, TARGET)
    read = load(tmp_path, TARGET, EagleOptions(working=1024)).drafter(PLAIN)
    assert read.working is not None and read.working.budget.slots == 1024
    assert draft.config == config and draft.name == draft.drafter(PLAIN).name == "eagle"
    table = tensors.pop("embed_tokens.weight") if own else MODEL["embedding"]
    np.testing.assert_array_equal(draft.params.embedding, table)
    assert draft.params.own_embedding == own and draft.params.head is head_of(MODEL)
    assert_holds(draft.params.layer, tensors)
    assert isinstance(draft.params, EagleParams) and isinstance(draft.config, EagleConfig)
    assert_partitioned(draft.params.in_int8().layer)


def test_files_as_the_authors_leave_them(tmp_path: Path) -> None:
    """Pickles, and the target's own embedding stored again."""
    torch = pytest.importorskip("torch", reason="writes the pickles of the authors")
    tensors = published(tmp_path)
    params = load(tmp_path, TARGET).params
    tensors["embed_tokens.weight"] = np.array(MODEL["embedding"])
    (tmp_path / "model.safetensors").unlink()
    state = {name: torch.from_numpy(value) for name, value in tensors.items()}
    torch.save(state, tmp_path / "pytorch_model.bin")
    found = load(tmp_path, TARGET)
    assert found.params.embedding is MODEL["embedding"] and not found.params.own_head
    same = replace(found.params, stores_embedding=False)
    jax.tree.map(np.testing.assert_array_equal, same, params)
    edit(tmp_path, max_position_embeddings=512)
    with pytest.warns(UserWarning, match=r"made for 512 .* for 1024, .* first 4 and the last 476 "):
        assert load(tmp_path, TARGET).seen == (476, 4)


@each_row(
    ("changes", "words"),
    [
        (dict(hidden_size=48, head_dim=8), "hidden_size=48, the target has hidden_size=36"),
        (dict(num_hidden_layers=2), "num_hidden_layers=2"),
        (dict(intermediate_size=31), "layers.0.mlp.down_proj.weight is (36, 29), must be (36, 31)"),
    ],
)
def test_refusals(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    published(tmp_path, **changes)
    with pytest.raises(ValueError, match=re.escape(words)):
        load(tmp_path, TARGET)


def test_what_is_no_eagle_draft(tmp_path: Path) -> None:
    """A norm before the layer is another network; and no layers can be named."""
    published(tmp_path)
    publish(tmp_path, {"layers.0.input_layernorm.weight": np.ones(36, np.float32)}, {})
    with pytest.raises(ValueError, match="unexpected layers.0.input_layernorm.weight"):
        load(tmp_path, TARGET)
    with pytest.raises(ValueError, match="reads the last hidden state; leave layers out"):
        EagleOptions(layers="1,2")
