"""The LongSpec draft layer once more, in NumPy and float64, token by token.

Written from the facts of the release (its tensor names and ``[out, in]`` layouts, its inclusive
window, its shift), not from our module: it shares no code and no layout with it.
"""

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


@dataclass(frozen=True)
class DraftOracle:
    """The draft layer over a sequence."""

    shape: Shape
    state: dict[str, np.ndarray]

    def hidden(self, embedded, positions, target_keys, target_values, window, shift):
        """Output of the layer for one row.

        Args:
          embedded: ``[T, hidden_size]``.
          positions: ``[T]``, at which tokens are rotated; who sees whom follows from their order.
          target_keys: the target's last-layer keys ``[T, kv_heads, head_dim]``, rotated.
          target_values: the target's last-layer values.
          window: tokens behind a query that it still sees, beside itself.
          shift: query ``t`` sees target keys up to ``t - shift``, and nothing if there is none.
        """
        x = embedded.astype(np.float64)
        normed = self._norm("input_layernorm", x)
        q, k, v = (self._heads(f"self_attn.{name}_proj", normed) for name in "qkv")
        q, k = self._rotate(q, positions), self._rotate(k, positions)
        attended = [
            self._attend(q[t], k[max(0, t - window) : t + 1], v[max(0, t - window) : t + 1])
            for t in range(len(x))
        ]
        x = x + np.stack(attended) @ self._weight("self_attn.o_proj").T
        normed = self._norm("post_self_attention_layernorm", x)
        q = self._rotate(self._heads("cross_attn.q_proj", normed), positions)
        attended = [
            self._attend(q[t], target_keys[: max(0, t - shift + 1)], target_values)
            for t in range(len(x))
        ]
        x = x + np.stack(attended) @ self._weight("cross_attn.o_proj").T
        normed = self._norm("post_cross_attention_layernorm", x)
        gate = normed @ self._weight("mlp.gate_proj").T
        up = normed @ self._weight("mlp.up_proj").T
        return x + (gate / (1 + np.exp(-gate)) * up) @ self._weight("mlp.down_proj").T

    def _weight(self, name):
        return self.state[f"{name}.weight"].astype(np.float64)

    def _norm(self, name, x):
        scale = np.sqrt((x**2).mean(-1, keepdims=True) + self.shape.rms_norm_eps)
        return x / scale * self._weight(name)

    def _heads(self, name, x):
        out = x @ self._weight(name).T + self.state[f"{name}.bias"].astype(np.float64)
        return out.reshape(len(x), -1, self.shape.head_dim)

    def _rotate(self, heads, positions):
        half = self.shape.head_dim // 2
        frequencies = self.shape.rope_theta ** (-np.arange(half) / half)
        angles = positions[:, None, None] * frequencies
        low, high = heads[..., :half], heads[..., half:]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)

    def _attend(self, q, keys, values):
        """One query ``[heads, head_dim]`` over its keys; zeros if it sees none."""
        groups = self.shape.num_attention_heads // self.shape.num_key_value_heads
        out = np.zeros_like(q)
        for head in range(len(q) if len(keys) else 0):
            scores = keys[:, head // groups] @ q[head] / np.sqrt(self.shape.head_dim)
            weights = np.exp(scores - scores.max())
            out[head] = weights / weights.sum() @ values[: len(keys), head // groups]
        return out.reshape(-1)
