"""What a parallel LongSpec draft learns under a frozen target, and how it is begun and saved.

Blocks begin at random anchors in every row (:mod:`train.drafts.blocks`). A block sees the last
``W`` tokens before its anchor and the target's keys and values before it. Slot ``j`` learns the
token after its own, and through the Markov head the text's token at the slot (teacher forcing).

The loss of a slot is ``(1 - share) * -log q[label] + share * sum |p - q|``, ``q`` the draft's
distribution with the Markov head's correction and ``p`` the target's (DSpark's loss, whose share is
0.9). Half of the distance is the total variation: how often draws of the two must differ.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, PyTree

from longspec_jax.axes import Array
from longspec_jax.config.target import TargetConfig
from longspec_jax.drafters.checkpoints import longspec
from longspec_jax.drafters.checkpoints.parallel import ARCHITECTURE, load_draft, save_draft
from longspec_jax.drafters.longspec import DraftConfig
from longspec_jax.drafters.parallel import ParallelConfig, ParallelLayers
from longspec_jax.models.layers import INITIAL_SCALE
from longspec_jax.models.target import capped, head_logits, head_of
from longspec_jax.ops.partitioned import with_sharding
from longspec_jax.ops.slicing import along
from longspec_jax.weights.hub import local_folder
from longspec_jax.weights.json_files import read_json

from ..acceptance import agreement_report
from ..config import StageConfig
from ..losses import ChunkLoss, Products, chunked_loss, surprise_of
from ..step import Batch, cast
from ..target import TargetView, drawn_positions, plain_positions, recomputing
from ..views import Reads, target_view
from .base import InitialDraft, TrainContext
from .block_attention import block_attention
from .blocks import drawn_anchors, even_anchors, places, slot_hits, slot_weights
from .kinds import ParallelSettings


class Draws(NamedTuple):
    """A draft step's randomness."""

    positions: Array
    """``[A, B, T]``."""
    anchors: Array
    """``[A, B, M]``, ascending: where blocks begin."""


