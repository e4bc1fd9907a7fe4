"""Matmuls of a decode step: few rows against weights that are read once.

Their time is that of reading the weights. On Hopper a kernel of our own reads them faster than
XLA's choice (``docs/design/kernels.md``) and saves the launches after it. It applies the gate of a
SwiGLU, and where it shares out a contraction it leaves *split-K partials*, which the op that reads
the result next adds up as it goes (:func:`longspec_jax.ops.layer.residual_norm`). Anywhere else
these are XLA's matmuls, which also define the ops and their gradients.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Float

from longspec_jax.axes import Array
from longspec_jax.ops import hardware
from longspec_jax.ops.dispatch import differentiable_op
from longspec_jax.ops.hardware import WARPGROUP_ROWS
from longspec_jax.ops.matmul import ordered_tiles
from longspec_jax.ops.partitioned import one_device

SWISH = 1.702
"""The slope of the gate of gpt-oss: ``x * sigmoid(1.702 x)`` is close to a GELU."""
WORTH_A_KERNEL = 2**21
"""Elements of the smallest weights that keep half of a Hopper GPU's multiprocessors reading."""
FEW_ON_CPU = 32
"""Rows up to which a CPU takes longer to copy weights into Eigen's order than to multiply."""
WORTH_AN_ORDER = 2**16
"""Elements of the smallest float32 weights of which the order matters on a CPU."""


def matmul_xla(
    x: Float[Array, "*rows K"],
    weights: Float[Array, "K ..."],
    bias: Array | None = None,
    gated: bool = False,
    split: bool = False,
) -> Array:
    """``[*rows, *out]`` of ``weights[K, *out]``, plus ``bias[*out]``; differentiable.

    float32 is exact, not TF32.

    Args:
      x: rows.
      weights: one matrix.
      bias: what is added.
      gated: whether to return ``silu(x @ weights[:, 0]) * (x @ weights[:, 1])``.
      split: whether to return split-K partials ``[S, *rows, N]``, whose sum is the result: one of
        the dtype of ``x``, or several float32.
    """
    # The produced axes stay apart: [2, F] in one axis could not be sharded over F. It is one plain
    # matmul all the same.
    over = ((x.ndim - 1,), (0,)), ((), ())
    out = jax.lax.dot_general(x, weights, over, precision=matmul_precision(weights.dtype))
    out = out if bias is None else out + bias
    out = gate(out) if gated else out
    return out[None] if split else out


matmul = differentiable_op(static=2)(matmul_xla)


@matmul.kernel("mosaic")
def _few_rows_mosaic(
    x: Array, weights: Array, bias: Array | None = None, gated: bool = False, split: bool = False
) -> Array:
    """The kernel where it is faster than XLA's matmuls, or makes the same time of fewer launches.

    XLA makes two launches of one row by small weights: 22 us for the queries, keys and values of an
    EAGLE-3 draft of 1,536 numbers on an H200, where this takes 6. The kernel for other GPUs was
    never measured on one.
    """
    hardware.require_hopper("the Mosaic matmul of few rows")
    rows = x.size // x.shape[-1]
    whole = rows <= 8 or rows % 8 == 0  # Others would be padded, which is a launch.
    if not whole or not 0 < rows <= WARPGROUP_ROWS or weights.size < WORTH_A_KERNEL:
        raise NotImplementedError(
            f"the Mosaic matmul takes 1 to 8 rows or whole groups of 8 up to {WARPGROUP_ROWS}, not "
            f"{rows}, and weights of {WORTH_A_KERNEL} elements or more, not {weights.size}"
        )
    return matmul_mosaic(x, weights, bias, gated=gated, split=split)


def head_matmul_xla(hidden: Array, table: Array) -> Array:
    """Logits ``hidden @ table.T`` of an LM head, accumulated and returned in float32."""
    return multiply_outputs_first(hidden, table)


def multiply_outputs_first(x: Float[Array, "*rows C"], table: Float[Array, "*out C"]) -> Array:
    """``[*rows, *out]`` of ``x @ table.T`` in plain JAX, accumulated and returned in float32.

    Few float32 rows on a CPU are multiplied as ``(table @ x.T).T``, which takes half the time
    (:mod:`longspec_jax.ops.matmul.outputs_first`).
    """
    rows, shape = x.size // x.shape[-1], (*x.shape[:-1], *table.shape[:-1])
    # With several axes of outputs the compiler would copy the table.
    table = table.reshape(-1, table.shape[-1])
    few = 1 < rows <= FEW_ON_CPU and table.dtype == x.dtype == jnp.float32
    few &= table.size >= WORTH_AN_ORDER
    if not (few and jax.default_backend() == "cpu" and one_device()):
        return _inputs_last(x, table).reshape(shape)
    # Eigen takes as long for 5 rows as for 8.
    padded = jnp.pad(x.reshape(rows, -1), ((0, -rows % (4 if rows <= 4 else 8)), (0, 0)))
    # Without a barrier the compiler would make ``x @ table.T`` of it again.
    turned = jax.lax.optimization_barrier(_inputs_last(table, padded))
    return turned.T[:rows].reshape(shape)


