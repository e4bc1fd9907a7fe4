"""The training of an EAGLE-3 draft in PyTorch, by its definition: one mask for all steps together.

From arXiv 2503.01840, section 3. Names of tensors are those of the published files.
"""

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the oracle is PyTorch")


def norm(x: Any, scale: Any, eps: float) -> Any:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * scale


def rotated(x: Any, positions: Any, theta: float) -> Any:
    """Heads ``[B, T, N, H]`` turned by their positions ``[T]``."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * theta ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def logits_of_steps(draft: dict[str, Any], config: Any, embedded: Any, hidden: Any, steps: int):
    """Logits ``[B, T, v]`` of every step of the training-time test.

    Args:
      draft: its tensors.
      config: its ``Eagle3Config``.
      embedded: embeddings ``[B, T, D]`` of the rows' tokens.
      hidden: the target's states ``[B, T, 3 D]``.
      steps: how many.
    """
    batch, length, _ = embedded.shape
    heads, kv, width = config.num_heads, config.num_kv_heads, config.head_width
    feature = hidden @ draft["fc.weight"].T
    keys, values, outputs = [], [], []
    index = torch.arange(length)
    for step in range(steps):
        ahead = torch.roll(embedded, -1 - step, 1)
        both = torch.cat(
            [
                norm(ahead, draft["midlayer.input_layernorm.weight"], config.norm_eps),
                norm(feature, draft["midlayer.hidden_norm.weight"], config.norm_eps),
            ],
            -1,
        )
        q, k, v = (
            (both @ draft[f"midlayer.self_attn.{name}_proj.weight"].T).view(
                batch, length, -1, width
            )
            for name in "qkv"
        )
        q = rotated(q, index + step, config.rope_theta)
        keys.append(rotated(k, index + step, config.rope_theta).repeat_interleave(heads // kv, 2))
        values.append(v.repeat_interleave(heads // kv, 2))
        causal, own = index[:, None] >= index, torch.eye(length, dtype=torch.bool)
        mask = torch.cat([causal, *[own] * step], 1)
        scores = torch.einsum("btnh,bsnh->bnts", q, torch.cat(keys, 1)) / width**0.5
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        attended = torch.einsum("bnts,bsnh->btnh", weights, torch.cat(values, 1)).flatten(2)
        x = feature + attended @ draft["midlayer.self_attn.o_proj.weight"].T
        y = norm(x, draft["midlayer.post_attention_layernorm.weight"], config.norm_eps)
        gate, up, down = (draft[f"midlayer.mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
        feature = x + (torch.nn.functional.silu(y @ gate.T) * (y @ up.T)) @ down.T
        outputs.append(
            norm(feature, draft["norm.weight"], config.norm_eps) @ draft["lm_head.weight"].T
        )
    return outputs


def loss_sum(logits: list[Any], wanted: Any, weights: Any, vocabulary: Any, decay: float) -> Any:
    """The loss, summed over tokens.

    Args:
      logits: of every step.
      wanted: the target's logits ``[B, T, V]``.
      weights: of the rows' tokens ``[B, T]``.
      vocabulary: the tokens that the draft can propose.
      decay: weight of a step relative to the one before.
    """
    total = torch.zeros(())
    length = wanted.shape[1]
    for step, scores in enumerate(logits):
        for i in range(length - 2 - step):
            at = i + 1 + step  # Its distribution is of the token after it.
            for row in range(len(wanted)):
                if int(wanted[row, at].argmax()) not in vocabulary:
                    continue
                p = wanted[row, at][vocabulary].softmax(-1)
                surprise = -(p * scores[row, i].log_softmax(-1)).sum()
                total = total + decay**step * weights[row, at + 1] * surprise
    return total
