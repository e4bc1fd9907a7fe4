"""The jitted step: what it learns, where its arrays live, and that devices do not change it."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from longspec_jax.config.layers import ExpertsConfig, LayerConfig, RecurrenceConfig, Rotary
from longspec_jax.drafters.longspec import DraftConfig
from longspec_jax.models.target import head_of
from longspec_jax.sharding import make_mesh, param_shardings, path_name
from tests.kit import ALL_PASSES, random_target, relative_error, tiny_target_config
from train.config import OptimizerConfig
from train.drafts.kinds import LongSpecSettings
from train.drafts.longspec import LongSpecObjective
from train.step import (
    ROWS,
    Batch,
    TrainState,
    decayed_parameters,
    initial_state,
    learning_rate,
    make_optimizer,
    make_step,
    state_shardings,
)
from train.target import TargetObjective, _lookup, run_target

ADAMW = OptimizerConfig(0.9, 0.95, 1e-6, 1.0, 0.1, False, 0.1, 1e-4)
SETTINGS = LongSpecSettings("longspec", "", 5, True, 4, 4)
STILL = replace(SETTINGS, anchor_offset=False, distillation=0.5)
TARGET = tiny_target_config(
    vocab_size=104, model_width=32, mlp_width=48, num_layers=1, num_heads=4, head_width=8
)
DRAFT = LongSpecObjective(TARGET, DraftConfig.for_target(TARGET, window=5), SETTINGS, 90, 16)
SPARSE = replace(
    TARGET,
    kinds=(LayerConfig(Rotary(), experts=ExpertsConfig(8, 2, 12)), LayerConfig(Rotary())),
    pattern=(0, 1),
    num_layers=2,
)
HYBRID = replace(
    TARGET,
    kinds=(LayerConfig(recurrence=RecurrenceConfig(2, 4, 6, 10)), LayerConfig(Rotary())),
    pattern=(0, 1),
    num_layers=2,
    gated_attention=True,
)
FROZEN = {"experts": SPARSE, "hybrid": HYBRID}
OBJECTIVES: dict[str, Any] = {
    "draft": DRAFT,
    "target": TargetObjective(TARGET, 16),
    "chunked": replace(DRAFT, mlp_chunk=24),
    "experts": replace(DRAFT, target=SPARSE, mlp_chunk=24, settings=STILL),
    "hybrid": replace(DRAFT, target=HYBRID, settings=STILL),
}
ONE = (1, 1, 1)


@functools.cache
def frozen_params() -> Any:
    return jax.jit(TargetObjective(TARGET, 16).initialize)(jax.random.key(7))


def batch(rows: tuple[int, int] = (1, 8), length: int = 13) -> Batch:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 104, (rows[0] * rows[1], length)).astype(np.int32)
    weights = (rng.random(tokens.shape) > 0.2).astype(np.float32)
    return Batch(tokens.reshape(*rows, length), weights.reshape(*rows, length))


class Trainer:
    """A compiled step and everything it needs."""

    def __init__(self, kind: str, mesh_shape: tuple[int, int, int]):
        self.mesh, self.objective = make_mesh(*mesh_shape), OBJECTIVES[kind]
        self.optimizer = make_optimizer(ADAMW)
        self.shardings = state_shardings(self.mesh, self.objective, self.optimizer)
        self.step = make_step(self.objective, self.optimizer, 3, self.mesh, self.shardings)
        self.frozen: Any = ()
        if kind != "target":
            params = random_target(FROZEN[kind]) if kind in FROZEN else frozen_params()
            self.frozen = jax.device_put(params, param_shardings(self.mesh, params))

    def run(self, data: Batch, steps: int) -> tuple[TrainState, dict[str, jax.Array]]:
        state = initial_state(self.objective, self.optimizer, self.shardings, seed=1)
        rows = NamedSharding(self.mesh, ROWS)
        data = jax.tree.map(lambda part: jax.device_put(part, rows), data)
        compiled = self.step._cache_size()
        for _ in range(steps):
            state, metrics = self.step(state, self.frozen, data, np.float32(1e-2))
        assert self.step._cache_size() <= compiled + 1, "one program for every draw and step"
        return state, metrics


trainer = functools.cache(Trainer)


@functools.cache
def single(kind: str) -> tuple[TrainState, dict[str, jax.Array]]:
    return trainer(kind, ONE).run(batch(), 2)


def assert_same(actual: tuple[TrainState, Any], expected: tuple[TrainState, Any]) -> None:
    for name, value in expected[1].items():
        assert relative_error(actual[1][name], value) < 1e-5, name
    leaves = [jax.tree.leaves(state.params) for state, _ in (actual, expected)]
    for one, other in zip(*leaves, strict=True):
        # Adam divides tiny gradients by themselves: rounding shows a little more than in the loss.
        assert relative_error(one, other) < 1e-4


def test_the_target_runs_no_further_than_is_read() -> None:
    """Of its last layer, here the only one, the keys and values are made and nothing else."""
    micro = jax.tree.map(lambda part: part[0], batch())
    params = jax.eval_shape(DRAFT.initialize, jax.random.key(0))
    draws = jax.tree.map(lambda leaf: leaf[0], DRAFT.draw(jax.random.key(1), (1, 8), 13))

    def products(settings: LongSpecSettings) -> int:
        objective = replace(DRAFT, settings=settings)
        sums = jax.jit(objective.sums).lower(params, frozen_params(), micro, draws)
        return sums.compile(ALL_PASSES).as_text().count(" dot(")

    # Scores, their values, output, gate and value, their product, and the head.
    assert products(replace(SETTINGS, distillation=0.5)) - products(SETTINGS) == 6


@pytest.mark.full
@pytest.mark.parametrize(("kind", "whole"), [("chunked", "draft"), ("target", "target")])
def test_devices_and_chunks_of_the_mlp_do_not_change_the_step(kind: str, whole: str) -> None:
    """A chunk is cut besides."""
    sharded = Trainer(kind, (2, 2, 2))
    result = sharded.run(batch(), 2)
    assert_same(result, single(whole))
    assert_placed(result[0], sharded.shardings)


@pytest.mark.full
@pytest.mark.parametrize("kind", FROZEN)
def test_a_draft_learns_from_a_target_of_unlike_layers(kind: str) -> None:
    """In chunks and on a mesh, the target's loss is that of one pass on one device."""
    data, params = batch(), random_target(FROZEN[kind])
    state, metrics = Trainer(kind, (2, 2, 2)).run(data, 1)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((state.params, metrics)))
    [tokens], [weights] = data[:2]
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    run = jax.jit(run_target, static_argnums=0)
    hidden = run(FROZEN[kind], params, tokens, positions).hidden
    losses = -jax.nn.log_softmax(hidden @ head_of(params).T)[:, :-1]
    own = np.take_along_axis(np.asarray(losses), tokens[:, 1:, None], axis=-1)[..., 0]
    expected = (own * weights[:, 1:]).sum() / weights[:, 1:].sum()
    assert float(metrics["target_loss"]) == pytest.approx(expected, rel=1e-5)


