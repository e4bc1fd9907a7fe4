"""One jitted, sharded optimiser step for anything with an objective, and its AdamW.

An *objective* knows what is learned: it draws a step's randomness and turns one micro-batch into
sums of losses. The step knows the rest: float32 masters cast to the model's dtype, accumulation
over micro-batches, clipping, AdamW. Loss and gradient are means over all weighted tokens of the
step, so neither the number of micro-batches nor the number of devices changes them.

The learning rate is a function of progress, a number in [0, 1] that the loop takes from steps or
from the clock. The optimiser itself does not know it, so that a stage limited by time decays
exactly like one limited by steps.
"""

import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from longspec_jax.axes import Array
from longspec_jax.config.names import BATCH_AXES
from longspec_jax.ops.partitioned import use_mesh
from longspec_jax.sharding import param_shardings, partition_spec, path_name

from .config import OptimizerConfig

ROWS = P(None, BATCH_AXES)
"""Batches are ``[A, B, T]``: micro-batches one after another, their rows spread over both data
axes."""
_NOT_DECAYED = re.compile(r"(scale|bias)$")


def cast(params: PyTree, dtype: str) -> PyTree:
    """All leaves in a dtype."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.dtype(dtype)), params)


class Batch(NamedTuple):
    """The rows of one optimiser step."""

    tokens: PyTree
    """``[A, B, T]`` int32."""
    weights: PyTree
    """``[A, B, T]`` float32; 0 for tokens that are not to be predicted, padding among them."""
    view: Mapping[str, PyTree] | None = None
    """What the draft reads of the target, as it was stored: arrays ``[A, B, T, ...]`` by name
    (:mod:`train.views`). None: the step runs the target."""


@struct.dataclass
class TrainState:
    """What a step changes. DONATED by every step."""

    step: PyTree
    """Optimiser steps of this stage, int32."""
    params: PyTree
    optimizer: PyTree


class Objective(Protocol):
    """What is learned. Static and hashable; parameters come in as arguments."""

    def initialize(self, key: Array) -> PyTree:
        """Fresh float32 parameters."""
        ...

    def draw(self, key: Array, rows: tuple[int, int], length: int) -> PyTree:
        """Randomness of one step, every leaf with leading axes ``[A, B]``."""
        ...

    def sums(self, params: PyTree, frozen: PyTree, batch: Batch, draws: PyTree) -> dict[str, Array]:
        """Weighted sums over one micro-batch ``[B, T]``; ``loss`` is the one that is learned."""
        ...

    def measure(self, params: PyTree, frozen: PyTree, batch: Batch) -> dict[str, float]:
        """What shows progress on one micro-batch, and is not learned."""
        ...

    def flops_per_token(self, length: int) -> float:
        """Operations that a token of a row of this length needs, forward and backward."""
        ...


Step = Callable[
    [TrainState, PyTree, Batch, float | np.floating], tuple[TrainState, dict[str, Array]]
]
"""``(state, frozen, batch, learning_rate) -> (state, metrics)``."""


def make_step(
    objective: Objective,
    optimizer: optax.GradientTransformation,
    seed: int,
    mesh: Mesh,
    state_sharding: TrainState,
) -> Step:
    """The jitted step; the state is donated, the learning rate and all draws are traced values."""
    root = jax.random.key(seed)

    def step(
        state: TrainState, frozen: PyTree, batch: Batch, rate: Array
    ) -> tuple[TrainState, dict[str, Array]]:
        accumulation, rows, length = batch.tokens.shape
        draws = objective.draw(jax.random.fold_in(root, state.step), (accumulation, rows), length)
        with use_mesh(mesh.abstract_mesh):
            sums, gradient = _accumulate(
                objective, state.params, frozen, batch, draws, state_sharding.params
            )
        updates, opt = optimizer.update(gradient, state.optimizer, state.params)
        params = jax.tree.map(lambda p, u: p - rate * u, state.params, updates)
        metrics = {**sums, "grad_norm": optax.global_norm(gradient)}
        return TrainState(state.step + 1, params, opt), metrics

    rows = NamedSharding(mesh, ROWS)
    nothing = NamedSharding(mesh, P())
    return jax.jit(
        step,
        donate_argnums=0,
        in_shardings=(state_sharding, None, rows, nothing),
        out_shardings=(state_sharding, nothing),
    )


def _accumulate(
    objective: Objective,
    params: PyTree,
    frozen: PyTree,
    batch: Batch,
    draws: PyTree,
    shardings: PyTree,
) -> tuple[dict[str, Array], PyTree]:
    """Mean losses and mean gradient over the weighted tokens of all micro-batches.

    The gradient is summed up in the shards of its parameters.
    """
    # A row's first token is never predicted.
    tokens = jnp.maximum(jnp.sum(batch.weights[:, :, 1:]), 1.0)

    def loss(
        params: PyTree, frozen: PyTree, micro: Batch, micro_draws: PyTree
    ) -> tuple[Array, dict[str, Array]]:
        sums = objective.sums(params, frozen, micro, micro_draws)
        means = {name: value / tokens for name, value in sums.items()}
        return means["loss"], means

    def add(total: PyTree, micro: tuple[Batch, PyTree]) -> tuple[PyTree, None]:
        # The weights do not change from one micro-batch to the next, and the compiler would gather
        # the shards of all layers before the loop and keep them whole; the barrier hides it.
        here, read, micro = jax.lax.optimization_barrier((params, frozen, micro))
        (_, means), gradient = jax.value_and_grad(loss, has_aux=True)(here, read, *micro)
        gradient = jax.lax.with_sharding_constraint(gradient, shardings)
        return jax.tree.map(jnp.add, total, (means, gradient)), None

    first = jax.tree.map(lambda leaf: leaf[0], (batch, draws))
    shapes = jax.eval_shape(lambda: jax.grad(loss, has_aux=True)(params, frozen, *first)[::-1])
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    (means, gradient), _ = jax.lax.scan(add, zeros, (batch, draws))
    return {**means, "tokens": tokens}, gradient


def state_shardings(
    mesh: Mesh, objective: Objective, optimizer: optax.GradientTransformation
) -> TrainState:
    """Where every leaf of the state lives: no two devices hold the same part of a large one.

    Beyond the table's rules, masters and moments are cut over the axis ``data`` as well, along the
    dimension that ``fsdp`` cuts and where it divides. Only what is read in a pass is whole there:
    a mesh of ``data`` alone is the layout called ZeRO-1, one of ``fsdp`` alone ZeRO-3.

    Moments are matched by their path, which ends in the parameter's; XLA would otherwise put them
    on one device.
    """
    params = jax.eval_shape(objective.initialize, jax.random.key(0))
    param_shardings(mesh, params)  # Refuses a mesh that does not divide them.
    shares = mesh.shape["data"] * mesh.shape["fsdp"]

    def place(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        spec = partition_spec(path_name(path)) if leaf.ndim else ()
        axes = (
            BATCH_AXES if axis == "fsdp" and size % shares == 0 else axis
            for size, axis in zip(leaf.shape, spec, strict=False)
        )
        return NamedSharding(mesh, P(*axes))

    moments = jax.eval_shape(optimizer.init, params)
    place_all = functools.partial(jax.tree_util.tree_map_with_path, place)
    return TrainState(NamedSharding(mesh, P()), place_all(params), place_all(moments))


def initial_state(
    objective: Objective,
    optimizer: optax.GradientTransformation,
    shardings: TrainState,
    seed: int,
    params: PyTree = None,
) -> TrainState:
    """A state at step 0, made where it lives; given parameters are taken over as float32 copies."""

    def begin(key: Array, given: PyTree) -> TrainState:
        params = objective.initialize(key) if given is None else cast(given, "float32")
        return TrainState(jnp.int32(0), params, optimizer.init(params))

    return jax.jit(begin, out_shardings=shardings)(jax.random.key(seed), params)


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Clipping, Adam and weight decay; updates are yet to be scaled by minus the learning rate."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps),
        optax.add_decayed_weights(
            config.weight_decay, mask=None if config.decay_all else decayed_parameters
        ),
    )


def decayed_parameters(params: PyTree) -> PyTree:
    """True for matrices and tables, False for norms and biases."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: _NOT_DECAYED.search(path_name(path)) is None, params
    )


def learning_rate(progress: float, peak: float, *, warmup: float, floor: float) -> float:
    """Linear warm-up over a fraction of the stage, then a cosine down to ``floor * peak``.

    ``progress`` is how much of the stage is done with this step, 0 to 1. So the first step learns,
    and the last one has the floor.
    """
    if progress < warmup:
        return peak * progress / warmup
    fraction = min(1.0, (progress - warmup) / max(1e-9, 1.0 - warmup))
    return peak * (floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * fraction)))
