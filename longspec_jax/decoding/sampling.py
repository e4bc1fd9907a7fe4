"""Drawing tokens: Gumbel-max with noise keyed by (row seed, absolute position).

Every draw of the project is ``argmax(filter(logits / temperature) + noise[position])``; temperature
0 is the plain argmax. The noise depends on the row's seed and on the index of the drawn token in
its own row, on nothing else: not on the round, the tree, the batch slot or the drafter. Plain and
speculative decoding therefore draw the same tokens (docs/design/decisions.md, decision 4.1), and
the draft, given the same noise, can aim at what the target is about to draw.

Filters follow the order of transformers: temperature, top-k, top-p, min-p. None of them sorts: each
finds its edge by bisection on the 32 bits of the logits. On two CPU cores and 128k tokens that
takes a quarter to a third of the time of a sort.

A draw's bits do not depend on how many rows or nodes are drawn alongside it. Operations on single
elements, counts, the maximum and the argmax have one result in any order. The compiler chooses the
order of a sum by the shape of the array, so the masses of top-p are added up as whole numbers.
"""

from collections.abc import Callable
from dataclasses import replace
from enum import IntEnum

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Bool, Float, Int, UInt

from longspec_jax.axes import Array, Leaf

NO_TOKEN = -1
"""What is drawn from logits that are not finite; no child of a tree carries it, and it ends a
row."""
TINY = float(jnp.finfo(jnp.float32).tiny)
"""The smallest normal number: the lowest temperature that samples."""
MOST_LIKELY = np.uint32(1 << 31)
"""What stands for a logit of 0, the largest, among the whole numbers in the order of logits."""
MASS_BITS = 42
"""Bits that a mass of top-p keeps after the point, at least; the largest mass is 1."""


class SamplingKind(IntEnum):
    """What the draws of some rows need; static, so that programs leave out what no row needs.

    Each kind serves the rows of the lesser ones too. The host chooses the greatest of the rows that
    are live at a launch.
    """

    GREEDY = 0
    """No row samples: no noise."""
    SAMPLED = 1
    """Rows may have a temperature above 0, and nothing else."""
    ANY = 2
    """Rows may have filters, adjusted logits and log-probabilities as well."""


@struct.dataclass
class Sampling:
    """How each row of a batch draws its tokens."""

    temperature: Leaf[Float[Array, " B"]]
    """0 draws the argmax."""
    top_k: Leaf[Int[Array, " B"]]
    """Only the ``k`` most likely tokens can be drawn; 0 for all."""
    top_p: Leaf[Float[Array, " B"]]
    """Only the smallest set of most likely tokens with this mass; 1 for all."""
    seed: Leaf[UInt[Array, " B"]]
    """The row's random stream."""
    log_min_p: Leaf[Float[Array, " B"]]
    """Logarithm of the least probability that can be drawn, relative to the most likely token's;
    minus infinity for none."""
    kind: SamplingKind = struct.field(pytree_node=False, default=SamplingKind.ANY)
    """Static. The general one in :class:`~longspec_jax.decoding.rows.Rows`."""

    def of_kind(self, kind: SamplingKind) -> "Sampling":
        """The same sampling, computed by programs of another kind."""
        return replace(self, kind=kind)

    @classmethod
    def greedy(cls, rows: int) -> "Sampling":
        """The argmax in each of this many rows."""
        return cls(
            jnp.zeros(rows),
            jnp.zeros(rows, jnp.int32),
            jnp.ones(rows),
            jnp.zeros(rows, jnp.uint32),
            jnp.full(rows, -jnp.inf, jnp.float32),
            SamplingKind.GREEDY,
        )


def noise(
    sampling: Sampling, positions: Int[Array, "B P"], vocabulary: int
) -> Float[Array, "B P V"]:
    """Standard Gumbel noise for the tokens at the given absolute positions of each row."""
    if sampling.kind is SamplingKind.GREEDY:
        return jnp.zeros((*positions.shape, 1), jnp.float32)

    def draw(seed: Array, position: Array) -> Array:
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)
        # The cheap mode caps the noise at 15.9, and with it the chance of a tail of many tokens: a
        # hundredth spread over 128k of them was drawn less than half as often as it should be.
        return jax.random.gumbel(key, (vocabulary,), jnp.float32, mode="high")

    drawn = jax.vmap(jax.vmap(draw, (None, 0)))(sampling.seed, positions)
    # An array of its own, rounded. In one loop with the addition to the logits the compiler may
    # leave a product unrounded, and would do so in the pass of one shape and not of another.
    return jax.lax.optimization_barrier(drawn)


def perturb(
    logits: Float[Array, "B T V"], gumbel: Float[Array, " B #T #V"], sampling: Sampling
) -> Float[Array, "B T V"]:
    """Scores whose argmax is the draw: filtered, tempered logits plus noise; plain ones at 0."""
    if sampling.kind is SamplingKind.GREEDY:
        return logits
    greedy, _, tempered = _tempered(logits, sampling)
    return jnp.where(greedy, logits, tempered + gumbel)


def processed(logits: Float[Array, "B T V"], sampling: Sampling) -> Float[Array, "B T V"]:
    """What transformers calls scores: over the temperature, -inf outside the filters' sets.

    The plain logits at temperature 0.
    """
    if sampling.kind is SamplingKind.GREEDY:
        return logits
    greedy, temperature, tempered = _tempered(logits, sampling)
    kept = jnp.where(jnp.isneginf(tempered), -jnp.inf, logits / temperature)
    return jnp.where(greedy, logits, kept)