def test_a_target_of_experts_is_not_trained_itself() -> None:
    with pytest.raises(NotImplementedError, match="not trained from scratch"):
        TargetObjective(SPARSE, 16)


def assert_placed(state: TrainState, shardings: TrainState) -> None:
    """Every parameter and optimiser leaf lies where it should, the larger ones in shards."""
    leaves, placed = jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(shardings)
    for (path, leaf), sharding in zip(leaves, placed, strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim), path_name(path)
        if leaf.ndim:
            assert leaf.dtype == jnp.float32
        if leaf.ndim > 1:
            share = leaf.addressable_shards[0].data.size
            assert share < leaf.size if "bias" in path_name(path) else 8 * share == leaf.size


@pytest.mark.parametrize("kind", ["draft", "target"])
def test_accumulation_does_not_change_the_step(kind: str) -> None:
    # Per-row draws follow the row, not its micro-batch.
    split = jax.tree.map(lambda part: part.reshape(4, 2, -1), batch())
    assert_same(trainer(kind, ONE).run(split, 2), single(kind))


def test_a_mixed_loss_is_the_mixture_of_its_parts() -> None:
    micro = jax.tree.map(lambda part: part[0], batch())
    params = jax.jit(DRAFT.initialize)(jax.random.key(0))
    draws = jax.tree.map(lambda leaf: leaf[0], DRAFT.draw(jax.random.key(1), (1, 8), 13))

    def sums(share: float) -> Any:
        mixed = replace(DRAFT, settings=replace(SETTINGS, distillation=share))
        return jax.jit(mixed.sums)(params, frozen_params(), micro, draws)

    plain, mixed, imitated = sums(0.0), sums(0.25), sums(1.0)
    assert set(plain) == {"loss"}
    assert mixed["cross_entropy"] == plain["loss"] and mixed["divergence"] > 0
    expected = 0.75 * mixed["cross_entropy"] + 0.25 * mixed["divergence"]
    assert relative_error(mixed["loss"], expected) < 1e-6
    assert imitated["loss"] == imitated["divergence"] == mixed["divergence"]


