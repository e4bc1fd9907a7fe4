"""The target in training: its pass over whole rows, what it learns itself, and what both cost.

A frozen target is only read: one layer's keys and values or the hidden states of some layers, its
embeddings and its head. The demo's target, which is trained from scratch, learns the next token.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jaxtyping import Int, PyTree

from longspec_jax.axes import Array
from longspec_jax.config.layers import RecurrenceConfig
from longspec_jax.config.target import TargetConfig
from longspec_jax.models.target import Target, head_of, scaled, sinks_of
from longspec_jax.ops.attention.dispatch import causal_attention
from longspec_jax.ops.partitioned import row_shares, with_sharding
from longspec_jax.ops.recurrence.operands import RecurrentTokens, empty_state
from longspec_jax.ops.recurrence.recurrence import chunk_recurrence

from .losses import cross_entropy_sum, next_token_labels
from .step import Batch, cast

LONG = 16384
"""Up to this number of tokens, MLP activations are small beside the weights of a 7B target."""
FORWARD_AND_BACKWARD = 3
"""Each matmul has two more in the backward pass: for its input and for its weights."""


def mlp_tokens_at_once(tokens: int) -> int:
    """Tokens whose MLP activations exist at once on a device that has this number; 0: all of them.

    A chunk's matmuls are large enough for the matrix units.
    """
    return 8192 if tokens > LONG else 0


def plain_positions(rows: tuple[int, int], length: int) -> Array:
    """Positions ``0, 1, 2, ...`` for every row, ``[A, B, T]``."""
    return jnp.broadcast_to(jnp.arange(length), (*rows, length))


def anchored_positions(
    key: Array, rows: tuple[int, int], length: int, *, max_offset: int, max_sinks: int = 4
) -> Int[Array, "A B T"]:
    """Positions whose first few stay and whose others move by a random offset (LongSpec 3.2).

    The first few are the attention sinks. So short rows train a draft at large positions.

    Args:
      key: randomness of this step.
      rows: micro-batches and rows of each.
      length: tokens of a row.
      max_offset: largest offset, itself included.
      max_sinks: most positions that stay; 0 to this many do, as in the published code.
    """
    sink_key, offset_key = jax.random.split(key)
    sinks = jax.random.randint(sink_key, (*rows, 1), 0, max_sinks + 1)
    offset = jax.random.randint(offset_key, (*rows, 1), 0, max_offset + 1)
    index = jnp.arange(length)
    return index + jnp.where(index >= sinks, offset, 0)


def drawn_positions(
    key: Array,
    rows: tuple[int, int],
    length: int,
    target: TargetConfig,
    max_offset: int,
    max_sinks: int,
) -> Int[Array, "A B T"]:
    """:func:`anchored_positions` within the range of a target; plain ones without an offset."""
    if not max_offset:
        return plain_positions(rows, length)
    # The target must not meet positions it was not made for.
    most = max(0, min(max_offset, target.max_positions - length))
    return anchored_positions(key, rows, length, max_offset=most, max_sinks=max_sinks)


class TargetView(NamedTuple):
    """What the draft and its measures need of one target pass."""

    hidden: Array
    """Final hidden states ``[B, T, D]``, divided as the target divides its logits."""
    keys: Array
    """Keys ``[B, T, K, H]`` of the layer that the draft reads; no other outlives the pass."""
    values: Array
    """Values ``[B, T, K, H]`` of this layer."""
    kept: Mapping[int, Array] = {}
    """The residual stream ``[B, T, D]`` after the layers that the draft asks for; -1 is the
    embedding."""


class TrainedTarget(Target):
    """The target with a gradient for its embedding table that a bfloat16 sum would lose.

    Frequent tokens receive thousands of contributions in a step; they are summed in float32.
    """

    def look_up(self, tokens: Array) -> Array:
        """As of :class:`Target`."""
        return _lookup(self.embedding, tokens)


@jax.custom_vjp
def _lookup(table: Array, tokens: Array) -> Array:
    return jnp.take(table, tokens, axis=0)


def _lookup_forward(table: Array, tokens: Array) -> tuple[Array, tuple[Array, Array]]:
    return _lookup(table, tokens), (table, tokens)


def _lookup_backward(saved: tuple[Array, Array], cotangent: Array) -> tuple[Array, None]:
    table, tokens = saved
    total = jnp.zeros(table.shape, jnp.float32).at[tokens].add(cotangent.astype(jnp.float32))
    return total.astype(table.dtype), None


_lookup.defvjp(_lookup_forward, _lookup_backward)


def run_target(
    config: TargetConfig,
    params: PyTree,
    tokens: Array,
    positions: Array,
    mlp_chunk: int = 0,
    keep: Sequence[int] = (),
) -> TargetView:
    """One causal pass of the target over whole rows ``[B, T]``.

    Args:
      config: of the target.
      params: its parameters.
      tokens: token ids.
      positions: theirs.
      mlp_chunk: most tokens of a device whose MLP activations exist at once; 0: all.
      keep: layers whose residual stream the draft reads, counted as in
        :class:`~longspec_jax.models.target.Target`.
    """

    def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
        window = config.layer(layer).window
        behind = None if window is None else window - 1  # The window counts the token itself.
        return causal_attention(
            q,
            k,
            v,
            sinks_of(params, layer),
            window=behind,
            scale=config.attention_scale,
            cap=config.attention_cap,
        )

    def recur(layer: int, tokens: RecurrentTokens, taps: Array) -> Array:
        rows, length = tokens.inputs.shape[:2]
        empty = empty_state(config.recurrent_layers[layer], rows, config.dtype)
        return chunk_recurrence(tokens, taps, empty, jnp.full(rows, length))[1]

    with jax.named_scope("target"):
        output: Any = TrainedTarget(config, mlp_chunk).apply(
            {"params": params}, tokens, positions, attend, tuple(keep), recur
        )
    read = config.read_layer
    # The head then makes logits of it, without another division.
    hidden = scaled(output.hidden, 1 / config.logits_divisor)
    return TargetView(hidden, output.keys[read], output.values[read], output.kept)


_CHEAP = frozenset(
    "add add_any broadcast_in_dim concatenate convert_element_type cos div dynamic_slice exp "
    "gather integer_pow iota log logistic max mul neg pad reduce_sum reshape rsqrt select_n "
    "sharding_constraint sin slice split square squeeze sub transpose".split()
)
"""Elementwise primitives, and those that move and sum."""


def is_costly(primitive: Primitive, *_: object, **__: object) -> bool:
    """Whether a result is kept for the backward pass: those of matmuls and attention are."""
    return primitive.name not in _CHEAP


def recomputing(run: Callable[..., Any], rows: int, tokens: int, mlp_chunk: int) -> Any:
    """A draft's pass; where its MLP goes in chunks, the backward pass computes the cheap again.

    Args:
      run: the pass.
      rows: of a micro-batch.
      tokens: that go through the MLP in these rows.
      mlp_chunk: most tokens of a device whose MLP activations exist at once; 0: all. Drafts pass
        half of their own limit, because the backward pass holds twice as much.
    """
    if mlp_chunk and tokens > mlp_chunk * row_shares(rows):
        return jax.checkpoint(run, policy=is_costly)
    return run


@dataclass(frozen=True)
class TargetObjective:
    """Next-token prediction by the target itself; nothing is frozen."""

    config: TargetConfig
    loss_chunk: int
    mlp_chunk: int = 0
    """Most tokens of a device whose MLP activations exist at once; 0: all."""

    def __post_init__(self) -> None:
        if self.config.is_sparse:
            raise NotImplementedError(
                "a target of experts is not trained from scratch: nothing balances the load of its "
                "experts; choose a shape with dense layers, or train a draft for a target of "
                "experts that is loaded"
            )

    def initialize(self, key: Array) -> PyTree:
        """Fresh parameters."""
        target = Target(replace(self.config, dtype="float32"))
        return target.init(key, jnp.zeros((1, 2), jnp.int32), method="initialize")["params"]

    def draw(self, key: Array, rows: tuple[int, int], length: int) -> tuple[()]:
        """No randomness."""
        return ()

    def sums(
        self, params: PyTree, frozen: PyTree, batch: Batch, draws: tuple[()]
    ) -> dict[str, Array]:
        """The cross-entropy."""
        hidden, head = self.run(params, batch)
        labels, weights = next_token_labels(batch.tokens, batch.weights)
        loss = cross_entropy_sum(
            hidden,
            head,
            labels,
            weights,
            chunk=self.loss_chunk,
            head_gradient=True,
            cap=self.config.logit_cap,
        )
        return {"loss": loss}

    def run(self, params: PyTree, batch: Batch) -> tuple[Array, Array]:
        """Final hidden states ``[B, T, D]``, and the LM head that reads them."""
        chunk, (rows, length) = -(-self.mlp_chunk // 2), batch.tokens.shape

        def hidden(params: PyTree, tokens: Array) -> Array:
            positions = plain_positions((1, rows), length)[0]
            return run_target(self.config, params, tokens, positions, chunk).hidden

        params = cast(params, self.config.dtype)
        [head] = with_sharding("v d", head_of(params))
        return recomputing(hidden, rows, rows * length, chunk)(params, batch.tokens), head

    def measure(self, params: PyTree, frozen: PyTree, batch: Batch) -> dict[str, float]:
        """The held-out cross-entropy."""
        tokens = jnp.maximum(jnp.sum(batch.weights[:, 1:]), 1.0)
        sums = _jitted_sums(self, params, frozen, batch, ())
        return {"heldout_loss": float(sums["loss"] / tokens)}

    def flops_per_token(self, length: int) -> float:
        """Operations that a token of a row of this length needs, forward and backward."""
        return FORWARD_AND_BACKWARD * (target_flops(self.config, length) + head_flops(self.config))


_jitted_sums = jax.jit(TargetObjective.sums, static_argnums=0)


# Floating-point operations of one token that no implementation can leave out. A multiplication with
# an addition counts as two. Attention counts the keys that a causal query sees. Norms, rotations
# and softmax count nothing, nor does what is computed twice to save memory.


def target_flops(config: TargetConfig, length: int) -> float:
    """All layers, forward."""
    return layers_flops(config, length, config.num_layers)


def layers_flops(config: TargetConfig, length: int, count: int) -> float:
    """The last layers of this number, forward."""
    total = 0.0
    for index in range(config.num_layers - count, config.num_layers):
        total += _layer_mlp_flops(config, index)
        if (recurrence := config.layer(index).recurrence) is not None:
            total += recurrence_flops(config, recurrence)
            continue
        total += projection_flops(config)
        if config.gated_attention:
            total += matmul_flops(config.model_width, config.num_heads * config.head_width)
        seen = min(config.layer(index).window or length, length)
        # A window of W tokens shows less to the first W - 1 tokens alone.
        keys = seen - seen * (seen - 1) / (2 * length)
        total += attention_flops(config, keys)
    return total


def flops_after_read_keys(config: TargetConfig, length: int) -> float:
    """Of the layers from the read one on, forward, all but its keys and values."""
    layers = config.num_layers - config.read_layer
    return layers_flops(config, length, layers) - keys_values_flops(config)


def recurrence_flops(config: TargetConfig, sizes: RecurrenceConfig) -> float:
    """Projections of a recurrent layer, and its state, which a token reads twice and writes."""
    values = sizes.value_heads * sizes.value_width
    made = sizes.key_heads * sizes.inputs_width + 2 * values + 2 * sizes.value_heads
    return matmul_flops(config.model_width, made) + 3 * matmul_flops(sizes.key_width, values)


def head_flops(config: TargetConfig) -> float:
    """The LM head, forward."""
    return matmul_flops(config.model_width, config.vocab_size)


def projection_flops(config: Any) -> float:
    """Queries, keys, values and output of a layer of target or draft."""
    heads = 2 * (config.num_heads + config.num_kv_heads)
    return matmul_flops(config.model_width, heads * config.head_width)


def keys_values_flops(config: Any) -> float:
    """Keys and values of a layer of target or draft."""
    return matmul_flops(config.model_width, 2 * config.num_kv_heads * config.head_width)


def mlp_flops(config: Any) -> float:
    """The gated MLP of a layer of target or draft."""
    return 3 * matmul_flops(config.model_width, config.mlp_width)


def _layer_mlp_flops(config: TargetConfig, index: int) -> float:
    """The MLP of a layer: of experts, the chosen ones, the shared one and the router."""
    experts = config.layer(index).experts
    if experts is None:
        return mlp_flops(config)
    router = matmul_flops(config.model_width, experts.count)
    computed = experts.chosen * experts.width
    if experts.shared is not None:
        computed, router = computed + experts.shared, router + matmul_flops(config.model_width, 1)
    return router + 3 * matmul_flops(config.model_width, computed)


def attention_flops(config: Any, keys: float) -> float:
    """Scores and weighted values of a query that sees this number of keys."""
    return 2 * matmul_flops(config.num_heads * config.head_width, 1) * keys


def matmul_flops(inputs: int, outputs: int) -> float:
    """A vector times a matrix."""
    return 2.0 * inputs * outputs
