"""Top-k, top-p and min-p without a sort: each finds the edge of what stays, digit by digit.

Logits become whole numbers in their order, and an edge is the largest number for which something
holds. A CPU tries a bit of it at a time. On a GPU a pass over the vocabulary costs more than what
is done in it, so a pass tries all values of several bits. Both find the same edge.

What stays does not depend on how many rows or nodes are filtered alongside it. Counts have one
result in any order. The compiler chooses the order of a sum by the shape of the array, so the
masses of top-p are added up as whole numbers.

A draft only guesses what the target draws. On a GPU its edges are the next of
:data:`ROUGH_EDGES`, by one pass, where a round's exact ones took several hundred launches a level.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, UInt

from longspec_jax.axes import Array
from longspec_jax.ops.partitioned import one_device

MOST_LIKELY = np.uint32(1 << 31)
"""What stands for a logit of 0, the largest, among the whole numbers in the order of logits."""
MASS_BITS = 42
"""Bits that a mass of top-p keeps after the point, at least; the largest mass is 1."""
ROUGH_EDGES = -np.arange(0.5, 8.5, 0.5, dtype=np.float32)
"""Logits, below that of the most likely token, at which a draft's filters may end: each lets in
tokens that are 1.65 times less likely than those above it."""
_WHOLE = np.uint32(2**32 - 1)


def filtered(
    logits: Float[Array, "B T V"],
    top_k: Int[Array, " B"],
    top_p: Float[Array, " B"],
    log_min_p: Float[Array, " B"],
) -> Float[Array, "B T V"]:
    """The logits inside the row's top-k, top-p and min-p sets, in this order; -inf for the others.

    Ties at an edge stay in.

    Args:
      logits: at most 0, and 0 for the most likely token.
      top_k: how many tokens stay; 0 for all.
      top_p: the mass of those that stay, of what top-k leaves; 1 for all.
      log_min_p: the least logit that stays.
    """
    vocabulary, shape = logits.shape[-1], logits.shape[:-1]
    bits_of_k, bits_of_p = (4, 3) if searches_wide() else (1, 1)
    order, top_p = in_order(logits), top_p[:, None]
    count = jnp.where(top_k > 0, jnp.minimum(top_k, vocabulary), vocabulary)[:, None]

    def hold_k(edges: Sequence[Array]) -> list[Array]:
        above = [(order >= edge[..., None]).astype(jnp.int32) for edge in edges]
        return [each >= count for each in sums(above)]

    kth = last_edge(hold_k, shape, bits_of_k)
    inside = order >= kth[..., None]
    # A token stays if the mass up to it, from the least likely on, exceeds what may be left out.
    # Small masses are added first: from the other end the sum reaches 1 with most of a long tail to
    # come.
    [whole] = masses(logits, [inside])
    left_out = (1 - top_p) * whole

    def may_be_left_out(edges: Sequence[Array]) -> list[Array]:
        below = [inside & (order < edge[..., None]) for edge in edges]
        return [each <= left_out for each in masses(logits, below)]

    smallest = jnp.minimum(last_edge(may_be_left_out, shape, bits_of_p), MOST_LIKELY)
    edge = jnp.maximum(kth, jnp.where(top_p < 1, smallest, 0))
    kept = (order >= edge[..., None]) & (logits >= log_min_p[:, None, None])
    return jnp.where(kept, logits, -jnp.inf)


def roughly_filtered(
    logits: Float[Array, "B w V"],
    top_k: Int[Array, " B"],
    top_p: Float[Array, " B"],
    log_min_p: Float[Array, " B"],
) -> Float[Array, "B w V"]:
    """As :func:`filtered`, but top-k and top-p let in what lies above the next rough edge."""
    weights, count = jnp.exp(logits), len(ROUGH_EDGES)
    counted = [(logits >= edge).astype(jnp.float32) for edge in ROUGH_EDGES]
    weighed = [jnp.where(logits >= edge, weights, 0) for edge in ROUGH_EDGES]
    found = sums([*counted, *weighed, weights])
    counts, mass, total = found[:count], found[count : 2 * count], found[-1]
    top_k, top_p = top_k[:, None], top_p[:, None]
    # From the lowest edge up, so that the highest one that is reached stays.
    nowhere = jnp.full_like(total, -jnp.inf)
    kth, of_k, smallest = nowhere, total, nowhere
    for edge, tokens, of_edge in reversed(list(zip(ROUGH_EDGES, counts, mass, strict=True))):
        enough = (top_k > 0) & (tokens >= top_k)
        kth, of_k = jnp.where(enough, edge, kth), jnp.where(enough, of_edge, of_k)
    for edge, of_edge in reversed(list(zip(ROUGH_EDGES, mass, strict=True))):
        smallest = jnp.where((top_p < 1) & (of_edge >= top_p * of_k), edge, smallest)
    edge = jnp.maximum(kth, smallest)[..., None]
    return jnp.where((logits >= edge) & (logits >= log_min_p[:, None, None]), logits, -jnp.inf)


def searches_wide() -> bool:
    """Whether a pass should try several values, and a draft's filters be rough: on one GPU.

    XLA for CPUs adds up several sums at once without vectors. A mesh may cut the vocabulary.
    """
    return jax.default_backend() != "cpu" and one_device()


def in_order(logits: Float[Array, "*rows V"]) -> UInt[Array, "*rows V"]:
    """Whole numbers in the order of the logits; equal ones for equal logits."""
    bits = jax.lax.bitcast_convert_type(jnp.where(logits == 0, 0.0, logits), jnp.uint32)
    return jnp.where(bits < MOST_LIKELY, bits | MOST_LIKELY, ~bits)


def last_edge(
    holds: Callable[[Sequence[Array]], Sequence[Array]], shape: tuple[int, ...], bits: int
) -> UInt[Array, "*rows"]:
    """The largest number of 32 bits for which something holds that holds for all smaller ones.

    Args:
      holds: whether it holds for each of several numbers ``[*rows]``.
      shape: of the rows.
      bits: that one pass decides.
    """
    passes, digits = -(-32 // bits), [np.uint32(digit) for digit in range(1, 1 << bits)]

    def narrow(step: Array, edge: Array) -> Array:
        shift = (bits * (passes - 1 - step)).astype(jnp.uint32)
        most, found = _WHOLE >> shift, jnp.zeros(shape, jnp.uint32)
        held = holds([edge | (digit << shift) for digit in digits])
        for digit, each in zip(digits, held, strict=True):
            found += each & (digit <= most)  # The first digit may have fewer bits.
        return edge | (found << shift)

    # A GPU's passes are few, and no loop: one would be left out of the CUDA graph, and the host
    # launches each of its passes.
    none = jnp.zeros(shape, jnp.uint32)
    return jax.lax.fori_loop(0, passes, narrow, none, unroll=bits > 1)


def masses(
    logits: Float[Array, "*rows V"], insides: Sequence[Bool[Array, "*rows V"]]
) -> list[Float[Array, "*rows"]]:
    """Sums of ``exp(logits)`` over the tokens inside, the same bits in whatever order.

    Every term is truncated to a fixed-point number of two to four digits. The sums of each digit
    are whole numbers and exact. Putting them together rounds as float32 does. What truncation
    leaves out of 128k tokens is 3e-8 of the largest mass at most, all tokens together.

    Args:
      logits: at most 0, and 0 for the most likely token.
      insides: the tokens of each sum.
    """
    bits = 32 - logits.shape[-1].bit_length()  # Of a digit: the sum of all tokens' has 32.
    places, rest, terms = -(-MASS_BITS // bits), jnp.exp(logits), []
    for _ in range(places):
        rest *= 2.0**bits
        whole = jnp.floor(rest)
        rest -= whole
        terms += [jnp.where(inside, whole.astype(jnp.uint32), 0) for inside in insides]
    found, total = sums(terms), [jnp.zeros(logits.shape[:-1], jnp.float32) for _ in insides]
    for index, of_digit in enumerate(found):
        place, number = divmod(index, len(insides))
        total[number] += of_digit.astype(jnp.float32) * 2.0 ** (-bits * (place + 1))
    return total


def sums(terms: Sequence[Array]) -> Sequence[Array]:
    """The sum ``[*rows]`` of each ``[*rows, V]``, on one GPU in one pass over what they share."""
    if len(terms) == 1 or not searches_wide():
        return [each.sum(axis=-1, dtype=each.dtype) for each in terms]
    none = [jnp.zeros((), each.dtype) for each in terms]

    def add(one: tuple[Array, ...], other: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(a + b for a, b in zip(one, other, strict=True))

    return jax.lax.reduce(tuple(terms), tuple(none), add, (terms[0].ndim - 1,))
