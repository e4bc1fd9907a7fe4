"""What a DFlash draft learns under a frozen target, and how it is begun and exported.

Blocks begin at random anchors in every row (:mod:`train.drafts.blocks`): the text's token at the
anchor and mask tokens after it, whose slots see each other and, in every layer, what is made of
the target's features before the anchor. Slot ``j`` learns the text's token at its own place (arXiv
2602.06036). The text should be the target's own, which ``python -m train.regenerate`` makes of any.

JetSpec's head (arXiv 2606.18394) is a draft whose slots see only the earlier ones. It learns the
target's distribution instead of the text, all slots alike.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, PyTree

from longspec_jax.axes import Array
from longspec_jax.config.target import TargetConfig
from longspec_jax.drafters.checkpoints.dflash import LAYERS, evenly, load_draft, save_draft
from longspec_jax.drafters.dflash import DFlashConfig, DFlashLayers, DFlashParams
from longspec_jax.drafters.draft import Target
from longspec_jax.models.target import head_of, scaled
from longspec_jax.ops.partitioned import with_sharding
from longspec_jax.ops.slicing import along

from ..acceptance import agreement_report
from ..config import StageConfig
from ..losses import cross_entropy_sum, distillation_sums
from ..step import Batch, cast
from ..target import TargetView, plain_positions, recomputing
from ..views import Reads, target_view
from .base import InitialDraft, TrainContext, refuse_offsets
from .block_attention import block_attention
from .blocks import drawn_anchors, even_anchors, places, slot_hits, slot_weights
from .kinds import DFlashSettings


def fresh_layers(config: DFlashConfig, key: Array) -> PyTree:
    """Fresh parameters, in the configuration's dtype."""
    dtype, positions = config.trunk.dtype, jnp.zeros((1, 2), jnp.int32)
    embedded = jnp.zeros((1, 2, config.model_width), dtype)
    hidden = [jnp.zeros((1, 2, config.target_width), dtype)] * len(config.features)

    def touch(layers: DFlashLayers) -> None:
        layers.keys_values(hidden, positions)
        layers(embedded, positions, lambda layer, q, k, v: q)

    layers = DFlashLayers(config)
    return layers.init(key, method=touch)["params"]