def _inputs_last(one: Float[Array, "*m C"], other: Float[Array, "n C"]) -> Float[Array, "*m n"]:
    """``one @ other.T`` in float32."""
    over = ((one.ndim - 1,), (1,)), ((), ())
    precision = matmul_precision(other.dtype)
    return jax.lax.dot_general(one, other, over, precision, preferred_element_type=jnp.float32)


def gate(gate_up: Array) -> Array:
    """``silu`` of the first half of ``[..., 2, F]`` times the second."""
    return jax.nn.silu(gate_up[..., 0, :]) * gate_up[..., 1, :]


def gelu_gate(gate_up: Array) -> Array:
    """The same with a GELU by its tanh formula (Gemma)."""
    return jax.nn.gelu(gate_up[..., 0, :], approximate=True) * gate_up[..., 1, :]


def bounded_gate(gate_up: Array, limit: float) -> Array:
    """The gate of gpt-oss, whose inputs are no larger than ``limit``."""
    first = jnp.minimum(gate_up[..., 0, :], limit)
    second = jnp.clip(gate_up[..., 1, :], -limit, limit)
    return (second + 1) * (first * jax.nn.sigmoid(SWISH * first))


def matmul_precision(dtype: DTypeLike) -> jax.lax.Precision | None:
    """Full float32 matmuls for float32 models; Ampere and later would use TF32 otherwise."""
    return jax.lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else None


def matmul_mosaic(
    x: Array, weights: Array, bias: Array | None = None, gated: bool = False, split: bool = False
) -> Array:
    """The matmul by this GPU's kernel; partials are one, or several in float32."""
    hopper = _require_kernel(x, weights)
    contracted = x.shape[-1]
    flat = weights if gated else weights.reshape(contracted, -1)
    operands = x.reshape(-1, contracted), flat, None if bias is None else bias.reshape(-1)
    # Older versions of jax lack what they need.
    if hopper:
        from longspec_jax.ops.matmul import ordered_mosaic

        tile = ordered_tiles.matmul_tile(contracted, flat.shape[-1], gated=gated, split=split)
        out = ordered_mosaic.matmul(*operands, tile=tile)
    else:
        from longspec_jax.ops.matmul import ordered_ampere

        out = ordered_ampere.matmul(*operands, split=split)
    if split:
        return out.reshape(-1, *x.shape[:-1], flat.shape[-1])
    return out.reshape(*x.shape[:-1], *weights.shape[2 if gated else 1 :])


def head_matmul_mosaic(hidden: Array, table: Array) -> Array:
    """Logits of an LM head by the kernel."""
    hopper = _require_kernel(hidden, table)
    vocabulary, flat = len(table), hidden.reshape(-1, hidden.shape[-1])
    if vocabulary % 8:
        # Copies take whole groups of 8. It is a copy of the table in every launch.
        table = jnp.pad(table, ((0, -vocabulary % 8), (0, 0)))
    if hopper:
        from longspec_jax.ops.matmul import ordered_mosaic

        tile = ordered_tiles.head_tile(table.shape[1], len(table))
        out = ordered_mosaic.head_matmul(flat, table, tile=tile)
    else:
        from longspec_jax.ops.matmul import ordered_ampere

        out = ordered_ampere.head_matmul(flat, table)
    return out[:, :vocabulary].reshape(*hidden.shape[:-1], vocabulary)


def _require_kernel(x: Array, weights: Array) -> bool:
    """Whether the kernel is Hopper's; raise for machines, dtypes and rows that none serves."""
    hopper = hardware.require_one_order("the Mosaic matmul")
    if x.dtype not in (jnp.bfloat16, jnp.float16) or weights.dtype != x.dtype:
        raise NotImplementedError(
            "the Mosaic matmul takes rows and weights both in bfloat16 or both in float16, not "
            f"{x.dtype} and {weights.dtype}"
        )
    if not one_device():
        raise NotImplementedError("a mesh cuts the weights, which only XLA's matmuls follow")
    if not x.size:
        raise NotImplementedError("the Mosaic matmul takes one row or more")
    return hopper
