"""The running softmax of the Triton kernels.

Inside a kernel scores and maxima are in base 2, in which the hardware exponentiates; what
:func:`finish` returns is natural.
"""

import math

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as pltriton

LOG2_E = math.log2(math.e)

State = tuple[jax.Array, jax.Array, jax.Array]
"""Running maximum [R], sum [R] and unnormalised output [R, H] of an online softmax, in base 2."""


def empty_state(rows: int, width: int) -> State:
    """The softmax state of rows that have seen no key."""
    return (
        jnp.full((rows,), -jnp.inf, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        jnp.zeros((rows, width), jnp.float32),
    )


def finish(state: State) -> tuple[jax.Array, jax.Array]:
    """Normalised output and natural log-sum-exp; zero and -inf for rows that saw no key."""
    top, total, acc = state
    safe = jnp.where(total > 0, total, 1.0)
    lse = jnp.where(total > 0, top / LOG2_E + jnp.log(safe), -jnp.inf)
    return acc / safe[:, None], lse


def exp2(x: jax.Array, interpret: bool) -> jax.Array:
    """Two to the x by the GPU's own instruction (relative error 2^-22), which flushes denormals."""
    if interpret:
        return jnp.exp2(x)
    (y,) = pltriton.elementwise_inline_asm(
        "ex2.approx.ftz.f32 $0, $1;",
        args=[x],
        constraints="=f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return y


def finite(top: jax.Array) -> jax.Array:
    """A maximum to subtract: 0 where nothing was seen, since -inf - (-inf) is NaN."""
    return jnp.where(top == -jnp.inf, 0.0, top)


def product(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """Matrix product with float32 accumulation; float32 operands are multiplied exactly."""
    return jax.lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def update(state: State, scores: jax.Array, v: jax.Array, interpret: bool) -> State:
    """The softmax after more keys, of which a row need not see any."""
    top, total, acc = state
    new_top = jnp.maximum(top, scores.max(axis=1))
    shift = finite(new_top)
    weight = exp2(scores - shift[:, None], interpret)
    keep = exp2(top - shift, interpret)
    acc = acc * keep[:, None] + product(weight.astype(v.dtype), v, (1, 0))
    return new_top, total * keep + weight.sum(axis=1), acc
