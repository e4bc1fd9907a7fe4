"""The gated MLP of long rows, a chunk of tokens at a time.

What is inside an MLP is wider than what goes in and out. 32k tokens of Llama-3-8B have 1.9 GB of
gates and values and 0.9 GB of their product, and as much again for their gradients. Here all four
exist for one chunk at a time. The backward pass repeats the first matmul, 2/9 more operations, and
sums the weights' gradients in float32.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float

from longspec_jax.axes import Array
from longspec_jax.ops.matmul.few_rows import gate, gelu_gate, matmul_precision, matmul_xla
from longspec_jax.ops.partitioned import row_shares, with_sharding
from longspec_jax.ops.slicing import chunk_length, cut, put, whole_chunks

WEIGHTS = "d u f, f d"
"""The axes of both kernels; a device that shares out rows reads them whole in every chunk."""


def chunked_mlp(
    x: Float[Array, "B T D"],
    gate_up: Float[Array, "D 2 F"],
    down: Float[Array, "F D"],
    *,
    chunk: int,
    gelu: bool = False,
) -> Float[Array, "B T D"]:
    """``(silu(x @ gate_up[:, 0]) * (x @ gate_up[:, 1])) @ down``; differentiable.

    Args:
      x: whole rows.
      gate_up: kernel of gate and value.
      down: kernel of the output.
      chunk: most tokens of a device in a chunk, at least one of each row.
      gelu: whether the gate is a GELU by its tanh formula.
    """
    rows, length, _ = x.shape
    size = chunk_length(rows // row_shares(rows), length, chunk)
    out: Any = _mlp(whole_chunks(x, size), gate_up, down, size, gelu)
    return out[:, :length]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _mlp(x: Array, gate_up: Array, down: Array, size: int, gelu: bool) -> Array:
    gate_up, down = with_sharding(WEIGHTS, gate_up, down)
    gated = gelu_gate if gelu else gate

    def step(out: Array, start: Array) -> tuple[Array, None]:
        [part] = with_sharding("b t d", cut(x, start, size))
        return put(out, matmul_xla(gated(matmul_xla(part, gate_up)), down), start), None

    return jax.lax.scan(step, jnp.zeros_like(x), jnp.arange(0, x.shape[1], size))[0]


def _forward(
    x: Array, gate_up: Array, down: Array, size: int, gelu: bool
) -> tuple[Array, tuple[Array, Array, Array]]:
    return _mlp(x, gate_up, down, size, gelu), (x, gate_up, down)


def _backward(size: int, gelu: bool, saved: Any, cotangent: Array) -> tuple[Array, Array, Array]:
    x, gate_up, down = saved
    whole_gate_up, whole_down = with_sharding(WEIGHTS, gate_up, down)
    shares = row_shares(x.shape[0])
    matmul = functools.partial(jnp.einsum, precision=matmul_precision(x.dtype))
    wide = functools.partial(matmul, preferred_element_type=jnp.float32)

    def shared_out(part: Array) -> Array:
        return part.reshape(shares, -1, *part.shape[1:])

    def step(carry: tuple[Array, Array, Array], start: Array) -> tuple[Any, None]:
        dx, d_gate_up, d_down = carry
        part, out = with_sharding(
            "b t d, b t d", *(cut(each, start, size) for each in (x, cotangent))
        )
        inner, through_gate = jax.vjp(gelu_gate if gelu else gate, matmul_xla(part, whole_gate_up))
        [d_inner] = through_gate(matmul("BTD,FD->BTF", out, whole_down))
        dx = put(dx, matmul("BTUF,DUF->BTD", d_inner, whole_gate_up), start)
        # Every device sums up what its own rows say; the sums are added once, after the loop.
        part, out, inner, d_inner = map(shared_out, (part, out, inner, d_inner))
        d_gate_up += wide("SBTD,SBTUF->SDUF", part, d_inner)
        d_down += wide("SBTF,SBTD->SFD", inner, out)
        return (dx, *with_sharding("b d u f, b f d", d_gate_up, d_down)), None

    zeros = [jnp.zeros((shares, *each.shape), jnp.float32) for each in (gate_up, down)]
    first = jnp.zeros_like(x), *with_sharding("b d u f, b f d", *zeros)
    (dx, *sums), _ = jax.lax.scan(step, first, jnp.arange(0, x.shape[1], size))
    d_gate_up, d_down = (each.sum(axis=0).astype(x.dtype) for each in sums)
    return dx, d_gate_up, d_down


_mlp.defvjp(_forward, _backward)
