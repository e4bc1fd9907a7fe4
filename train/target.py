"""The target in training: its pass over whole rows, and what it learns itself.

A frozen target is only read: one layer's keys and values or the hidden states of some layers, its
embeddings and its head. The demo's target, which is trained from scratch, learns the next token.
"""

import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jaxtyping import Int, PyTree

from longspec_jax.axes import Array
from longspec_jax.config.target import TargetConfig
from longspec_jax.models.target import Target, TargetOutput, head_of, scaled, sinks_of
from longspec_jax.ops.attention.dispatch import causal_attention
from longspec_jax.ops.partitioned import row_shares, with_sharding
from longspec_jax.ops.recurrence.operands import RecurrentTokens, empty_state
from longspec_jax.ops.recurrence.recurrence import chunk_recurrence

from .losses import cross_entropy_sum, next_token_labels
from .step import Batch, cast

LONG = 16384
"""Up to this number of tokens, MLP activations are small next to the weights of a 7B target."""


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
        """See :class:`Target`."""
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
        output = typing.cast(
            TargetOutput,
            TrainedTarget(config, mlp_chunk).apply(
                {"params": params}, tokens, positions, attend, tuple(keep), recur
            ),
        )
    keys, values = output.keys[config.read_layer], output.values[config.read_layer]
    assert keys is not None and values is not None, "drafts read a layer that has attention"
    # The head then makes logits of it, without another division.
    hidden = scaled(output.hidden, 1 / config.logits_divisor)
    return TargetView(hidden, keys, values, output.kept)


Given = ParamSpec("Given")
Found = TypeVar("Found")
_CHEAP = frozenset(
    "add add_any broadcast_in_dim concatenate convert_element_type cos div dynamic_slice exp "
    "gather integer_pow iota log logistic max mul neg pad reduce_sum reshape rsqrt select_n "
    "sharding_constraint sin slice split square squeeze sub transpose".split()
)
"""Elementwise primitives, and those that move and sum."""


def is_costly(primitive: Primitive, *_: object, **__: object) -> bool:
    """Whether a result is kept for the backward pass: those of matmuls and attention are."""
    return primitive.name not in _CHEAP


def recomputing(
    run: Callable[Given, Found], rows: int, tokens: int, mlp_chunk: int
) -> Callable[Given, Found]:
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


_jitted_sums = jax.jit(TargetObjective.sums, static_argnums=0)
