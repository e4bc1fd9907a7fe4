"""The gated delta rule over a sequence, and over a tree, as a few matmuls.

A token decays the state of a value head by ``a``, and writes the difference between its value and
what the state says of its key, times a strength (Gated DeltaNet, arXiv:2412.06464, equation 10):

    S <- a S;  S <- S + k (beta (v - k S));  o = q S / sqrt(X)

with queries and keys of length 1. What the tokens of a path write solves a triangular system (the
WY form of section 3.3). The matrix relates a token to those it sees, so that a tree is a matter of
its mask: of two nodes neither of which sees the other the entry is zero, and all nodes of a tree
are solved at once from the one state before its root. A power of the matrix is zero, so its inverse
is a product of a few powers. A prompt is cut into blocks, which are solved side by side; the state
goes from block to block. The forms differ by the rounding of float32.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from longspec_jax.axes import Array
from longspec_jax.ops.recurrence.operands import RecurrentRows
from longspec_jax.ops.slicing import whole_chunks

BLOCK = 64
"""Tokens of a prompt that are solved as one system."""
NORM_EPS = 1e-6
"""Added to the sum of squares of a query or key."""
Memory = Float[Array, "B J P X Y"]


class RecurrenceOperands(NamedTuple):
    """What every token brings to the recurrence, in float32."""

    queries: Float[Array, "B T J X"]
    """Normalised, divided by the root of their width."""
    keys: Float[Array, "B T J X"]
    """Normalised."""
    values: Float[Array, "B T J P Y"]
    log_decay: Float[Array, "B T J P"]
    strength: Float[Array, "B T J P"]


def normalised(x: Array) -> Array:
    """Vectors of length 1, but for an epsilon."""
    return x * jax.lax.rsqrt((x * x).sum(axis=-1, keepdims=True) + NORM_EPS)


def delta_rule_chunk(memory: Memory, tokens: RecurrenceOperands) -> tuple[Memory, Array]:
    """The rule over a chunk of a prompt, in blocks of :data:`BLOCK` tokens."""
    batch, length = tokens.keys.shape[:2]
    # Tokens of padding decay nothing and write nothing.
    whole = [whole_chunks(part, min(BLOCK, length)) for part in tokens]
    blocks = whole[0].shape[1] // min(BLOCK, length)
    of_blocks = RecurrenceOperands(
        *(part.reshape(batch * blocks, -1, *part.shape[2:]) for part in whole)
    )
    size = of_blocks.keys.shape[1]
    total = jnp.cumsum(of_blocks.log_decay, axis=1)
    faded = _faded(total, total, jnp.tri(size, dtype=bool)[None])
    # (I + L) u = beta (v - exp(total) k S), solved for any state S before the block.
    strength = of_blocks.strength[..., None]
    right = jnp.concatenate(
        [
            strength * of_blocks.values,
            strength * jnp.exp(total)[..., None] * of_blocks.keys[:, :, :, None],
        ],
        axis=-1,
    )
    if size > 1:  # One token depends only on the state.
        right = jnp.moveaxis(right, 1, 3)
        right = jax.lax.linalg.triangular_solve(
            _system(of_blocks, faded), right, left_side=True, lower=True, unit_diagonal=True
        )
        right = jnp.moveaxis(right, 3, 1)
    width = of_blocks.values.shape[-1]
    # Updates if the state were zero, what reads the state for them, and what reads them.
    solved = right[..., :width], right[..., width:], _scores(of_blocks, faded)

    def split(part: Array) -> Array:
        return jnp.moveaxis(part.reshape(batch, blocks, *part.shape[1:]), 1, 0)

    def step(memory: Array, block: tuple[RecurrenceOperands, tuple, Array]) -> tuple[Array, Array]:
        tokens, (free, by_memory, scores), total = block
        updates = free - _einsum("btjpx,bjpxy->btjpy", by_memory, memory)
        before = _einsum("btjx,bjpxy->btjpy", tokens.queries, memory) * jnp.exp(total)[..., None]
        out = before + _einsum("bjptu,bujpy->btjpy", scores, updates)
        faded = updates * jnp.exp(total[:, -1:] - total)[..., None]
        memory = memory * jnp.exp(total[:, -1])[..., None, None]
        return memory + _einsum("btjx,btjpy->bjpxy", tokens.keys, faded), out

    memory, out = jax.lax.scan(step, memory, jax.tree.map(split, (of_blocks, solved, total)))
    out = jnp.moveaxis(out, 0, 1)
    return memory, out.reshape(batch, blocks * size, *out.shape[3:])[:, :length]


def delta_rule_tree(
    memory: Memory,
    tokens: RecurrenceOperands,
    mask: Bool[Array, "B T T"],
    levels: int,
    behind: tuple[RecurrentRows, Bool[Array, "B T U"]] | None = None,
) -> tuple[Array, Array, Array]:
    """What the nodes of trees read, each after its own path, and what they write.

    Args:
      memory: the state before the roots.
      tokens: the nodes; a node comes after those that it sees.
      mask: which nodes a node sees, itself included.
      levels: most ancestors that a node has among the nodes.
      behind: tokens between the state and the nodes, and which of them each node sees.

    Returns:
      The updates ``[B, T, J, P, Y]``, the sums of the logarithms of decay along the paths
      ``[B, T, J, P]``, and what the nodes read ``[B, T, J, P, Y]``.
    """
    total = _einsum("btu,bujp->btjp", mask.astype(jnp.float32), tokens.log_decay)
    if behind is not None:
        earlier, seen = behind
        total += _einsum("btu,bujp->btjp", seen.astype(jnp.float32), earlier.log_decay)
    rows = jnp.stack([tokens.keys, tokens.queries])
    found = _einsum("rbtjx,bjpxy->rbtjpy", rows, memory) * jnp.exp(total)[..., None]
    if behind is not None:
        earlier, seen = behind
        faded = _faded(total, earlier.total, seen)
        operands = rows, earlier.keys, faded, earlier.updates
        found += _einsum("rbtjx,bujx,bjptu,bujpy->rbtjpy", *operands)
    known, read = found
    faded = _faded(total, total, mask)
    updates = (tokens.values - known) * tokens.strength[..., None]
    # (I + L)^-1 = (I - L)(I + L^2)(I + L^4) ..., up to the power of L that is zero.
    power, reached = -_system(tokens, faded), 1
    while reached <= levels:
        updates += _einsum("bjptu,bujpy->btjpy", power, updates)
        reached *= 2
        if reached <= levels:
            power = _einsum("bjptu,bjpuv->bjptv", power, power)
    return updates, total, read + _einsum("bjptu,bujpy->btjpy", _scores(tokens, faded), updates)


def _scores(tokens: RecurrenceOperands, faded: Array) -> Array:
    """How much of every update a token reads, ``[B, J, P, T, T]``."""
    return faded * _einsum("btjx,bujx->bjtu", tokens.queries, tokens.keys)[:, :, None]


def _system(tokens: RecurrenceOperands, faded: Array) -> Array:
    """``L``: how much of every earlier token's update a token's lacks, ``[B, J, P, T, T]``."""
    alike = _einsum("btjx,bujx->bjtu", tokens.keys, tokens.keys)[:, :, None]
    by_strength = jnp.moveaxis(tokens.strength, 1, -1)[..., None]
    before = jnp.tri(tokens.keys.shape[1], k=-1, dtype=bool)
    return jnp.where(before, by_strength * faded * alike, 0.0)


def _faded(total: Array, earlier: Array, seen: Array) -> Array:
    """What is left of every earlier token at each token that sees it, ``[B, J, P, T, U]``."""
    at, of = (jnp.moveaxis(part, 1, -1) for part in (total, earlier))
    between = at[..., :, None] - of[..., None, :]
    return jnp.exp(jnp.where(seen[:, None, None], between, -jnp.inf))


def _einsum(axes: str, *operands: Array) -> Array:
    """In float32 all through: a GPU would round the operands of matmuls to fewer bits."""
    return jnp.einsum(axes, *operands, precision="highest")
