"""Our draft equals an independent implementation of the release's, on the release's file format."""

import json
from dataclasses import asdict, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from longspec_jax.config.tree import TreeConfig
from longspec_jax.drafters.base import Params
from longspec_jax.drafters.checkpoints.longspec import load_draft
from longspec_jax.drafters.longspec import LongSpecDrafter, LongSpecLayer, LongSpecParams
from longspec_jax.ops.attention.dispatch import causal_attention, tree_attention
from longspec_jax.ops.attention.operands import Fresh
from tests.kit import after_prompts, greedy_beliefs, tiny_target_config, view_of
from tests.models.draft_oracle import Shape, random_state
from tests.models.parallel_oracle import DraftOracle, torch

LENGTH = 19


def _load(tmp_path, shape, state):
    save_file(state, tmp_path / "model.safetensors")
    raw = asdict(shape) | dict(model_type="llama", torch_dtype="float32", vocab_size=101)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    target = tiny_target_config(num_kv_heads=shape.num_key_value_heads, norm_eps=1e-6)
    return load_draft(tmp_path, target)


def _inputs(shape):
    rng = np.random.default_rng(7)
    embedded = rng.normal(size=(LENGTH, shape.hidden_size))
    kv = rng.normal(size=(2, LENGTH, shape.num_key_value_heads, shape.head_dim))
    return embedded.astype("float32"), *kv.astype("float32")


def _expected(shape, state, embedded, positions, keys, values, window, shift):
    """The oracle's output, in float64."""
    oracle = DraftOracle(
        {name: torch.tensor(each).double() for name, each in state.items()},
        shape.num_attention_heads,
        shape.num_key_value_heads,
        window,
        shape.rms_norm_eps,
        shape.rope_theta,
    )
    rows = (torch.tensor(each).double() for each in (embedded, positions, keys, values))
    return oracle.hidden(*rows, shift).numpy()


def _ours(config, params, embedded, positions, keys, values, shift):
    """Our module, with the attention patterns of training."""
    seen = np.arange(LENGTH)[None, :] <= np.arange(LENGTH)[:, None] - shift

    @jax.jit
    def apply(params, embedded, positions, keys, values, seen):
        def attend_cross(q):
            out = tree_attention(q, Fresh(keys, values, seen), implementation="reference").out
            return out.astype(q.dtype)

        return LongSpecLayer(config).apply(
            {"params": params},
            embedded,
            positions,
            lambda q, k, v: causal_attention(q, k, v, window=config.window),
            attend_cross,
        )

    rows = (jnp.asarray(x)[None] for x in (embedded, positions, keys, values, seen))
    return apply(params, *rows)


@pytest.mark.full
@pytest.mark.parametrize(
    "kv_heads, window, shift", [(6, 512, 1), (2, 512, 1), (1, 512, 1), (2, 3, 2), (2, 1, 4)]
)
def test_layer(tmp_path, kv_heads, window, shift):
    """Windows with both ends included; the first ``shift`` queries see nothing of the target."""
    shape = Shape(num_key_value_heads=kv_heads)
    state = random_state(shape)
    config, params = _load(tmp_path, shape, state)
    config = replace(config, window=window)
    # Anchor-offset positions: the first tokens stay, the rest is far away.
    positions = np.where(np.arange(LENGTH) < 3, 0, 900) + np.arange(LENGTH)
    embedded, keys, values = _inputs(shape)
    expected = _expected(shape, state, embedded, positions, keys, values, window, shift)
    actual = _ours(config, params, embedded, positions, keys, values, shift).hidden[0]
    np.testing.assert_allclose(actual, expected, atol=1e-4)


def test_norm_epsilon_comes_from_the_drafts_own_file(tmp_path):
    shape = Shape(rms_norm_eps=0.5)
    config, _ = _load(tmp_path, shape, random_state(shape))
    assert config.norm_eps == 0.5


def test_dead_tensors_do_not_matter(tmp_path):
    """Cross-attention reads the target's keys and values; its stored projections may be absent."""
    shape = Shape()
    state = random_state(shape)
    _, params = _load(tmp_path, shape, state)
    without = {
        k: v for k, v in state.items() if "cross_attn.k" not in k and "cross_attn.v" not in k
    }
    (tmp_path / "live").mkdir()
    _, live = _load(tmp_path / "live", shape, without)
    jax.tree.map(np.testing.assert_array_equal, params, live)


def test_proposed_tree(tmp_path):
    """Two levels of a decode-time tree: the ring, the window along a path, the growing shift."""
    shape, prompt, window, widths = Shape(), 9, 4, (3, 4)
    state = random_state(shape)
    config, params = _load(tmp_path, shape, state)
    config = replace(config, window=window)
    rng = np.random.default_rng(5)
    embedding, head = rng.normal(size=(2, 101, shape.hidden_size)).astype("float32")
    tokens = rng.integers(0, 101, prompt)
    keys, values = rng.normal(size=(2, prompt, 2, shape.head_dim)).astype("float32")

    def scores(path):
        """Log-probabilities after the prompt and a path of fresh tokens, by the oracle."""
        line = np.concatenate([tokens, path])
        places = np.arange(len(line))
        given = embedding[line], places, keys, values, window
        hidden = _expected(shape, state, *given, shift=len(path))
        logits = head.astype(np.float64) @ hidden[-1]
        return logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()

    pending = 42
    first = scores([pending])
    children = np.argsort(-first)[:3]
    second = np.stack([first[child] + scores([pending, child]) for child in children])
    best = np.argsort(-second, axis=None)[:4]
    parents, grandchildren = np.unravel_index(best, second.shape)

    drafter = LongSpecDrafter(config, TreeConfig(widths))
    own = LongSpecParams(params, jnp.asarray(embedding), jnp.asarray(head))
    length = jnp.asarray([prompt])
    cache = (jnp.asarray(x).swapaxes(0, 1)[None] for x in (keys, values))
    view, models = view_of(jnp.asarray([pending]), length, *cache), Params(None, own)
    drafted = after_prompts(drafter, models, tokens[None], length)
    propose = jax.jit(lambda: drafter.propose(models, drafted, view, greedy_beliefs(1, 2)))
    tree = propose()
    np.testing.assert_array_equal(tree.tokens[0], [pending, *children, *grandchildren])
    np.testing.assert_array_equal(tree.parents[0, 1:], [0, 0, 0, *(1 + parents)])
