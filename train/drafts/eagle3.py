"""The training-time test of EAGLE-3 (arXiv 2503.01840, section 3.2): what such a draft learns.

When the draft grows a tree, it knows the target's features up to the last committed token, and
below that its own outputs. Training does the same from every token ``i`` of a row at once. Step 0
reads the feature of ``i`` and token ``i + 1``. Step ``s`` reads what step ``s - 1`` put out there,
and token ``i + 1 + s`` of the text, at position ``i + s``. It sees the keys of step 0 up to ``i``,
which are of the target's features, and only at ``i`` the keys of its own earlier steps. Its result
predicts what the target predicts at token ``i + 1 + s``.

In every step the draft learns the target's distribution over the tokens that it can propose, ``p``
restricted to them and renormalised: the loss of a step is ``-sum p log q``. Tokens at which the
target's own choice is not one of them do not count, as in the published trainer. Steps count
``1, decay, decay^2, ...``.
"""

import typing
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, PyTree

from longspec_jax.axes import Array
from longspec_jax.config.target import TargetConfig
from longspec_jax.drafters.checkpoints.eagle3 import load_draft, save_draft
from longspec_jax.drafters.draft import Target
from longspec_jax.drafters.eagle3 import Eagle3Config, Eagle3Layer, Eagle3Params, LevelOutput
from longspec_jax.drafters.vocabulary import most_frequent
from longspec_jax.models.layers import INITIAL_SCALE
from longspec_jax.models.target import capped, head_logits, head_of, scaled
from longspec_jax.ops.attention.dispatch import causal_attention
from longspec_jax.ops.partitioned import with_sharding
from longspec_jax.sharding import param_shardings

from ..acceptance import agreement_report, count_hits, counted_tokens
from ..config import StageConfig
from ..losses import ChunkLoss, chunked_loss, next_token_labels, surprise_of
from ..step import Batch, cast
from ..target import TargetView, is_costly, plain_positions
from ..views import Reads, target_view
from .base import InitialDraft, TrainContext, refuse_offsets
from .kinds import Eagle3Settings
from .own_keys import attention_with_own


def fresh_layer(config: Eagle3Config, key: Array) -> PyTree:
    """Fresh parameters of the layer, in the configuration's dtype."""
    embedded = jnp.zeros((1, 2, config.model_width), config.dtype)
    hidden = [jnp.zeros((1, 2, config.target_width), config.dtype)] * len(config.features)
    layer = Eagle3Layer(config)
    return layer.init(key, embedded, hidden, jnp.zeros((1, 2), jnp.int32), method=_touch)["params"]


def _touch(layer: Eagle3Layer, embedded: Array, hidden: Sequence[Array], positions: Array) -> None:
    layer(embedded, layer.fused(hidden), positions, lambda q, k, v: q)


