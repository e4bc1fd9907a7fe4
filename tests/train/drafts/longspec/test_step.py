"""A LongSpec draft's steps are those of PyTorch's, token by token from the definition."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from train.config import StageConfig
from train.drafts.kinds import LongSpecSettings
from train.drafts.longspec import LongSpecObjective
from train.target import run_target

from .. import steps as tiny

WINDOW, OFFSET = 5, 40
STAGE = StageConfig("short", 13, 4, 2, tiny.RATE, 4, 0, 0.0, OFFSET)
SETTINGS = LongSpecSettings("longspec", "", WINDOW, True, 4, 4)
DATA = tiny.random_batch((2, 2), STAGE.seq_len)


@functools.cache
def whole(share: float) -> tiny.Trained:
    return tiny.four_steps(replace(SETTINGS, distillation=share), tiny.given(STAGE), DATA, 30)


@pytest.mark.parametrize("share", [0.0, 0.7], ids=["text", "distilled"])
def test_four_steps_are_those_of_pytorch(share: float, tmp_path: Path) -> None:
    """Loss, norm of the gradient, and parameters, at moved positions and with every shift."""
    from tests.models.parallel_oracle import ParallelOracle, torch

    one = whole(share)
    objective = one.begun.trainer.objective(STAGE, 30, 0)
    assert isinstance(objective, LongSpecObjective)
    layer = objective.draft
    stored = tiny.tensors(one.begun, one.first, tmp_path / "first")
    draft = {
        name: torch.tensor(each).requires_grad_()
        for name, each in stored.items()
        if name not in tiny.UNREAD
    }
    oracle = ParallelOracle(
        draft, 1, layer.num_heads, layer.num_kv_heads, WINDOW, layer.norm_eps, layer.rope_theta
    )
    embedding, head = (torch.tensor(np.array(tiny.FROZEN[name])) for name in ("embedding", "head"))
    target = jax.jit(lambda tokens, at: run_target(tiny.TARGET, tiny.FROZEN, tokens, at))
    moved, shifts = [], set()

    def attend(q: Any, keys: Any, values: Any, seen: Any) -> Any:
        """Of a row; a query that sees nothing gets zeros."""
        keys, values = (each.repeat_interleave(2, dim=1) for each in (keys, values))
        scores = torch.einsum("qhw,khw->hqk", q, keys) / q.shape[-1] ** 0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num()
        return torch.einsum("hqk,khw->qhw", weights, values).flatten(1)

    def logits(x: Any, at: Any, keys: Any, values: Any, shift: int) -> Any:
        """Of a row: a token sees itself and 5 before it, and the target up to ``shift`` behind."""
        behind = torch.arange(len(x))[:, None] - torch.arange(len(x))
        normed = oracle.norm(x, "input_layernorm")
        q, k, v = (oracle.split(normed, f"self_attn.{part}_proj") for part in "qkv")
        near = (behind >= 0) & (behind <= WINDOW)
        found = attend(oracle.rotate(q, at), oracle.rotate(k, at), v, near)
        x = x + found @ draft["self_attn.o_proj.weight"].T
        normed = oracle.norm(x, "post_self_attention_layernorm")
        q = oracle.rotate(oracle.split(normed, "cross_attn.q_proj"), at)
        found = attend(q, keys, values, behind >= shift)
        x = x + found @ draft["cross_attn.o_proj.weight"].T
        normed = oracle.norm(x, "post_cross_attention_layernorm")
        gate, up, down = (draft[f"mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        x = x + (torch.nn.functional.silu(normed @ gate.T) * (normed @ up.T)) @ down.T
        return x @ head.T

    def loss(step: int) -> Any:
        key = jax.random.fold_in(jax.random.key(tiny.SEED), step)
        draws = jax.device_get(objective.draw(key, (2, 2), STAGE.seq_len))
        total = torch.zeros(())
        for a, b in np.ndindex(2, 2):
            view = jax.device_get(target(DATA.tokens[a], draws.positions[a]))
            hidden, keys, values = (torch.tensor(np.array(each[b])) for each in view[:3])
            at, shift = draws.positions[a, b], int(draws.shift[a, b])
            moved.append(at.max() >= STAGE.seq_len)
            shifts.add(shift)
            tokens = torch.tensor(np.array(DATA.tokens[a, b])).long()
            found = logits(embedding[tokens], torch.tensor(np.array(at)), keys, values, shift)
            logs, aim = found[:-1].log_softmax(-1), (hidden[:-1] @ head.T).softmax(-1)
            text = -logs.gather(-1, tokens[1:, None])[:, 0]
            divergence = (aim * (aim.log() - logs)).sum(-1)
            counts = torch.tensor(DATA.weights[a, b, 1:])
            total = total + (counts * ((1 - share) * text + share * divergence)).sum()
        return total / DATA.weights[:, :, 1:].sum()

    tiny.assert_learns_as_pytorch(one, draft, loss, tmp_path / "last")
    assert any(moved) and shifts == {1, 2, 3, 4}


def test_devices_and_chunks_do_not_change_the_steps() -> None:
    """Few tokens of the loss, of which the last are no whole chunk, and MLPs in pieces."""
    cut = tiny.four_steps(SETTINGS, tiny.given(STAGE, fsdp=2, tp=2), DATA, 10, 8)
    tiny.assert_same_steps(cut, whole(0.0))
