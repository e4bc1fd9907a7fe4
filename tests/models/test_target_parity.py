"""The parity ladder, norm to cached decoding: our target equals transformers' in float32."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.config.target import TargetConfig
from longspec_jax.decoding.target import TargetModel
from longspec_jax.models.layers import RMSNorm, rotary_angles
from longspec_jax.models.target import Attention, Layer, Target
from longspec_jax.ops.attention.dispatch import causal_attention
from longspec_jax.weights.hf import load_target
from tests.models.hf_models import FAMILIES, KV_HEADS, LLAMA3, make_model, save_model, torch

TOLERANCE = 1e-4
"""Largest absolute error of a logit, the bar of the project; the steps below are held to less."""
TIGHT = 2e-5

# What families differ in does not depend on how heads share keys: a case of each, not of each pair.
SHARING = {"Qwen3": "MQA", "Mistral": "MHA"}
PLAIN = [(family, SHARING.get(family, "GQA"), {}) for family in FAMILIES]
CASES = [
    *PLAIN,
    ("Llama", "GQA", dict(rope_parameters=LLAMA3 | dict(rope_theta=5e5))),
    ("Llama", "MHA", dict(rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=1e4))),
    ("Llama", "MQA", dict(tie_word_embeddings=True)),
    ("Qwen3", "GQA", dict(tie_word_embeddings=False)),
]


def _name(case):
    family, kv, overrides = case
    return "-".join([family, kv, *overrides])


@pytest.fixture(scope="module", params=CASES, ids=_name)
def pair(request, tmp_path_factory):
    """A transformers model, and the configuration and parameters loaded from its folder."""
    family, kv, overrides = request.param
    model = make_model(family, KV_HEADS[kv], **overrides)
    return model, *load_target(save_model(model, tmp_path_factory.mktemp("model")))


def _causal(layer, q, k, v):
    return causal_attention(q, k, v)


def _hidden(config, length=23):
    return np.random.default_rng(1).normal(size=(2, length, config.model_width)).astype("float32")


def _tokens(config, length=23):
    return np.random.default_rng(2).integers(0, config.vocab_size, (2, length))


def _hf_inputs(model, x):
    """Rotary tables and causal mask as transformers' layers take them."""
    length = x.shape[1]
    angles = model.model.rotary_emb(x, torch.arange(length)[None])
    mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
    return angles, mask


def _positions(x):
    return jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])


def _angles(config: TargetConfig, x):
    return rotary_angles(_positions(x), config.head_width, config.rotary)


def test_norm(pair):
    model, config, params = pair
    x = 3 * _hidden(config)
    with torch.no_grad():
        expected = model.model.norm(torch.from_numpy(x)).numpy()
    actual = RMSNorm(config.norm_eps, jnp.float32).apply({"params": params["final_norm"]}, x)
    np.testing.assert_allclose(actual, expected, atol=2e-6)


def test_attention(pair):
    model, config, params = pair
    x = _hidden(config)
    angles, mask = _hf_inputs(model, torch.from_numpy(x))
    with torch.no_grad():
        expected = model.model.layers[0].self_attn(
            hidden_states=torch.from_numpy(x), position_embeddings=angles, attention_mask=mask
        )[0]
    partials = _run(Attention(config), params["layers_0"]["attention"], x)
    np.testing.assert_allclose(partials.sum(axis=0), expected.numpy(), atol=TIGHT)


def test_layer(pair):
    model, config, params = pair
    x = _hidden(config)
    angles, mask = _hf_inputs(model, torch.from_numpy(x))
    with torch.no_grad():
        expected = model.model.layers[1](
            torch.from_numpy(x), attention_mask=mask, position_embeddings=angles
        )
    expected = expected[0] if isinstance(expected, tuple) else expected

    @jax.jit
    def apply(params, x):
        angles = _angles(config, x)
        return Layer(config).apply({"params": params}, x, None, angles, causal_attention)

    stream, increment, _, _ = apply(params["layers_1"], x)
    np.testing.assert_allclose(stream + increment.sum(axis=0), expected.numpy(), atol=TIGHT)


def test_logits_and_last_keys_and_values(pair):
    """The draft reads the last layer's keys and values: rotated, as transformers caches them."""
    model, config, params = pair
    tokens = _tokens(config)
    with torch.no_grad():
        expected = model(torch.from_numpy(tokens), use_cache=True)
    logits, keys, values = _forward(config, params, tokens)
    assert np.abs(expected.logits).max() > 2, "logits near zero would prove nothing"
    np.testing.assert_allclose(logits, expected.logits.numpy(), atol=TOLERANCE)
    cached = expected.past_key_values.layers[-1]
    for ours, theirs in ((keys, cached.keys), (values, cached.values)):
        np.testing.assert_allclose(ours.swapaxes(1, 2), theirs.numpy(), atol=TIGHT)


@pytest.mark.parametrize("pair", PLAIN, ids=_name, indirect=True)
def test_cached_decoding(pair):
    """Chunks into the cache, then a chain and a branching tree, against one uncached pass each."""
    model, config, params = pair
    target, tokens = TargetModel(config), _tokens(config)
    prefill, verify = jax.jit(target.prefill_chunk), jax.jit(partial(target.verify, levels=2))
    cache = target.allocate(batch=2, capacity=37)
    last = jnp.asarray([7, 7])
    for offset in (0, 8):
        logits, cache, *_ = prefill(
            params,
            cache,
            jnp.asarray(tokens[:, offset : offset + 8]),
            jnp.asarray([offset] * 2),
            last,
        )
    expected = _hf_logits(model, tokens)
    np.testing.assert_allclose(logits, expected[:, 15], atol=TOLERANCE)

    # Nodes 1 and 2 are children of the root, node 3 follows node 2.
    mask = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], bool)
    positions = 16 + np.array([0, 1, 1, 2])
    verified = verify(
        params,
        cache,
        jnp.asarray(tokens[:, 16:20]),
        jnp.broadcast_to(positions, (2, 4)),
        jnp.broadcast_to(mask, (2, 4, 4)),
        jnp.asarray([16, 16]),
    )
    for path in ([16], [16, 17], [16, 18], [16, 18, 19]):
        alone = np.concatenate([tokens[:, :16], tokens[:, path]], axis=1)
        node = path[-1] - 16
        expected = _hf_logits(model, alone)[:, -1]
        np.testing.assert_allclose(verified.logits[:, node], expected, atol=TOLERANCE)


def _run(module, params, x):
    """Output of a layer's attention under a causal mask."""

    def apply(params, x):
        return module.apply({"params": params}, x, _angles(module.config, x), causal_attention)[0]

    return jax.jit(apply)(params, x)


def _forward(config, params, tokens):
    """Logits, and the last layer's keys and values."""

    def apply(params, tokens):
        model, variables = Target(config), {"params": params}
        output = model.apply(variables, tokens, _positions(tokens), _causal)
        logits = model.apply(variables, output.hidden, method="unembed")
        return logits, output.keys[-1], output.values[-1]

    return jax.jit(apply)(params, tokens)


def _hf_logits(model, tokens):
    with torch.no_grad():
        return model(torch.from_numpy(tokens)).logits.numpy()
