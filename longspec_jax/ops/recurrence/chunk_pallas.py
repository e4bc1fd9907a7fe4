"""Gated DeltaNet over a prompt's chunk, as Pallas kernels for Triton.

The chunk is cut into blocks of 64 tokens (:mod:`longspec_jax.ops.recurrence.delta_rule`). Two
launches: :func:`_solve_kernel` inverts the systems of all blocks side by side, with a program for
each block and value head; then :func:`_rule_kernel` takes a state from block to block, with a
program for some columns of a value head's state, which depend on no others.

The matrix units multiply 16 bits. A float32 number is the sum of two numbers of 16 bits, but for
2^-17 of it, and a product of two has three parts; what is left out is as small. The convolution
leaves queries, keys and values in 16 bits, so they take part whole, and their norms are factors.
Blocks of 16 are inverted by elimination, and what is beyond them by three powers: more powers of
the system of keys that are alike would cancel each other.

A state is float32 from block to block and from chunk to chunk. So a prompt that is cut at multiples
of 64 tokens leaves the bits that it leaves whole.

**Expected times** (H200, Qwen3.5-4B, 2,048 tokens of a layer): 30 us for the systems, 34 MB of
which are written and read again, and 32 dependent blocks of 4 to 5 us. XLA has some seven launches
a block and a batched triangular solve: 1.5 to 2 ms.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from longspec_jax.axes import Array, Ref
from longspec_jax.ops.launchers import launcher
from longspec_jax.ops.recurrence.delta_rule import BLOCK, NORM_EPS, Memory
from longspec_jax.ops.triton_launch import triton_call

PART = 16
"""Tokens whose system is inverted by elimination."""
COLUMNS = 32
"""Columns of a state that a program takes from block to block."""
WARPS = 4
"""Of a program of either kernel."""
_TABLES, _FACTORS = 4, 4
"""What :func:`_solve_kernel` leaves of a block: matrices, and numbers of every token."""


@launcher("interpret")
def delta_rule_chunk(
    memory: Memory, mixed: Array, log_decay: Array, strength: Array, *, interpret: bool = False
) -> tuple[Memory, Array]:
    """The state after whole blocks of tokens, and what they read ``[B, T, J, P, Y]``.

    Args:
      memory: the state before them.
      mixed: queries, keys and values as the convolution leaves them, ``[B, T, J, W]``.
      log_decay: logarithm of the factor on the state before a token writes, ``[B, T, J, P]``.
      strength: share of the difference to its value that a token writes, likewise.
    """
    batch, heads, shared, width, value = memory.shape
    length, blocks, of_values = mixed.shape[1], mixed.shape[1] // BLOCK, heads * shared
    tables, factors = triton_call(
        functools.partial(_solve_kernel, width=width),
        grid=(blocks, of_values, batch),
        out_shape=[
            jax.ShapeDtypeStruct((batch, blocks, of_values, _TABLES, BLOCK, BLOCK), mixed.dtype),
            jax.ShapeDtypeStruct((batch, blocks, of_values, _FACTORS, BLOCK), jnp.float32),
        ],
        warps=WARPS,
        stages=1,
        interpret=interpret,
        name="delta_rule_systems",
    )(mixed, log_decay, strength)
    behind, out = triton_call(
        _rule_kernel,
        grid=(value // COLUMNS, of_values, batch),
        out_shape=[
            jax.ShapeDtypeStruct(memory.shape, jnp.float32),
            jax.ShapeDtypeStruct((batch, length, heads, shared, value), jnp.float32),
        ],
        warps=WARPS,
        stages=2,
        interpret=interpret,
        name="delta_rule_blocks",
    )(memory, mixed, tables, factors)
    return behind, out


def _solve_kernel(
    mixed_ref: Ref,
    decay_ref: Ref,
    strength_ref: Ref,
    tables_ref: Ref,
    factors_ref: Ref,
    *,
    width: int,
) -> None:
    """The inverse of a block's system, its scores, and the factors on keys and queries.

    The tables are the inverse, times the tokens' strengths, and how much of every update a token
    reads, each of two parts. The factors are those on what the state says of a key, on a key that
    is written, on what the state says of a query, and on the state.
    """
    block, of_head, batch = (pl.program_id(axis) for axis in range(3))
    shared = decay_ref.shape[3]
    head, share = of_head // shared, of_head % shared
    t, x = jnp.arange(BLOCK), jnp.arange(width)
    token, row, column = block * BLOCK + t, t[:, None], t[None]

    def rows(first: int) -> tuple[Array, Array]:
        """Queries or keys, and one over their lengths."""
        found = pltriton.load(mixed_ref.at[batch, token[:, None], head, first + x[None]])
        wide = found.astype(jnp.float32)
        return found, jax.lax.rsqrt((wide * wide).sum(axis=1) + NORM_EPS)

    (q, of_q), (k, of_k) = rows(0), rows(width)
    of_q *= width**-0.5
    log_decay, strength = (
        pltriton.load(ref.at[batch, token, head, share]) for ref in (decay_ref, strength_ref)
    )
    total = jnp.where(row >= column, log_decay[None], 0.0).sum(axis=1)
    faded = jnp.exp(jnp.where(row >= column, total[:, None] - total[None], -jnp.inf))
    alike = _dot(k, k, over=(1, 1)) * of_k[:, None] * of_k[None]
    system = jnp.where(row > column, strength[:, None] * faded * alike, 0.0)
    near = row // PART == column // PART
    within, beyond = jnp.where(near, system, 0.0), jnp.where(near, 0.0, system)

    def eliminate(step: Array, inverse: Array) -> Array:
        """What the tokens in one place of every part write to those after them."""
        of_token = jnp.where(row % PART == step, inverse, 0.0).sum(axis=0)
        seen = jnp.where(column % PART == step, within, 0.0).sum(axis=1)
        return inverse - jnp.where(near, seen[:, None] * of_token[None], 0.0)

    of_parts = jax.lax.fori_loop(0, PART - 1, eliminate, jnp.where(row == column, 1.0, 0.0))
    # (I + M)^-1 = I - M + M^2 - M^3 of what the parts see of those before them.
    between, inverse = _product(_halves(of_parts), _halves(beyond)), of_parts
    for _ in range(BLOCK // PART - 1):
        inverse = of_parts - _product(_halves(between), _halves(inverse))
    scores = faded * _dot(q, k, over=(1, 1)) * of_q[:, None] * of_k[None]
    at = batch, block, of_head
    tables = *_halves(inverse * strength[None]), *_halves(scores)
    for index, table in enumerate(tables):
        pltriton.store(tables_ref.at[*at, index, row, column], table)
    last = log_decay.sum()
    by_token = jnp.exp(total)
    factors = by_token * of_k, jnp.exp(last - total) * of_k, by_token * of_q
    for index, factor in enumerate((*factors, jnp.exp(jnp.full(BLOCK, last)))):
        pltriton.store(factors_ref.at[*at, index, t], factor)


def _rule_kernel(
    memory_ref: Ref,
    mixed_ref: Ref,
    tables_ref: Ref,
    factors_ref: Ref,
    behind_ref: Ref,
    out_ref: Ref,
) -> None:
    """All blocks of a row, in some columns of a value head."""
    tile, of_head, batch = (pl.program_id(axis) for axis in range(3))
    _, _, shared, width, value = memory_ref.shape
    head, share = of_head // shared, of_head % shared
    t, x, y = jnp.arange(BLOCK), jnp.arange(width), tile * COLUMNS + jnp.arange(COLUMNS)

    def visit(block: Array, memory: Array) -> Array:
        at, token = (batch, block, of_head), (block * BLOCK + t)[:, None]
        q, k, v = (
            pltriton.load(mixed_ref.at[batch, token, head, columns[None]])
            for columns in (x, width + x, 2 * width + share * value + y)
        )
        inverse, rest, scores, rest_of_scores = (
            pltriton.load(tables_ref.at[*at, index, t[:, None], t[None]])
            for index in range(_TABLES)
        )
        of_known, of_written, of_read = (
            pltriton.load(factors_ref.at[*at, index, t]) for index in range(_FACTORS - 1)
        )
        high, low = _halves(memory)
        known, read = (_dot(rows, high) + _dot(rows, low) for rows in (k, q))
        update = v.astype(jnp.float32) - of_known[:, None] * known
        update = _product((inverse, rest), _halves(update))
        out = _product((scores, rest_of_scores), _halves(update)) + of_read[:, None] * read
        pltriton.store(out_ref.at[batch, token, head, share, y[None]], out)
        high, low = _halves(of_written[:, None] * update)
        written = _dot(k, high, over=(0, 0)) + _dot(k, low, over=(0, 0))
        return memory * factors_ref[*at, _FACTORS - 1, 0] + written

    own = batch, head, share, x[:, None], y[None]
    memory = pltriton.load(memory_ref.at[*own])
    blocks = mixed_ref.shape[1] // BLOCK
    pltriton.store(behind_ref.at[*own], jax.lax.fori_loop(0, blocks, visit, memory))


def _halves(x: Array) -> tuple[Array, Array]:
    """Two numbers of 16 bits that add up to each, but for 2^-17 of it."""
    high = x.astype(jnp.bfloat16)
    return high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)


def _product(left: tuple[Array, Array], right: tuple[Array, Array]) -> Array:
    """The product of two matrices in halves."""
    (left_high, left_low), (right_high, right_low) = left, right
    rest = _dot(left_high, right_low) + _dot(left_low, right_high)
    return _dot(left_high, right_high) + rest


def _dot(left: Array, right: Array, over: tuple[int, int] = (1, 0)) -> Array:
    """A product that contracts these axes."""
    axes = ((over[:1], over[1:]), ((), ()))
    return jax.lax.dot_general(left, right, axes, preferred_element_type=jnp.float32)
