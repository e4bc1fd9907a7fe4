"""What is learned: a target's next tokens, or a draft's under a frozen target.

Objectives are static and hashable; parameters, batches and randomness come in as arguments.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from longspec_jax.axes import Array
from longspec_jax.config import TargetConfig
from longspec_jax.drafters.longspec.config import DraftConfig
from longspec_jax.drafters.longspec.model import LongSpecLayer
from longspec_jax.models.target import Target, head_of
from longspec_jax.ops.partitioned import with_sharding

from .acceptance import Pair, simulated_acceptance
from .config import DraftSettings
from .losses import (
    cross_entropy_and_choice,
    cross_entropy_sum,
    cross_entropy_sums,
    distillation_sums,
    next_token_labels,
)
from .passes import Draws, cast, run_draft, run_target
from .rollout import roll_out
from .step import Batch
from .transforms import anchored_positions, noisy_shifts, plain_positions


@dataclass(frozen=True)
class TargetObjective:
    """Next-token prediction by the target itself; nothing is frozen."""

    config: TargetConfig
    loss_chunk: int

    def initialize(self, key: Array) -> Any:
        """Fresh parameters."""
        target = Target(replace(self.config, dtype="float32"))
        return target.init(key, jnp.zeros((1, 2), jnp.int32), method="initialize")["params"]

    def draw(self, key: Array, rows: tuple[int, int], length: int) -> tuple[()]:
        """No randomness."""
        return ()

    def sums(self, params: Any, frozen: Any, batch: Batch, draws: tuple[()]) -> dict[str, Array]:
        """The cross-entropy."""
        params = cast(params, self.config.dtype)
        positions = plain_positions((1, batch.tokens.shape[0]), batch.tokens.shape[1])[0]
        hidden = run_target(self.config, params, batch.tokens, positions).hidden
        labels, weights = next_token_labels(*batch)
        [head] = with_sharding("v d", head_of(params))
        loss = cross_entropy_sum(
            hidden, head, labels, weights, chunk=self.loss_chunk, head_gradient=True
        )
        return {"loss": loss}

    def measure(self, params: Any, frozen: Any, batch: Batch) -> dict[str, float]:
        """The held-out cross-entropy."""
        tokens = jnp.maximum(jnp.sum(batch.weights[:, 1:]), 1.0)
        return {"heldout_loss": float(_sums(self, params, frozen, batch, ())["loss"] / tokens)}


@dataclass(frozen=True)
class DraftObjective:
    """Next-token prediction by the draft, which reads the frozen target's last layer."""

    target: TargetConfig
    draft: DraftConfig
    settings: DraftSettings
    max_offset: int
    loss_chunk: int
    mlp_chunk: int = 0
    """Most tokens of a device whose MLP activations exist at once; 0: all."""
    target_loss: bool = True
    """Report the target's own cross-entropy, which costs its last layer and a pass of the head.
    With a share of distillation it comes for nothing, and always."""

    def initialize(self, key: Array) -> Any:
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
        positions = plain_positions(rows, length)
        if s.anchor_offset and self.max_offset:
            positions = anchored_positions(
                position_key,
                rows,
                length,
                # The target must not meet positions it was not made for.
                max_offset=max(0, min(self.max_offset, self.target.max_positions - length)),
                max_sinks=s.max_sinks,
                per_row=s.per_row,
            )
        return Draws(
            positions, noisy_shifts(shift_key, rows, max_shift=s.max_shift, per_row=s.per_row)
        )

    def sums(self, params: Any, frozen: Any, batch: Batch, draws: Draws) -> dict[str, Array]:
        """What the draft learns and, as a check on the positions, the target's cross-entropy.

        Without the latter nothing reads the target's last layer but its keys and values, and the
        compiler leaves out the rest.

        With a share of distillation ``loss`` is the mixture, and its parts are named beside it.
        """
        view = run_target(self.target, frozen, batch.tokens, draws.positions, self.mlp_chunk)
        view = jax.lax.stop_gradient(view)
        labels, weights = next_token_labels(*batch)
        [head] = with_sharding("v d", head_of(frozen))

        run = partial(run_draft, self.draft, params, frozen, batch.tokens, mlp_chunk=self.mlp_chunk)

        whole: Any = {"labels": labels, "weights": weights, "chunk": self.loss_chunk}
        if share := self.settings.distillation:
            found = distillation_sums(run(draws, view), view.hidden, head, share=share, **whole)
            sums = found._asdict()
            return {"target_loss": sums.pop("teacher_loss"), **sums}
        if self.settings.rollout:
            chain = roll_out(
                self.settings.rollout,
                self.settings.rollout_decay,
                lambda shift: run(Draws(draws.positions, jnp.full_like(draws.shift, shift)), view),
                lambda states, learned: cross_entropy_and_choice(
                    states, head, labels, learned, chunk=self.loss_chunk
                ),
                labels,
                weights,
            )
            told = cross_entropy_sum(view.hidden, head, **whole)
            return chain._asdict() | ({"target_loss": told} if self.target_loss else {})
        if self.target_loss:
            loss, told = cross_entropy_sums(run(draws, view), view.hidden, head, **whole)
            return {"loss": loss, "target_loss": told}
        return {"loss": cross_entropy_sum(run(draws, view), head, **whole)}

    def measure(self, params: Any, frozen: Any, batch: Batch) -> dict[str, float]:
        """Simulated acceptance."""
        return simulated_acceptance(
            Pair(
                self.target,
                self.draft,
                self.settings.max_shift,
                self.loss_chunk,
                self.mlp_chunk,
            ),
            params,
            frozen,
            batch.tokens,
            batch.weights,
        )


@partial(jax.jit, static_argnums=0)
def _sums(
    objective: TargetObjective, params: Any, frozen: Any, batch: Batch, draws: Any
) -> dict[str, Array]:
    return objective.sums(params, frozen, batch, draws)
