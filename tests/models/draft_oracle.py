"""Random tensors of a released LongSpec draft, by the names and layouts of the release."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Shape:
    """Sizes of a draft, in the words of a ``config.json``."""

    hidden_size: int = 36
    intermediate_size: int = 53
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


def random_state(shape: Shape, seed: int = 0) -> dict[str, np.ndarray]:
    """The 20 tensors of a released draft, every one of them random."""
    width, hidden = shape.hidden_size, shape.intermediate_size
    q = shape.num_attention_heads * shape.head_dim
    kv = shape.num_key_value_heads * shape.head_dim
    shapes: dict[str, tuple[int, ...]] = {}
    for name in ("input", "post_self_attention", "post_cross_attention"):
        shapes[f"{name}_layernorm.weight"] = (width,)
    for name in ("self_attn", "cross_attn"):
        for projection, rows in (("q", q), ("k", kv), ("v", kv)):
            shapes[f"{name}.{projection}_proj.weight"] = (rows, width)
            shapes[f"{name}.{projection}_proj.bias"] = (rows,)
        shapes[f"{name}.o_proj.weight"] = (width, q)
    shapes["mlp.gate_proj.weight"] = shapes["mlp.up_proj.weight"] = (hidden, width)
    shapes["mlp.down_proj.weight"] = (width, hidden)
    assert len(shapes) == 20
    rng = np.random.default_rng(seed)
    state = {name: 0.2 * rng.normal(size=size) for name, size in shapes.items()}
    for name in state:
        state[name] = (state[name] + ("layernorm" in name)).astype(np.float32)
    return state