def test_the_embedding_gradient_is_the_plain_one() -> None:
    table = jax.random.normal(jax.random.key(0), (7, 3))
    tokens = jnp.asarray([[1, 1, 6], [0, 1, 6]])

    def loss(look: Any, table: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(look(table, tokens)))

    @jax.jit
    def gradients(table: jax.Array) -> tuple[jax.Array, jax.Array]:
        plain = jax.grad(lambda t: loss(lambda t, i: jnp.take(t, i, axis=0), t))(table)
        return jax.grad(lambda t: loss(_lookup, t))(table), plain

    assert relative_error(*gradients(table)) < 1e-6


def first_updates(optimizer: Any, gradient: Any, params: Any) -> Any:
    return optimizer.update(gradient, optimizer.init(params), params)[0]


def test_norms_and_biases_do_not_decay_by_default() -> None:
    params = jax.eval_shape(DRAFT.initialize, jax.random.key(0))
    decayed = jax.tree_util.tree_leaves_with_path(decayed_parameters(params))
    for path, decays in decayed:
        assert decays == path_name(path).endswith("kernel")
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), params)
    ones = jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), params)
    for config in (ADAMW, replace(ADAMW, decay_all=True)):
        updates = jax.jit(functools.partial(first_updates, make_optimizer(config)))(zeros, ones)
        moved = [bool(np.any(leaf)) for leaf in jax.tree.leaves(updates)]
        assert all(moved) == config.decay_all and any(moved)


def test_the_learning_rate_warms_up_and_decays() -> None:
    def rate(progress: float) -> float:
        return learning_rate(progress, 2.0, warmup=0.1, floor=0.25)

    assert rate(0.0) == 0.0 and rate(0.05) == pytest.approx(1.0) and rate(0.1) == pytest.approx(2.0)
    assert rate(0.55) == pytest.approx(1.25) and rate(1.0) == pytest.approx(0.5)


def test_padding_changes_no_sum() -> None:
    """Rows may be padded to any length: the losses are those of their tokens."""
    data, draws = batch(), DRAFT.draw(jax.random.key(2), (1, 8), 13)
    data.weights[..., 7:] = 0
    params, frozen = jax.jit(DRAFT.initialize)(jax.random.key(1)), frozen_params()
    mixed = replace(DRAFT, settings=STILL)

    @jax.jit
    def sums(micro: Batch, drawn: Any) -> dict[str, jax.Array]:
        return mixed.sums(params, frozen, micro, drawn)

    def cut(length: int) -> dict[str, jax.Array]:
        drawn = draws._replace(positions=draws.positions[0, ..., :length], shift=draws.shift[0])
        return sums(jax.tree.map(lambda part: part[0, :, :length], data), drawn)

    for name, value in cut(7).items():
        np.testing.assert_allclose(value, cut(13)[name], rtol=1e-5, err_msg=name)
