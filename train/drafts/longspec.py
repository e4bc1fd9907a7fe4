"""What a LongSpec draft learns under a frozen target, and how it is begun and saved.

The draft predicts the next token, of the text or as the target's own distribution says. It reads
one layer of the target, under the two random transforms of LongSpec 3.2:

*Anchor-offset positions* (:func:`train.target.anchored_positions`): short sequences train the draft
at large positions. The target runs on the same positions.

*Flash noisy training*: the draft proposes several tokens past the last one the target has seen, so
in training query ``t`` sees the target's keys up to ``t - shift`` only. The shift is a traced
number and needs no mask: rolling the queries turns it into plain causal attention.

Both draw for every row by itself; the published code draws once for each micro-batch. Rows are
arranged as ``[A, B]``, micro-batches by rows, so draws do not depend on how devices share them.
"""

import typing
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, PyTree

from longspec_jax.axes import Array
from longspec_jax.config.target import TargetConfig
from longspec_jax.drafters.checkpoints.longspec import load_draft, save_draft
from longspec_jax.drafters.longspec import DraftConfig, DraftOutput, LongSpecLayer
from longspec_jax.models.target import head_of
from longspec_jax.ops.attention.dispatch import causal_attention
from longspec_jax.ops.partitioned import with_sharding

from ..acceptance import agreement_report, count_hits, counted_tokens
from ..config import StageConfig
from ..losses import cross_entropy_sum, distillation_sums, next_token_labels
from ..step import Batch, cast
from ..target import TargetView, drawn_positions, plain_positions, recomputing, run_target
from ..views import Reads, target_view
from .base import InitialDraft, TrainContext
from .kinds import LongSpecSettings


class Draws(NamedTuple):
    """A draft step's randomness."""

    positions: Array
    """``[A, B, T]``."""
    shift: Array
    """``[A, B]``."""


def noisy_shifts(key: Array, rows: tuple[int, int], *, max_shift: int = 4) -> Int[Array, "A B"]:
    """How far behind each row's queries the target's last visible key lies: 1 to ``max_shift``."""
    return jax.random.randint(key, rows, 1, max_shift + 1)


def shifted_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    shift: Int[Array, " B"],
    attend: Callable[[Array, Array, Array], Array] = causal_attention,
) -> Float[Array, "B T N H"]:
    """Causal attention that sees keys ``<= t - shift``; the first ``shift`` rows are 0.

    Query ``t`` is moved to row ``t - shift``, where plain causal attention shows it exactly those
    keys, and its result is moved back. One compiled program and one fused kernel serve all shifts.
    """
    out = _roll(attend(_roll(q, -shift), k, v), shift)
    visible = jnp.arange(q.shape[1]) >= shift[:, None]
    return jnp.where(visible[:, :, None, None], out, 0)


@jax.custom_vjp
def _roll(x: Float[Array, "B T ..."], by: Int[Array, " B"]) -> Float[Array, "B T ..."]:
    """Every row rolled along its tokens by its own distance.

    The gradient is the opposite roll; left to JAX it would be a scatter.
    """
    return jax.vmap(lambda row, distance: jnp.roll(row, distance, axis=0))(x, by)


def _roll_forward(x: Array, by: Array) -> tuple[Array, Array]:
    return _roll(x, by), by


def _roll_backward(by: Array, cotangent: Array) -> tuple[Array, None]:
    return _roll(cotangent, -by), None


_roll.defvjp(_roll_forward, _roll_backward)