def run_blocks(
    config: ParallelConfig,
    params: PyTree,
    frozen: PyTree,
    tokens: Int[Array, "B T"],
    draws: Draws,
    view: TargetView,
    every: int,
    mlp_chunk: int = 0,
) -> Float[Array, "B slots D"]:
    """What the LM head reads of every slot of every block.

    The MLP goes in chunks of half of ``mlp_chunk``, because the backward pass holds twice as much.
    Where there are several chunks, the backward pass also recomputes everything but matmuls and
    attention.

    Args:
      config: of the draft.
      params: its float32 parameters.
      frozen: the target's.
      tokens: of whole rows.
      draws: of these rows.
      view: of the target's forward over them.
      every: as in :func:`drawn_anchors`.
      mlp_chunk: most tokens of a device whose MLP activations exist at once; 0: all.
    """
    params = cast(
        {name: each for name, each in params.items() if name != "markov"}, config.layer.dtype
    )
    mlp_chunk = -(-mlp_chunk // 2)
    layers = ParallelLayers(config, mlp_chunk=mlp_chunk)
    window, last = config.layer.window, tokens.shape[1] - 1
    with jax.named_scope("draft"):
        embedded = jax.lax.stop_gradient(jnp.take(frozen["embedding"], tokens, axis=0))
        [embedded] = with_sharding("b t d", embedded)
        at = jnp.minimum(places(draws.anchors, config.block), last)

        def run(params: PyTree, embedded: Array, draws: Draws, keys: Array, values: Array) -> Array:
            bound = layers.bind({"params": params})
            rows = bound.keys_values(embedded, draws.positions)

            def attend_self(layer: int, q: Array, k: Array, v: Array) -> Array:
                # Deeper layers see only their block.
                past, reach = (rows, window) if layer == 0 else (None, 0)
                return block_attention(q, past, draws.anchors, every, window=reach, own=(k, v))

            def attend_cross(q: Array) -> Array:
                return block_attention(q, (keys, values), draws.anchors, every)

            pending, positions = along(draws.anchors, embedded), along(at, draws.positions)
            return bound(pending, positions, attend_self, attend_cross)

        run = recomputing(run, len(at), at.size, mlp_chunk)
        return run(params, embedded, draws, view.keys, view.values)


class About(NamedTuple):
    """What is known of every slot."""

    labels: Int[Array, "B n"]
    """The token of the text that follows."""
    weights: Float[Array, "B n"]
    """0 where nothing is to be learned."""
    teacher: Float[Array, "B n D"]
    """The target's final hidden state that predicts the same token."""


class BlockLoss(NamedTuple):
    """Sums over weighted slots, float32, by the names of the metrics."""

    loss: Float[Array, ""]
    """The mixture. Only it has a gradient."""
    cross_entropy: Float[Array, ""]
    """Of the text."""
    distance: Float[Array, ""]
    """``sum |p - q|``, 0 to 2."""
    target_loss: Float[Array, ""]
    """The target's own cross-entropy of the text."""


def block_loss(
    products: Products,
    about: About,
    *,
    share: float,
    chunk: int,
    cap: float | None = None,
) -> BlockLoss:
    """The loss of all slots and its parts.

    Args:
      products: of the target's LM head, which is frozen, and of the Markov head if there is one:
        its embedding of the token before each slot's, and its other table, which learn.
      about: of the slots; no gradient.
      share: of the distance, 0 to 1.
      chunk: most tokens of a device whose logits exist at once; of each model half as many.
      cap: bounds the logits of both softly, as the target's.
    """
    (_, head), *markov = products
    learns = (False, *(True for _ in markov))
    loss, sums = chunked_loss(
        partial(_of_chunk, share, cap),
        products,
        about,
        chunk=max(1, chunk // 2),
        learns=learns,
        whole=head,
        cap=cap,
    )
    return BlockLoss(loss, *sums)


def _of_chunk(
    share: float, cap: float | None, logits: Array, head: Array, about: About
) -> ChunkLoss:
    wanted = capped(head_logits(head, about.teacher), cap)
    lse, surprise, label = surprise_of(logits, about.labels)
    teacher_lse, teacher, _ = surprise_of(wanted, about.labels)
    q, p = jnp.exp(logits - lse[..., None]), jnp.exp(wanted - teacher_lse[..., None])
    distance, sign = jnp.abs(p - q).sum(-1), jnp.sign(q - p)
    away = q * (sign - jnp.sum(q * sign, axis=-1, keepdims=True))
    error = (1 - share) * (q - label) + share * away
    sums = tuple(jnp.sum(about.weights * each) for each in (surprise, distance, teacher))
    loss = (1 - share) * sums[0] + share * sums[1]
    return ChunkLoss(loss, error * about.weights[..., None], sums)


@dataclass(frozen=True)
class ParallelObjective:
    """Prediction of the next ``block`` tokens at many anchors of every row."""

    target: TargetConfig
    draft: ParallelConfig
    settings: ParallelSettings
    max_offset: int
    loss_chunk: int
    mlp_chunk: int = 0
    """Most tokens of a device whose MLP activations exist at once; 0: all."""

    def initialize(self, key: Array) -> PyTree:
        """Fresh parameters; the Markov head corrects nothing at first."""
        layer = replace(self.draft.layer, dtype="float32")
        config, width, block = replace(self.draft, layer=layer), layer.model_width, self.draft.block
        embedded, positions = jnp.zeros((1, 1, width)), jnp.zeros((1, block), jnp.int32)
        draft = ParallelLayers(config)
        attends = (lambda layer, q, k, v: q), (lambda q: q)
        params = draft.init(key, embedded, positions, *attends)["params"]
        if not config.markov_rank:
            return params
        shape = config.vocab_size, config.markov_rank
        # Not near 0 on both sides, where neither would learn.
        first = INITIAL_SCALE * jax.random.normal(jax.random.fold_in(key, 1), shape)
        return {**params, "markov": {"embedding": first, "head": jnp.zeros(shape)}}

    def draw(self, key: Array, rows: tuple[int, int], length: int) -> Draws:
        """Positions, the target's and the draft's alike, and anchors."""
        position_key, anchor_key = jax.random.split(key)
        s = self.settings
        offset = self.max_offset if s.anchor_offset else 0
        positions = drawn_positions(position_key, rows, length, self.target, offset, s.max_sinks)
        return Draws(positions, drawn_anchors(anchor_key, rows, length, s.anchor_every))

    def sums(self, params: PyTree, frozen: PyTree, batch: Batch, draws: Draws) -> dict[str, Array]:
        """The loss, its parts, and as a check on the positions the target's cross-entropy.

        Slots weigh so that a row's sum is that of its tokens: figures are means over tokens.
        """
        products, about = self._run(params, frozen, batch, draws)
        share, chunk, cap = self.settings.distillation, self.loss_chunk, self.target.logit_cap
        return block_loss(products, about, share=share, chunk=chunk, cap=cap)._asdict()

    def measure(self, params: PyTree, frozen: PyTree, batch: Batch) -> dict[str, float]:
        """Simulated acceptance, slot ``j`` being shift ``j + 1``."""
        return agreement_report(*_agreement(self, params, frozen, batch))

    def _run(
        self, params: PyTree, frozen: PyTree, batch: Batch, draws: Draws
    ) -> tuple[Products, About]:
        """Forwards of target and draft: what the loss reads."""
        s, c, tokens, weights = self.settings, self.draft, batch.tokens, batch.weights
        view = target_view(self.target, frozen, batch, draws.positions, self.mlp_chunk)
        hidden = run_blocks(
            c, params, frozen, tokens, draws, view, s.anchor_every, mlp_chunk=self.mlp_chunk
        )
        last = tokens.shape[1] - 1
        index = places(draws.anchors, c.block)
        at, follows = jnp.minimum(index, last), jnp.minimum(index + 1, last)
        slots = slot_weights(c.block, s.anchor_every, s.decay)
        counts = jnp.where(index < last, along(follows, weights), 0)
        counts *= jnp.tile(slots, draws.anchors.shape[1])
        about = About(along(follows, tokens), counts, along(at, view.hidden))
        [head] = with_sharding("v d", head_of(frozen))
        if not c.markov_rank:
            return ((hidden, head),), about
        markov = params["markov"]
        # From the float32 table: the gradients of frequent tokens are sums of thousands.
        before = jnp.take(markov["embedding"], along(at, tokens), axis=0).astype(hidden.dtype)
        [table] = with_sharding("v r", markov["head"].astype(hidden.dtype))
        return ((hidden, head), (before, table)), about


@partial(jax.jit, static_argnums=0)
def _agreement(
    objective: ParallelObjective, params: PyTree, frozen: PyTree, batch: Batch
) -> tuple[Array, Array, Array]:
    """What :func:`train.acceptance.agreement_report` reads."""
    rows, length = batch.tokens.shape
    anchors = even_anchors(rows, length, objective.settings.anchor_every)
    draws = Draws(plain_positions((1, rows), length)[0], anchors)
    products, about = objective._run(params, frozen, batch, draws)

    def in_blocks(each: Array) -> Array:
        return each.reshape(*anchors.shape, objective.draft.block, *each.shape[2:])

    # The Markov head as more columns of the LM head.
    hidden, table = (jnp.concatenate(each, axis=-1) for each in zip(*products, strict=True))
    hidden, wanted, weights = map(in_blocks, (hidden, about.teacher, about.weights))
    head = products[0][1]
    return slot_hits(hidden, table, wanted, head, weights, chunk=objective.loss_chunk)


@dataclass(frozen=True)
class ParallelTrainer:
    """A parallel LongSpec draft for a target, as the pipeline trains it."""

    target: TargetConfig
    draft: ParallelConfig
    settings: ParallelSettings

    def objective(self, stage: StageConfig, loss_chunk: int, mlp_chunk: int) -> ParallelObjective:
        """What a stage learns."""
        return ParallelObjective(
            self.target, self.draft, self.settings, stage.max_offset, loss_chunk, mlp_chunk
        )

    def reads(self, stage: StageConfig) -> Reads | None:
        """Keys and values of one layer, and what the loss imitates."""
        if self.settings.anchor_offset and stage.max_offset:
            return None
        return Reads(hidden=True, keys_values=True)

    def save(self, folder: Path, params: PyTree) -> None:
        """Write the draft's folder."""
        save_draft(folder, self.draft, params, target=self.target)


def begin(settings: ParallelSettings, given: TrainContext) -> InitialDraft:
    """A fresh draft, or one that begins with what the settings name.

    That is a parallel draft of the same shape, or a LongSpec draft, whose layer becomes the first.
    """
    target = given.target
    layer = DraftConfig.for_target(target, dtype=given.dtype, window=settings.window)
    shape = settings.layers, settings.block, settings.markov_rank
    draft, params = ParallelConfig(layer, target.vocab_size, *shape), None
    if settings.init:
        folder = local_folder(settings.init)
        if ARCHITECTURE in read_json(folder / "config.json").texts("architectures"):
            found, params = load_draft(folder, target, dtype="float32", mesh=given.mesh)
            _check_shape(settings, found)
            layer, first = found.layer, None
        else:
            layer, first = longspec.load_draft(folder, target, dtype="float32", mesh=given.mesh)
        layer = replace(layer, dtype=given.dtype, window=settings.window)
        draft = replace(draft, layer=layer)
        if first is not None:
            params = _begun_from(ParallelObjective(target, draft, settings, 0, 1), first, given)
    return InitialDraft(ParallelTrainer(target, draft, settings), given.params, params)


def _check_shape(settings: ParallelSettings, found: ParallelConfig) -> None:
    """Refuse to begin with a draft of another shape."""
    shape = {"layers": found.num_layers, "block": found.block, "markov_rank": found.markov_rank}
    for name, theirs in shape.items():
        if (ours := getattr(settings, name)) != theirs:
            raise ValueError(
                f"--config.draft.{name}={ours}, and the draft to begin with, {settings.init}, has "
                f"{theirs}; set --config.draft.{name}={theirs}"
            )


def _begun_from(objective: ParallelObjective, first: PyTree, given: TrainContext) -> PyTree:
    """Fresh parameters after a LongSpec draft's layer."""
    params = objective.initialize(jax.random.key(given.seed))
    # The LM head reads that layer without a norm: ours begins with the size that the head expects.
    size = jnp.sqrt(jnp.mean(jnp.square(given.params["final_norm"]["scale"].astype(jnp.float32))))
    norm = {"scale": params["final_norm"]["scale"] * size}
    return {**params, "layers_0": first, "final_norm": norm}
