"""The jitted step: what it learns, where its arrays live, and that devices do not change it."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from longspec_jax.config import DraftConfig
from longspec_jax.sharding import make_mesh, param_shardings, partition_spec, path_name
from tests.kit import random_target, relative_error, tiny_target_config
from train.config import DraftSettings, OptimizerConfig
from train.objectives import DraftObjective, TargetObjective
from train.optim import decayed_parameters, learning_rate, make_optimizer
from train.step import ROWS, Batch, TrainState, initial_state, make_step, state_shardings

ADAMW = OptimizerConfig(0.9, 0.95, 1e-6, 1.0, 0.1, False, 0.1, 1e-4)
SETTINGS = DraftSettings(5, "", True, 4, 4, True)
TARGET = tiny_target_config(vocab_size=104, model_width=32, mlp_width=48, head_width=8)
MESHES = {"one": (1, 1, 1), "fsdp": (1, 4, 1), "tp": (1, 1, 2), "mixed": (2, 2, 2)}


def draft_objective(**overrides: Any) -> DraftObjective:
    draft = DraftConfig.for_target(TARGET, window=5)
    fields = dict(target=TARGET, draft=draft, settings=SETTINGS, max_offset=90, loss_chunk=16)
    return DraftObjective(**{**fields, **overrides})


def batch(rows: tuple[int, int] = (1, 8), length: int = 13) -> Batch:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 104, (rows[0] * rows[1], length)).astype(np.int32)
    weights = (rng.random(tokens.shape) > 0.2).astype(np.float32)
    return Batch(tokens.reshape(*rows, length), weights.reshape(*rows, length))


def run(
    objective: Any, data: Batch, mesh_shape: tuple[int, int, int] = (1, 1, 1), steps: int = 2
) -> tuple[TrainState, dict[str, jax.Array], Any]:
    mesh = make_mesh(*mesh_shape)
    optimizer = make_optimizer(ADAMW)
    shardings = state_shardings(mesh, objective, optimizer)
    state = initial_state(objective, optimizer, shardings, seed=1)
    frozen: Any = ()
    if isinstance(objective, DraftObjective):
        params = random_target(TARGET)
        frozen = jax.device_put(params, param_shardings(mesh, params))
    step = make_step(objective, optimizer, 3, mesh, shardings)
    data = Batch(*(jax.device_put(part, NamedSharding(mesh, ROWS)) for part in data))
    for _ in range(steps):
        state, metrics = step(state, frozen, data, np.float32(1e-2))
    assert step._cache_size() == 1, "one program for every draw and step"
    return state, metrics, shardings


@functools.cache
def single(kind: str) -> tuple[TrainState, dict[str, jax.Array]]:
    objective = draft_objective() if kind == "draft" else TargetObjective(TARGET, 16)
    return run(objective, batch())[:2]


@pytest.mark.parametrize("kind", ["draft", "target"])
@pytest.mark.parametrize("mesh", ["fsdp", "tp", "mixed"])
def test_devices_do_not_change_the_step(kind: str, mesh: str) -> None:
    expected, metrics = single(kind)
    objective = draft_objective() if kind == "draft" else TargetObjective(TARGET, 16)
    state, sharded_metrics, shardings = run(objective, batch(), MESHES[mesh])
    for name in metrics:
        assert relative_error(sharded_metrics[name], metrics[name]) < 1e-5, name
    for actual, wanted in zip(
        jax.tree.leaves(state.params), jax.tree.leaves(expected.params), strict=True
    ):
        # Adam divides tiny gradients by themselves: rounding shows a little more than in the loss.
        assert relative_error(actual, wanted) < 1e-4
    assert_placed(state, shardings)


def assert_placed(state: TrainState, shardings: TrainState) -> None:
    """Every parameter and optimiser leaf lies where the rule table says."""
    leaves, placed = jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(shardings)
    for (path, leaf), sharding in zip(leaves, placed, strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim), path_name(path)
        if leaf.ndim:
            wanted = NamedSharding(sharding.mesh, partition_spec(path_name(path)))
            assert leaf.sharding.is_equivalent_to(wanted, leaf.ndim), path_name(path)
            assert leaf.dtype == jnp.float32


@pytest.mark.parametrize("kind", ["draft", "target"])
def test_accumulation_does_not_change_the_step(kind: str) -> None:
    expected, metrics = single(kind)
    # Per-row draws follow the row, not its micro-batch.
    objective = draft_objective() if kind == "draft" else TargetObjective(TARGET, 16)
    whole = batch()
    split = Batch(*(part.reshape(4, 2, -1) for part in whole))
    state, split_metrics, _ = run(objective, split)
    assert relative_error(split_metrics["loss"], metrics["loss"]) < 1e-5
    assert relative_error(split_metrics["grad_norm"], metrics["grad_norm"]) < 1e-5
    for actual, wanted in zip(
        jax.tree.leaves(state.params), jax.tree.leaves(expected.params), strict=True
    ):
        assert relative_error(actual, wanted) < 1e-4


@pytest.mark.parametrize("objective", [draft_objective(), TargetObjective(TARGET, 64)])
def test_a_batch_is_learned_by_heart(objective: Any) -> None:
    first = run(objective, batch(), steps=1)[1]["loss"]
    last = run(objective, batch(), steps=60)[1]["loss"]
    assert last < 0.8 * first


def test_the_target_gets_no_gradient_and_its_loss_is_reported() -> None:
    objective, data = draft_objective(max_offset=0), batch()
    micro = Batch(*(part[0] for part in data))
    frozen = random_target(TARGET)
    params = objective.initialize(jax.random.key(0))
    draws = jax.tree.map(lambda leaf: leaf[0], objective.draw(jax.random.key(1), (1, 8), 13))
    loss = jax.grad(lambda frozen: objective.sums(params, frozen, micro, draws)["loss"])
    gradient = loss(frozen)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(gradient))
    sums = objective.sums(params, frozen, micro, draws)
    alone = TargetObjective(TARGET, 16).sums(frozen, (), micro, ())["loss"]
    assert relative_error(sums["target_loss"], alone) < 1e-5


def test_the_embedding_gradient_is_the_plain_one() -> None:
    table = jax.random.normal(jax.random.key(0), (7, 3))
    tokens = jnp.asarray([[1, 1, 6], [0, 1, 6]])
    from train.passes import _lookup

    def loss(look: Any, table: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(look(table, tokens)))

    expected = jax.grad(lambda t: loss(lambda t, i: jnp.take(t, i, axis=0), t))(table)
    assert relative_error(jax.grad(lambda t: loss(_lookup, t))(table), expected) < 1e-6


def test_norms_and_biases_do_not_decay_by_default() -> None:
    params = draft_objective().initialize(jax.random.key(0))
    decayed = jax.tree_util.tree_leaves_with_path(decayed_parameters(params))
    for path, decays in decayed:
        assert decays == path_name(path).endswith("kernel")
    zeros = jax.tree.map(jnp.zeros_like, params)
    ones = jax.tree.map(jnp.ones_like, params)
    for config in (ADAMW, replace(ADAMW, decay_all=True)):
        optimizer = make_optimizer(config)
        updates, _ = optimizer.update(zeros, optimizer.init(ones), ones)
        moved = [bool(np.any(leaf)) for leaf in jax.tree.leaves(updates)]
        assert all(moved) == config.decay_all and any(moved)


def test_the_learning_rate_warms_up_and_decays() -> None:
    def rate(progress: float) -> float:
        return learning_rate(progress, 2.0, warmup=0.1, floor=0.25)

    assert rate(0.0) == 0.0 and rate(0.05) == pytest.approx(1.0) and rate(0.1) == pytest.approx(2.0)
    assert rate(0.55) == pytest.approx(1.25) and rate(1.0) == pytest.approx(0.5)
