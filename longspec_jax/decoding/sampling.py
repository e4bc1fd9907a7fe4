"""Drawing tokens: Gumbel-max with noise keyed by (row seed, absolute position).

Every draw of the project is ``argmax(filter(logits / temperature) + noise[position])``; temperature
0 is the plain argmax. The noise depends on the row's seed and on the index of the drawn token in
its own row, on nothing else: not on the round, the tree, the batch slot or the drafter. Plain and
speculative decoding therefore draw the same tokens (docs/design/decisions.md, decision 4.1), and
the draft, given the same noise, can aim at what the target is about to draw.

Filters follow the order of transformers: temperature, top-k, top-p, min-p
(:mod:`longspec_jax.decoding.filters`). On two CPU cores and 128k tokens they take a quarter to a
third of the time of a sort.

A draw's bits do not depend on how many rows or nodes are drawn alongside it. Operations on single
elements, the maximum and the argmax have one result in any order.
"""

from dataclasses import replace
from enum import IntEnum

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Float, Int, UInt

from longspec_jax.axes import Array, Leaf
from longspec_jax.decoding.filters import filtered, roughly_filtered, searches_wide

NO_TOKEN = -1
"""What is drawn from logits that are not finite; no child of a tree carries it, and it ends a
row."""
TINY = float(jnp.finfo(jnp.float32).tiny)
"""The smallest normal number: the lowest temperature that samples."""


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
    logits: Float[Array, "B T V"],
    gumbel: Float[Array, " B #T #V"],
    sampling: Sampling,
    *,
    guessed: bool = False,
) -> Float[Array, "B T V"]:
    """Scores whose argmax is the draw: filtered, tempered logits plus noise; plain ones at 0.

    Args:
      logits: the target's, or a draft's.
      gumbel: noise of the tokens' positions.
      sampling: of the rows.
      guessed: whether they are a draft's, whose filters need not be exact.
    """
    if sampling.kind is SamplingKind.GREEDY:
        return logits
    greedy, _, tempered = _tempered(logits, sampling, guessed=guessed)
    return jnp.where(greedy, logits, tempered + gumbel)


def processed(logits: Float[Array, "B T V"], sampling: Sampling) -> Float[Array, "B T V"]:
    """What transformers calls scores: over the temperature, -inf outside the filters' sets.

    The plain logits at temperature 0.
    """
    if sampling.kind is SamplingKind.GREEDY:
        return logits
    greedy, temperature, tempered = _tempered(logits, sampling, guessed=False)
    kept = jnp.where(jnp.isneginf(tempered), -jnp.inf, logits / temperature)
    return jnp.where(greedy, logits, kept)


def _tempered(
    logits: Float[Array, "B T V"], sampling: Sampling, *, guessed: bool
) -> tuple[Array, Array, Array]:
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
        keep = roughly_filtered if guessed and searches_wide() else filtered
        tempered = keep(tempered, sampling.top_k, sampling.top_p, sampling.log_min_p)
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
