"""The training-time test of EAGLE-3 over whole rows (arXiv 2503.01840, section 3.2).

When the draft grows a tree, it knows the target's features up to the last committed token, and
below that its own outputs. Training does the same from every token ``i`` of a row at once. Step 0
reads the feature of ``i`` and token ``i + 1``. Step ``s`` reads what step ``s - 1`` put out there,
and token ``i + 1 + s`` of the text, at position ``i + s``. It sees the keys of step 0 up to ``i``,
which are of the target's features, and the keys of its own earlier steps at ``i`` alone. Its result
predicts what the target predicts at token ``i + 1 + s``.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float

from longspec_jax.axes import Array
from longspec_jax.drafters.eagle3 import Eagle3Config, Eagle3Layer
from longspec_jax.models.target import scaled
from longspec_jax.ops.attention.dispatch import causal_attention
from longspec_jax.ops.partitioned import with_sharding

from ...step import cast
from ...target import TargetView, is_costly
from ..own_keys import behind, causal_beside


def fresh_layer(config: Eagle3Config, key: Array) -> Any:
    """Fresh parameters of the layer, in the configuration's dtype."""
    embedded = jnp.zeros((1, 2, config.model_width), config.dtype)
    hidden = [jnp.zeros((1, 2, config.target_width), config.dtype)] * len(config.features)
    layer: Any = Eagle3Layer(config)
    return layer.init(key, embedded, hidden, jnp.zeros((1, 2), jnp.int32), method=_touch)["params"]


def _touch(layer: Any, embedded: Array, hidden: Sequence[Array], positions: Array) -> None:
    layer(embedded, layer.fused(hidden), positions, lambda q, k, v: q)


def run_draft(
    config: Eagle3Config,
    params: Any,
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
      factor: on embeddings, as of the target.

    Returns:
      At token ``t`` and step ``s`` what predicts the token behind ``t``, from token ``t - 1 - s``
      on. What a row is too short for (``s >= t``) is meaningless, and finite.
    """
    layer: Any = Eagle3Layer(config, mlp_chunk=-(-mlp_chunk // 2))

    def level(
        params: Any, embedded: Array, feature: Array, positions: Array, past: Any
    ) -> tuple[Array, Array, tuple[Array, Array]]:
        fresh: Any = None

        def attend(q: Array, k: Array, v: Array) -> Array:
            nonlocal fresh
            fresh = k, v
            return _attention(config, q, (*past, fresh))

        output = layer.apply({"params": params}, embedded, feature, positions, attend)
        return output.hidden, output.feedback, fresh

    # All but matmuls and attention is computed again in the backward pass: steps would hold it all.
    level = jax.checkpoint(level, policy=is_costly)
    with jax.named_scope("draft"):
        params = cast(params, config.dtype)
        [embedded] = with_sharding("b t d", jnp.take(embedding, tokens, axis=0))
        embedded = scaled(embedded, factor)
        feature = layer.apply(
            {"params": params}, [view.kept[each] for each in config.features], method="fused"
        )
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


def attention_with_own(
    q: Float[Array, "B T N H"],
    keys: Float[Array, "B T K H"],
    values: Float[Array, "B T K H"],
    own_keys: Float[Array, "B T R K H"],
    own_values: Float[Array, "B T R K H"],
    *,
    scale: float | None = None,
) -> Float[Array, "B T N H"]:
    """One softmax over keys ``<= t`` of a row and ``R`` keys that token ``t`` has for itself.

    The last token of a row, which has no use here, gets 0.

    Args:
      q: the queries.
      keys: of the row.
      values: likewise.
      own_keys: those that a token has for itself.
      own_values: likewise.
      scale: factor on the scores; ``H ** -0.5`` if absent.
    """
    batch, length, heads, width = q.shape
    factor = width**-0.5 if scale is None else scale
    grouped = q.reshape(batch, length, keys.shape[2], -1, width)
    scores = factor * jnp.einsum(
        "BTKGH,BTRKH->BTKGR", grouped, own_keys, preferred_element_type=jnp.float32
    )
    own = jnp.einsum(
        "BTKGR,BTRKH->BTKGH", jax.nn.softmax(scores).astype(q.dtype), own_values
    ).reshape(q.shape)
    score = jax.nn.logsumexp(scores, axis=-1).reshape(batch, length, heads, 1)
    # A query sees the keys before its place and shall see its own: it moves one place.
    out = causal_beside(behind(q, 0), keys, values, behind(score, 0), scale=factor)
    out, share = (jnp.pad(each[:, 1:], ((0, 0), (0, 1), (0, 0), (0, 0))) for each in out)
    return out + share * own