def run_draft(
    config: DraftConfig,
    params: PyTree,
    frozen: PyTree,
    tokens: Array,
    draws: Draws,
    view: TargetView,
    mlp_chunk: int = 0,
) -> Array:
    """Hidden states ``[B, T, D]`` of the draft over whole rows, given the target's last layer.

    Its MLP goes in chunks of half of ``mlp_chunk``, because the backward pass holds twice as much.
    Where there are several chunks, the backward pass also recomputes everything but matmuls and
    attention.
    """
    mlp_chunk = -(-mlp_chunk // 2)

    def layer(params: PyTree, embedded: Array, draws: Draws, keys: Array, values: Array) -> Array:
        output = LongSpecLayer(config, mlp_chunk=mlp_chunk).apply(
            {"params": cast(params, config.dtype)},
            embedded,
            draws.positions,
            lambda q, k, v: causal_attention(q, k, v, window=config.window),
            lambda q: shifted_attention(q, keys, values, draws.shift),
        )
        return typing.cast(DraftOutput, output).hidden

    layer = recomputing(layer, len(tokens), tokens.size, mlp_chunk)
    with jax.named_scope("draft"):
        embedded = jax.lax.stop_gradient(jnp.take(frozen["embedding"], tokens, axis=0))
        [embedded] = with_sharding("b t d", embedded)
        return layer(params, embedded, draws, view.keys, view.values)


@dataclass(frozen=True)
class LongSpecObjective:
    """Next-token prediction by the draft, which reads one layer of the frozen target."""

    target: TargetConfig
    draft: DraftConfig
    settings: LongSpecSettings
    max_offset: int
    loss_chunk: int
    mlp_chunk: int = 0
    """Most tokens of a device whose MLP activations exist at once; 0: all."""

    def initialize(self, key: Array) -> PyTree:
        """Fresh parameters."""
        config = replace(self.draft, dtype="float32")
        embedded = jnp.zeros((1, 2, config.model_width), jnp.float32)
        positions = jnp.zeros((1, 2), jnp.int32)
        draft = LongSpecLayer(config)
        return draft.init(key, embedded, positions, lambda q, k, v: q, lambda q: q)["params"]

    def draw(self, key: Array, rows: tuple[int, int], length: int) -> Draws:
        """Positions, the target's and the draft's alike, and the shift."""
        position_key, shift_key = jax.random.split(key)
        s = self.settings
        offset = self.max_offset if s.anchor_offset else 0
        positions = drawn_positions(position_key, rows, length, self.target, offset, s.max_sinks)
        return Draws(positions, noisy_shifts(shift_key, rows, max_shift=s.max_shift))

    def sums(self, params: PyTree, frozen: PyTree, batch: Batch, draws: Draws) -> dict[str, Array]:
        """The draft's loss; with distillation its parts, and the target's own cross-entropy.

        Without it nothing reads the target after the keys and values of one layer, and the
        compiler leaves out the rest.
        """
        view = target_view(self.target, frozen, batch, draws.positions, self.mlp_chunk)
        labels, weights = next_token_labels(batch.tokens, batch.weights)
        [head] = with_sharding("v d", head_of(frozen))
        hidden = run_draft(
            self.draft, params, frozen, batch.tokens, draws, view, mlp_chunk=self.mlp_chunk
        )
        share, chunk, cap = self.settings.distillation, self.loss_chunk, self.target.logit_cap
        if not share:
            loss = cross_entropy_sum(hidden, head, labels, weights, chunk=chunk, cap=cap)
            return {"loss": loss}
        sums = distillation_sums(
            hidden, view.hidden, head, labels, weights, share=share, chunk=chunk, cap=cap
        )
        return sums._asdict()

    def measure(self, params: PyTree, frozen: PyTree, batch: Batch) -> dict[str, float]:
        """Simulated acceptance, for every number of tokens after the target's keys.

        Besides it the target's own cross-entropy, which says whether it fits the data.
        """
        *found, target_loss = _measured(self, params, frozen, batch)
        report = agreement_report(*found)
        return {**report, "target_loss": float(target_loss)} if report else {}


@partial(jax.jit, static_argnums=0)
def _measured(
    objective: LongSpecObjective, params: PyTree, frozen: PyTree, batch: Batch
) -> tuple[Array, Array, Array, Array]:
    """What :func:`train.acceptance.agreement_report` reads, and the target's cross-entropy."""
    rows, length = batch.tokens.shape
    positions, mlp_chunk = plain_positions((1, rows), length)[0], objective.mlp_chunk
    view = run_target(objective.target, frozen, batch.tokens, positions, mlp_chunk)
    labels, weights = next_token_labels(batch.tokens, batch.weights)
    counted, head = counted_tokens(weights), head_of(frozen)

    def at_shift(shift: Array) -> tuple[Array, Array]:
        draws = Draws(positions, jnp.full((rows,), shift))
        hidden = run_draft(objective.draft, params, frozen, batch.tokens, draws, view, mlp_chunk)
        return count_hits(hidden, head, view.hidden, head, counted, chunk=objective.loss_chunk)

    chunk, cap = objective.loss_chunk, objective.target.logit_cap
    loss = cross_entropy_sum(view.hidden, head, labels, weights, chunk=chunk, cap=cap)
    shifts = jnp.arange(1, objective.settings.max_shift + 1)
    hits = jax.lax.map(at_shift, shifts)
    return *hits, jnp.sum(counted, (1, 2)), loss / jnp.maximum(jnp.sum(weights), 1.0)


@dataclass(frozen=True)
class LongSpecTrainer:
    """A LongSpec draft for a target, as the pipeline trains it."""

    target: TargetConfig
    draft: DraftConfig
    settings: LongSpecSettings

    def objective(self, stage: StageConfig, loss_chunk: int, mlp_chunk: int) -> LongSpecObjective:
        """What a stage learns."""
        return LongSpecObjective(
            self.target, self.draft, self.settings, stage.max_offset, loss_chunk, mlp_chunk
        )

    def reads(self, stage: StageConfig) -> Reads | None:
        """Keys and values of one layer, and what distillation imitates."""
        if self.settings.anchor_offset and stage.max_offset:
            return None
        return Reads(hidden=bool(self.settings.distillation), keys_values=True)

    def save(self, folder: Path, params: PyTree) -> None:
        """Write the draft in the released format."""
        save_draft(folder, self.draft, params, target=self.target)


def begin(settings: LongSpecSettings, given: TrainContext) -> InitialDraft:
    """A fresh draft, or the one that the settings name, which must fit the target."""
    draft, params = DraftConfig.for_target(given.target), None
    if settings.init:
        draft, params = load_draft(settings.init, given.target, dtype="float32", mesh=given.mesh)
    draft = replace(draft, dtype=given.dtype, window=settings.window)
    return InitialDraft(LongSpecTrainer(given.target, draft, settings), given.params, params)
