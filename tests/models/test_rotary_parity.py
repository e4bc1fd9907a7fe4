"""Rotary frequencies and rotations equal transformers', up to the last position of the range.

At position 262143 one bit of a frequency moves an angle by 0.016: a model would still talk, and no
test at short positions would notice.
"""

import jax
import jax.numpy as jnp
import numpy as np

from longspec_jax.config.layers import Rotary
from longspec_jax.models.layers import rotary_angles
from longspec_jax.ops.layer import rotate
from longspec_jax.weights.hf_config import rope_scaling, rope_theta
from longspec_jax.weights.json_files import JsonObject
from tests.kit import each_row
from tests.models.families import torch, transformers

POSITIONS = np.array([[0, 1, 31, 4095, 32767, 131071, 262143]])
LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
ROPES = {
    "vicuna-16k": dict(rope_type="linear", factor=4.0, rope_theta=1e4),
    "longchat-7b": dict(rope_type="linear", factor=8.0, rope_theta=1e4),
    "linear-3": dict(rope_type="linear", factor=3.0, rope_theta=1e4),
    "llama-3-262k": dict(rope_type="default", rope_theta=283461213.0),
    "llama-3.1": LLAMA3 | dict(rope_theta=5e5),
    "yarn": dict(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=32768, rope_theta=1e6
    ),
    "yarn, not truncated": dict(
        rope_type="yarn",
        factor=32.0,
        original_max_position_embeddings=4096,
        truncate=False,
        rope_theta=1e6,
    ),
    "yarn, two scales": dict(
        rope_type="yarn",
        factor=16.0,
        original_max_position_embeddings=16384,
        mscale=1.0,
        mscale_all_dim=0.5,
        rope_theta=1e6,
    ),
    "qwq": dict(rope_type="default", rope_theta=1e6),
}


def _oracle(rope, head_width):
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = transformers.LlamaConfig(
        hidden_size=2 * head_width,
        num_attention_heads=2,
        head_dim=head_width,
        rope_parameters=dict(rope),
        max_position_embeddings=262144,
    )
    return LlamaRotaryEmbedding(config)


def _angles(values, head_width):
    raw = JsonObject(values)
    rotary = Rotary(rope_theta(raw), rope_scaling(raw))
    return jax.jit(lambda p: rotary_angles(p, head_width, rotary))(POSITIONS)


@each_row("head_width", [64, 128])
@each_row("rope", ROPES.values())
def test_angles(rope, head_width):
    cos, sin = _oracle(rope, head_width)(torch.zeros(1), torch.from_numpy(POSITIONS))
    half = head_width // 2
    for ours, theirs in zip(
        _angles({"rope_parameters": rope}, head_width), (cos, sin), strict=True
    ):
        # torch's own power is off by one bit for a rare frequency.
        np.testing.assert_allclose(ours, theirs.numpy()[..., :half], atol=5e-5)


def test_condense_ratio_is_linear_scaling():
    """The first LongChat files say ``rope_condense_ratio`` instead."""
    linear = {"rope_scaling": {"type": "linear", "factor": 8.0}}
    for condensed in (
        {"rope_condense_ratio": 8, "rope_scaling": None},
        # What transformers 5 makes of such a file.
        {"rope_condense_ratio": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ):
        for ours, theirs in zip(_angles(condensed, 128), _angles(linear, 128), strict=True):
            np.testing.assert_array_equal(ours, theirs)


@each_row("rope", [ROPES["vicuna-16k"], ROPES["llama-3.1"]])
def test_rotation(rope):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, k = np.random.default_rng(3).normal(size=(2, 1, 7, 3, 64)).astype("float32")
    cos, sin = _oracle(rope, 64)(torch.zeros(1), torch.from_numpy(POSITIONS))
    heads_first = (torch.from_numpy(x).transpose(1, 2) for x in (q, k))
    expected = apply_rotary_pos_emb(*heads_first, cos, sin)
    angles = _angles({"rope_parameters": rope}, 64)
    for ours, theirs in zip((q, k), expected, strict=True):
        rotated = rotate(jnp.asarray(ours), angles)
        np.testing.assert_allclose(rotated, theirs.transpose(1, 2).numpy(), atol=1e-4)
