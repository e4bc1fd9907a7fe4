"""Four optimiser steps of a tiny draft of any kind, as its tests compare them with PyTorch."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from safetensors.numpy import load_file

from longspec_jax.sharding import make_mesh, param_shardings
from tests.kit import random_target, relative_error, tiny_target_config
from train.config import OptimizerConfig, StageConfig
from train.drafts.base import InitialDraft, TrainContext
from train.drafts.kinds import KINDS
from train.step import ROWS, Batch, initial_state, make_optimizer, make_step, state_shardings

ADAMW = OptimizerConfig(0.9, 0.95, 1e-6, 0.5, 0.1, False, 0.1, 1e-4)
RATE, SEED = 1e-2, 3
TARGET = tiny_target_config(
    vocab_size=48, model_width=16, mlp_width=20, num_layers=3, num_heads=4, num_kv_heads=2,
    head_width=8, max_positions=64,
)  # fmt: skip
FROZEN = random_target(TARGET)
UNREAD = {
    *("d2t", "t2d"),
    *(
        f"{layer}cross_attn.{each}_proj.{kind}"
        for layer in ("", "layers.0.", "layers.1.")
        for each in "kv"
        for kind in ("weight", "bias")
    ),
}
"""Tensors of an exported file that are not learned."""


class Trained(NamedTuple):
    """A draft that learned for four steps."""

    begun: InitialDraft
    first: Any
    """Parameters before the first step."""
    metrics: list[dict[str, Any]]
    last: Any


def given(stage: StageConfig, count_tokens: Any = pytest.fail, **axes: int) -> TrainContext:
    """What a draft of :data:`TARGET` is begun with."""
    mesh = make_mesh(**axes)
    frozen = jax.device_put(FROZEN, param_shardings(mesh, FROZEN))
    return TrainContext(TARGET, frozen, (stage,), 3, "float32", mesh, count_tokens)


def random_batch(rows: tuple[int, int], length: int) -> Batch:
    """Random tokens, a fifth of which are not to be predicted."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, TARGET.vocab_size, (*rows, length)).astype(np.int32)
    return Batch(tokens, (rng.random(tokens.shape) > 0.2).astype(np.float32))


def four_steps(
    settings: Any, given: TrainContext, data: Batch, loss_chunk: int, mlp_chunk: int = 0
) -> Trained:
    """A draft of these settings after four steps on one batch."""
    begun, [stage], mesh = KINDS[settings.kind].begin(settings, given), given.stages, given.mesh
    objective = begun.trainer.objective(stage, loss_chunk, mlp_chunk)
    optimizer = make_optimizer(ADAMW)
    shardings = state_shardings(mesh, objective, optimizer)
    state = initial_state(objective, optimizer, shardings, 1, begun.params)
    first, metrics = jax.device_get(state.params), []
    step = make_step(objective, optimizer, SEED, mesh, shardings)
    data = jax.tree.map(lambda part: jax.device_put(part, NamedSharding(mesh, ROWS)), data)
    for _ in range(4):
        state, values = step(state, begun.frozen, data, np.float32(RATE))
        metrics.append(jax.device_get(values))
    assert jax.tree.leaves(state.params)[0].sharding.mesh.shape == mesh.shape
    return Trained(begun, first, metrics, jax.device_get(state.params))


def assert_same_steps(one: Trained, other: Trained) -> None:
    """Metrics and parameters are the same but for rounding."""
    for here, there in zip(one.metrics, other.metrics, strict=True):
        for name, value in here.items():
            assert relative_error(there[name], value) < 1e-5, name
    for leaf, other_leaf in zip(*map(jax.tree.leaves, (one.last, other.last)), strict=True):
        # Adam divides tiny gradients by themselves: rounding shows a little more than in the loss.
        assert relative_error(other_leaf, leaf) < 1e-4


def assert_learns_as_pytorch(
    one: Trained, draft: Mapping[str, Any], loss: Callable[[int], Any], folder: Path
) -> None:
    """Loss, norm of the gradient, and parameters are those of PyTorch's own steps.

    Args:
      one: what is compared.
      draft: PyTorch's parameters before the first step, by the names of the exported file.
      loss: of a step's number, computed from them.
      folder: for the exported file.
    """
    torch = pytest.importorskip("torch", reason="the oracle is PyTorch")
    groups = [
        {"params": [p for p in draft.values() if p.ndim > 1], "weight_decay": ADAMW.weight_decay},
        {"params": [p for p in draft.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(ADAMW.b1, ADAMW.b2), eps=ADAMW.eps)
    begun = {name: value.detach().clone() for name, value in draft.items()}
    for step, values in enumerate(one.metrics):
        optimizer.zero_grad()
        found = loss(step)
        found.backward()
        norm = torch.nn.utils.clip_grad_norm_(draft.values(), ADAMW.clip)
        optimizer.step()
        assert relative_error(values["loss"], found.item()) < 1e-5
        assert relative_error(values["grad_norm"], float(norm)) < 1e-4
    learned = tensors(one.begun, one.last, folder)
    assert learned.keys() - UNREAD == draft.keys()
    for name, value in draft.items():
        assert relative_error(learned[name], value.detach().numpy()) < 1e-4, name
        assert relative_error(begun[name].numpy(), learned[name]) > 1e-3, f"{name} was not learned"


def tensors(begun: InitialDraft, params: Any, folder: Path) -> dict[str, np.ndarray]:
    """Parameters under the names of the exported file."""
    begun.trainer.save(folder, params)
    return load_file(folder / "model.safetensors")
