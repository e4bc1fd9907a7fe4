"""The loss of blocks: cross-entropy of the text and distance to the target's distribution.

``(1 - share) * -log q[label] + share * sum |p - q|`` of every slot, ``q`` the draft's distribution
with the Markov head's correction and ``p`` the target's (DSpark's loss, whose share is 0.9). Half
of the distance is the total variation: how often draws of the two must differ.

As in :mod:`train.losses`, logits exist for one chunk of slots at a time, and their gradient is
computed beside the loss. Here it reaches the Markov head's table, too.
"""

import functools
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from longspec_jax.axes import Array
from longspec_jax.models.target import capped, head_logits
from longspec_jax.ops.matmul.few_rows import matmul_precision
from longspec_jax.ops.partitioned import row_shares
from longspec_jax.ops.slicing import chunk_length, cut, put, whole_chunks

from ...losses import before_cap


class Learned(NamedTuple):
    """What the loss is differentiated by."""

    hidden: Float[Array, "B n D"]
    """What the LM head reads of every slot."""
    before: Float[Array, "B n r"]
    """The Markov head's embedding of the token before each slot's; ``r`` may be 0."""
    table: Float[Array, "V r"]
    """The Markov head's other table."""


class About(NamedTuple):
    """What is known of every slot."""

    labels: Int[Array, "B n"]
    """The token of the text that follows."""
    weights: Float[Array, "B n"]
    """0 where nothing is to be learned."""
    teacher: Float[Array, "B n D"]
    """The target's final hidden state that predicts the same token."""


class BlockLoss(NamedTuple):
    """Sums over weighted slots, float32."""

    loss: Float[Array, ""]
    """The mixture, which alone has a gradient."""
    cross_entropy: Float[Array, ""]
    """Of the text."""
    distance: Float[Array, ""]
    """``sum |p - q|``, 0 to 2."""
    teacher_loss: Float[Array, ""]
    """The target's own cross-entropy of the text."""


How: TypeAlias = tuple[float, float | None]
"""The share of the distance, and the cap; static."""


def block_loss(
    learned: Learned,
    head: Float[Array, "V D"],
    about: About,
    *,
    share: float,
    chunk: int,
    cap: float | None = None,
) -> BlockLoss:
    """The loss of all slots and its parts.

    Args:
      learned: gets gradients.
      head: the target's LM head, which draft and target share; frozen.
      about: of the slots; no gradient.
      share: of the distance, 0 to 1.
      chunk: most tokens of a device whose logits exist at once; of each model half as many.
      cap: bounds the logits of both softly, as the target's.
    """
    rows, slots = about.labels.shape
    size = chunk_length(rows // row_shares(rows), slots, max(1, chunk // 2))
    hidden, before = (whole_chunks(each, size) for each in learned[:2])
    about = jax.lax.stop_gradient(About(*(whole_chunks(each, size) for each in about)))
    found: Any = _chunked((share, cap), size, Learned(hidden, before, learned.table), head, about)
    return BlockLoss(found[0], *jax.lax.stop_gradient(found[1:]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _chunked(how: How, size: int, learned: Learned, head: Array, about: About) -> Any:
    return _loop(how, size, learned, head, about, None)[0]


def _forward(how: How, size: int, learned: Learned, head: Array, about: About) -> Any:
    table = jnp.zeros(learned.table.shape, jnp.float32)
    none = Learned(jnp.zeros_like(learned.hidden), jnp.zeros_like(learned.before), table)
    sums, gradient = _loop(how, size, learned, head, about, none)
    return sums, gradient._replace(table=gradient.table.astype(learned.table.dtype))


def _backward(how: How, size: int, gradient: Learned, cotangents: Any) -> Any:
    def scaled(each: Array) -> Array:
        return (each.astype(jnp.float32) * cotangents[0]).astype(each.dtype)

    return jax.tree.map(scaled, gradient), None, None


_chunked.defvjp(_forward, _backward)


def _loop(
    how: How, size: int, learned: Learned, head: Array, about: About, first: Learned | None
) -> tuple[tuple[Array, ...], Any]:
    """The sums of all chunks, and the gradient if there is one to begin with."""
    precision, table = matmul_precision(head.dtype), learned.table

    def step(carry: tuple[Any, Any], start: Array) -> tuple[tuple[Any, Any], None]:
        sums, gradient = carry
        x, z, *mine = (cut(each, start, size) for each in (*learned[:2], *about))
        logits = head_logits(head, x)
        if table.shape[1]:
            logits += head_logits(table, z)
        found, error = _of_chunk(how, logits, head, About(*mine))
        if gradient is not None:
            error = error.astype(head.dtype)
            dx, dz = (
                jnp.einsum("BtV,VD->BtD", error, each, precision=precision)
                for each in (head, table)
            )
            of_table = jnp.einsum(
                "BtV,Btr->Vr", error, z, precision=precision, preferred_element_type=jnp.float32
            )
            gradient = Learned(
                put(gradient.hidden, dx, start),
                put(gradient.before, dz, start),
                gradient.table + of_table,
            )
        return (jax.tree.map(jnp.add, sums, found), gradient), None

    zeros = (jnp.zeros((), jnp.float32),) * len(BlockLoss._fields)
    starts = jnp.arange(0, learned.hidden.shape[1], size)
    return jax.lax.scan(step, (zeros, first), starts)[0]


def _of_chunk(
    how: How, logits: Array, head: Array, about: About
) -> tuple[tuple[Array, ...], Array]:
    """The sums of a chunk, and the gradient of its loss by the logits before their cap."""
    share, cap = how
    logits = capped(logits, cap)
    wanted = capped(head_logits(head, about.teacher), cap)
    # One-hot by comparison fuses, and stays local under a sharded vocabulary.
    label = about.labels[..., None] == jnp.arange(logits.shape[-1])
    (q, surprise), (p, teacher) = (_distribution(each, label) for each in (logits, wanted))
    distance, sign = jnp.abs(p - q).sum(-1), jnp.sign(q - p)
    away = q * (sign - jnp.sum(q * sign, axis=-1, keepdims=True))
    error = (1 - share) * (q - label) + share * away
    sums = tuple(jnp.sum(about.weights * each) for each in (surprise, distance, teacher))
    loss = (1 - share) * sums[0] + share * sums[1]
    return (loss, *sums), before_cap(error * about.weights[..., None], logits, cap)


def _distribution(logits: Array, label: Array) -> tuple[Array, Array]:
    """``softmax`` and ``-log softmax[label]``."""
    lse = jax.nn.logsumexp(logits, axis=-1)
    return jnp.exp(logits - lse[..., None]), lse - jnp.sum(label * logits, axis=-1)
