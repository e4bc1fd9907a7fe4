"""LongSpec drafts once more, in PyTorch: the layer of the release, and the parallel draft.

Written from the format (tensor names and ``[out, in]`` layouts) and the definition of the drafts
(inclusive window, shift), not from our modules: it shares no code and no layout with them.
Gradients are PyTorch's own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the oracle is written in PyTorch")


@dataclass(frozen=True)
class DraftOracle:
    """A draft of one layer by the tensors of its file, ``[out, in]`` each."""

    state: Mapping[str, Any]
    heads: int
    kv_heads: int
    window: int
    eps: float
    theta: float

    def hidden(self, embedded, positions, keys, values, shift):
        """Output of the layer for one row.

        Args:
          embedded: ``[T, D]``.
          positions: ``[T]``, at which tokens are rotated; who sees whom follows from their order.
          keys: the target's last-layer keys ``[S, kv_heads, width]``, rotated.
          values: its values.
          shift: query ``t`` sees target keys up to ``t - shift``, and nothing if there is none.
        """
        queries = torch.arange(len(embedded))[:, None]
        behind, known = queries - torch.arange(len(embedded)), torch.arange(len(keys))
        near = (behind >= 0) & (behind <= self.window)
        return self.layer("", embedded, positions, near, keys, values, queries - known >= shift)

    def layer(self, name, x, at, near, keys, values, known, before=()):
        """One layer over ``x`` ``[T, D]`` at positions ``at``.

        Args:
          name: begins the names of its tensors.
          x: what enters it.
          at: positions of the tokens.
          near: which own keys every token sees; all if None.
          keys: the target's.
          values: the target's.
          known: which target keys every token sees; all if None.
          before: own keys and values of earlier tokens, which come before those of ``x``.
        """
        normed = self.norm(x, f"{name}input_layernorm")
        q, k, v = (self.split(normed, f"{name}self_attn.{part}_proj") for part in "qkv")
        q, k = self.rotate(q, at), self.rotate(k, at)
        if before:
            k, v = torch.cat([before[0], k]), torch.cat([before[1], v])
        x = x + self.attend(q, k, v, near) @ self.state[f"{name}self_attn.o_proj.weight"].T
        normed = self.norm(x, f"{name}post_self_attention_layernorm")
        q = self.rotate(self.split(normed, f"{name}cross_attn.q_proj"), at)
        found = self.attend(q, keys, values, known)
        x = x + found @ self.state[f"{name}cross_attn.o_proj.weight"].T
        normed = self.norm(x, f"{name}post_cross_attention_layernorm")
        gate = normed @ self.state[f"{name}mlp.gate_proj.weight"].T
        up = normed @ self.state[f"{name}mlp.up_proj.weight"].T
        down = self.state[f"{name}mlp.down_proj.weight"]
        return x + (torch.nn.functional.silu(gate) * up) @ down.T

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

    def attend(self, q, keys, values, seen):
        """All queries over the keys that each sees; zeros where it sees none."""
        groups = self.heads // self.kv_heads
        keys, values = (each.repeat_interleave(groups, dim=1) for each in (keys, values))
        scores = torch.einsum("qhw,khw->hqk", q, keys) / q.shape[-1] ** 0.5
        if seen is not None:
            scores = scores.masked_fill(~seen, -torch.inf)
        weights = scores.softmax(-1).nan_to_num()
        return torch.einsum("hqk,khw->qhw", weights, values).flatten(1)


@dataclass(frozen=True)
class ParallelOracle(DraftOracle):
    """A parallel draft, block by block."""

    layers: int

    def slots(self, pending, before, positions, keys, values):
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
        normed = self.norm(before[-self.window :], "layers.0.input_layernorm")
        old_k, old_v = (self.split(normed, f"layers.0.self_attn.{part}_proj") for part in "kv")
        earlier = self.rotate(old_k, past[-self.window :]), old_v
        for layer in range(self.layers):
            given = f"layers.{layer}.", x, here, None, keys, values, None
            x = self.layer(*given, () if layer else earlier)
        return self.norm(x, "norm")

    def correction(self, tokens):
        """What the Markov head adds to logits after these tokens."""
        first, second = (self.state[f"markov_head.markov_w{part}.weight"] for part in (1, 2))
        return first[tokens] @ second.T
