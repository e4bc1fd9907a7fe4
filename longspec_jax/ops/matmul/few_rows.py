"""Matmuls of a decode step: few rows against weights that are read once.

Their time is that of reading the weights. On Hopper a kernel of our own reads them faster than
XLA's choice (``docs/kernels.md``) and saves the launches after it. It applies the gate of a SwiGLU,
and where it shares out a contraction it leaves *split-K partials*, which the op that reads the
result next adds up as it goes (:func:`longspec_jax.ops.layer.residual_norm`). Anywhere else these
are XLA's matmuls, which also define the ops and their gradients.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float

from longspec_jax.axes import Array
from longspec_jax.ops import hardware
from longspec_jax.ops.dispatch import Op
from longspec_jax.ops.hardware import WARPGROUP_ROWS
from longspec_jax.ops.matmul import ordered_tiles
from longspec_jax.ops.partitioned import one_device

SWISH = 1.702
"""The slope of the gate of gpt-oss: ``x * sigmoid(1.702 x)`` is close to a GELU."""
WORTH_A_KERNEL = 2**21
"""Elements of the smallest weights that keep half of a Hopper GPU's multiprocessors reading."""


@jax.custom_jvp
def matmul(
    x: Float[Array, "*rows K"], weights: Float[Array, "K ..."], bias: Array | None = None
) -> Array:
    """``[*rows, *out]`` of ``weights[K, *out]``, plus ``bias[*out]``; differentiable."""
    return MATMUL(x, weights, bias)


@jax.custom_jvp
def matmul_partials(
    x: Float[Array, "*rows K"], weights: Float[Array, "K N"]
) -> Float[Array, "S *rows N"]:
    """Split-K partials, whose sum is the result: one of the dtype of ``x``, or several float32.

    Differentiable.
    """
    return MATMUL_PARTIALS(x, weights)


@jax.custom_jvp
def gated_matmul(
    x: Float[Array, "*rows K"], weights: Float[Array, "K 2 F"]
) -> Float[Array, "*rows F"]:
    """``silu(x @ weights[:, 0]) * (x @ weights[:, 1])``; differentiable."""
    return GATED_MATMUL(x, weights)


def matmul_xla(x: Array, weights: Array, bias: Array | None = None) -> Array:
    """The matmul in plain JAX; float32 is exact, not TF32."""
    # The produced axes stay apart: [2, F] in one axis could not be sharded over F. It is one plain
    # matmul all the same.
    over = ((x.ndim - 1,), (0,)), ((), ())
    out = jax.lax.dot_general(x, weights, over, precision=matmul_precision(weights.dtype))
    return out if bias is None else out + bias


def matmul_partials_xla(x: Array, weights: Array) -> Array:
    """The whole result as the only partial."""
    return matmul_xla(x, weights)[None]


def gated_matmul_xla(x: Array, weights: Array) -> Array:
    """The gated matmul in plain JAX."""
    return gate(matmul_xla(x, weights))


def head_matmul_xla(hidden: Array, table: Array) -> Array:
    """Logits ``hidden @ table.T`` of an LM head, accumulated and returned in float32."""
    return jnp.einsum(
        "...D,VD->...V",
        hidden,
        table,
        precision=matmul_precision(table.dtype),
        preferred_element_type=jnp.float32,
    )


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


def matmul_precision(dtype: Any) -> jax.lax.Precision | None:
    """Full float32 matmuls for float32 models; Ampere and later would use TF32 otherwise."""
    return jax.lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else None


def matmul_mosaic(x: Array, weights: Array, bias: Array | None = None) -> Array:
    """The matmul by the kernel for Hopper GPUs."""
    flat = weights.reshape(weights.shape[0], -1)
    flat_bias = None if bias is None else bias.reshape(-1)
    return _launch(x, flat, flat_bias).reshape(*x.shape[:-1], *weights.shape[1:])


def matmul_partials_mosaic(x: Array, weights: Array) -> Array:
    """The kernel's partials: the whole result, or several in float32."""
    out = _launch(x, weights, split=True)
    return out if out.ndim > x.ndim else out[None]


