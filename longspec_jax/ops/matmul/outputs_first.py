"""float32 weights with their outputs first, as a CPU multiplies a few rows with them fastest.

XLA for CPUs multiplies matrices by Eigen, which copies both operands block by block into an order
of its own. With one row nothing is copied. With the few rows of a tree that copy of the weights
takes most of the time, and how long depends on which operand the weights are. Processor
milliseconds for 576 x 3072 weights on a CPU with AVX2, by rows:

    ================================ ==== ==== ==== ==== ====
    weights                             1    2    4    8   16
    ================================ ==== ==== ==== ==== ====
    inputs first, ``x @ w``          0.35 0.72 0.98 1.17 1.54
    outputs first, ``(w @ x.T).T``   0.36 0.60 0.61 0.76 1.04
    outputs first, ``x @ w.T``       0.43 1.04 1.09 1.27 1.73
    ================================ ==== ==== ==== ==== ====

So a model's weights lie outputs first, as checkpoints store them, and few rows are the operand that
is transposed. An LM head lies so everywhere.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Float, PyTree

from longspec_jax.axes import Array, Leaf
from longspec_jax.ops.dispatch import traced_once
from longspec_jax.ops.matmul.few_rows import (
    WORTH_AN_ORDER,
    gate,
    multiply_outputs_first,
)

CHOOSE = "router", "shared_gate"
"""The projections that choose among experts: few columns, on whose last bits much depends."""


@struct.dataclass
class OutputsFirst:
    """The kernel of a projection, float32, with the contracted axis last."""

    rows: Leaf[Float[Array, "*out C"]]

    def kernel(self, dtype: DTypeLike) -> Float[Array, "C ..."]:
        """The weights with their inputs first, a copy."""
        return jnp.moveaxis(self.rows, -1, 0).astype(dtype)


@traced_once("gated", "split")
def matmul(
    x: Float[Array, "*rows C"],
    weights: OutputsFirst,
    bias: Array | None = None,
    gated: bool = False,
    split: bool = False,
) -> Array:
    """As :func:`longspec_jax.ops.matmul.few_rows.matmul`."""
    out = multiply_outputs_first(x, weights.rows)
    out = out if bias is None else out + bias
    out = gate(out) if gated else out
    return out[None] if split else out


def with_outputs_first(params: PyTree, mesh: Mesh | None = None) -> Any:
    """A loaded model's parameters as this machine multiplies with them fastest.

    On a CPU, and on no mesh, large float32 kernels become :class:`OutputsFirst`. Each takes the
    place of the array that it was made of, which is deleted: there is never a second copy.
    """
    if mesh is not None or jax.default_backend() != "cpu":
        return params
    return _converted(params, "")


def _converted(layer: Any, name: str) -> Any:
    """Parameters of a module of this name; of one that ends in ``out`` two axes are contracted."""
    converted = {
        key: _converted(value, key) if isinstance(value, dict) else value
        for key, value in layer.items()
    }
    kernel = converted.get("kernel")
    if isinstance(kernel, jax.Array) and name not in CHOOSE:
        if kernel.dtype == jnp.float32 and kernel.size >= WORTH_AN_ORDER:
            contracted = 2 if name.endswith("out") else 1
            converted["kernel"] = OutputsFirst(_turned(kernel, contracted))
            kernel.delete()
    return converted


def _turned(kernel: Array, contracted: int) -> Array:
    flat = kernel.reshape(-1, *kernel.shape[contracted:])
    return jax.block_until_ready(jnp.moveaxis(flat, 0, -1))
