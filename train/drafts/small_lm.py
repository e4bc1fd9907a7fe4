"""What a small language model learns next to a frozen target, and how it is begun and saved.

It learns the text, the target's own distribution (Hinton et al. 2015), or both. It shares nothing
with the target but the numbers of the tokens: embedding and LM head are one table of its own.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from longspec_jax.axes import Array
from longspec_jax.config.target import TargetConfig
from longspec_jax.drafters.checkpoints.small_lm import load
from longspec_jax.drafters.draft import Target
from longspec_jax.drafters.small_lm import SmallLMOptions
from longspec_jax.models.target import head_of
from longspec_jax.ops.partitioned import with_sharding
from longspec_jax.weights.hf import save_target

from ..acceptance import agreement_report, count_hits, counted_tokens
from ..config import StageConfig
from ..losses import distillation_sums, next_token_labels
from ..step import Batch
from ..target import TargetObjective, plain_positions, run_target
from ..views import Reads, target_view
from .base import InitialDraft, TrainContext, refuse_offsets
from .kinds import SmallLMSettings

DEPTH = 3
"""Levels of its default trees."""


@dataclass(frozen=True)
class SmallLMObjective:
    """Next-token prediction by the small model, of the text and as the frozen target predicts."""

    target: TargetConfig
    draft: TargetConfig
    distillation: float
    loss_chunk: int
    mlp_chunk: int = 0
    """Most tokens of a device whose MLP activations exist at once; 0: all."""

    @property
    def alone(self) -> TargetObjective:
        """The small model learning the text, as a target that is trained from scratch does."""
        return TargetObjective(self.draft, self.loss_chunk, self.mlp_chunk)

    def initialize(self, key: Array) -> PyTree:
        """Fresh parameters."""
        return self.alone.initialize(key)

    def draw(self, key: Array, rows: tuple[int, int], length: int) -> tuple[()]:
        """No randomness."""
        return ()

    def sums(
        self, params: PyTree, frozen: PyTree, batch: Batch, draws: tuple[()]
    ) -> dict[str, Array]:
        """The loss; with distillation also its parts, and the target's own cross-entropy."""
        if not self.distillation:
            return self.alone.sums(params, frozen, batch, draws)
        view = target_view(self.target, frozen, batch, _positions(batch), self.mlp_chunk)
        hidden, head = self.alone.run(params, batch)
        labels, weights = next_token_labels(batch.tokens, batch.weights)
        [teacher_head] = with_sharding("v d", head_of(frozen))
        sums = distillation_sums(
            hidden,
            view.hidden,
            head,
            labels,
            weights,
            share=self.distillation,
            chunk=self.loss_chunk,
            cap=self.target.logit_cap,
            teacher_head=teacher_head,
        )
        return sums._asdict()

    def measure(self, params: PyTree, frozen: PyTree, batch: Batch) -> dict[str, float]:
        """Simulated acceptance.

        A guess at any distance reads all tokens before its own, so that all agree alike.
        """
        return agreement_report(*_hits(self, params, frozen, batch))


def _positions(batch: Batch) -> Array:
    return plain_positions((1, len(batch.tokens)), batch.tokens.shape[1])[0]


@partial(jax.jit, static_argnums=0)
def _hits(
    objective: SmallLMObjective, params: PyTree, frozen: PyTree, batch: Batch
) -> tuple[Array, Array, Array]:
    """What :func:`train.acceptance.agreement_report` reads."""
    wanted = run_target(
        objective.target, frozen, batch.tokens, _positions(batch), objective.mlp_chunk
    ).hidden
    hidden, head = objective.alone.run(params, batch)
    counted = counted_tokens(next_token_labels(batch.tokens, batch.weights)[1])
    found = count_hits(hidden, head, wanted, head_of(frozen), counted, chunk=objective.loss_chunk)
    hits, not_finite = (jnp.stack([each] * DEPTH) for each in found)
    return hits, not_finite, jnp.sum(counted, (1, 2))


@dataclass(frozen=True)
class SmallLMTrainer:
    """A small model for a target, as the pipeline trains it."""

    target: TargetConfig
    draft: TargetConfig
    settings: SmallLMSettings

    def objective(self, stage: StageConfig, loss_chunk: int, mlp_chunk: int) -> SmallLMObjective:
        """What a stage learns.

        Raises:
          ValueError: for a stage of anchor-offset positions.
        """
        refuse_offsets(stage, "a small language model")
        share = self.settings.distillation
        return SmallLMObjective(self.target, self.draft, share, loss_chunk, mlp_chunk)

    def reads(self, stage: StageConfig) -> Reads | None:
        """The final hidden states, of which the target's distribution is made."""
        return Reads(hidden=True) if self.settings.distillation else None

    def save(self, folder: Path, params: PyTree) -> None:
        """Write a model that this library and transformers load."""
        save_target(folder, self.draft, params)


def begin(settings: SmallLMSettings, given: TrainContext) -> InitialDraft:
    """A fresh small model, or the one that the settings name.

    Raises:
      ValueError: if the model to start from has another vocabulary or cannot draft, or the settings
        do not fit the target.
    """
    longest, params = max(stage.seq_len for stage in given.stages), None
    if settings.init:
        options = SmallLMOptions(dtype="float32", context=1)
        draft = load(settings.init, Target(given.target, given.params), options, mesh=given.mesh)
        draft.check_fits(given.target)
        config, params = draft.config, draft.params
        fresh = jax.eval_shape(TargetObjective(config, 1).initialize, jax.random.key(0))
        if jax.tree.structure(params) != jax.tree.structure(fresh):
            raise ValueError(
                f"--config.draft.init={settings.init}: the weights are quantised, and codes are "
                "not trained; start from the model in 16 or 32 bits"
            )
        longest = max(longest, config.max_positions)
    else:
        config = fresh_config(settings, given.target)
    config = replace(config, dtype=given.dtype, max_positions=longest)
    return InitialDraft(SmallLMTrainer(given.target, config, settings), given.params, params)


def fresh_config(settings: SmallLMSettings, target: TargetConfig) -> TargetConfig:
    """The shape of a fresh small model: Llama's layers over the target's vocabulary.

    Raises:
      ValueError: if the sizes do not fit each other.
    """
    s = settings
    if s.width % (2 * s.heads) or s.heads % s.kv_heads:
        raise ValueError(
            f"--config.draft.width={s.width}, heads={s.heads} and kv_heads={s.kv_heads} do not fit "
            "each other: width must be a multiple of twice the heads, heads one of kv_heads"
        )
    return TargetConfig(
        architecture="LlamaForCausalLM",
        vocab_size=target.vocab_size,
        model_width=s.width,
        mlp_width=s.mlp_width,
        num_layers=s.layers,
        num_heads=s.heads,
        num_kv_heads=s.kv_heads,
        head_width=s.width // s.heads,
        max_positions=target.max_positions,
        rope_theta=target.rope_theta,
        tied_embeddings=True,
    )
