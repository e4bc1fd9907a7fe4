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
ROUGH_EDGES = -np.arange(0.5, 8.5, 0.5, np.float32)
"""Logits, below that of the most likely token, at which a draft's filters may end: each lets in
tokens that are 1.65 times less likely than those above it."""
_WHOLE = np.uint32(2**32 - 1)


def filtered(
    logits: Float[Array, "B T V"],
    top_k: Int[Array, " B"],
    top_p: Float[Array, " B"],
    log_min_p: Float[Array, " B"],
    *,
    wide: bool,
) -> Float[Array, "B T V"]:
    """The logits inside the row's top-k, top-p and min-p sets, in this order; -inf for the others.

    Ties at an edge stay in.

    Args:
      logits: at most 0, and 0 for the most likely token.
      top_k: how many tokens stay; 0 for all.
      top_p: the mass of those that stay, of what top-k leaves; 1 for all.
      log_min_p: the least logit that stays.
      wide: whether a pass tries several bits of an edge; the result is the same.
    """
    vocabulary, shape = logits.shape[-1], logits.shape[:-1]
    order, top_p = in_order(logits), top_p[:, None]
    count = jnp.where(top_k > 0, jnp.minimum(top_k, vocabulary), vocabulary)[:, None, None]

    def hold_k(edges: Sequence[Array]) -> Array:
        above = [(order >= edge[..., None]).astype(jnp.int32) for edge in edges]
        return sums(above) >= count

    kth = last_edge(hold_k, shape, 4 if wide else 1)
    inside = order >= kth[..., None]
    # A token stays if the mass up to it, from the least likely on, exceeds what may be left out.
    # Small masses are added first: from the other end the sum reaches 1 with most of a long tail to
    # come.
    left_out = (1 - top_p)[..., None] * masses(logits, [inside])

    def may_be_left_out(edges: Sequence[Array]) -> Array:
        return masses(logits, [inside & (order < edge[..., None]) for edge in edges]) <= left_out

    smallest = jnp.minimum(last_edge(may_be_left_out, shape, 3 if wide else 1), MOST_LIKELY)
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
    weights, edges = jnp.exp(logits), jnp.asarray(ROUGH_EDGES)
    # The same comparisons, but not for XLA: one that several terms share is a launch of its own.
    above_all = np.nextafter(ROUGH_EDGES, np.float32(-np.inf))
    counted = [(logits >= edge).astype(jnp.float32) for edge in ROUGH_EDGES]
    weighed = [jnp.where(logits > least, weights, 0) for least in above_all]
    counts, mass, total = jnp.split(
        sums([*counted, *weighed, weights]), [len(edges), 2 * len(edges)], axis=-1
    )

    def first(reached: Bool[Array, "B w n"], values: Float[Array, " *n"], none: Array) -> Array:
        at = jnp.argmax(reached, axis=-1, keepdims=True)
        values = jnp.broadcast_to(values, reached.shape)
        return jnp.where(
            reached.any(axis=-1, keepdims=True), jnp.take_along_axis(values, at, axis=-1), none
        )

    enough = (counts >= top_k[:, None, None]) & (top_k > 0)[:, None, None]
    all_of = first(enough, mass, total)
    heavy = (mass >= top_p[:, None, None] * all_of) & (top_p < 1)[:, None, None]
    lowest = jnp.float32(-jnp.inf)
    edge = jnp.maximum(first(enough, edges, lowest), first(heavy, edges, lowest))
    return jnp.where((logits >= edge) & (logits >= log_min_p[:, None, None]), logits, -jnp.inf)


def searches_wide() -> bool:
    """Whether a pass should try several values: on one GPU.

    XLA for CPUs adds up several sums at once without vectors. A mesh may cut the vocabulary.
    """
    return jax.default_backend() != "cpu" and one_device()


def in_order(logits: Float[Array, "*rows V"]) -> UInt[Array, "*rows V"]:
    """Whole numbers in the order of the logits; equal ones for equal logits."""
    bits = jax.lax.bitcast_convert_type(jnp.where(logits == 0, 0.0, logits), jnp.uint32)
    return jnp.where(bits < MOST_LIKELY, bits | MOST_LIKELY, ~bits)


def last_edge(
    holds: Callable[[Sequence[Array]], Array], shape: tuple[int, ...], bits: int
) -> UInt[Array, "*rows"]:
    """The largest number of 32 bits for which something holds that holds for all smaller ones.

    Args:
      holds: of several numbers ``[*rows]``, whether it holds for each ``[*rows, n]``.
      shape: of the rows.
      bits: that one pass decides.
    """
    passes, digits = -(-32 // bits), np.arange(1, 1 << bits, dtype=np.uint32)

    def narrow(step: Array, edge: Array) -> Array:
        shift = (bits * (passes - 1 - step)).astype(jnp.uint32)
        held = holds([edge | (digit << shift) for digit in digits])
        held &= digits <= (_WHOLE >> shift)  # The first digit may have fewer bits.
        return edge | (held.sum(axis=-1, dtype=jnp.uint32) << shift)

    return jax.lax.fori_loop(0, passes, narrow, jnp.zeros(shape, jnp.uint32))


def masses(
    logits: Float[Array, "*rows V"], insides: Sequence[Bool[Array, "*rows V"]]
) -> Float[Array, "*rows n"]:
    """Sums of ``exp(logits)`` over the tokens inside, the same bits in whatever order.

    Every term is truncated to a fixed-point number of two to four digits. The sums of each digit
    are whole numbers and exact. Putting them together rounds as float32 does. What truncation
    leaves out of 128k tokens is 3e-8 of the largest mass at most, all tokens together.

    Args:
      logits: at most 0, and 0 for the most likely token.
      insides: the tokens of each sum.
    """
    bits = 32 - logits.shape[-1].bit_length()  # Of a digit: the sum of all tokens' has 32.
    rest, digits = jnp.exp(logits), []
    for _ in range(-(-MASS_BITS // bits)):
        rest *= 2.0**bits
        whole = jnp.floor(rest)
        rest -= whole
        digits.append(whole.astype(jnp.uint32))
    found = sums([jnp.where(inside, digit, 0) for digit in digits for inside in insides])
    total = jnp.zeros((*logits.shape[:-1], len(insides)), jnp.float32)
    for place, of_digit in enumerate(jnp.split(found, len(digits), axis=-1), start=1):
        total += of_digit.astype(jnp.float32) * 2.0 ** (-bits * place)
    return total


def sums(terms: Sequence[Array]) -> Array:
    """``[*rows, n]``: the sum of each ``[*rows, V]``, all in one pass over what they share."""
    if len(terms) == 1 or not searches_wide():
        return jnp.stack([each.sum(axis=-1, dtype=each.dtype) for each in terms], axis=-1)
    none = [jnp.zeros((), each.dtype) for each in terms]

    def add(one: tuple[Array, ...], other: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(a + b for a, b in zip(one, other, strict=True))

    return jnp.stack(jax.lax.reduce(tuple(terms), tuple(none), add, (terms[0].ndim - 1,)), axis=-1)
