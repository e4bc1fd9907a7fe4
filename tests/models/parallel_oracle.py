"""The parallel LongSpec draft once more, in PyTorch, block by block.

Written from the format (tensor names and ``[out, in]`` layouts) and the definition of the draft,
not from our module: it shares no code and no layout with it. Gradients are PyTorch's own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the oracle is written in PyTorch")


@dataclass(frozen=True)
class ParallelOracle:
    """A draft by the tensors of its file, ``[out, in]`` each."""

    state: Mapping[str, Any]
    layers: int
    heads: int
    kv_heads: int
    window: int
    eps: float
    theta: float

    def hidden(self, pending, before, positions, keys, values):
        """What the LM head reads of the slots of one block.

        Args:
          pending: embedding of the block's first token ``[D]``.
          before: embeddings of all tokens before it ``[n, D]``.
          positions: of these tokens and of the slots, ``[n + slots]``.
          keys: the target's last-layer keys of the tokens before it ``[n, kv_heads, width]``.
          values: its values.
        """
        x = torch.cat([pending[None], self.state["slot_embeddings.weight"]])
        past, here = positions[: len(before)], positions[len(before) :]
        for layer in range(self.layers):
            name = f"layers.{layer}"
            normed = self.norm(x, f"{name}.input_layernorm")
            q, k, v = (self.split(normed, f"{name}.self_attn.{part}_proj") for part in "qkv")
            q, k = self.rotate(q, here), self.rotate(k, here)
            if layer == 0:
                normed = self.norm(before[-self.window :], f"{name}.input_layernorm")
                old_k, old_v = (self.split(normed, f"{name}.self_attn.{p}_proj") for p in "kv")
                k = torch.cat([self.rotate(old_k, past[-self.window :]), k])
                v = torch.cat([old_v, v])
            x = x + self.attend(q, k, v) @ self.state[f"{name}.self_attn.o_proj.weight"].T
            normed = self.norm(x, f"{name}.post_self_attention_layernorm")
            q = self.rotate(self.split(normed, f"{name}.cross_attn.q_proj"), here)
            found = self.attend(q, keys, values)
            x = x + found @ self.state[f"{name}.cross_attn.o_proj.weight"].T
            normed = self.norm(x, f"{name}.post_cross_attention_layernorm")
            gate = normed @ self.state[f"{name}.mlp.gate_proj.weight"].T
            up = normed @ self.state[f"{name}.mlp.up_proj.weight"].T
            down = self.state[f"{name}.mlp.down_proj.weight"]
            x = x + (torch.nn.functional.silu(gate) * up) @ down.T
        return self.norm(x, "norm")

    def correction(self, tokens):
        """What the Markov head adds to logits behind these tokens."""
        first, second = (self.state[f"markov_head.markov_w{part}.weight"] for part in (1, 2))
        return first[tokens] @ second.T

    def norm(self, x, name):
        scale = torch.rsqrt((x**2).mean(-1, keepdim=True) + self.eps)
        return x * scale * self.state[f"{name}.weight"]

    def split(self, x, name):
        width = len(self.state[f"{name}.bias"])
        heads = self.kv_heads if name.endswith(("k_proj", "v_proj")) else self.heads
        found = x @ self.state[f"{name}.weight"].T + self.state[f"{name}.bias"]
        return found.reshape(len(x), heads, width // heads)

    def rotate(self, heads, positions):
        half = heads.shape[-1] // 2
        turns = self.theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = (positions.double()[:, None, None] * turns).to(heads.dtype)
        low, high = heads[..., :half], heads[..., half:]
        cos, sin = torch.cos(angles), torch.sin(angles)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)

    def attend(self, q, keys, values):
        """All queries over all keys; zeros if there are none."""
        if not len(keys):
            return torch.zeros(len(q), q.shape[1] * q.shape[2], dtype=q.dtype)
        groups = self.heads // self.kv_heads
        keys, values = (each.repeat_interleave(groups, dim=1) for each in (keys, values))
        scores = torch.einsum("qhw,khw->hqk", q, keys) / q.shape[-1] ** 0.5
        return torch.einsum("hqk,khw->qhw", scores.softmax(-1), values).reshape(len(q), -1)