def _tempered(logits: Float[Array, "B T V"], sampling: Sampling) -> tuple[Array, Array, Array]:
    """Which rows are greedy, the temperatures of the others, and their filtered logits.

    The logits are over the temperature, and 0 for the most likely token.
    """
    # Hardware may flush a subnormal temperature to zero, at which samples are the argmax anyway.
    greedy = (sampling.temperature < TINY)[:, None, None]
    temperature = jnp.where(greedy, 1.0, sampling.temperature[:, None, None])
    # Below their maximum, so that a small temperature can send the others to -inf and never all to
    # inf.
    tempered = (logits - logits.max(axis=-1, keepdims=True)) / temperature
    if sampling.kind is SamplingKind.ANY:
        tempered = _filter(tempered, sampling)
    return greedy, temperature, tempered


def draw(
    logits: Float[Array, "B T V"], gumbel: Float[Array, " B #T #V"], sampling: Sampling
) -> Int[Array, "B T"]:
    """The drawn token of every position; ties go to the lowest token id.

    :data:`NO_TOKEN` where the logits hold NaN or infinity, so that nothing can be drawn.
    """
    scores = perturb(logits, gumbel, sampling)
    token = jnp.argmax(scores, axis=-1)
    # One NaN or infinity decides the argmax, or spoils the maximum that all are compared with.
    best = jnp.take_along_axis(scores, token[..., None], axis=-1)[..., 0]
    return jnp.where(jnp.isfinite(best), token, NO_TOKEN).astype(jnp.int32)


def masked(logits: Float[Array, "B T V"], bits: UInt[Array, "B T W"]) -> Float[Array, "B T V"]:
    """The logits of the allowed tokens, -inf for the others.

    Args:
      bits: bit ``v % 32`` of word ``v // 32`` is set where token ``v`` is allowed.
    """
    token = jnp.arange(logits.shape[-1])
    words = jnp.take(bits, token // 32, axis=-1)
    allowed = words >> (token % 32).astype(jnp.uint32) & 1
    return jnp.where(allowed == 1, logits, -jnp.inf)


def _filter(logits: Float[Array, "B T V"], sampling: Sampling) -> Float[Array, "B T V"]:
    """Send logits outside the row's top-k, top-p and min-p sets to -inf; ties at an edge stay in.

    Args:
      logits: at most 0, and 0 for the most likely token.
    """
    vocabulary, shape = logits.shape[-1], logits.shape[:-1]
    order, top_p = _in_order(logits), sampling.top_p[:, None]
    count = jnp.where(sampling.top_k > 0, jnp.minimum(sampling.top_k, vocabulary), vocabulary)

    def holds_k(edge: Array) -> Array:
        return (order >= edge[..., None]).sum(axis=-1, dtype=jnp.int32) >= count[:, None]

    kth = _last_edge(holds_k, shape)
    inside = order >= kth[..., None]
    # A token stays if the mass up to it, from the least likely on, exceeds what may be left out.
    # Small masses are added first: from the other end the sum reaches 1 with most of a long tail to
    # come.
    left_out = (1 - top_p) * mass(logits, inside)

    def may_be_left_out(edge: Array) -> Array:
        return mass(logits, inside & (order < edge[..., None])) <= left_out

    smallest = jnp.minimum(_last_edge(may_be_left_out, shape), MOST_LIKELY)
    edge = jnp.maximum(kth, jnp.where(top_p < 1, smallest, 0))
    kept = (order >= edge[..., None]) & (logits >= sampling.log_min_p[:, None, None])
    return jnp.where(kept, logits, -jnp.inf)


def _in_order(logits: Float[Array, "*rows V"]) -> UInt[Array, "*rows V"]:
    """Whole numbers in the order of the logits; equal ones for equal logits."""
    bits = jax.lax.bitcast_convert_type(jnp.where(logits == 0, 0.0, logits), jnp.uint32)
    return jnp.where(bits < MOST_LIKELY, bits | MOST_LIKELY, ~bits)


def _last_edge(holds: Callable[[Array], Array], shape: tuple[int, ...]) -> UInt[Array, "*rows"]:
    """The largest number for which something holds that holds for all smaller ones, bit by bit."""

    def narrow(step: Array, edge: Array) -> Array:
        higher = edge | (MOST_LIKELY >> step.astype(jnp.uint32))
        return jnp.where(holds(higher), higher, edge)

    return jax.lax.fori_loop(0, 32, narrow, jnp.zeros(shape, jnp.uint32))


def mass(logits: Float[Array, "*rows V"], inside: Bool[Array, "*rows V"]) -> Float[Array, "*rows"]:
    """Sums of ``exp(logits)`` over the tokens inside, the same bits in whatever order.

    Every term is truncated to a fixed-point number of two to four digits. The sums of each digit
    are whole numbers and exact. Putting them together rounds as float32 does. What truncation
    leaves out of 128k tokens is 3e-8 of the largest mass at most, all tokens together.

    Args:
      logits: at most 0, and 0 for the most likely token.
    """
    bits = 32 - logits.shape[-1].bit_length()  # Of a digit: the sum of all tokens' has 32.
    rest = jnp.where(inside, jnp.exp(logits), 0)
    total = jnp.zeros(logits.shape[:-1], jnp.float32)
    for digit in range(1, -(-MASS_BITS // bits) + 1):
        rest *= 2.0**bits
        whole = jnp.floor(rest)
        rest -= whole
        sums = whole.astype(jnp.uint32).sum(axis=-1)
        total += sums.astype(jnp.float32) * 2.0 ** (-bits * digit)
    return total
