"""Drawing tokens: Gumbel-max with noise keyed by (row seed, absolute position).

Every draw of the project is ``argmax(filter(logits / temperature) + noise[position])``; temperature
0 is the plain argmax. The noise depends on the row's seed and on the index of the drawn token in
its own row, on nothing else: not on the round, the tree, the batch slot or the drafter. Plain and
speculative decoding therefore draw the same tokens (docs/design.md, decision 4.1), and the draft,
given the same noise, can aim at what the target is about to draw.

Filters follow the order of transformers: temperature, then top-k, then top-p.

A draw's bits do not depend on how many rows or nodes are drawn beside it. Operations on single
elements, sorting, the maximum and the argmax have one result in any order. The compiler chooses the
order of a sum by the shape of the array, so the masses of top-p are added up as whole numbers.
"""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Float, Int, UInt

from longspec_jax.axes import Array, Leaf

NO_TOKEN = -1
"""What is drawn from logits that are not finite; no child of a tree carries it, and it ends a
row."""
TINY = float(jnp.finfo(jnp.float32).tiny)
"""The smallest normal number: the lowest temperature that samples."""
MASS_BITS = 42
"""Bits that a mass of top-p keeps behind the point, at least; the largest mass is 1."""


class SamplingKind(NamedTuple):
    """What the sampling of some rows needs; static, so that programs leave out what no row needs.

    The host chooses it for every launch by the rows that are live then.
    """

    stochastic: bool = True
    """Whether a row has a temperature above 0. Spares greedy rows the noise."""
    filtered: bool = True
    """Whether a row uses top-k or top-p. Spares the others a sort of the vocabulary."""

    def __or__(self, other: "SamplingKind") -> "SamplingKind":
        """What the rows of both need."""
        return SamplingKind(*map(max, self, other))


ANY_KIND = SamplingKind()
"""Serves all rows."""


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
    kind: SamplingKind = struct.field(pytree_node=False, default=ANY_KIND)
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
            SamplingKind(stochastic=False, filtered=False),
        )


def noise(
    sampling: Sampling, positions: Int[Array, "B P"], vocabulary: int
) -> Float[Array, "B P V"]:
    """Standard Gumbel noise for the tokens at the given absolute positions of each row."""
    if not sampling.kind.stochastic:
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
    if not sampling.kind.stochastic:
        return logits
    # Hardware may flush a subnormal temperature to zero, at which samples are the argmax anyway.
    greedy = (sampling.temperature < TINY)[:, None, None]
    temperature = jnp.where(greedy, 1.0, sampling.temperature[:, None, None])
    # Below their maximum, so that a small temperature can send the others to -inf and never all to
    # inf.
    tempered = (logits - logits.max(axis=-1, keepdims=True)) / temperature
    if sampling.kind.filtered:
        tempered = _filter(tempered, sampling)
    return jnp.where(greedy, logits, tempered + gumbel)


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


def _filter(logits: Float[Array, "B T V"], sampling: Sampling) -> Float[Array, "B T V"]:
    """Send logits outside the row's top-k and top-p sets to -inf; ties at the edge stay in."""
    vocabulary = logits.shape[-1]
    ascending = jnp.sort(logits, axis=-1)
    top_p = sampling.top_p[:, None, None]
    count = jnp.where(sampling.top_k > 0, jnp.minimum(sampling.top_k, vocabulary), vocabulary)
    rank = jnp.arange(vocabulary)[::-1]
    inside = rank < count[:, None, None]
    # A token stays if the mass up to it, from the least likely on, exceeds what may be left out.
    # Small masses are added first: from the other end the sum reaches 1 with most of a long tail to
    # come.
    mass = cumulative_mass(jnp.where(inside, ascending, -jnp.inf))
    kept = (mass > (1 - top_p) * mass[..., -1:]) | (top_p >= 1) | (rank == 0)
    edge = jnp.min(jnp.where(inside & kept, ascending, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits >= edge, logits, -jnp.inf)


def cumulative_mass(logits: Float[Array, "*rows V"]) -> Float[Array, "*rows V"]:
    """Running sums of ``exp(logits)``, the same bits whatever the order in which they are added.

    Every term is truncated to a fixed-point number of two to four digits. The sums of each digit
    are whole numbers and exact. Putting them together rounds as float32 does. What truncation
    leaves out of 128k tokens is 3e-8 of the largest mass at most, all tokens together.

    Args:
      logits: at most 0, and 0 for the most likely token.
    """
    bits = 32 - logits.shape[-1].bit_length()  # Of a digit: the sum of all tokens' has 32.
    rest, total = jnp.exp(logits), jnp.zeros(logits.shape, jnp.float32)
    for digit in range(1, -(-MASS_BITS // bits) + 1):
        rest *= 2.0**bits
        whole = jnp.floor(rest)
        rest -= whole
        sums = jnp.cumsum(whole.astype(jnp.uint32), axis=-1)
        total += sums.astype(jnp.float32) * 2.0 ** (-bits * digit)
    return total