def run_draft(
    config: Eagle3Config,
    params: PyTree,
    embedding: Array,
    tokens: Array,
    positions: Array,
    view: TargetView,
    *,
    steps: int,
    mlp_chunk: int = 0,
    factor: float = 1.0,
) -> Float[Array, "B T S D"]:
    """What the draft's LM head reads in every step of the training-time test.

    Args:
      config: of the draft.
      params: of its layer.
      embedding: the target's table ``[V, D]``.
      tokens: of whole rows, ``[B, T]``.
      positions: theirs.
      view: the target's, with the residual streams of ``config.features``.
      steps: of the test.
      mlp_chunk: most tokens of a device whose MLP activations exist at once; 0: all.
      factor: on embeddings, as in the target.

    Returns:
      At token ``t`` and step ``s`` what predicts the token after ``t``, from token ``t - 1 - s``
      on. What a row is too short for (``s >= t``) is meaningless, and finite.
    """
    layer = Eagle3Layer(config, mlp_chunk=-(-mlp_chunk // 2))

    def level(
        params: PyTree, embedded: Array, feature: Array, positions: Array, past: PyTree
    ) -> tuple[Array, Array, tuple[Array, Array]]:
        fresh: PyTree = None

        def attend(q: Array, k: Array, v: Array) -> Array:
            nonlocal fresh
            fresh = k, v
            return _attention(config, q, (*past, fresh))

        found = layer.apply({"params": params}, embedded, feature, positions, attend)
        output = typing.cast(LevelOutput, found)
        return output.hidden, output.feedback, fresh

    # All but matmuls and attention is computed again in the backward pass: steps would hold it all.
    level = jax.checkpoint(level, policy=is_costly)
    with jax.named_scope("draft"):
        params = cast(params, config.dtype)
        [embedded] = with_sharding("b t d", jnp.take(embedding, tokens, axis=0))
        embedded = scaled(embedded, factor)
        kept = [view.kept[each] for each in config.features]
        feature = typing.cast(Array, layer.apply({"params": params}, kept, method="fused"))
        past, outputs = (), []
        for step in range(steps):
            ahead = jnp.roll(embedded, -1 - step, axis=1)
            hidden, feature, fresh = level(params, ahead, feature, positions + step, past)
            past = *past, fresh
            outputs.append(jnp.roll(hidden, 1 + step, axis=1))
        return jnp.stack(outputs, axis=2)


def _attention(config: Eagle3Config, q: Array, levels: Sequence[tuple[Array, Array]]) -> Array:
    """Attention of a step's queries, given keys and values of every step so far."""
    (keys, values), *own = levels
    scale = config.attention_scale
    if not own:
        return causal_attention(q, keys, values, scale=scale)
    own_keys, own_values = (jnp.stack(each, axis=2) for each in zip(*own, strict=True))
    return attention_with_own(q, keys, values, own_keys, own_values, scale=scale)


class Frozen(NamedTuple):
    """What the objective reads and does not change."""

    target: PyTree
    """The target's parameters."""
    vocabulary: Array | None
    """The target's tokens that the draft can propose, ascending, ``[v]``; all if None."""
    places: Array | None
    """Where every token of the target is among them, ``[V]``, -1 for one that is not."""


@dataclass(frozen=True)
class Eagle3Objective:
    """The training-time test of a draft that reads hidden states of the frozen target."""

    target: TargetConfig
    draft: Eagle3Config
    steps: int
    decay: float
    loss_chunk: int
    mlp_chunk: int = 0
    """Most tokens of a device whose MLP activations exist at once; 0: all."""
    own_head: bool = True
    """Whether the draft has an LM head of its own; otherwise it reads the target's."""

    def initialize(self, key: Array) -> PyTree:
        """Fresh parameters of the layer, and of an LM head of its own."""
        config, (layer_key, head_key) = replace(self.draft, dtype="float32"), jax.random.split(key)
        layer, shape = fresh_layer(config, layer_key), (config.proposable, config.model_width)
        if not self.own_head:
            return layer
        return {**layer, "head": INITIAL_SCALE * jax.random.normal(head_key, shape, jnp.float32)}

    def draw(self, key: Array, rows: tuple[int, int], length: int) -> tuple[()]:
        """No randomness."""
        return ()

    def sums(
        self, params: PyTree, frozen: Frozen, batch: Batch, draws: tuple[()]
    ) -> dict[str, Array]:
        """The draft's loss over all steps, and the target's cross-entropy, a check on the data.

        With a reduced vocabulary ``in_vocabulary`` counts the tokens at which the target's choice
        can be proposed.
        """
        hidden, view = self._passes(params, frozen, batch)
        labels, weights = next_token_labels(batch.tokens, batch.weights)
        ahead = jnp.arange(1, self.steps + 1)
        reached = jnp.arange(labels.shape[1])[:, None] >= ahead
        step_weights = weights[..., None] * reached * self.decay ** (ahead - 1.0)
        [target_head] = with_sharding("v d", head_of(frozen.target))
        # Logits of the target and of every step exist at once.
        sizes = self.target.vocab_size, self.steps * self.draft.proposable
        loss, (target_loss, known) = chunked_loss(
            partial(_soft_loss, self.target.logit_cap),
            ((hidden, self._head(params, target_head)),),
            (labels, weights, step_weights, view.hidden),
            chunk=max(1, self.loss_chunk * sizes[0] // sum(sizes)),
            learns=(self.own_head,),
            whole=(target_head, frozen.vocabulary, frozen.places),
            cap=None if self.own_head else self.target.logit_cap,
        )
        sums = {"loss": loss, "target_loss": target_loss}
        return sums if frozen.places is None else {**sums, "in_vocabulary": known}

    def measure(self, params: PyTree, frozen: Frozen, batch: Batch) -> dict[str, float]:
        """Simulated acceptance; shift ``s`` is step ``s - 1`` of the test."""
        return agreement_report(*_hits(self, params, frozen, batch))

    def _passes(self, params: PyTree, frozen: Frozen, batch: Batch) -> tuple[Array, TargetView]:
        """The draft's states ``[B, T, S, D]``, and what the target gives."""
        tokens, (rows, length) = batch.tokens, batch.tokens.shape
        positions = plain_positions((1, rows), length)[0]
        view = target_view(
            self.target, frozen.target, batch, positions, self.mlp_chunk, self.draft.features
        )
        layer = {name: part for name, part in params.items() if name != "head"}
        embedding = jax.lax.stop_gradient(frozen.target["embedding"])
        hidden = run_draft(
            self.draft,
            layer,
            embedding,
            tokens,
            positions,
            view,
            steps=self.steps,
            mlp_chunk=self.mlp_chunk,
            factor=self.target.embedding_factor,
        )
        if not self.own_head:  # The target's own states are divided already.
            hidden = scaled(hidden, 1 / self.target.logits_divisor)
        return hidden, view

    def _head(self, params: PyTree, target_head: Array) -> Array:
        """The LM head that the draft's states are for."""
        if not self.own_head:
            return target_head
        [head] = with_sharding("v d", cast(params["head"], self.draft.dtype))
        return head


def _soft_loss(cap: float | None, logits: Array, whole: PyTree, parts: PyTree) -> ChunkLoss:
    """Soft cross-entropy of all steps ``[B, t, S, v]``.

    Its other sums are the target's cross-entropy, and the tokens whose choice can be proposed.
    """
    target_head, vocabulary, places = whole
    labels, weights, step_weights, wanted = parts
    scores = capped(head_logits(target_head, wanted), cap)
    _, target_surprise, _ = surprise_of(scores, labels)
    known = weights
    if places is not None:
        can = places[jnp.argmax(scores, axis=-1)] >= 0
        known, step_weights = weights * can, step_weights * can[..., None]
        scores = jnp.take(scores, vocabulary, axis=-1)
    aim = jax.nn.softmax(scores)[:, :, None]
    lse = jax.nn.logsumexp(logits, axis=-1)
    loss = jnp.sum(step_weights * (lse - jnp.sum(aim * logits, axis=-1)))
    error = (jnp.exp(logits - lse[..., None]) - aim) * step_weights[..., None]
    return ChunkLoss(loss, error, (jnp.sum(weights * target_surprise), jnp.sum(known)))


@partial(jax.jit, static_argnums=0)
def _hits(
    objective: Eagle3Objective, params: PyTree, frozen: Frozen, batch: Batch
) -> tuple[Array, Array, Array]:
    """What :func:`train.acceptance.agreement_report` reads."""
    hidden, view = objective._passes(params, frozen, batch)
    # The first tokens of a row are reached only by its first steps.
    _, weights = next_token_labels(batch.tokens, batch.weights)
    counted = counted_tokens(weights.at[:, : objective.steps].set(0.0))
    target_head = head_of(frozen.target)
    head = objective._head(params, target_head)

    def of_step(states: Array) -> tuple[Array, Array]:
        return count_hits(
            states,
            head,
            view.hidden,
            target_head,
            counted,
            chunk=objective.loss_chunk,
            places=frozen.places,
        )

    return *jax.lax.map(of_step, jnp.moveaxis(hidden, 2, 0)), jnp.sum(counted, (1, 2))


@dataclass(frozen=True, eq=False)
class Eagle3Trainer:
    """An EAGLE-3 draft for a target, as the pipeline trains it."""

    target: TargetConfig
    draft: Eagle3Config
    settings: Eagle3Settings
    vocabulary: np.ndarray | None
    """The target's tokens that it can propose; all if None."""
    own_head: bool
    """Whether it has an LM head of its own."""

    def objective(self, stage: StageConfig, loss_chunk: int, mlp_chunk: int) -> Eagle3Objective:
        """What a stage learns.

        Raises:
          ValueError: for a stage of anchor-offset positions.
        """
        refuse_offsets(stage, "an EAGLE-3 draft")
        settings = self.settings
        sizes = settings.steps, settings.decay, loss_chunk, mlp_chunk
        return Eagle3Objective(self.target, self.draft, *sizes, self.own_head)

    def reads(self, stage: StageConfig) -> Reads:
        """The hidden states that it fuses, and those of the distribution that it learns."""
        return Reads(hidden=True, kept=self.draft.features)

    def save(self, folder: Path, params: PyTree) -> None:
        """Write the draft in SpecForge's format, which SGLang and vLLM read.

        Tables of the target's are not stored: its embedding, and an LM head that is not its own.
        """
        layer = {name: part for name, part in params.items() if name != "head"}
        # What is not stored may be any table.
        nothing = jnp.zeros((0, self.draft.model_width))
        tables = nothing, params["head"] if self.own_head else nothing
        vocabulary = None if self.vocabulary is None else jnp.asarray(self.vocabulary)
        draft = Eagle3Params(
            layer, *tables, vocabulary, stores_embedding=False, stores_head=self.own_head
        )
        save_draft(folder, self.draft, draft)


def begin(settings: Eagle3Settings, given: TrainContext) -> InitialDraft:
    """A fresh draft, or the one that the settings name.

    A fresh draft's own LM head begins as the target's rows of the tokens that it can propose.

    Raises:
      ValueError: if the draft to start from does not fit the target or cannot be trained here, or
        the settings do not fit the target.
    """
    longest = max(stage.seq_len for stage in given.stages)
    own_head = settings.own_head
    if settings.init:
        draft, params = _loaded(settings.init, given)
        draft = replace(draft, max_positions=max(longest, draft.max_positions))
        vocabulary = None if params.vocabulary is None else np.asarray(params.vocabulary)
        own_head = params.stores_head
        layer, head, rows = {**params.layer}, params.head, None
    else:
        draft, vocabulary = fresh_config(settings, given.target, longest), None
        if draft.proposable < draft.vocab_size:
            vocabulary = np.sort(most_frequent(given.count_tokens(), draft.proposable))
        layer, head, rows = {}, head_of(given.params), vocabulary
    draft = replace(draft, dtype=given.dtype)
    trainer = Eagle3Trainer(given.target, draft, settings, vocabulary, own_head)
    start = {**layer, "head": head} if own_head else layer
    return InitialDraft(trainer, _frozen(given, vocabulary), _placed(draft, start, rows, given))


def fresh_config(settings: Eagle3Settings, target: TargetConfig, longest: int) -> Eagle3Config:
    """The shape of a fresh draft: width, heads and rotary embedding are its target's.

    Args:
      settings: the sizes of vocabulary and MLP, and the layers that the draft reads.
      target: of the draft.
      longest: tokens of the longest row that it is trained on, the range of its positions.

    Raises:
      ValueError: if the settings do not fit the target.
    """
    size = settings.vocabulary
    if size > target.vocab_size:
        raise ValueError(
            f"--config.draft.vocabulary={size} is above the target's {target.vocab_size} tokens; "
            "set it to 0 for all of them"
        )
    layers = target.num_layers
    features = tuple(map(int, settings.layers.split(","))) if settings.layers else ()
    if not features and layers < 5:
        raise ValueError(
            f"the target has {layers} layers, too few for an early, a middle and a late one; name "
            "those after which the draft takes the hidden states with --config.draft.layers=0,1"
        )
    config = Eagle3Config(
        model_width=target.model_width,
        target_width=target.model_width,
        mlp_width=settings.mlp_width or target.mlp_width,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_width=target.head_width,
        vocab_size=target.vocab_size,
        proposable=size or target.vocab_size,
        # What enters the third layer, the middle one, and the third from the end.
        features=features or (1, layers // 2 - 1, layers - 4),
        max_positions=longest,
        rope_theta=target.rope_theta,
        rope_scaling=target.rope_scaling,
        norm_eps=target.norm_eps,
    )
    config.check_fits(target)
    return config


def _loaded(source: str, given: TrainContext) -> tuple[Eagle3Config, Eagle3Params]:
    """The draft to start from: its shape and its parameters."""
    config, params = load_draft(source, Target(given.target, given.params), mesh=given.mesh)
    if params.own_embedding:
        raise ValueError(
            f"--config.draft.init={source}: the draft has an embedding of its own, and the "
            "target's is trained with here; start from another draft, or leave init empty"
        )
    if config.window is not None:
        raise ValueError(
            f"--config.draft.init={source}: the draft has a sliding window of {config.window}, "
            "which is not trained here; start from another draft, or leave init empty"
        )
    return config, params


def _placed(
    draft: Eagle3Config, start: PyTree, rows: np.ndarray | None, given: TrainContext
) -> PyTree:
    """Parameters to start from in float32, spread over the mesh.

    A fresh layer is made where ``start`` has none; ``rows`` are taken from its LM head.
    """
    config = replace(draft, dtype="float32")

    def made(start: PyTree) -> PyTree:
        if not start.keys() - {"head"}:
            start = {**start, **fresh_layer(config, jax.random.key(given.seed))}
        if rows is not None:
            start = {**start, "head": jnp.take(start["head"], rows, axis=0)}
        return cast(start, "float32")

    shapes = jax.eval_shape(made, start)
    return jax.jit(made, out_shardings=param_shardings(given.mesh, shapes))(start)


def _frozen(given: TrainContext, vocabulary: np.ndarray | None) -> Frozen:
    if vocabulary is None:
        return Frozen(given.params, None, None)
    places = np.full(given.target.vocab_size, -1, np.int32)
    places[vocabulary] = np.arange(len(vocabulary))
    everywhere = NamedSharding(given.mesh, P())
    return Frozen(given.params, *jax.device_put((vocabulary, places), everywhere))