def gated_matmul_mosaic(x: Array, weights: Array) -> Array:
    """The gated matmul by the kernel."""
    return _launch(x, weights)


def head_matmul_mosaic(hidden: Array, table: Array) -> Array:
    """Logits of an LM head by the kernel."""
    _require_kernel(hidden, table)
    from longspec_jax.ops.matmul import ordered_mosaic  # Older versions of jax lack what it needs.

    vocabulary, flat = len(table), hidden.reshape(-1, hidden.shape[-1])
    if vocabulary % 8:
        # The copy engine takes whole groups of 8. It is a copy of the table in every launch.
        table = jnp.pad(table, ((0, -vocabulary % 8), (0, 0)))
    tile = ordered_tiles.head_tile(table.shape[1], len(table))
    out = ordered_mosaic.head_matmul(flat, table, tile=tile)[:, :vocabulary]
    return out.reshape(*hidden.shape[:-1], vocabulary)


def _launch(x: Array, weights: Array, bias: Array | None = None, *, split: bool = False) -> Array:
    """``[*rows, N]``, or the kernel's split-K partials ``[S, *rows, N]``."""
    _require_kernel(x, weights)
    from longspec_jax.ops.matmul import ordered_mosaic

    contracted, columns, gated = x.shape[-1], weights.shape[-1], weights.ndim == 3
    tile = ordered_tiles.matmul_tile(contracted, columns, gated=gated, split=split)
    out = ordered_mosaic.matmul(x.reshape(-1, contracted), weights, bias, tile=tile)
    return out.reshape(*out.shape[:-2], *x.shape[:-1], columns)


def _require_kernel(x: Array, weights: Array) -> None:
    """Raise for machines, dtypes and rows that the kernel does not serve."""
    hardware.require_hopper("the Mosaic matmul")
    if x.dtype not in (jnp.bfloat16, jnp.float16) or weights.dtype != x.dtype:
        raise NotImplementedError(
            "the Mosaic matmul takes rows and weights both in bfloat16 or both in float16, not "
            f"{x.dtype} and {weights.dtype}"
        )
    if not one_device():
        raise NotImplementedError("a mesh cuts the weights, which only XLA's matmuls follow")
    if not x.size:
        raise NotImplementedError("the Mosaic matmul takes one row or more")


def _of_few_rows(kernel: Callable[..., Array]) -> Callable[..., Array]:
    """The kernel where it is faster than XLA's matmuls, or makes the same time of fewer launches.

    One row costs as much in either.
    """

    def launch(x: Array, weights: Array, bias: Array | None = None) -> Array:
        rows = x.size // x.shape[-1]
        if rows % 8 or not 0 < rows <= WARPGROUP_ROWS or weights.size < WORTH_A_KERNEL:
            raise NotImplementedError(
                f"the Mosaic matmul takes whole groups of 8 rows up to {WARPGROUP_ROWS}, not "
                f"{rows}, and weights of {WORTH_A_KERNEL} elements or more, not {weights.size}"
            )
        return kernel(x, weights) if bias is None else kernel(x, weights, bias)

    return launch


MATMUL = Op("matmul", {"mosaic": _of_few_rows(matmul_mosaic), "xla": matmul_xla})
MATMUL_PARTIALS = Op(
    "matmul_partials", {"mosaic": _of_few_rows(matmul_partials_mosaic), "xla": matmul_partials_xla}
)
GATED_MATMUL = Op(
    "gated_matmul", {"mosaic": _of_few_rows(gated_matmul_mosaic), "xla": gated_matmul_xla}
)


@matmul.defjvp
def _differentiate(primals: tuple, tangents: tuple) -> tuple:
    return jax.jvp(matmul_xla, primals, tangents)


@matmul_partials.defjvp
def _differentiate_partials(primals: tuple, tangents: tuple) -> tuple:
    return jax.jvp(matmul_partials_xla, primals, tangents)


@gated_matmul.defjvp
def _differentiate_gated(primals: tuple, tangents: tuple) -> tuple:
    return jax.jvp(gated_matmul_xla, primals, tangents)