def run_blocks(
    config: DFlashConfig,
    params: PyTree,
    embedding: Float[Array, "V D"],
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    anchors: Int[Array, "B M"],
    view: TargetView,
    every: int,
    mlp_chunk: int = 0,
    factor: float = 1.0,
) -> Float[Array, "B M slots D"]:
    """What the LM head reads of every slot of every block.

    Args:
      config: of the draft.
      params: its float32 parameters.
      embedding: the target's table.
      tokens: of whole rows.
      positions: theirs, ascending by 1.
      anchors: where blocks begin, one in every ``every`` tokens.
      view: the target's, with the residual streams of ``config.features``.
      every: as in :func:`train.drafts.blocks.drawn_anchors`.
      mlp_chunk: most tokens of a device whose MLP activations exist at once; 0: all. Half as many
        are taken, because the backward pass holds twice as much. Where there are several chunks,
        the backward pass also recomputes everything but matmuls and attention.
      factor: on embeddings, as in the target.
    """
    mlp_chunk = -(-mlp_chunk // 2)
    layers = DFlashLayers(config, mlp_chunk=mlp_chunk)
    rows, blocks = anchors.shape

    def run(params: PyTree, hidden: PyTree, embedded: Array, at: Array) -> Array:
        bound = layers.bind({"params": params})
        context = bound.keys_values(hidden, positions)

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            causal = config.causal[layer]
            return block_attention(q, context[layer], anchors, every, own=(k, v), causal=causal)

        return bound(embedded, at, attend)

    with jax.named_scope("draft"):
        pending = along(anchors, tokens)[:, :, None]
        masks = jnp.full((rows, blocks, config.block - 1), config.mask_token, tokens.dtype)
        block = jnp.concatenate([pending, masks], axis=2).reshape(rows, -1)
        [embedded] = with_sharding("b t d", jnp.take(embedding, block, axis=0))
        embedded = scaled(embedded, factor)
        # Positions go on after the row's end.
        at = positions[:, :1] + places(anchors, config.block)
        run = recomputing(run, rows, at.size, mlp_chunk)
        hidden = [view.kept[each] for each in config.features]
        found = run(cast(params, config.trunk.dtype), hidden, embedded, at)
    return found.reshape(rows, blocks, config.block, -1)


@dataclass(frozen=True)
class DFlashObjective:
    """Prediction of a block's tokens at many anchors of every row."""

    target: TargetConfig
    draft: DFlashConfig
    anchor_every: int
    decay: float
    loss_chunk: int
    mlp_chunk: int = 0
    """Most tokens of a device whose MLP activations exist at once; 0: all."""
    distillation: float = 0.0
    """Share of the divergence from the target's distribution in the loss."""

    def initialize(self, key: Array) -> PyTree:
        """Fresh parameters."""
        trunk = replace(self.draft.trunk, dtype="float32")
        return fresh_layers(replace(self.draft, trunk=trunk), key)

    def draw(self, key: Array, rows: tuple[int, int], length: int) -> Array:
        """Where blocks begin, ``[A, B, M]``."""
        return drawn_anchors(key, rows, length, self.anchor_every)

    def sums(self, params: PyTree, frozen: PyTree, batch: Batch, draws: Array) -> dict[str, Array]:
        """The loss, and its parts where there are two; a row's weights sum up to its tokens'.

        Where only the text is learned, nothing reads the target after the last of the draft's
        features, and the compiler leaves out the rest.
        """
        hidden, view = self._run(params, frozen, batch, draws)
        labels, weights, at = self._slots(batch, draws)
        weights *= slot_weights(self.draft.tokens, self.anchor_every, self.decay)
        [head] = with_sharding("v d", head_of(frozen))
        rows = len(labels)
        hidden = hidden.reshape(rows, -1, hidden.shape[-1])
        labels, weights = labels.reshape(rows, -1), weights.reshape(rows, -1)
        chunk, cap, share = self.loss_chunk, self.target.logit_cap, self.distillation
        if not share:
            loss = cross_entropy_sum(hidden, head, labels, weights, chunk=chunk, cap=cap)
            return {"loss": loss}
        teacher = along(at - 1, view.hidden).reshape(rows, -1, view.hidden.shape[-1])
        found = distillation_sums(
            hidden, teacher, head, labels, weights, share=share, chunk=chunk, cap=cap
        )
        return found._asdict()

    def measure(self, params: PyTree, frozen: PyTree, batch: Batch) -> dict[str, float]:
        """Simulated acceptance; slot ``j`` is shift ``j``."""
        return agreement_report(*_hits(self, params, frozen, batch))

    def _run(
        self, params: PyTree, frozen: PyTree, batch: Batch, anchors: Array
    ) -> tuple[Array, TargetView]:
        """What the LM head reads of all slots but the pending token's, and the target's view."""
        rows, length = batch.tokens.shape
        positions = plain_positions((1, rows), length)[0]
        chunk, features = self.mlp_chunk, self.draft.features
        view = target_view(self.target, frozen, batch, positions, chunk, features)
        embedding = jax.lax.stop_gradient(frozen["embedding"])
        hidden = run_blocks(
            self.draft,
            params,
            embedding,
            batch.tokens,
            positions,
            anchors,
            view,
            every=self.anchor_every,
            mlp_chunk=self.mlp_chunk,
            factor=self.target.embedding_factor,
        )
        # The head then makes logits of it, without another division.
        hidden = scaled(hidden, 1 / self.target.logits_divisor)
        return hidden[:, :, self.draft.first_slot :], view

    def _slots(self, batch: Batch, anchors: Array) -> tuple[Array, Array, Array]:
        """Labels, weights and places of all slots but the pending token's, ``[B, M, slots]``."""
        last = batch.tokens.shape[1] - 1
        index = anchors[:, :, None] + jnp.arange(1, self.draft.block)
        at = jnp.minimum(index, last)
        return along(at, batch.tokens), jnp.where(index <= last, along(at, batch.weights), 0), at


@partial(jax.jit, static_argnums=0)
def _hits(
    objective: DFlashObjective, params: PyTree, frozen: PyTree, batch: Batch
) -> tuple[Array, Array, Array]:
    """What :func:`train.acceptance.agreement_report` reads."""
    rows, length = batch.tokens.shape
    anchors = even_anchors(rows, length, objective.anchor_every)
    hidden, view = objective._run(params, frozen, batch, anchors)
    _, weights, at = objective._slots(batch, anchors)
    wanted, head = along(at - 1, view.hidden), head_of(frozen)
    return slot_hits(hidden, head, wanted, head, weights, chunk=objective.loss_chunk)


@dataclass(frozen=True)
class DFlashTrainer:
    """A DFlash draft for a target, as the pipeline trains it."""

    target: TargetConfig
    draft: DFlashConfig
    settings: DFlashSettings

    def objective(self, stage: StageConfig, loss_chunk: int, mlp_chunk: int) -> DFlashObjective:
        """What a stage learns.

        Raises:
          ValueError: for a stage of anchor-offset positions.
        """
        refuse_offsets(stage, "a DFlash draft")
        s, chunks = self.settings, (loss_chunk, mlp_chunk)
        blocks = s.anchor_every, s.decay
        return DFlashObjective(self.target, self.draft, *blocks, *chunks, s.distillation)

    def reads(self, stage: StageConfig) -> Reads:
        """The hidden states that it fuses, and what the loss imitates."""
        return Reads(hidden=bool(self.settings.distillation), kept=self.draft.features)

    def save(self, folder: Path, params: PyTree) -> None:
        """Write the draft in z-lab's format, which SGLang and vLLM read."""
        # Tables are the target's and are not stored, so that any will do.
        nothing = jnp.zeros((0, 0))
        draft = DFlashParams(params, nothing, nothing, stores_embedding=False, stores_head=False)
        save_draft(folder, self.draft, draft)


def begin(settings: DFlashSettings, given: TrainContext) -> InitialDraft:
    """A fresh draft, or the one that the settings name.

    Raises:
      ValueError: if the draft to start from does not fit the target or cannot be trained here, or
        the settings do not fit the target.
    """
    longest, params = max(stage.seq_len for stage in given.stages), None
    if settings.init:
        draft, params = _loaded(settings.init, given)
        longest = max(longest, draft.trunk.max_positions)
    else:
        draft = fresh_config(settings, given.target)
    trunk = replace(draft.trunk, dtype=given.dtype, max_positions=longest)
    trainer = DFlashTrainer(given.target, replace(draft, trunk=trunk), settings)
    return InitialDraft(trainer, given.params, params)


def fresh_config(settings: DFlashSettings, target: TargetConfig) -> DFlashConfig:
    """The shape of a fresh draft: Qwen3's layers with the target's widths, heads and rotation.

    Raises:
      ValueError: if the settings do not fit the target.
    """
    mask = settings.mask_token
    if mask >= target.vocab_size:
        raise ValueError(
            f"--config.draft.mask_token={mask} must be one of the target's {target.vocab_size} "
            "tokens, or -1 for the last"
        )
    if settings.features:
        features = tuple(map(int, settings.features.split(",")))
    elif target.num_layers < 5:
        raise ValueError(
            f"the target has {target.num_layers} layers, too few to spread features over; name "
            "those after which the draft takes the hidden states with --config.draft.features=0,1"
        )
    else:
        features = evenly(target.num_layers, settings.layers)
    trunk = TargetConfig(
        architecture=LAYERS,
        vocab_size=target.vocab_size,
        model_width=target.model_width,
        mlp_width=target.mlp_width,
        num_layers=settings.layers,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_width=target.head_width,
        max_positions=target.max_positions,
        rope_theta=target.rope_theta,
        rope_scaling=target.rope_scaling,
        norm_eps=target.norm_eps,
        qk_norm=True,
    )
    config = DFlashConfig(
        trunk,
        target_width=target.model_width,
        target_layers=target.num_layers,
        proposable=target.vocab_size,
        features=features,
        block=settings.block,
        mask_token=target.vocab_size - 1 if mask < 0 else mask,
        causal=(settings.causal,) * settings.layers,
    )
    config.check_fits(target)
    return config


def _loaded(source: str, given: TrainContext) -> tuple[DFlashConfig, PyTree]:
    """The draft to start from: its shape and parameters.

    Raises:
      ValueError: for one with more than the layers of DFlash.
    """
    config, params = load_draft(source, Target(given.target, given.params), mesh=given.mesh)
    more = {
        "proposes from the pending token's slot": config.from_pending,
        "has a Markov head": config.markov is not None,
        "has a confidence head": config.confidence is not None,
        "has sliding windows": any(config.windows),
        "has convolutions": config.convolution is not None,
        "has tables of its own": params.own_embedding or params.stores_head,
    }
    for what, there in more.items():
        if there:
            raise ValueError(
                f"--config.draft.init={source}: the draft {what}, which is not trained here; start "
                "from a plain DFlash draft, or leave init empty"
            )
    return config, params.layer
