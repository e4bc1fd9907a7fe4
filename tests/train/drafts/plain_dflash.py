"""DFlash's training loss in PyTorch, block by block from the paper's definition."""

from typing import Any

import torch


class DFlashOracle:
    """A draft under the names of its published file; tensors may want gradients."""

    def __init__(self, state: dict[str, Any], config: Any):
        self.state, self.config, self.trunk = state, config, config.trunk

    def logits(self, table: Any, head: Any, features: Any, anchor: int, token: int) -> Any:
        """Of all slots but the first, ``[slots - 1, V]``.

        Args:
          table: the target's embedding.
          head: its LM head.
          features: its states of the text before the anchor, side by side ``[anchor, m D]``.
          anchor: place of the pending token.
          token: the pending token.
        """
        slots = self.config.block
        x = table[[token] + [self.config.mask_token] * (slots - 1)]
        context = self.norm(features @ self.state["fc.weight"].T, "hidden_norm")
        past, here = torch.arange(anchor), torch.arange(anchor, anchor + slots)
        for layer in range(self.trunk.num_layers):
            name = f"layers.{layer}"
            y = self.norm(x, f"{name}.input_layernorm")
            both, places = torch.cat([context, y]), torch.cat([past, here])
            q = self.rotated(self.heads(y, name, "q"), f"{name}.self_attn.q_norm", here)
            k = self.rotated(self.heads(both, name, "k"), f"{name}.self_attn.k_norm", places)
            v = self.heads(both, name, "v")
            groups = q.shape[1] // k.shape[1]
            k, v = (each.repeat_interleave(groups, dim=1) for each in (k, v))
            scores = torch.einsum("qhw,khw->hqk", q, k) / q.shape[-1] ** 0.5
            if self.config.causal[layer]:
                later = places[None] > here[:, None]
                scores = scores.masked_fill(later, -torch.inf)
            out = torch.einsum("hqk,khw->qhw", scores.softmax(-1), v).reshape(slots, -1)
            x = x + out @ self.state[f"{name}.self_attn.o_proj.weight"].T
            y = self.norm(x, f"{name}.post_attention_layernorm")
            gate, up, down = (self.state[f"{name}.mlp.{p}_proj.weight"] for p in self.MLP)
            x = x + (torch.nn.functional.silu(y @ gate.T) * (y @ up.T)) @ down.T
        return self.norm(x, "norm")[1:] @ head.T

    MLP = "gate", "up", "down"

    def norm(self, x: Any, name: str) -> Any:
        scale = torch.rsqrt((x**2).mean(-1, keepdim=True) + self.trunk.norm_eps)
        return x * scale * self.state[f"{name}.weight"]

    def heads(self, x: Any, name: str, part: str) -> Any:
        found = x @ self.state[f"{name}.self_attn.{part}_proj.weight"].T
        return found.reshape(len(x), -1, self.trunk.head_width)

    def rotated(self, heads: Any, name: str, positions: Any) -> Any:
        heads, half = self.norm(heads, name), heads.shape[-1] // 2
        turns = self.trunk.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = (positions.double()[:, None, None] * turns).to(heads.dtype)
        low, high = heads[..., :half], heads[..., half:]
        cos, sin = torch.cos(angles), torch.sin(angles)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
